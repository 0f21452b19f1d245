// Assertions that state a law where it is kept.
//
// PW_CHECK is always on and is for what can only be false through a bug or through corrupted shared memory: it
// prints file, line and text, then aborts. PW_DCHECK is for what a hot path cannot afford to ask; it is on where
// PATHWAYS_DCHECK is defined (debug and sanitizer builds). Wrong input from a caller is neither: it is a Status or
// an Error.
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
// The condition is still compiled, so that it cannot rot, but never evaluated.
#define PW_DCHECK(condition) static_cast<void>(sizeof(static_cast<bool>(condition)))
#endif
