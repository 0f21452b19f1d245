/// FarBlocks: blocks of a client on another machine that a link has brought by value, and those into which hosts
/// here write what the client reads.
///
/// A block is announced (kBlock), filled (kData), and named by its number in a command, which from here on says where
/// the block lies. What is read goes back behind the last host's part of it, and before that is told (LINK-3). Then the
/// hosts alone hold the block: its memory is this machine's (see link/received_arena.h).
///
/// Threading: one thread at a time (a link's lock); processes that map the segment meanwhile.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "link/frames.h"
#include "link/received_arena.h"
#include "memory/segment.h"
#include "messages/shared_segments.h"

namespace pathways {

class FarBlocks {
 public:
  /// `segment` holds a ClientBlock whose arena nobody has used.
  /// `most_unnamed`: how many blocks may be here before the commands that name them.
  FarBlocks(Segment segment, size_t most_unnamed);

  /// Makes room for a block and leases it to these hosts. `stamp`: see ReceivedArena::make; `commands`: how many will
  /// name it; `may_take`: there is room beside other clients. What finds no room, the hosts refuse. False, and nothing
  /// happens: there are such a block or too many.
  [[nodiscard]] bool add(const BlockFrame& frame, std::span<const uint32_t> hosts, uint64_t stamp, size_t commands,
                         bool may_take = true);
  /// Writes bytes that came. False: they are not of a block that is here.
  bool write(uint64_t number, uint64_t at, std::span<const std::byte> bytes);
  /// Reads bytes that go back. False: as above.
  bool read(uint64_t number, uint64_t at, std::span<std::byte> out) const;
  /// A command names the block: where it lies; 0: nowhere.
  uint64_t place(uint64_t number);

  struct Fetched {
    uint64_t number;
    std::vector<BlockPiece> pieces;
  };
  bool is_fetching(uint64_t token) const { return fetches_.contains(token); }
  /// A host's part of a fetch is over: it has written these pieces; nullopt: it has failed. When it was the last one
  /// here, and has not failed: the block, with what hosts have written of it; call `end` when these bytes have gone.
  std::optional<Fetched> settle(uint64_t token, std::optional<std::span<const BlockPiece>> written);
  /// The same, of one that has the whole block.
  std::optional<Fetched> settle_whole(uint64_t token);
  /// No completion of this token counts any more. Returns its block, which is over; 0: none.
  uint64_t fail(uint64_t token);
  /// The host is lost, and what it was lent up to this stamp. Returns the blocks of fetches that are over.
  std::vector<uint64_t> reclaim(uint32_t host, uint64_t stamp);
  void end(uint64_t number);

  /// What there is of the client's blocks on this machine.
  KeptFrame kept() const { return {taken_, arena_.bytes_in_use()}; }
  /// Called from time to time. Finds out what is free again, and gives its pages back after a while.
  void look(int64_t now_ns);
  /// Whether `look` should be called soon.
  bool is_trimming() const { return trim_ns_ != INT64_MAX; }
  const Segment& segment() const { return segment_; }

 private:
  struct Block {
    uint64_t at;  ///< its place; 0: there was no room
    uint64_t bytes;
    uint64_t token;  ///< of a fetch; else 0
    uint64_t stamp;
    size_t commands;              ///< that will name it
    size_t left;                  ///< hosts that have not answered, of a fetch
    std::vector<uint32_t> hosts;  ///< of a fetch
    std::vector<BlockPiece> written{};
  };
  const Block* holding(uint64_t number, uint64_t at, uint64_t bytes) const;

  Segment segment_;
  ReceivedArena arena_;
  std::map<uint64_t, Block> blocks_;      ///< by number
  std::map<uint64_t, uint64_t> fetches_;  ///< number by token
  size_t unnamed_ = 0;                    ///< blocks that a command is still to name
  const size_t most_unnamed_;
  uint64_t taken_ = 0;
  int64_t trim_ns_ = INT64_MAX;  ///< when pages are given back
};

}  // namespace pathways
