/// RelayLink: a relay's end of a connection. The trunk leads to the head, a branch to each machine that is carried.
/// What comes on one of them goes on over the other, as it is: a relay has no keys (carrier.h, CARRY-1).
///
///   CARRY-2 (apart)   When much waits for a machine, the head is told to send nothing more for it (kHold); when much
///                     waits for the head, the machine that brings it is told. What comes even so breaks that machine's
///                     branch, at kMostKept or kMostRelayed, and never the trunk.
///
/// An answer waits for those of the other machines that were sent something with this one, for kGathers at most. So
/// what a run brings back from all machines reaches the head together, as soon as the last answer would have; and the
/// answer of a machine that alone was sent something waits for none.
///
/// Threading: as a Link. A relay's lock is taken last, but for the locks of links' queues.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "link/link.h"

namespace pathways {

class RelayLink;

/// What the links of a relay share.
class RelayHub : public std::enable_shared_from_this<RelayHub> {
 public:
  static constexpr uint32_t kTrunk = UINT32_MAX;  ///< stands for the number of a machine
  static constexpr std::chrono::nanoseconds kGathers = std::chrono::milliseconds(1);

  explicit RelayHub(std::shared_ptr<LinkPool> pool, Clock clock = monotonic_ns)
      : pool_(std::move(pool)), clock_(clock) {}

  std::shared_ptr<RelayLink> open_trunk();
  /// The branch of a machine, by the number that the head has said. The one before is in use no more.
  std::shared_ptr<RelayLink> open_branch(uint32_t number);
  /// The number by which the head expects the machine of this name.
  std::optional<uint32_t> number_of(const std::string& machine);
  /// The branch is over: the head is told, if it does not know it.
  void end(uint32_t number);
  /// Machines that the head carries no more, since the last call.
  std::vector<uint32_t> take_ended();

 private:
  friend class RelayLink;
  std::shared_ptr<RelayLink> find(uint32_t number);
  void expect(uint32_t number, std::string machine);
  void ended(uint32_t number);
  void asked(uint32_t number);
  void answered(uint32_t number);
  std::chrono::nanoseconds gathers(int64_t now_ns);
  std::shared_ptr<RelayLink> open(uint32_t number);

  const std::shared_ptr<LinkPool> pool_;
  const Clock clock_;
  std::mutex mutex_;  ///< guards what follows
  std::map<uint32_t, std::weak_ptr<RelayLink>> links_;
  std::map<std::string, uint32_t> expected_;
  std::vector<uint32_t> ended_;
  std::set<uint32_t> asked_;  ///< machines that were sent something, and have not answered
  int64_t until_ns_ = 0;      ///< until then answers wait for those of the others; 0: none waits
};

class RelayLink final : public Link {
 public:
  static constexpr uint64_t kMostWaiting = uint64_t{1} << 20;  ///< bytes for an end, before others are held
  static constexpr uint32_t kLongestName = 64;

  RelayLink(std::shared_ptr<RelayHub> relay, uint32_t number, Clock clock = monotonic_ns)
      : Link(clock), relay_(std::move(relay)), number_(number) {}
  ~RelayLink() override { close(); }

 private:
  void take(const FrameHeader& header, std::span<const std::byte> payload) override;
  void pass(RelayLink& to, const FrameHeader& header, std::span<const std::byte> payload);
  void send_records(FrameWriter& to) override;
  bool read_block(const Block&, uint64_t, std::span<std::byte>) override { return false; }
  void sent(const Block&) override {}
  std::chrono::nanoseconds gathers(int64_t now_ns) override;
  bool flush() override { return false; }
  void add_kept(Stats&) const override {}
  void forget() override {}

  const std::shared_ptr<RelayHub> relay_;
  const uint32_t number_;
  std::mutex held_mutex_;    ///< guards what follows; taken as a relay's lock
  std::set<uint32_t> held_;  ///< machines of which nothing more is to come, until what waits here is collected
};

}  // namespace pathways
