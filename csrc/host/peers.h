/// Peers: the other hosts, as one host knows them, and the channels to and from them.
///
/// A peer's channel is chosen when the peer is opened: rings of these two hosts alone, or the rings between this host
/// and its machine's link, which all peers beyond the link share (link/machine_link.h). Nobody asks afterwards which
/// it is.
///
///   PEER-1  a record of a peer counts only between the epochs that both ends know. So nothing of a lost host, and
///           nothing that was meant for it, reaches its successor. What makes no sense in a record closes the channel
///           from its sender, with an error that names the host; what makes no sense in a ring closes the channels from
///           all who come through it. Nothing else is closed.
///
/// How PEER-1 is kept. A ring of two hosts is made anew for each successor, and its records name the sender. A link
/// names the sender to the one who reads, and drops what is for an epoch of the destination that is over (LINK-2). This
/// class drops what comes through a link from another epoch than the sender's present one. A sender counts only on its
/// own channel, so no host can speak for another one.
///
/// The order tells a host of a loss, and it may come by a slow link. A successor beyond the link speaks as soon as it
/// is expected here. So what it says before this host knows of the loss is kept, and counts when it is opened.
///
/// Threading: the owner's thread, and between `leave` and `come_back` a thread of this class instead. `check` and
/// `expect`: any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "messages/outbox.h"
#include "messages/peer_records.h"
#include "messages/shared_segments.h"
#include "sync/byte_ring.h"

namespace pathways {

/// How long to wait until the records that are kept in an outbox may go out. `due`: see Outbox, by this clock.
std::chrono::nanoseconds overflow_look(int64_t due, Clock clock);

class Peers {
 public:
  /// Does a record of a peer, without its PeerHeader. Returns what is wrong with it; empty: nothing, and it was done.
  using Take = std::function<std::string(uint32_t peer, std::span<const std::byte> record)>;
  /// The channel from a peer is closed, because of a fault.
  using Closed = std::function<void(uint32_t peer, const std::string& fault)>;
  static constexpr size_t kMostKept = size_t{16} << 20;  ///< bytes of one peer that is expected (TRUST-1)

  /// `own`: the block of this host, number `self`. `blocks`: those of all hosts, by number; not there: the host is lost
  /// now, or beyond the link. `epochs`: of all hosts; kAbsent: the host is lost now. Empty: the hosts that have blocks
  /// are there, in epoch 0. Throws Error(kInvalid) when this host has no rings to one of them.
  Peers(uint32_t self, const HostView& own, const std::vector<HostView>& blocks, std::vector<int32_t> epochs,
        ControllerBlock* controller, Clock clock, Take take, Closed closed);

  /// Whether this host may have a channel to a host of that number.
  bool may_reach(uint32_t host) const { return host == self_ || host < peers_.size(); }
  /// False: the peer is lost, and nothing is sent to it.
  bool is_there(uint32_t host) const { return peers_.at(host).state != State::kAbsent; }
  /// The most bytes that may follow a record to a peer that is there.
  uint32_t max_bytes(uint32_t host) const {
    return peers_[host].channel->out.max_record() - uint32_t{sizeof(PeerHeader) + sizeof(PeerRecord)};
  }
  /// Sends a record, and what follows it, to a peer that is there.
  void send(uint32_t host, const PeerRecord& record, std::span<const std::byte> behind);
  /// Publishes what was sent. True while some record is kept back, because there is no room or it is not due yet.
  bool flush();
  /// When the oldest record that is kept back may go out; see Outbox::due.
  int64_t due() const;
  /// GANG-2: the owner's thread may be in a launch for long. What was sent goes out now; what cannot, another thread
  /// sends until `come_back`.
  void leave();
  void come_back();

  /// Does the records that have come. Returns how many.
  uint32_t drain();
  /// The first records of long words that a peer is sending: for Take, which empties it. They are lost with the peer.
  std::vector<uint64_t>& partial_words(uint32_t host) { return peers_[host].partial_words; }
  /// The peer is lost. What it has sent before must have been drained.
  void lose(uint32_t host);
  /// Throws Error(kInvalid) when `replace` could not open this peer.
  void check(uint32_t host, const HostView& block, int32_t epoch) const;
  /// `replace` will open this peer, which is beyond the link.
  void expect(uint32_t host, int32_t epoch);
  /// Opens the successor of a lost peer, or a peer that was not there before. `block`: its block; not there: it is
  /// beyond the link. Nobody else uses the ring from the predecessor any more (host/losses.cc).
  void replace(uint32_t host, const HostView& block, int32_t epoch);

 private:
  enum class State : uint8_t {
    kAbsent,  ///< not there yet, or lost -> kOpen
    kOpen,    ///< -> kClosed, kAbsent
    kClosed,  ///< nothing of it counts any more (PEER-1); it is still told things -> kAbsent
  };
  struct Channel {
    Outbox out;
    ByteRing::Consumer in;
    std::optional<PeerHeader> only = {};  ///< who is at its other end; nullopt: the link, for all that are beyond it
    std::string fault = {};               ///< why it is not read any more; who is opened then is closed at once
  };
  struct Peer {
    State state = State::kAbsent;
    int32_t epoch = kAbsent;
    Channel* channel = nullptr;
    PeerHeader header = {0, 0};  ///< of what is sent to it
    std::vector<uint64_t> partial_words = {};
  };

  /// What an expected peer has said.
  struct Early {
    std::vector<std::vector<std::byte>> records = {};
    size_t bytes = 0;  ///< more than kMostKept: some records were dropped
  };

  void open(uint32_t host, const HostView& block, int32_t epoch);
  bool keep(const PeerHeader& from, std::span<const std::byte> bytes);
  void take_early(uint32_t host, int32_t epoch);
  uint32_t drain(Channel& channel);
  std::string take(const Channel& channel, std::span<const std::byte> bytes);
  bool may_bring(const Channel& channel, const PeerHeader& from) const;
  void close(uint32_t host, const std::string& fault);

  const uint32_t self_;
  const HostView own_;
  const int64_t distance_ns_;
  const Clock clock_;
  const Take take_;
  const Closed closed_;
  int32_t epoch_ = 0;        ///< of this host
  std::vector<Peer> peers_;  ///< by number; its size never changes
  std::vector<std::unique_ptr<Channel>> channels_;
  Channel* link_ = nullptr;  ///< one of them, for all peers that have none of their own; nullptr: there is no link
  std::vector<std::byte> record_;                           ///< scratch: copy of the record being read (TRUST-1)
  std::jthread speaker_;                                    ///< see leave()
  std::mutex mutex_;                                        ///< guards expected_
  std::map<std::pair<uint32_t, int32_t>, Early> expected_;  ///< by host and epoch
};

}  // namespace pathways
