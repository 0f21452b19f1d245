/// ClientLinkAtClient: the client's end of the link between a client's machine and the head.
///
/// The client has its block, and believes that the controller and the hosts are here: the link reads its rings as the
/// controller does, completes its futures as hosts do, and writes the cluster's status. What the client leases to hosts
/// goes to the head by value, and the link returns all leases of a block together. The head tells how much of the
/// client's memory it keeps, so that the client has no more there and here than its arena is large (ClientBlock).
///
/// TRUST-1: the client may be another process, so its block is used through a view.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "link/lent_blocks.h"
#include "link/link.h"
#include "link/record_credit.h"
#include "memory/segment.h"
#include "messages/outbox.h"
#include "messages/shared_segments.h"

namespace pathways {

class ClientLinkAtClient final : public Link {
 public:
  /// `client`: its block; `bell`: at which the client rings (a BellBlock); `status`: what the client reads of the
  /// cluster; its memory must outlive the link. Throws Error(kInvalid) when a segment is none of these.
  ClientLinkAtClient(Segment client, Segment bell, StatusBlock* status, Clock clock = monotonic_ns);
  ~ClientLinkAtClient() override { close(); }

  /// Tells the client that the cluster is gone. Only the first end counts.
  void fail(std::string_view why);

 private:
  void joined() override;
  void send_records(FrameWriter& to) override;
  bool read_block(const Block& block, uint64_t at, std::span<std::byte> out) override;
  void sent(const Block& block) override;
  void take(const FrameHeader& header, std::span<const std::byte> payload) override;
  bool flush() override;
  void forget() override {}
  bool send_record(ClientRing ring, std::span<std::byte> record, FrameWriter& to);
  bool lease(std::span<std::byte> record, FrameWriter& to);
  bool is_lent(const CommandRecord& record) const;
  void return_leases(const LentBlocks::Lent& lent);
  void add_kept(Stats& now) const override { add_box(now, to_client_); }
  void count_kept();
  void take_status(const FrameHeader& header, std::span<const std::byte> payload);
  void take_data(std::span<const std::byte> payload);
  void take_record(std::span<const std::byte> record);
  void take_block_over(uint64_t number);

  Segment client_, bell_segment_;
  const ClientView view_;
  StatusBlock* const status_;
  // All that follows is guarded by mutex_.
  ByteRing::Consumer records_, cancels_;
  Outbox to_client_;
  RecordCredit credit_;
  LentBlocks lent_;
  uint64_t lent_bytes_ = 0;  ///< of all blocks that went to the head
  KeptFrame kept_{};
};

}  // namespace pathways
