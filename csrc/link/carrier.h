/// Carrier: an end of the connection to a relay, which carries the links of other machines, or this machine's own.
///
/// A relay is a machine whose agent joins others with the head (relay_link.h). So the head sends and receives for many
/// machines at once: one wakeup, one call of TLS, one system call. The head has a carrier for each relay, with a link
/// for each machine there; a machine that is carried has one, with its only link.
///
///   CARRY-1 (sealed)  What a link says crosses the relay in sealed messages (sealer.h), by keys that the machine got
///                     from the head over TLS, one for each direction. A message that was changed, made up, left out,
///                     sent twice or out of its turn breaks the link, and nothing of it is applied. So a relay can
///                     only withhold.
///   CARRY-2 (apart)   What breaks or holds up a link breaks or holds up no other one of its carrier.
///
/// Threading: as a Link. The carrier takes its links' locks under its own. It seals and opens messages at the end of
/// `collect` and of `deliver`, without a lock: who has a lock that a sealer takes may wait for a carrier (sealer.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "link/link.h"
#include "link/sealer.h"

namespace pathways {

class Carrier final : public Link {
 public:
  static constexpr size_t kMostMessage = size_t{64} << 10;  ///< bytes of a message, before it is sealed

  explicit Carrier(Clock clock = monotonic_ns) : Link(clock) {}
  ~Carrier() override { close(); }

  /// Carries a link that is in no pool, from `start` on; delivers to it at once. The number is the machine's, which no
  /// other link of this carrier ever had. `machine`: its name, which the relay gets to hear; empty: this is its end.
  void add(uint32_t number, const std::shared_ptr<Link>& link, std::shared_ptr<Sealer> sealer,
           const std::string& machine);
  void start(uint32_t number);
  /// Carries it no more, and tells the relay. A second call does nothing.
  void drop(uint32_t number);
  /// Links that broke since the last call, and why. Nothing is collected or delivered for them.
  std::vector<std::pair<uint32_t, std::string>> take_broken();

 private:
  struct Member {
    std::shared_ptr<Link> link;  ///< nullptr when the carrier is closed
    const std::shared_ptr<Sealer> sealer;
    uint64_t sent = 0;  ///< messages
    bool is_started = false, is_held = false;
    bool is_over = false;  ///< it is broken, or dropped
    bool waits = false;    ///< for room in a ring of this machine
    uint64_t taken = 0;    ///< messages; of the delivering thread, and not guarded
  };
  struct Unsealed {  ///< a message in what is being collected
    std::shared_ptr<Sealer> sealer;
    uint64_t number;
    std::span<std::byte> message;
  };
  struct Arrived {  ///< a kCarried or a kEnd
    uint32_t number;
    std::shared_ptr<Member> carried;
    bool is_end;
    std::vector<std::byte> message;
  };

  void send_records(FrameWriter& to) override;
  bool send_collected(FrameWriter& to);
  void take(const FrameHeader& header, std::span<const std::byte> payload) override;
  void finish_collect() override;
  void finish_deliver() override;
  std::string take_message(Member& carried, Link& link, std::span<const std::byte> message);
  void break_link(uint32_t number, Member& carried, const std::string& why);
  bool flush() override;
  bool must_look_soon() const override;
  void add_kept(Stats& now) const override;
  void forget() override;
  bool read_block(const Block&, uint64_t, std::span<std::byte>) override { return false; }
  void sent(const Block&) override {}

  std::vector<Unsealed> unsealed_;  ///< of the collecting thread
  std::vector<Arrived> arrived_;    ///< of the delivering thread
  std::vector<std::byte> opened_;   ///< of the delivering thread
  // All that follows is guarded by mutex_.
  std::map<uint32_t, std::shared_ptr<Member>> carried_;
  uint32_t next_ = 0;                 ///< where the next pass begins
  std::vector<std::byte> collected_;  ///< of the link `collected_of_`
  uint32_t collected_of_ = 0;
  size_t collected_at_ = 0, collected_end_ = 0;
  std::vector<std::pair<uint32_t, std::string>> broken_;
};

}  // namespace pathways
