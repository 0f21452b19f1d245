/// EarlySends: the credit by which a host sends small transfers to other machines before their receives are announced
/// (FAR-3, device/early_chunk.h).
///
/// Threading: the executor's thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/check.h"
#include "device/early_chunk.h"

namespace pathways {

/// A send that began before the destination had announced its receive.
struct EarlySend {
  enum class State : uint8_t {
    kUnderWay,  ///< -> kKept, kFailed, or removed
    kKept,      ///< the destination has it; removed by the announcement
    kFailed     ///< removed by the announcement, which lets it be sent again
  };
  uint32_t destination;
  uint64_t bytes;  ///< of credit
  State state = State::kUnderWay;
  std::optional<std::vector<uint64_t>> offsets = {};  ///< announced while the send was under way
  std::optional<std::string> given_up = {};           ///< why: the destination was lost meanwhile
};

class EarlySends {
 public:
  /// Takes credit with a destination. False: there is not enough.
  bool take(uint32_t destination, uint64_t bytes) {
    uint64_t& used = used_[destination];
    if (bytes > kMostEarly - used) return false;
    used += bytes;
    return true;
  }
  void return_credit(uint32_t destination, uint64_t bytes) {
    uint64_t& used = used_.at(destination);
    PW_CHECK(used >= bytes);
    used -= bytes;
  }
  /// Removes the early send to a destination, and gives its credit back. nullopt: there is none.
  std::optional<EarlySend> remove(std::vector<EarlySend>& sends, uint32_t destination) {
    for (auto at = sends.begin(); at != sends.end(); ++at) {
      if (at->destination != destination) continue;
      EarlySend send = std::move(*at);
      sends.erase(at);
      return_credit(destination, send.bytes);
      return send;
    }
    return std::nullopt;
  }
  static EarlySend* find(std::vector<EarlySend>& sends, uint32_t destination) {
    for (EarlySend& send : sends) {
      if (send.destination == destination) return &send;
    }
    return nullptr;
  }
  void clear() { used_.clear(); }

 private:
  std::unordered_map<uint32_t, uint64_t> used_;  ///< by destination; never above kMostEarly
};

}  // namespace pathways
