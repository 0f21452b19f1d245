/// MachineLink: the link between the head and a machine that has hosts.
///
/// The head, the controller's machine, has a twin of each far host's block: the controller writes and reads its rings
/// as ever, and the link is the host's end of them. The agent's machine has the hosts' own blocks, and the link is the
/// controller's end.
///
/// A block that a command leases to hosts of this link crosses by value, once for all of them (kBlock, kData): the
/// agent has memory of its own for each client's blocks (link/far_blocks.h). The head returns the hosts' leases when a
/// put's bytes are in the link, and that of a fetch when the host has answered. Of a put's block goes what the hosts of
/// this link need, as far as the client says that (LeasedPart); of a fetch's comes back what they have written.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "link/awaited_futures.h"
#include "link/far_blocks.h"
#include "link/lent_blocks.h"
#include "link/link.h"
#include "link/link_hub.h"
#include "memory/segment.h"
#include "messages/outbox.h"
#include "messages/shared_segments.h"

namespace pathways {

class MachineLink final : public Link {
 public:
  enum class End : uint8_t { kHead, kAgent };

  /// `pool`: whose sender collects from it. At the head the controller marks hosts there; hosts ring at the agent's
  /// twin of the controller's block.
  static std::shared_ptr<MachineLink> open(LinkHub& hub, End end, Clock clock = monotonic_ns,
                                           std::shared_ptr<LinkPool> pool = nullptr);
  MachineLink(LinkHub& hub, End end, Clock clock);
  ~MachineLink() override { close(); }

  /// Head: `block` is the twin of a host of the other machine, `controller` the controller's block. Agent: `block` is
  /// the host's own, `controller` the twin. The link drops `keep`, which keeps both mapped, when it uses them no more:
  /// some time after `remove_host`, which waits for nobody.
  void add_host(uint32_t host, int32_t incarnation, const HostView& block, ControllerBlock* controller,
                std::shared_ptr<const void> keep = nullptr);
  void remove_host(uint32_t host);
  /// Agent: memory for the blocks of a client. Each client has one until the hosts start anew.
  Segment twin_client(uint32_t client, size_t arena_bytes);

 private:
  struct Twin {
    FarBlocks memory;
    std::set<uint32_t> gone{};  ///< hosts that were told of the client's end
  };
  struct FarHost {
    std::shared_ptr<const void> keep;  ///< the memory of all that follows, and so the last to go
    int32_t incarnation;
    ByteRing::Consumer from, from_far;
    Outbox to, to_far;
    DoorbellWord* bell;                      ///< agent
    AwaitedFutures awaited{};                ///< head
    std::map<uint32_t, int32_t> silenced{};  ///< agent: hosts, in an epoch each, that said more than it reads
  };

  // collect
  void send_records(FrameWriter& to) override;
  bool read_block(const Block& block, uint64_t at, std::span<std::byte> out) override;
  void sent(const Block& block) override;
  bool must_look_soon() const override;
  void look(int64_t now_ns) override;
  void add_kept(Stats& now) const override;
  bool pump_host(uint32_t number, FarHost& host, FrameWriter& to);
  bool pump_far(uint32_t number, FarHost& host, FrameWriter& to);
  bool lease(uint32_t host, std::span<std::byte> record, FrameWriter& to);
  std::vector<BlockPiece> needed(const CommandRecord& record, std::vector<uint32_t> hosts);
  bool answer_fetch(std::span<const std::byte> record, FrameWriter& to);
  // deliver
  void take(const FrameHeader& header, std::span<const std::byte> payload) override;
  bool flush() override;
  void take_from_controller(const FrameHeader& header, std::span<const std::byte> record);
  void take_to_controller(const FrameHeader& header, std::span<const std::byte> record);
  void take_peer(const FrameHeader& header, std::span<const std::byte> payload);
  void keep_from_peer(FarHost& host, const PeerHeader& source, std::span<const std::byte> record);
  void take_block(const FrameHeader& header, std::span<const std::byte> payload);
  void take_data(const FrameHeader& header, std::span<const std::byte> payload);
  bool answers(uint32_t number, FarHost& host, std::span<const std::byte> record);
  FarHost* host_of(uint32_t host, int32_t incarnation);
  void forget() override;
  void forget_in_pool(uint32_t number, const FarHost& host);

  LinkHub& hub_;
  const End end_;
  // All that follows is guarded by mutex_.
  std::map<uint32_t, FarHost> hosts_;
  uint32_t next_host_ = 0;                    ///< where the next pass begins
  std::unordered_map<uint32_t, Twin> twins_;  ///< agent
  LentBlocks lent_;                           ///< the head
};

}  // namespace pathways
