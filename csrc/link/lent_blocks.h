/// LentBlocks: blocks of clients' memory that one end of a link has lent to hosts behind the other end.
///
/// Each lease has a number, which the frames about it name. So this end writes only to what it lent for a fetch, takes
/// back only what it lent, and both for nobody but the hosts that it lent it to (LINK-2, ARENA-5).
///
/// Threading: one thread at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
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

class LentBlocks {
 public:
  struct Lent {
    uint64_t handle;  ///< of the command: a put's buffer, or a fetch's token
    uint64_t bytes;
    bool is_fetch;
    std::vector<uint32_t> hosts;  ///< that have not returned it
    uint64_t lease = 0;           ///< its number
  };

  /// Whether the block is lent for this command already.
  bool has(uint32_t client, uint64_t offset, uint64_t handle, bool is_fetch) const {
    const auto lent = lent_.find({client, offset});
    return lent != lent_.end() && lent->second.handle == handle && lent->second.is_fetch == is_fetch;
  }
  /// Leases out a block; returns the lease's number. No two have the same.
  uint64_t lease_out(uint32_t client, uint64_t offset, Lent lent) {
    lent.lease = ++last_;
    lent_.insert_or_assign(Key{client, offset}, std::move(lent));
    return last_;
  }
  /// Whether the other end may write these bytes of a block.
  bool may_write(uint32_t client, uint64_t offset, uint64_t lease, uint64_t at, uint64_t bytes) const {
    const auto lent = lent_.find({client, offset});
    return lent != lent_.end() && lent->second.lease == lease && lent->second.is_fetch && at <= lent->second.bytes &&
           bytes <= lent->second.bytes - at;
  }
  /// A host returns its lease. False: it has none.
  bool take_back(uint32_t client, uint64_t offset, uint64_t lease, uint32_t host) {
    const auto lent = lent_.find({client, offset});
    if (lent == lent_.end() || lent->second.lease != lease || std::erase(lent->second.hosts, host) == 0) return false;
    if (lent->second.hosts.empty()) lent_.erase(lent);
    return true;
  }
  /// All hosts return their leases. False: there is no such lease.
  bool take_back_all(uint32_t client, uint64_t offset, uint64_t lease) {
    const auto lent = lent_.find({client, offset});
    if (lent == lent_.end() || lent->second.lease != lease) return false;
    lent_.erase(lent);
    return true;
  }
  /// What is still said about the host's leases counts no more.
  void remove_host(uint32_t host) {
    for (auto& [key, lent] : lent_) std::erase(lent.hosts, host);
    std::erase_if(lent_, [](const auto& each) { return each.second.hosts.empty(); });
  }
  void remove_client(uint32_t client) {
    std::erase_if(lent_, [&](const auto& each) { return each.first.first == client; });
  }

 private:
  using Key = std::pair<uint32_t, uint64_t>;  // client and offset
  std::map<Key, Lent> lent_;
  uint64_t last_ = 0;
};

}  // namespace pathways
