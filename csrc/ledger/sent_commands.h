/// What the controller keeps of one client's commands for the moment when a host is lost: the descriptions that the
/// host's successor needs again, and the memory that the client leased to the host.
///
/// Grants keeps each command here as it sends the command; Recovery reads.
///
///   OWN-1  a client takes back the memory that it leased to a lost host in commands that were sent there.
///
/// Invariant: `defined_bytes_` is the sum of the descriptions' bytes.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "memory/arena.h"
#include "messages/credits.h"
#include "messages/records.h"

namespace pathways {

class SentCommands {
 public:
  /// Keeps what is needed of a command that is sent to `hosts`. False when the client has described more than
  /// kMostDefinedBytes.
  bool keep(const CommandRecord& record, std::span<const std::byte> bytes, std::span<const uint32_t> hosts) {
    bool is_in_bounds = true;
    if (static_cast<CommandKind>(record.header.detail) == CommandKind::kBackend && record.token == 0 &&
        record.handle != 0) {
      std::vector<std::byte>& definition = definitions_[record.handle];
      defined_bytes_ += bytes.size() - definition.size();
      definition.assign(bytes.begin(), bytes.end());
      is_in_bounds = defined_bytes_ <= kMostDefinedBytes;
    }
    if (record.lease_stamp == 0) return is_in_bounds;
    for (const uint32_t h : hosts) {
      if (h < lease_stamp_.size()) lease_stamp_[h] = std::max(lease_stamp_[h], record.lease_stamp);
    }
    return is_in_bounds;
  }

  /// The stamp of the last lease that was sent to a host, once; 0: none.
  uint64_t take_lease(uint32_t host) { return host < lease_stamp_.size() ? std::exchange(lease_stamp_[host], 0) : 0; }

  /// Backend commands by number; a successor gets them again.
  const std::map<uint64_t, std::vector<std::byte>>& definitions() const { return definitions_; }

  void validate() const {
    uint64_t bytes = 0;
    for (const auto& definition : definitions_) bytes += definition.second.size();
    PW_CHECK(bytes == defined_bytes_);
  }

 private:
  std::map<uint64_t, std::vector<std::byte>> definitions_;
  uint64_t defined_bytes_ = 0;
  std::array<uint64_t, Arena::kBorrowers> lease_stamp_{};  ///< by host: stamp of the last lease sent there
};

}  // namespace pathways
