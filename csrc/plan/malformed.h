/// How a plan that breaks an invariant is refused: Error(kInvalid), whose text says where it is wrong.
///
/// Threading: pure functions.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"

namespace pathways::malformed {

[[noreturn]] inline void refuse(const std::string& what) { throw Error(Status::kInvalid, "malformed plan: " + what); }

/// `table`: what the table holds, in the singular.
[[noreturn]] inline void refuse(const char* table, size_t index, const std::string& what) {
  refuse(std::string(table) + " " + std::to_string(index) + ": " + what);
}

}  // namespace pathways::malformed
