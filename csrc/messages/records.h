/// The records that travel on rings between client, controller and hosts: the whole wire format of the hot path.
///
/// Each record begins with a `RecordHeader`; the record's kind fixes what follows. All records are trivially copyable,
/// of fixed width, 8-aligned, and in the machine's byte order. Links carry them as they are. Directions:
///   client -> controller   kRun, kCommand; kCancel, on a ring of its own
///   controller -> host     kRun (with its place in the order), kCommand, kClientGone, kHostLost
///   host -> controller     kRunDone, kCommandsDone, kHoldOver, kFailed; kFutureDone and kFetchDone, which the link
///                          takes off
///   controller -> client   kFailed, kReclaim
///   host -> host           kReceiveReady (where to write), kReceiveDone (it is written), kDecision; of exchanges of
///                          rows: kExchangeReport, kExchangeDecision, kExchangeWritten (movement/row_exchanges.h)
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/text.h"

namespace pathways {

enum class RecordKind : uint16_t {
  kRun = 1,
  kCommand = 2,
  kCancel = 3,
  kClientGone = 4,
  kRunDone = 5,
  kFailed = 6,
  kReceiveReady = 7,
  kReceiveDone = 8,
  kHostLost = 9,
  kReclaim = 10,
  kCommandsDone = 11,
  kHoldOver = 12,
  kDecision = 13,
  kExchangeReport = 14,
  kExchangeDecision = 15,
  kExchangeWritten = 16,
  kFutureDone = 17,
  kFetchDone = 18,
};

/// How something ended that one host tells another. kDead: it belongs to a branch that was not taken.
enum class Outcome : uint16_t { kDone = 0, kFailed = 1, kDead = 2 };

/// What a command asks of the hosts. Its payload follows the record.
enum class CommandKind : uint16_t {
  kPut = 1,      ///< makes the buffer `handle` from the payload's bytes; the backend defines the payload
  kFetch = 2,    ///< writes the buffer `handle` to where the payload says, then completes `token`
  kRelease = 3,  ///< payload: handles that the client will not name again
  kBackend = 4,  ///< any other work that has a place in the order; the backend defines the payload. `token`, unless 0:
                 ///< a plan that no later run names. `handle`, unless 0: a number under which the command describes
                 ///< something, replacing the number's earlier description; a lost host's successor gets it again
  /// Backend work that takes long and is done beside the order (reading and writing a checkpoint). With a token: the
  /// host starts it when the buffer `handle` is ready (at once if `handle` is 0), and then completes `token`. Without a
  /// token: it makes the buffer `handle`. The host may keep the memory of the buffer for longer than the client does:
  /// see `hold`.
  kTask = 5,
  kRename = 6,   ///< payload: pairs of handles; the first now names the buffer of the second, and its own is released
  kOffload = 7,  ///< controller only: moves the buffers off the devices; the backend defines payload and answer
  kRestore = 8,  ///< controller only: moves them back
  kFail = 9,     ///< controller only: the buffer `handle` failed before any host knew of it; payload: the error text
};

inline constexpr uint32_t kNoSpaceSet = 0xffffffffu;

struct RecordHeader {
  RecordKind kind;
  uint16_t detail;  ///< CommandKind for commands, flags for runs
  uint32_t client;
};

/// Flags of a RunRecord's header.detail. Each flag adds 8-byte words behind the handles, in this order.
enum RunDetail : uint16_t {
  kRunWanted = 1,  ///< one bit per result, 64 per word: write the result into the client's read-back area (READ-1)
  kRunHasSubmitted = 8,  ///< one word: when the client submitted it (monotonic_ns()); only while a trace is on. The
                         ///< client omits it when the record would not fit; the controller does not forward it
  kRunHasDeadline = 2,  ///< one word: the time by which the run must be over (monotonic_ns(), one clock on one machine)
};

/// The tag of a run that the controller makes of a composite, until the entry's id replaces it.
inline constexpr uint64_t kElementTag = ~uint64_t{0};

/// Followed by the handles of `arguments` arguments and `results` results, 8 bytes each; then the words of the flags in
/// `header.detail`. A host gets those of its own arguments and results only (dispatch/run_parts.h).
struct RunRecord {
  RecordHeader header;  ///< detail: RunDetail
  uint64_t tag;    ///< client -> controller: the client's own number of the run; controller -> host: the entry's id
  uint64_t order;  ///< place in the cluster's order; 0 until the sequencer has set it
  uint32_t plan;
  uint32_t group;
  uint32_t arguments;
  uint32_t results;
};

/// Followed by `bytes` bytes of payload, padded to 8.
struct CommandRecord {
  RecordHeader header;
  uint64_t handle;
  uint64_t token;
  uint32_t group;
  uint32_t bytes;
  uint64_t space_bytes = 0;          ///< kPut, kTask: bytes that the buffer which it makes takes on each memory space
  uint32_t space_set = kNoSpaceSet;  ///< kPut, kTask: see sequencer/admission.h; kNoSpaceSet: in no ledger
  uint16_t is_refused = 0;           ///< kPut: there is no room for it; the hosts return what it leases
  uint16_t lease_others = 0;         ///< hosts that got a counted reference instead of a lease (Lease::others)
  uint64_t lease_stamp = 0;          ///< stamp of the memory that is leased to each host; 0: none
  uint64_t space_devices = 0;        ///< controller -> host: the host's devices of `space_set`, one bit each (MEM-6)
  /// controller -> host, kTask: the number of the task's hold on the memory of its buffer (MEM-7). Each host sends a
  /// HoldOverRecord when it keeps nothing of the buffer for the task any more. 0: the buffer is in no ledger
  uint64_t hold = 0;
  /// kPut, kFetch: the block that is leased to each host: offset in the client's arena, size; 0 bytes: none. A link
  /// carries the block by value: where it arrives, `lease_at` is the offset in that machine's arena for the client.
  uint64_t lease_at = 0, lease_bytes = 0;
  /// kPut: so many LeasedParts (leased_parts.h) lie in the block behind these bytes: what each host needs; 0: all.
  uint32_t lease_parts = 0, reserved = 0;
};

struct CancelRecord {
  RecordHeader header;
  uint64_t tag;
};

struct ClientGoneRecord {
  RecordHeader header;
};

struct RunDoneRecord {
  RecordHeader header;
  uint64_t tag;       ///< the entry's id
  uint32_t gangs;     ///< gang launches of this run on this host (GANG-1)
  uint32_t expected;  ///< those in the host's plan, in branches that are taken: it launches all of them or none
  uint32_t host;
  uint32_t batch = 0;   ///< runs of this host whose ends it noticed together have the same number
  int64_t busy_ns = 0;  ///< time in which some device of this host was busy for the run
  uint64_t known = 0;   ///< the predicates that this host knows, by their bits (GANG-1, plan/branches.h)
  uint64_t chosen = 0;  ///< those of them that hold
};

/// A host has answered `count` commands of the client, whose records have `bytes` bytes, and keeps nothing of them. It
/// reports many at once: see messages/credits.h.
struct CommandsDoneRecord {
  RecordHeader header;
  uint64_t count;
  uint64_t bytes;
};

/// The host keeps nothing for the task with this hold any more: see CommandRecord.
struct HoldOverRecord {
  RecordHeader header;
  uint64_t hold;
};

/// The detail of a FailedRecord's header when a deadline has passed: the client replaces the text by its own, better
/// one.
inline constexpr uint16_t kFailedByDeadline = 1;

inline constexpr uint32_t kMostText = 4096;  ///< bytes of one error text

/// Followed by `bytes` bytes of UTF-8 text, padded to 8. Handle 0: the client itself was evicted; the text is the
/// reason.
struct FailedRecord {
  RecordHeader header;
  uint64_t handle;
  uint32_t bytes;
  uint32_t reserved;
};

/// This host's part of a future is done, whose client's memory is not here: the link on the client's machine takes the
/// record off the ring to the controller. Why on that ring: it must arrive before the record of the run's end, after
/// which the controller does not fail the run's futures any more (LINK-1). Followed by `runs` pieces of the value that
/// the client wanted with it, each a ValueRun and its bytes, padded to 8.
struct FutureDoneRecord {
  RecordHeader header;
  uint64_t handle;
  uint32_t runs;
  uint32_t is_large;  ///< 1: the value is in the future's large slot (ReadBackSlot)
};

/// The same for the token of a fetch into a block. Followed by `pieces` BlockPieces: what this host has written of the
/// block. The link sends these bytes, and then a FutureDoneRecord (LINK-3): hosts of other machines write the others.
struct FetchDoneRecord {
  RecordHeader header;
  uint64_t handle;
  uint32_t pieces, reserved;
};

/// A host is lost, and with it what lay on its island. It got leases of the client with stamps up to `stamp`, and will
/// return none of them any more; 0: it got none.
struct ReclaimRecord {
  RecordHeader header;
  uint32_t host, reserved;
  uint64_t stamp;
};

/// Hosts that are lost, at this point of the order (ERR-2). Followed by their numbers, 4 bytes each, padded to 8, and
/// by the failure reason: `bytes` bytes of text, padded to 8.
struct HostLostRecord {
  RecordHeader header;
  uint64_t loss;  ///< how many losses the cluster has had, this one included
  uint32_t hosts, bytes;
};

static_assert(sizeof(RecordHeader) == 8 && sizeof(RunRecord) == 40 && sizeof(CommandRecord) == 96);
static_assert(sizeof(FutureDoneRecord) == 24 && sizeof(FetchDoneRecord) == 24);
static_assert(std::is_trivially_copyable_v<RunRecord> && std::is_trivially_copyable_v<FailedRecord>);

/// How many 8-byte words follow a RunRecord.
inline constexpr uint64_t words_behind(const RunRecord& run) {
  const uint64_t handles = uint64_t{run.arguments} + run.results;
  return handles + ((run.header.detail & kRunWanted) != 0 ? (uint64_t{run.results} + 63) / 64 : 0) +
         ((run.header.detail & kRunHasSubmitted) != 0 ? 1 : 0) + ((run.header.detail & kRunHasDeadline) != 0 ? 1 : 0);
}

/// The record at the start of `bytes`, which must be long enough.
template <typename Record>
Record read_record(std::span<const std::byte> bytes) {
  static_assert(std::is_trivially_copyable_v<Record>);
  Record record;
  std::memcpy(&record, bytes.data(), sizeof record);
  return record;
}

template <std::unsigned_integral T>
constexpr T padded(T bytes) {
  return (bytes + T{7}) & ~T{7};
}

/// The beginning of an error's text that fits, padded, into `room` bytes behind a record.
inline std::span<const std::byte> text_bytes(std::string_view text, uint32_t room) {
  return std::as_bytes(std::span(cut_text(text, std::min(kMostText, room - 8))));
}

/// Bytes of a command with its payload.
inline constexpr uint64_t bytes_of(const CommandRecord& command) {
  return sizeof command + padded(uint64_t{command.bytes});
}

}  // namespace pathways
