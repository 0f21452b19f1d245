#include "loops/loops.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "dispatch/controller_options.h"
#include "ledger/client_records.h"

namespace pathways {
namespace {

bool is_wanted(std::span<const std::byte> run, uint32_t result) {
  const auto record = read_record<RunRecord>(run);
  if ((record.header.detail & kRunWanted) == 0) return false;
  const size_t mask = sizeof record + (size_t{record.arguments} + record.results) * sizeof(uint64_t);
  return (word_at(run, mask + result / 64 * sizeof(uint64_t)) >> (result % 64) & 1) != 0;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------- ordered

void Loops::begin(ClientState& client, std::span<const std::byte> bytes,
                  const std::shared_ptr<const Composite>& composite) {
  const auto record = read_record<RunRecord>(bytes);
  if (record.arguments != composite->arguments || !composites_.is_whole(*composite)) {
    clients_.fault(client, "a run of composite '" + composite->name +
                               "' has another number of arguments, or one of its plans was dropped");
    return;
  }
  PW_DCHECK(client.loop == 0);
  std::vector<uint64_t> arguments(record.arguments);
  for (uint32_t i = 0; i < record.arguments; ++i) arguments[i] = argument_of(bytes, i);
  std::unordered_map<uint64_t, uint32_t> times;
  if (!composite->donated.empty()) {
    for (const uint64_t argument : arguments) ++times[argument];
  }
  if (std::any_of(composite->donated.begin(), composite->donated.end(),
                  [&](uint32_t position) { return times[arguments[position]] != 1; })) {
    clients_.fault(client, "composite '" + composite->name + "' is wrong: it is given a donated argument twice");
    return;
  }
  auto made = std::make_unique<Loop>(composite, arguments);
  Loop& loop = *made;
  loop.number = client.loop = ++last_;
  loop.client = client.id;
  loop.record.assign(bytes.begin(), bytes.end());
  loop.memory = ledger_.share_memory_of(record.plan);
  loop.is_made.resize(record.results);
  for (const uint32_t position : composite->donated) {
    const BlockId block = ledger_.take_block(client, Handle{arguments[position]});
    if (block != HandleTable::kNoBlock) loop.blocks.push_back(block);
  }
  loop.admitted = ledger_.enter(client, bytes, *loop.memory);
  client.credits.run_admitted();
  ready_.push_back(loop.number);
  loops_.emplace(loop.number, std::move(made));
}

Loops::Loop* Loops::find(uint64_t number) const {
  const auto found = loops_.find(number);
  return found == loops_.end() ? nullptr : found->second.get();
}

uint32_t Loops::advance() {
  for (const Grants::CompositeRunOver& over : grants_.composite_runs_over()) {
    Loop* loop = find(over.composite);
    PW_DCHECK(loop != nullptr && loop->in_flight != 0);
    --loop->in_flight;
    if (ahead_[over.id] != 0) {
      loop->walk.tell(ahead_[over.id], over.goes_on);
    } else if (loop->walk.is_waiting() && loop->deciding == over.id) {
      loop->walk.decide(over.goes_on);
    }
    ready_.push_back(over.composite);
  }
  grants_.composite_runs_over().clear();
  looked_.clear();
  std::swap(looked_, ready_);
  std::sort(looked_.begin(), looked_.end());
  looked_.erase(std::unique(looked_.begin(), looked_.end()), looked_.end());
  uint32_t done = 0;
  for (const uint64_t number : looked_) {
    if (Loop* loop = find(number)) done += advance(*loop);
  }
  return done;
}

uint32_t Loops::advance(const ClientState& client) {
  Loop* loop = find(client.loop);
  return loop == nullptr ? 0 : advance(*loop);
}

/// The loop may be gone when this returns.
uint32_t Loops::advance(Loop& loop) {
  ClientState* client = clients_.find(loop.client);
  uint32_t done = 0;
  while (!loop.is_ordered && client != nullptr && client->fault.empty()) {
    const CompositeStep* step = loop.walk.next();
    release(*client, *loop.composite, std::exchange(loop.walk.released(), {}));
    if (loop.walk.is_waiting()) break;
    if (step == nullptr) {
      release(*client, *loop.composite, std::exchange(loop.leftover, {}));
      close(loop);
      ++done;
      break;
    }
    if (loop.in_flight >= loop.composite->parallel) break;
    if (client->credits.is_flooded()) {  // FLOW-1: a host that does not read has its releases before it
      ready_.push_back(loop.number);
      break;
    }
    if (!shares_.may_enter(client->id, step->plan)) {
      if (grants_.trace().is_on()) grants_.trace().waits(client->id, kWaitsForTurn);
      ready_.push_back(loop.number);
      break;
    }
    if (!order(loop, *client, *step)) break;
    ++done;
  }
  if (loop.is_ordered && loop.in_flight == 0) over(loop);
  return done;
}

/// Gives the next run its place in the order. False: the composite is wrong, and its client is about to be evicted.
bool Loops::order(Loop& loop, ClientState& client, const CompositeStep& step) {
  const auto inputs = loop.walk.inputs();
  if (loop.walk.wrong() != nullptr) {
    clients_.fault(client, "composite '" + loop.composite->name + "' is wrong: " + loop.walk.wrong());
    return false;
  }
  std::vector<uint64_t> outputs(step.outputs.size());
  std::vector<uint64_t> wanted((outputs.size() + 63) / 64);
  bool is_any_wanted = false;
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    const int32_t result = loop.walk.result_of(i);
    if (result < 0) {
      outputs[i] = client.hidden.take().raw;
      continue;
    }
    outputs[i] = result_of(loop.record, static_cast<uint32_t>(result));
    loop.is_made[static_cast<size_t>(result)] = true;
    if (!is_wanted(loop.record, static_cast<uint32_t>(result))) continue;
    wanted[i / 64] |= uint64_t{1} << (i % 64);
    is_any_wanted = true;
  }
  const RunRecord record{{RecordKind::kRun, is_any_wanted ? uint16_t{kRunWanted} : uint16_t{0}, client.id},
                         kElementTag,
                         0,
                         step.plan,
                         step.group,
                         static_cast<uint32_t>(inputs.size()),
                         static_cast<uint32_t>(outputs.size())};
  run_.clear();
  const auto append = [&](std::span<const std::byte> bytes) { run_.insert(run_.end(), bytes.begin(), bytes.end()); };
  append(std::as_bytes(std::span{&record, 1}));
  append(std::as_bytes(inputs));
  append(std::as_bytes(std::span(outputs)));
  if (is_any_wanted) append(std::as_bytes(std::span(wanted)));
  const EntryId id = grants_.submit_composite_run(client, run_, step.group, loop.number);
  shares_.entered(client.id, step.plan, id);
  ++loop.in_flight;
  loop.deciding = id;
  loop.walk.ran(outputs);
  if (id >= ahead_.size()) ahead_.resize(id + 1);
  ahead_[id] = loop.walk.ahead();
  for (const uint64_t taken : std::exchange(loop.walk.taken(), {})) {
    if (Handle{taken}.is_hidden()) {
      client.hidden.put_back(Handle{taken});
    } else if (!step.is_taken_everywhere) {
      loop.leftover.push_back(taken);
    }
  }
  return true;
}

/// CLI-1: the client's later records may be ordered.
void Loops::close(Loop& loop) {
  loop.is_ordered = true;
  ClientState* client = clients_.find(loop.client);
  if (client == nullptr || client->loop != loop.number) return;
  client->loop = 0;
  ordered_.push_back(client->id);
}

/// Releases owned buffers on all hosts of the composite, whichever have them, behind all that was ordered.
void Loops::release(ClientState& client, const Composite& composite, std::vector<uint64_t> handles) {
  for (size_t at = 0; at < handles.size(); at += kMostReleases) {
    const auto piece = std::span(handles).subspan(at, std::min(kMostReleases, handles.size() - at));
    send(client, composite.group, release_command(client.id, composite.group, piece));
  }
  for (const uint64_t handle : handles) {
    if (Handle{handle}.is_hidden()) client.hidden.put_back(Handle{handle});
  }
}

/// A lost host needs no such command, and nobody must wait for its successor with it (ERR-2).
void Loops::send(ClientState& client, GroupId group, std::span<const std::byte> command) {
  const auto members = grants_.hosts_of(group);
  if (std::none_of(members.begin(), members.end(), [&](uint32_t h) { return hosts_.is_lost(h); })) {
    (void)grants_.submit(client, command, group, EntryKind::kCommand, 0);
    return;
  }
  for (const uint32_t h : members) {
    if (!hosts_.is_lost(h)) (void)grants_.submit(client, command, kOneHost | h, EntryKind::kCommand, 0);
  }
}

// ------------------------------------------------------------------------------------------------------------- ends

/// DEAD-1, ERR-2. The loop stays until its granted runs are over.
void Loops::end(Loop& loop, std::string_view text, uint16_t detail) {
  ClientState* client = clients_.find(loop.client);
  if (client == nullptr) return;
  const std::vector<uint64_t> results = results_of(loop.record);
  std::vector<uint64_t> taken;  // by runs that are dropped: nobody takes these buffers
  grants_.drop_composite_runs(loop.number, [&](std::span<const std::byte> run) {
    const auto record = read_record<RunRecord>(run);
    const PlanMemory* memory = ledger_.memory_of(record.plan);
    for (size_t i = 0; memory != nullptr && i < memory->donated.size(); ++i) {
      taken.push_back(argument_of(run, memory->donated[i]));
    }
    for (uint32_t i = 0; i < record.results; ++i) {
      const auto at = std::find(results.begin(), results.end(), result_of(run, i));
      if (at != results.end()) loop.is_made[static_cast<size_t>(at - results.begin())] = false;
    }
  });
  const GroupId group = loop.composite->group;
  for (size_t at = 0; at < taken.size(); at += kMostReleases) {
    const auto piece = std::span(taken).subspan(at, std::min(kMostReleases, taken.size() - at));
    send(*client, group, release_command(client->id, group, piece));
  }
  std::vector<uint64_t> owned = std::exchange(loop.leftover, {});
  if (!loop.is_ordered) loop.walk.for_each_owned([&](uint64_t handle) { owned.push_back(handle); });
  release(*client, *loop.composite, std::move(owned));
  const auto failures = failure_commands(client->id, loop.record, loop.memory.get(), text);
  for (size_t i = 0; i < results.size(); ++i) {
    const Handle result{results[i]};
    if (!loop.is_made[i]) {
      clients_.tell(*client, result, text, detail);
      send(*client, loop.memory->results[i].group, failures[i]);
    } else if (detail == kFailedByDeadline) {
      clients_.tell(*client, result, text, detail);
      clients_.is_late(*client, result);
    }
  }
  if (!loop.is_ordered) {
    shares_.withdraw(client->id);
    close(loop);
  }
  loop.has_ended = true;
  ready_.push_back(loop.number);
}

bool Loops::cancel(const ClientState& client, uint64_t tag, std::string_view text) {
  for (const auto& [number, loop] : loops_) {
    if (loop->client != client.id || read_record<RunRecord>(loop->record).tag != tag) continue;
    ++stats_.dropped;
    end(*loop, text);
    return true;
  }
  return false;
}

bool Loops::may_end(uint64_t number) const {
  const Loop* loop = find(number);
  return loop != nullptr && !loop->has_ended;
}

void Loops::hosts_lost(std::string_view text) {
  for (const auto& [number, loop] : loops_) {
    const auto members = grants_.hosts_of(loop->composite->group);
    if (std::any_of(members.begin(), members.end(), [&](uint32_t h) { return hosts_.is_lost(h); })) end(*loop, text);
  }
}

void Loops::client_gone(uint32_t client) {
  for (const auto& [number, loop] : loops_) {
    if (loop->client != client) continue;
    for (const BlockId block : std::exchange(loop->blocks, {})) ledger_.release_block(block);
    loop->is_ordered = loop->has_ended = true;
    ready_.push_back(number);
  }
  composites_.forget_client(client);
}

/// Its last run is over.
void Loops::over(Loop& loop) {
  ledger_.leave(*loop.memory, loop.admitted, loop.client);
  for (const BlockId block : loop.blocks) ledger_.release_block(block);
  if (ClientState* client = clients_.find(loop.client)) {
    client->credits.run_over();
    clients_.run_over(*client);
  }
  loops_.erase(loop.number);
}

void Loops::validate() const {
  for (const auto& [number, loop] : loops_) {
    const ClientState* client = clients_.find(loop->client);
    PW_CHECK(loop->number == number && loop->in_flight <= loop->composite->parallel);
    PW_CHECK(loop->is_ordered || (client != nullptr && client->loop == number));
    PW_CHECK(client == nullptr || client->loop != number || !loop->is_ordered);
  }
}

}  // namespace pathways
