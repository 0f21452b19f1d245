/// ERR-2 in the controller: lost hosts leave the order, and their successors enter it.
///
/// A loss is a point in the order. Before that point, for each lost host: whole records that the host sent count; what
/// the host had been granted and has not completed is over. Behind that point: entries that waited for the host wait
/// for its successor. Surviving hosts get the loss in their rings, behind everything that they were granted together
/// with the lost hosts. So each surviving host knows for certain what will never come (Executor::on_hosts_lost).
///
/// What a lost host had been granted is over: the controller completes it in the host's place, and every pending future
/// with a part on that host fails. Entries that still waited for a lost host wait on, and run on its successor. Two
/// kinds of runs are dropped instead: runs that need lost hosts and surviving hosts, so that no surviving host waits
/// for a host that is starting; and runs that have a lost buffer as an argument, which can only fail, also those that
/// are submitted later (LostBuffers). OWN-1, ARENA-5: each client takes back the memory that it leased to a lost host
/// in commands that were sent there.
///
/// The Controller calls `lose` and `restore`, by mail. State: how many losses there were; which hosts are lost is with
/// HostRings, what successors need again is with SentCommands.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "controller/admission_queue.h"
#include "controller/inbox.h"
#include "dispatch/grants.h"
#include "dispatch/host_rings.h"
#include "ledger/clients.h"
#include "ledger/lost_buffers.h"
#include "ledger/memory_ledger.h"
#include "loops/loops.h"

namespace pathways {

class Recovery {
 public:
  Recovery(HostRings& hosts, Clients& clients, MemoryLedger& ledger, Grants& grants, Loops& loops,
           AdmissionQueue& queue, Inbox& inbox)
      : hosts_(hosts),
        clients_(clients),
        ledger_(ledger),
        grants_(grants),
        loops_(loops),
        queue_(queue),
        inbox_(inbox) {}

  /// The processes of these hosts have ended. Returns the number of this loss. Throws Error(kInvalid) for a host that
  /// is not there, or lost already; then nothing has happened.
  uint64_t lose(const std::vector<uint32_t>& hosts, std::string_view text);
  /// The successor of a lost host takes part from now on. `gone`: clients that it may know, and that have left before.
  /// Throws Error(kInvalid) for a host that is not lost.
  void restore(uint32_t host, const HostView& block, std::span<const uint32_t> gone);

 private:
  void hear_last_words(uint32_t host);
  void reclaim(uint32_t host);
  void tell_survivors(const std::vector<uint32_t>& hosts, std::string_view text);
  struct Waiting {
    EntryId id;
    const Entry* entry;
    std::span<const std::byte> bytes;
    bool is_stranded;  ///< a run that is about to be dropped
  };
  using Lines = std::unordered_map<uint32_t, std::vector<Waiting>>;  // by client
  using Lost = std::unordered_map<uint32_t, LostBuffers>;            // by client
  Lines lines() const;
  Lost fail_futures(const std::vector<uint32_t>& hosts, const LossText& text);
  void fail_waiting(Lost lost, const LossText& text);
  void fail_held(ClientState& client, LostBuffers& lost);
  void describe_again(ClientState& client, uint32_t host);

  HostRings& hosts_;
  Clients& clients_;
  MemoryLedger& ledger_;
  Grants& grants_;
  Loops& loops_;
  AdmissionQueue& queue_;
  Inbox& inbox_;
  uint64_t losses_ = 0;
};

}  // namespace pathways
