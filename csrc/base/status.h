// How the core reports a failure: hot paths return a Status; outer functions throw an Error that contains a Status.
//
// Threading: values. An Error has one identity in the process, because its vtable and typeinfo live in
// libpathways_core.so only (the destructor is its key function).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace pathways {

enum class [[nodiscard]] Status : std::uint8_t {
  kOk,
  kPending,   // begun; its end is reported later
  kFull,      // no room now; try again after somebody consumed
  kEmpty,     // nothing there now
  kTimeout,   // the time given has passed
  kStale,     // the handle's generation is over, or the object is no longer in the required state
  kClosed,    // the other side is gone and does not come back
  kInvalid,   // malformed input; trying again cannot help
  kNoMemory,  // does not fit into the region or budget now
  kFailed,    // the system refused; the message says why
};

/// The name without the k, for messages and tests: "Ok", "Full", ...
std::string_view to_string(Status status) noexcept;

/// The exception of the core. `what()` says what was expected and what was found.
class __attribute__((visibility("default"))) Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message);
  ~Error() override;

  Error(const Error&) = default;
  Error& operator=(const Error&) = default;

  [[nodiscard]] Status status() const noexcept { return status_; }

 private:
  Status status_;
};

/// Throws Error(status, "<message>: <strerror(errno_value)>").
[[noreturn]] void throw_errno(Status status, const std::string& message, int errno_value);

}  // namespace pathways
