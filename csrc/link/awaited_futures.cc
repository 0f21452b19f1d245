#include "link/awaited_futures.h"

namespace pathways {

void AwaitedFutures::sent(std::span<const std::byte> bytes) {
  const auto header = read_record<RecordHeader>(bytes);
  if (header.kind == RecordKind::kClientGone) {
    clients_.erase(header.client);
  } else if (header.kind == RecordKind::kRun && bytes.size() >= sizeof(RunRecord)) {
    const auto run = read_record<RunRecord>(bytes);
    if (bytes.size() < sizeof run + words_behind(run) * sizeof(uint64_t)) return;
    const auto results = bytes.subspan(sizeof run + run.arguments * sizeof(uint64_t));
    for (uint32_t i = 0; i < run.results; ++i) {
      add(header.client, Handle{read_record<uint64_t>(results.subspan(i * sizeof(uint64_t)))});
    }
  } else if (header.kind == RecordKind::kCommand && bytes.size() >= sizeof(CommandRecord)) {
    const auto command = read_record<CommandRecord>(bytes);
    const auto kind = static_cast<CommandKind>(header.detail);
    const bool is_task = kind == CommandKind::kTask;
    if (kind == CommandKind::kPut || (is_task && command.token == 0)) add(header.client, Handle{command.handle});
    if (kind == CommandKind::kFetch) clients_[header.client].fetches.insert(command.token);
    if (is_task) add(header.client, Handle{command.token});
  }
}

bool AwaitedFutures::take(uint32_t client, Handle future) {
  const auto of_client = clients_.find(client);
  if (of_client == clients_.end()) return false;
  auto& [generations, fetches] = of_client->second;
  if (fetches.erase(future.raw) != 0) return true;
  const auto found = generations.find(future.index());
  if (found == generations.end() || found->second != future.generation()) return false;
  generations.erase(found);
  return true;
}

}  // namespace pathways
