#include "base/status.h"

#include <system_error>

namespace pathways {

std::string_view to_string(Status status) noexcept {
  switch (status) {
    case Status::kOk:
      return "Ok";
    case Status::kPending:
      return "Pending";
    case Status::kFull:
      return "Full";
    case Status::kEmpty:
      return "Empty";
    case Status::kTimeout:
      return "Timeout";
    case Status::kStale:
      return "Stale";
    case Status::kClosed:
      return "Closed";
    case Status::kInvalid:
      return "Invalid";
    case Status::kNoMemory:
      return "NoMemory";
    case Status::kFailed:
      return "Failed";
  }
  return "Unknown";
}

Error::Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
Error::~Error() = default;

void throw_errno(Status status, const std::string& message, int errno_value) {
  throw Error(status, message + ": " + std::generic_category().message(errno_value));
}

}  // namespace pathways
