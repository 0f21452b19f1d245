/// The records that travel on rings between client, controller and hosts: the whole wire format of the hot path.
///
/// Each record begins with a `RecordHeader`; what follows is fixed by its kind. All are trivially copyable and of fixed
/// width, 8-aligned, in the machine's byte order: rings never leave the machine. Directions:
///   client -> controller   kRun, kCommand; on a ring of its own kCancel
///   controller -> host     kRun (with its place in the order), kCommand, kClientGone, kHostLost; kGo
///   host -> controller     kRunDone, kCommandsDone, kFailed; kEnqueued. This and kGo: in sequential dispatch only
///   controller -> client   kFailed, kReclaim
///   host -> host           kReceiveReady (where to write), kReceiveDone (it is written)
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

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
  kGo = 9,
  kEnqueued = 10,
  kHostLost = 11,
  kReclaim = 12,
  kCommandsDone = 13,
};

/// A flag in a run's `detail`, from the controller to hosts: its nodes are prepared as goes come, not before.
inline constexpr uint16_t kRunStepwise = 4;

/// What a command asks of the hosts. Its payload follows the record.
enum class CommandKind : uint16_t {
  kPut = 1,      ///< makes the buffer `handle` of the payload's bytes; the payload is the backend's
  kFetch = 2,    ///< writes the buffer `handle` where the payload says, then completes `token`
  kRelease = 3,  ///< payload: handles that the client will not name again
  kBackend = 4,  ///< anything else that has a place in the order; the payload is the backend's. `token`, unless it is
                 ///< 0: a plan that no later run names. `handle`, unless it is 0: a number under which the command
                 ///< describes something, in place of what it described before; a lost host's successor hears it again
  /// Work of the backend's that takes long and is done beside the order (a checkpoint's reading and writing). With a
  /// token: done with the buffer `handle` once it is ready (with none if 0), then completes `token`. Without: makes the
  /// buffer `handle`.
  kTask = 5,
  kRename = 6,   ///< payload: pairs of handles; the buffer of the second takes the name of the first, whose own goes
  kOffload = 7,  ///< controller only: moves the client's buffers off the devices; the backend's payload, and answer
  kRestore = 8,  ///< controller only: and back
  kFail = 9,     ///< controller only: the buffer `handle` failed before any host heard of it; the payload is why
};

inline constexpr uint32_t kNoSpaceSet = 0xffffffffu;

struct RecordHeader {
  RecordKind kind;
  uint16_t detail;  ///< CommandKind for commands, flags for runs
  uint32_t client;
};

/// What a RunRecord's header.detail may say. Each adds 8-byte words behind the handles, in this order.
enum RunDetail : uint16_t {
  kRunWanted = 1,       ///< a bit per result, 64 to a word: write it into the client's read-back area (READ-1)
  kRunHasDeadline = 2,  ///< one word, the moment (monotonic_ns(), one clock on one machine) by which it must be over
};

/// Followed by `arguments`, then `results` handles, 8 bytes each; then what `header.detail` says.
struct RunRecord {
  RecordHeader header;  ///< detail: RunDetail
  uint64_t tag;    ///< client -> controller: the client's own number of the run; controller -> host: the entry's id
  uint64_t order;  ///< place in the cluster's order; 0 until the sequencer gave one
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
  uint64_t space_bytes = 0;          ///< kPut, kTask: what the buffer that it makes takes, on each place
  uint32_t space_set = kNoSpaceSet;  ///< the same: see sequencer/admission.h; kNoSpaceSet: in no ledger
  uint32_t is_refused = 0;           ///< kPut: there is no room for it; the hosts give back what the payload holds
  uint64_t lease_stamp = 0;          ///< stamp of the client's memory that the payload lends to each host; 0: none
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
  uint32_t expected;  ///< what its plan has of them: a host launches all or none
  uint32_t host;
  uint32_t reserved;
};

/// A host is done with `count` commands of the client's, in records of so many bytes: what it read, answered and keeps
/// nothing of. Said for many at once: see messages/credits.h.
struct CommandsDoneRecord {
  RecordHeader header;
  uint64_t count;
  uint64_t bytes;
};

/// The detail of a FailedRecord's header when it is a deadline that has passed: the client knows the better words.
inline constexpr uint16_t kFailedByDeadline = 1;

/// Followed by `bytes` bytes of UTF-8 text, padded to 8. Handle 0: the client itself was put out, and why.
struct FailedRecord {
  RecordHeader header;
  uint64_t handle;
  uint32_t bytes;
  uint32_t reserved;
};

/// A lost host has heard of what the client lent it with stamps up to `stamp`, and gives back none of it any more.
struct ReclaimRecord {
  RecordHeader header;
  uint32_t host;
  uint32_t reserved;
  uint64_t stamp;
};

/// A transfer's destination to one of its sources. Followed by `count` offsets into the destination's arena.
struct ReceiveReadyRecord {
  RecordHeader header;  ///< detail: 1 when more offsets of the same post follow in the next record
  uint64_t order;
  uint32_t node;  ///< global node
  uint32_t host;  ///< who posts
  uint32_t count;
  uint32_t reserved;
};

/// Followed by `bytes` bytes of text, padded to 8, when the source value failed and nothing was written.
struct ReceiveDoneRecord {
  RecordHeader header;  ///< detail: 1 when the source failed
  uint64_t order;
  uint32_t node;
  uint32_t host;  ///< who has written
  uint32_t bytes;
  uint32_t reserved;
};

/// Hosts that are gone, at this point of the order (ERR-2). Followed by their numbers, 4 bytes each, padded to 8, and
/// by `bytes` bytes of text, padded to 8, which says the failure reason of them.
struct HostLostRecord {
  RecordHeader header;
  uint64_t loss;  ///< how many losses the cluster has had, this one included
  uint32_t hosts;
  uint32_t bytes;
};

/// To a host that holds part of a run sent as kRunStepwise: it prepares its nodes up to `last`.
struct GoRecord {
  RecordHeader header;
  uint64_t order;
  uint32_t last;  ///< global node
  uint32_t reserved;
};

/// A host has enqueued a call of a run sent as kRunStepwise, or will never do so.
struct EnqueuedRecord {
  RecordHeader header;
  uint64_t tag;   ///< the entry's id
  uint32_t node;  ///< global node
  uint32_t host;
};

static_assert(sizeof(RecordHeader) == 8 && sizeof(RunRecord) == 40 && sizeof(CommandRecord) == 56);
static_assert(std::is_trivially_copyable_v<RunRecord> && std::is_trivially_copyable_v<FailedRecord>);

/// 8-byte words that follow a RunRecord.
inline constexpr uint64_t words_behind(const RunRecord& run) {
  const uint64_t handles = uint64_t{run.arguments} + run.results;
  return handles + ((run.header.detail & kRunWanted) != 0 ? (uint64_t{run.results} + 63) / 64 : 0) +
         ((run.header.detail & kRunHasDeadline) != 0 ? 1 : 0);
}

/// The record that a ring's bytes begin with; there are enough of them.
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

/// Of a command with its payload.
inline constexpr uint64_t bytes_of(const CommandRecord& command) {
  return sizeof command + padded(uint64_t{command.bytes});
}

}  // namespace pathways
