// A backend that refuses every operation. A test overrides what it is about.
#pragma once

#include "device/backend.h"

namespace pathways::test {

class StubBackend : public Device, public Mover, public ClientWork {};

/// XLA's habits on CPU: a gang blocks, and one device computes within the launch.
inline constexpr Quirks kCpuHabits{0, true, true};

}  // namespace pathways::test
