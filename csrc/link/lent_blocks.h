/// LentBlocks: blocks of clients' memory that one end of a link sends by value, or awaits from the other end.
///
/// Each has a number, which the frames about it and its command name. So this end takes only what it awaits for a
/// fetch, and ends each lease once, for nobody but the hosts that have it (LINK-2, ARENA-5).
///
/// Threading: one thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "messages/records.h"

namespace pathways {

/// A command that leases a block.
struct LeasingCommand {
  CommandRecord record;
  bool is_fetch;
  uint64_t handle;  ///< a put's buffer, or a fetch's token
};

/// nullopt: the record leases nothing.
inline std::optional<LeasingCommand> leasing(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(CommandRecord)) return std::nullopt;
  const auto record = read_record<CommandRecord>(bytes);
  const auto kind = static_cast<CommandKind>(record.header.detail);
  const bool is_fetch = kind == CommandKind::kFetch;
  if (record.header.kind != RecordKind::kCommand || record.lease_bytes == 0) return std::nullopt;
  if (!is_fetch && kind != CommandKind::kPut) return std::nullopt;
  return LeasingCommand{record, is_fetch, is_fetch ? record.token : record.handle};
}

/// Says in a command where its block is now: at an offset, or for the other end of a link its number.
inline void set_lease(std::span<std::byte> command, uint64_t at, uint64_t bytes) {
  auto record = read_record<CommandRecord>(command);
  record.lease_at = at;
  record.lease_bytes = bytes;
  std::memcpy(command.data(), &record, sizeof record);
}

class LentBlocks {
 public:
  struct Lent {
    uint32_t client;
    uint64_t handle;  ///< of the command: a put's buffer, or a fetch's token
    bool is_fetch;
    uint64_t offset, bytes;
    uint32_t others;                ///< counted references, where the link itself returns all leases
    std::vector<uint32_t> hosts;    ///< those that have not returned it, where each returns its own
    std::vector<uint32_t> awaited;  ///< those whose command has not gone out
  };

  /// The number of the block that is lent for this command; 0: none is.
  uint64_t number_of(uint32_t client, uint64_t handle, bool is_fetch) const {
    const auto found = numbers_.find({client, handle, is_fetch});
    return found == numbers_.end() ? 0 : found->second;
  }
  uint64_t add(Lent lent) {
    numbers_[{lent.client, lent.handle, lent.is_fetch}] = ++last_;
    lent_.emplace(last_, std::move(lent));
    return last_;
  }
  /// nullptr: nothing is lent by that number any more.
  Lent* find(uint64_t number) {
    const auto found = lent_.find(number);
    return found == lent_.end() ? nullptr : &found->second;
  }
  /// Whether the other end may write these bytes of a client's block.
  const Lent* writable(uint32_t client, uint64_t number, uint64_t at, uint64_t bytes) {
    const Lent* lent = find(number);
    const bool may =
        lent != nullptr && lent->client == client && lent->is_fetch && at <= lent->bytes && bytes <= lent->bytes - at;
    return may ? lent : nullptr;
  }
  void end(uint64_t number) {
    const auto found = lent_.find(number);
    if (found == lent_.end()) return;
    numbers_.erase({found->second.client, found->second.handle, found->second.is_fetch});
    lent_.erase(found);
  }
  /// Ends it if there is nothing left to wait for: no host's lease, and no command that names it.
  void end_if_over(uint64_t number) {
    const Lent* lent = find(number);
    if (lent != nullptr && lent->hosts.empty() && lent->awaited.empty()) end(number);
  }
  /// The host's leases are not this link's affair any more: those of one client, or all.
  void remove_host(uint32_t host, std::optional<uint32_t> client = std::nullopt) {
    std::vector<uint64_t> touched;
    for (auto& [number, lent] : lent_) {
      if (client.has_value() && lent.client != *client) continue;
      if (std::erase(lent.hosts, host) + std::erase(lent.awaited, host) != 0) touched.push_back(number);
    }
    for (const uint64_t number : touched) end_if_over(number);
  }

 private:
  using Key = std::tuple<uint32_t, uint64_t, bool>;
  std::map<uint64_t, Lent> lent_;
  std::map<Key, uint64_t> numbers_;
  uint64_t last_ = 0;
};

}  // namespace pathways
