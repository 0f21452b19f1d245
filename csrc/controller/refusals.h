/// The error text of a record that is refused because there is no memory for it (MEM-3, MEM-5).
///
/// Used by AdmissionQueue. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "dispatch/controller_options.h"
#include "ledger/memory_ledger.h"

namespace pathways {

/// `what` the record is; `biggest`: its biggest buffers, as text, or empty; `wanted`: the bytes that it needs on the
/// space of the judgement.
std::string refusal_text(const ControllerOptions& options, const MemoryLedger& ledger, uint32_t client,
                         const std::string& what, const std::string& biggest, uint64_t wanted,
                         const Judgement& judgement);

}  // namespace pathways
