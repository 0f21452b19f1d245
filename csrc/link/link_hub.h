/// LinkHub: what the links of one machine share: which host is reached over which link, and the clients' memory.
///
/// The hub of the controller's machine ("head") has one link to each agent, and passes on what agents' hosts say to
/// each other. The hub of an agent has one link, to the head.
///
/// LINK-2 (known)   a frame counts only if it names a host, in its present incarnation, which the link's own end of the
///                  cluster has (link.h checks senders, the hub destinations); or a client that is here. So a machine
///                  can speak for its own hosts only, and what is on its way when a host is lost reaches no successor.
///                  A host completes only its own part of a future, once (link/awaited_futures.h).
///
/// Threading: any thread. Locks: a link's, then the hub's or that of a link's queue; never the other way.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "memory/arena.h"
#include "messages/peer_records.h"
#include "messages/shared_segments.h"

namespace pathways {

class Link;

/// Whether it is a whole FutureDoneRecord.
bool is_completion(std::span<const std::byte> record);
/// Counts a host's part of a client's future, after it has written the value that came with it.
void complete_future(const ClientView& client, std::span<const std::byte> completion);

class LinkHub {
 public:
  /// `most_received`: bytes of this machine's memory for the blocks of clients on other machines, of all together. When
  /// they are taken, each of the n clients may still have an n(n + 1)-th of as many. The sum of these parts is less
  /// than `most_received`, also when clients come one after the other and keep theirs: so they take less than twice as
  /// much.
  explicit LinkHub(uint64_t most_received = UINT64_MAX) : most_received_(most_received) {}
  LinkHub(const LinkHub&) = delete;
  LinkHub& operator=(const LinkHub&) = delete;

  /// A client. Its block must stay mapped until `remove_client` has returned; `keep` may see to that. `link`: the
  /// client is on another machine, where its futures are, and `view` is of its twin.
  void add_client(uint32_t client, const ClientView& view, std::shared_ptr<const void> keep = nullptr,
                  const std::shared_ptr<Link>& link = nullptr);
  void remove_client(uint32_t client);
  /// The hosts of a group of the controller's, by its number.
  void add_group(uint32_t group, std::vector<uint32_t> hosts);

  // For links.
  /// Whether the client of a link, whose blocks take `mine` bytes, may take more: there is room, or it has less than
  /// its part. A link whose client has not joined has none.
  bool has_room_for(uint64_t bytes, uint64_t mine, const Link& link);
  /// A client's blocks take so many bytes now, and took so many before.
  void count_received(uint64_t now, uint64_t before) { received_ += now - before; }
  void add_destination(uint32_t host, int32_t incarnation, const std::shared_ptr<Link>& link);
  void remove_destination(uint32_t host, const Link* link);
  /// The link to a host, if this is its present incarnation; else nullptr.
  std::shared_ptr<Link> link_to(uint32_t host, int32_t incarnation);
  std::vector<uint32_t> group(uint32_t number);
  /// See `complete_future`; passes the record on when the client is on another machine.
  void complete(std::span<const std::byte> completion);
  /// Writes to, or reads from, a live block of a client. False: there is no such block, or the client is gone.
  bool write(uint32_t client, uint64_t offset, uint64_t at, std::span<const std::byte> bytes);
  bool read(uint32_t client, uint64_t offset, uint64_t at, std::span<std::byte> bytes);
  /// Whether the client has leased a block of so many bytes there to the host.
  bool is_leased(uint32_t client, uint64_t offset, uint64_t bytes, uint32_t host);
  void return_lease(uint32_t client, uint64_t offset, uint32_t host);

 private:
  struct Client {
    ClientView view;
    std::shared_ptr<const void> keep;
    std::shared_ptr<Link> link;  ///< nullptr: the client is on this machine
  };
  struct Destination {
    int32_t incarnation;
    std::weak_ptr<Link> link;
    const Link* name;  ///< the same link, to compare
  };
  const uint64_t most_received_;
  std::atomic<uint64_t> received_{0};
  std::mutex mutex_;  ///< guards what follows
  std::unordered_map<uint32_t, Client> clients_;
  std::unordered_map<uint32_t, std::vector<uint32_t>> groups_;
  std::unordered_map<uint32_t, Destination> destinations_;
};

}  // namespace pathways
