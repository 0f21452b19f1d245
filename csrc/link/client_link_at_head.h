/// ClientLinkAtHead: the head's end of the link to a client on another machine.
///
/// The head has a twin of the client's block, whose arena has what the client puts (far_blocks.h). The controller uses
/// its rings as those of any client, and the link is the client's end of them. The twin's future table and read-back
/// area are not used: the client has its own.
/// Completions of hosts come through the hub, and go on to the client (LinkHub::complete).
///
/// TRUST-1: what comes from the client is data, as in a ring that the client could write: the controller checks it.
/// A client can name no other client here, because its records enter the rings of its own twin only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "link/far_blocks.h"
#include "link/link.h"
#include "link/link_hub.h"
#include "link/record_credit.h"
#include "memory/segment.h"
#include "messages/outbox.h"
#include "messages/shared_segments.h"

namespace pathways {

class ClientLinkAtHead final : public Link {
 public:
  /// `twin`: the client's block here, fresh; `bell`: at which clients' ends ring the controller (a BellBlock);
  /// `status`: the cluster's (a StatusBlock).
  ClientLinkAtHead(LinkHub& hub, Segment twin, Segment bell, Segment status, Clock clock = monotonic_ns);
  ~ClientLinkAtHead() override { close(); }

 private:
  void joined() override;
  void send_records(FrameWriter& to) override;
  bool precede(std::span<const std::byte> frame, FrameWriter& to) override;
  bool read_block(const Block& block, uint64_t at, std::span<std::byte> out) override;
  void sent(const Block& block) override;
  bool must_look_soon() const override;
  void look(int64_t now_ns) override;
  void take(const FrameHeader& header, std::span<const std::byte> payload) override;
  bool flush() override;
  void add_kept(Stats& now) const override;
  void forget() override { count_received(0); }
  void count_received(uint64_t bytes);
  void send_status(FrameWriter& to);
  void send_retired(FrameWriter& to);
  void send_blocks_over(FrameWriter& to);
  void hear(std::span<const std::byte> record);
  void take_record(ClientRing ring, std::span<const std::byte> record);
  void take_block(const FrameHeader& header, std::span<const std::byte> payload);
  void take_data(std::span<const std::byte> payload);

  LinkHub& hub_;
  FarBlocks blocks_;
  Segment bell_segment_, status_segment_;
  const ClientView view_;
  const StatusBlock* const status_;
  // All that follows is guarded by mutex_.
  Outbox records_, cancels_;
  ByteRing::Consumer inbox_;
  RecordCredit credit_;
  uint32_t sent_status_ = 0, sent_trace_ = 0;
  uint64_t sent_retired_ = 0;
  std::vector<uint64_t> over_;  ///< blocks into which nothing comes any more, for the client
  KeptFrame sent_kept_{};
  uint64_t received_bytes_ = 0;  ///< as the hub counts them
};

}  // namespace pathways
