/// One client's held records, in their order: the first waits for memory, the others wait behind it.
///
/// AdmissionQueue fills and empties it. Inbox asks whether more may be held. Deadlines asks whether a held run is still
/// held.
///
/// A release does not stand in the line. It takes effect behind the last held record that names the buffer, not behind
/// all of them: the other held records may wait for that very memory. A fetch passes the line when no record in it
/// names the buffer: a client that waits at its quota may have to read an array before it can delete it. So does a step
/// of a save that names no buffer, when no other step and no task is in line: the first record may wait for the memory
/// that hosts keep until the save is over. A record whose token has the table index of something in line does not pass,
/// because the index would change its meaning too early.
/// Records that lease memory to hosts are sent in the order of their stamps (ARENA-5): one that leases does not pass
/// another.
///
/// Invariants, at any time when no record is taken out (`take_front` before `put_back` or `forget`):
///   - `load_` counts the records in line and their bytes;
///   - `handles_` says for each handle how many records in line name it, and names no other handle; `indices_` says the
///     same of the table indices of these handles, and of the tokens of fetches and tasks in line; `leases_` is the
///     number of records in line that lease memory to hosts, `tasks_` that of tasks and steps in line;
///   - a handle whose release waits (`releases_`) is one of `handles_`.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "messages/credits.h"
#include "messages/records.h"
#include "sequencer/sequencer.h"

namespace pathways {

class HeldRecords {
 public:
  struct Held {
    std::vector<std::byte> record;
    std::string dropped;  ///< why the run was dropped; empty: it was not. Its hosts get the failure in its place
  };

  bool empty() const { return line_.empty(); }
  size_t size() const { return line_.size(); }
  /// FLOW-1: as many are held as allowed.
  bool is_full() const { return load_.is_above(kMostHeld, kMostHeldBytes); }
  const Held& front() const { return line_.front(); }
  /// Whether a record in line names the handle.
  bool names(uint64_t handle) const { return handles_.contains(handle); }
  /// Whether a task, or a step of a save or restore, is in line.
  bool has_tasks() const { return tasks_ != 0; }
  /// Whether a fetch, or a step of a save, may be ordered before the records in line. No other record may.
  bool lets_pass(std::span<const std::byte> record) const;
  /// Calls f(record) for each record in line that was not dropped, the oldest first.
  template <typename F>
  void for_each(F&& f) const {
    for (const Held& held : line_) {
      if (held.dropped.empty()) f(std::span<const std::byte>(held.record));
    }
  }
  /// The held run with this tag that was not dropped; nullptr: none.
  Held* find_run(uint64_t tag);

  void push(std::span<const std::byte> record);
  /// Takes the first record out of the line. The caller then calls `put_back` or `forget`.
  Held take_front();
  void put_back(std::vector<std::byte> record);
  /// The record that was taken out is ordered, refused or dropped. Releases that waited for it become due.
  void forget(std::span<const std::byte> record) { count(record, false); }

  /// The client has released a handle, which lies on the hosts of `group`. The release is due when no record in line
  /// names the handle.
  void release(uint64_t handle, GroupId group);
  /// The releases that have become due since the last call, sorted by group.
  std::vector<std::pair<GroupId, uint64_t>> take_due_releases();

  void validate() const;

 private:
  void count(std::span<const std::byte> record, bool is_added);
  void count_index(uint64_t handle, bool is_added);
  void count_handle(uint64_t handle, bool is_added);

  std::deque<Held> line_;
  Load load_;                                         ///< records in `line_`
  std::unordered_map<uint64_t, uint32_t> handles_;    ///< how many held records name each handle
  std::unordered_map<uint32_t, uint32_t> indices_;    ///< and each index, tokens among them
  uint64_t leases_ = 0;                               ///< how many lease memory to hosts
  uint64_t tasks_ = 0;                                ///< how many are tasks, or steps without a buffer
  std::unordered_map<uint64_t, GroupId> releases_;    ///< released handles that held records still name, and groups
  std::vector<std::pair<GroupId, uint64_t>> let_go_;  ///< groups and released handles that no held record names
};

}  // namespace pathways
