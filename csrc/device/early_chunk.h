/// Early chunks: what another machine sends before its receive has memory here (FAR-3).
///
///   FAR-3 (early)  a source on another machine sends a small transfer before the receive is announced, as far as its
///                  credit with the destination goes. So a small transfer does not wait for the announcement, which
///                  goes by way of the controller's machine. The destination keeps the chunk until the receive has
///                  memory. Every receive is announced all the same: the announcement gives the credit back, and lets
///                  what was not sent early, or was refused, be sent then. Neither end trusts the other: a destination
///                  keeps at most kMostEarly bytes of each source, and refuses what is beyond.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace pathways {

inline constexpr uint64_t kMostEarlyChunk = uint64_t{32} << 10;  ///< bytes of one transfer that is sent early
inline constexpr uint64_t kMostEarly = uint64_t{1} << 20;        ///< bytes of one source that a host keeps

/// Bytes that count as kept for as long as this object lives. Threading: any thread may make and destroy it.
class EarlyChunk {
 public:
  /// `kept`: the bytes of its source that are kept; the caller has added those of this chunk.
  EarlyChunk(std::span<const std::byte> bytes, std::shared_ptr<std::atomic<uint64_t>> kept)
      : bytes_(bytes.begin(), bytes.end()), kept_(std::move(kept)) {}
  ~EarlyChunk() {
    if (kept_ != nullptr) kept_->fetch_sub(bytes_.size(), std::memory_order_relaxed);
  }
  EarlyChunk(EarlyChunk&& other) noexcept = default;
  EarlyChunk& operator=(EarlyChunk&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(kept_, other.kept_);
    return *this;
  }
  EarlyChunk(const EarlyChunk&) = delete;
  EarlyChunk& operator=(const EarlyChunk&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
  std::shared_ptr<std::atomic<uint64_t>> kept_;  ///< moved from: nullptr
};

}  // namespace pathways
