#include "controller/refusals.h"

#include <cstdio>
#include <iterator>

namespace pathways {
namespace {

constexpr size_t kHoldersNamed = 3;

std::string in_bytes(uint64_t count) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  double value = static_cast<double>(count);
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[48];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace

std::string refusal_text(const ControllerOptions& options, const MemoryLedger& ledger, uint32_t client,
                         const std::string& what, const std::string& biggest, uint64_t wanted,
                         const Judgement& judgement) {
  const Admission& admission = ledger.admission();
  const SpaceId worst = judgement.worst;
  const uint64_t most = judgement.is_quota ? admission.clients().quota(client) : admission.budget(worst);
  const std::string bound = judgement.is_quota ? "quota" : "budget";
  std::string text = "ResourceExhaustedError: " + what + " needs " + in_bytes(wanted) + " (" + std::to_string(wanted) +
                     " bytes) on " + options.name_of_space(worst) +
                     (judgement.is_quota ? ", where this client's quota is " : ", whose budget is ") + in_bytes(most) +
                     " (" + std::to_string(most) + " bytes)";
  if (!biggest.empty()) text += "; its biggest buffers: " + biggest;
  if (judgement.verdict == Verdict::kNever) {
    return text + ". It can never fit: make it smaller, or the " + bound + " bigger";
  }
  if (judgement.is_quota) {  // MEM-5: without a search, because a client may run into its quota all the time
    return text + ". This client's live arrays hold " + in_bytes(admission.held(client, worst)) +
           " there. Delete arrays, or donate arguments, to make room";
  }
  text += ". " + in_bytes(admission.live(worst)) + " are held there by live arrays:";
  for (const Admission::Holder& holder : admission.holders(worst, kHoldersNamed)) {
    std::string name = "put there";
    if (holder.plan != Admission::kPut) {
      const PlanMemory* memory = ledger.memory_of(holder.plan);
      name = memory == nullptr ? "results of a program" : "results of program '" + memory->name + "'";
    }
    text += " " + in_bytes(holder.bytes) + " " + name + " by " +
            (holder.client == client ? std::string("this client") : "client " + std::to_string(holder.client)) + ";";
  }
  text.back() = '.';
  return text + " Delete arrays, or donate arguments, to make room";
}

}  // namespace pathways
