// Assertions: each states a law at the code that keeps it.
//
// PW_CHECK is always on. Use it for a condition that is false only through a bug or corrupted shared memory: it prints
// file, line and text, then aborts. PW_DCHECK is for a check that is too slow for a hot path; it is on only where
// PATHWAYS_DCHECK is defined (debug and sanitizer builds). Do not use either for wrong input from a caller: return a
// Status or throw an Error.
#pragma once

namespace pathways::detail {

[[noreturn]] void check_failed(const char* file, int line, const char* text) noexcept;

}  // namespace pathways::detail

#define PW_CHECK(condition)                            \
  (static_cast<bool>(condition) ? static_cast<void>(0) \
                                : ::pathways::detail::check_failed(__FILE__, __LINE__, #condition))

#if defined(PATHWAYS_DCHECK)
#define PW_DCHECK(condition) PW_CHECK(condition)
#else
// The condition is still compiled, so that it stays valid code, but it is never evaluated.
#define PW_DCHECK(condition) static_cast<void>(sizeof(static_cast<bool>(condition)))
#endif
