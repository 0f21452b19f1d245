#include "ledger/held_records.h"

#include <algorithm>

#include "base/check.h"
#include "ledger/client_records.h"

namespace pathways {
namespace {

/// Calls f(handle) for each handle that a record names.
template <typename F>
void for_each_handle(std::span<const std::byte> bytes, F&& f) {
  if (is_run(bytes)) {
    const auto record = read_record<RunRecord>(bytes);
    for (uint32_t i = 0; i < record.arguments + record.results; ++i) f(argument_of(bytes, i));
  } else if (is_command(bytes, CommandKind::kRename)) {
    const auto record = read_record<CommandRecord>(bytes);
    for (size_t at = 0; at + sizeof(uint64_t) <= record.bytes; at += sizeof(uint64_t)) {
      f(word_at(bytes, sizeof record + at));
    }
  } else {
    f(read_record<CommandRecord>(bytes).handle);
  }
}

/// The token that a record completes; 0: none. Of other commands, `token` is no handle.
uint64_t token_of(std::span<const std::byte> bytes) {
  const bool has_one = is_command(bytes, CommandKind::kFetch) || is_command(bytes, CommandKind::kTask);
  return has_one ? read_record<CommandRecord>(bytes).token : 0;
}

/// Whether a command leases memory to its hosts.
bool leases(std::span<const std::byte> bytes) {
  return !is_run(bytes) && read_record<CommandRecord>(bytes).lease_stamp != 0;
}

bool is_task_or_step(std::span<const std::byte> bytes) {
  return !is_run(bytes) && (is_command(bytes, CommandKind::kTask) || is_step(bytes));
}

}  // namespace

bool HeldRecords::lets_pass(std::span<const std::byte> bytes) const {
  if (is_run(bytes)) return false;
  const auto record = read_record<CommandRecord>(bytes);
  if (is_command(bytes, CommandKind::kFetch)) {
    if (names(record.handle)) return false;
  } else if (!is_step(bytes) || tasks_ != 0) {
    return false;
  }
  const uint64_t token = token_of(bytes);
  return (record.lease_stamp == 0 || leases_ == 0) && (token == 0 || !indices_.contains(Handle{token}.index()));
}

HeldRecords::Held* HeldRecords::find_run(uint64_t tag) {
  const auto at = std::find_if(line_.begin(), line_.end(), [&](const Held& held) {
    return held.dropped.empty() && is_run(held.record) && read_record<RunRecord>(held.record).tag == tag;
  });
  return at == line_.end() ? nullptr : &*at;
}

void HeldRecords::push(std::span<const std::byte> record) {
  count(record, true);
  load_.add(1, record.size());
  line_.push_back({{record.begin(), record.end()}, {}});
}

HeldRecords::Held HeldRecords::take_front() {
  Held held = std::move(line_.front());
  line_.pop_front();
  load_.remove(1, held.record.size());
  return held;
}

void HeldRecords::put_back(std::vector<std::byte> record) {
  load_.add(1, record.size());
  line_.push_front({std::move(record), {}});
}

void HeldRecords::release(uint64_t handle, GroupId group) {
  if (names(handle)) {
    releases_.emplace(handle, group);
  } else {
    let_go_.emplace_back(group, handle);
  }
}

std::vector<std::pair<GroupId, uint64_t>> HeldRecords::take_due_releases() {
  auto due = std::exchange(let_go_, {});
  std::stable_sort(due.begin(), due.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return due;
}

void HeldRecords::count(std::span<const std::byte> record, bool is_added) {
  for_each_handle(record, [&](uint64_t handle) {
    count_handle(handle, is_added);
    count_index(handle, is_added);
  });
  count_index(token_of(record), is_added);
  if (leases(record)) leases_ += is_added ? 1 : ~uint64_t{0};
  if (is_task_or_step(record)) tasks_ += is_added ? 1 : ~uint64_t{0};
}

void HeldRecords::count_index(uint64_t handle, bool is_added) {
  if (!Handle{handle}.valid()) return;
  const uint32_t index = Handle{handle}.index();
  if (is_added) {
    ++indices_[index];
  } else if (const auto at = indices_.find(index); at != indices_.end() && --at->second == 0) {
    indices_.erase(at);
  }
}

void HeldRecords::count_handle(uint64_t handle, bool is_added) {
  if (is_added) {
    ++handles_[handle];
    return;
  }
  const auto at = handles_.find(handle);
  if (at == handles_.end() || --at->second != 0) return;
  handles_.erase(at);
  if (const auto released = releases_.find(handle); released != releases_.end()) {
    let_go_.emplace_back(released->second, handle);
    releases_.erase(released);
  }
}

void HeldRecords::validate() const {
  uint64_t bytes = 0, lending = 0, tasks = 0;
  std::unordered_map<uint64_t, uint32_t> handles;
  std::unordered_map<uint32_t, uint32_t> indices;
  for (const Held& held : line_) {
    bytes += held.record.size();
    const auto count_index_of = [&](uint64_t handle) {
      if (Handle{handle}.valid()) ++indices[Handle{handle}.index()];
    };
    for_each_handle(held.record, [&](uint64_t handle) {
      ++handles[handle];
      count_index_of(handle);
    });
    count_index_of(token_of(held.record));
    if (leases(held.record)) ++lending;
    if (is_task_or_step(held.record)) ++tasks;
  }
  PW_CHECK(load_.count == line_.size() && load_.bytes == bytes);
  PW_CHECK(handles == handles_);
  PW_CHECK(indices == indices_ && lending == leases_ && tasks == tasks_);
  for (const auto& release : releases_) PW_CHECK(handles_.contains(release.first));
}

}  // namespace pathways
