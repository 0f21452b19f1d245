/// ERR-2: which of a client's buffers were lost with a host, so that what names them fails at once.
///
/// A buffer that lay on a lost host never comes back. A run that has it as an argument can only fail. Without this
/// class the run would wait for the host's successor, which may never come, to hear the same. Inbox asks before it
/// takes a record: such a run is refused, and its results count as lost, too. The token of a fetch or of a save that
/// reads such a buffer fails at once; the command itself is still sent, because its lease must come back.
///
/// An object is true for one place in the order of the client's records, and follows these from there on. A client's
/// own one is at the last record that was taken. At a loss, Recovery makes another one: it begins with what this loss
/// has cost, is taken back to before all that still waits, follows that, and ends up in the client's own.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>

#include "base/ids.h"

namespace pathways {

/// Why buffers were lost; null: nothing was lost.
using LossText = std::shared_ptr<const std::string>;

class LostBuffers {
 public:
  bool empty() const { return lost_.empty(); }
  void add(Handle handle, LossText why) { lost_[handle.raw] = std::move(why); }
  /// A run has donated them (FUT-3): no later record names them.
  void donated(std::span<const uint64_t> handles) {
    for (const uint64_t handle : handles) lost_.erase(handle);
  }

  /// Why a valid record of the client's cannot succeed; null: no lost buffer keeps it from that.
  LossText named_by(std::span<const std::byte> record) const;

  /// The record is taken. What it makes is lost if `why` is not null. What it releases or renames is followed.
  void follow(std::span<const std::byte> record, const LossText& why);
  /// The reverse, for the record at whose place the object is: what it makes is not there yet, and what it renames has
  /// its old name. What it released, and what the renamed name meant before it, is not known.
  void take_back(std::span<const std::byte> record);

  /// Adds all of `others`.
  void merge(LostBuffers&& others) { lost_.merge(std::move(others.lost_)); }

  /// Forgets each buffer for which `is_over(handle)`: the client has released it without a record.
  template <typename F>
  void prune(F&& is_over) {
    std::erase_if(lost_, [&](const auto& each) { return is_over(Handle{each.first}); });
  }

 private:
  /// What was named `from` is named `to`; what was named `to` is forgotten.
  void name(uint64_t from, uint64_t to);

  std::unordered_map<uint64_t, LossText> lost_;  // by handle
};

}  // namespace pathways
