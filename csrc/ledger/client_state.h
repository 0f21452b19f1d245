/// All that the controller knows of one client. The comment above a group of fields names the class that writes them;
/// the others only read.
///
/// Threading: the controller's stepping thread only, once the client was added.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "ledger/client_credits.h"
#include "ledger/client_limits.h"
#include "ledger/handle_table.h"
#include "ledger/held_records.h"
#include "ledger/hidden_handles.h"
#include "ledger/lost_buffers.h"
#include "ledger/sent_commands.h"
#include "messages/outbox.h"
#include "messages/shared_segments.h"
#include "sequencer/space_classes.h"

namespace pathways {

/// Where a client's future table is.
enum class ClientPlace : uint8_t {
  kHere,       ///< in the block that the controller has
  kElsewhere,  ///< on the client's machine; that of the block is not used
};

struct ClientState {
  /// A client without memory, in whose name records enter the order.
  explicit ClientState(uint32_t number, uint32_t hosts = 0) : id(number), credits(hosts) {}
  /// Throws Error(kInvalid) when the client's rings are invalid.
  ClientState(uint32_t number, const ClientView& block, DoorbellWord* doorbell, uint32_t hosts,
              ClientPlace where = ClientPlace::kHere)
      : id(number),
        place(where),
        view(block),
        bell(doorbell),
        inbox(block.from_client()),
        cancels(block.cancels()),
        outbox(block.to_client(), &block.futures().doorbell()),
        credits(hosts),
        handles(block.futures().capacity()) {}

  /// Whether a future may be pending: of a client elsewhere nobody here knows.
  bool may_be_pending(Handle future) const {
    return place == ClientPlace::kElsewhere || view.futures().poll(future) == FutureState::kPending;
  }

  const uint32_t id;
  const ClientPlace place = ClientPlace::kHere;
  ClientView view;
  DoorbellWord* const bell = nullptr;  ///< the client rings it for the controller

  // Inbox
  ByteRing::Consumer inbox;
  ByteRing::Consumer cancels;
  uint64_t newest = 0;                     ///< the highest tag of a run that was taken from its ring
  std::unordered_set<uint64_t> cancelled;  ///< tags of runs whose cancel came before the run itself
  bool is_unread = false;                  ///< the controller reads it no further: it has too much under way

  // ReadyClients
  uint32_t ticket = 0;    ///< of its bell, when the controller last found that it was rung
  uint32_t quiet = 0;     ///< comparisons of all bells since
  bool is_near = false;   ///< it has rung lately
  bool is_ready = false;  ///< it is to be looked at

  // Clients
  bool is_dirty = false;  ///< it has something to be published
  Outbox outbox;
  uint64_t retired = 0;      ///< runs that are over
  bool has_unsent = false;   ///< the client was not notified of `retired` yet
  std::vector<Handle> late;  ///< results of granted runs whose deadline has passed; see Clients::fail_late()
  std::string fault;         ///< why it is to be evicted; empty: it is not
  bool is_mute = false;      ///< its ring from the controller is invalid: nothing more is sent

  // Controller
  bool is_suspended = false;
  AtQuota at_quota = AtQuota::kRefuse;

  // Grants
  uint64_t device_ns = 0;  ///< device time of its runs so far

  // Several classes count in `credits`; see there. Grants writes `sent`
  ClientCredits credits;
  SentCommands sent;

  // MemoryLedger
  HandleTable handles;

  // Inbox and Recovery
  LostBuffers lost;

  // Loops
  uint64_t loop = 0;  ///< its composite of which not all runs are ordered; 0: none (CLI-1)
  HiddenHandles hidden;

  // AdmissionQueue
  HeldRecords held;
  bool is_paced = false;     ///< it has too much under way, so its held records are not ordered
  int64_t held_since = 0;    ///< when only live buffers began to keep the first record out; 0: they do not
  int64_t turn_since = 0;    ///< when its turn began, or the time between two turns
  uint32_t turns = 0;        ///< turns it has had for the first held record
  uint32_t renewals = 0;     ///< new graces it has had for the first held record
  bool is_its_turn = false;  ///< see AdmissionQueue::may_wait_for_blocks()
  int64_t room_since = 0;    ///< when only live buffers began to keep the first record out, whoever is busy; 0: not
  std::optional<SpaceId> asks_for_room;  ///< SUSP-2: the memory space where it found the least room
  bool is_room_refused = false;          ///< SUSP-2: nobody makes room for the first record
  /// Its first held record, if it has one, is not kept out by live buffers any more.
  void not_kept_out() {
    held_since = room_since = 0;
    asks_for_room.reset();
  }
};

}  // namespace pathways
