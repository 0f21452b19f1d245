/// HostLink: what the executor reports to the rest of the cluster.
///
/// Threading: all calls come from the executor's thread, one at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "base/ids.h"
#include "base/status.h"
#include "device/exchange_io.h"
#include "futures/read_back.h"
#include "messages/records.h"
#include "runs/error_table.h"

namespace pathways {

/// What a run took on this host's devices; see runs/device_clock.h.
struct DeviceTime {
  int64_t busy_ns = 0;  ///< in which some device was busy for it
  uint32_t batch = 0;   ///< runs whose ends were noticed together have the same number
};

/// What was chosen between the cases of a branch: the case `taken`, or why there is none; or it is dead, because the
/// branch in which the scalar is computed was not taken.
struct Decision {
  Outcome outcome = Outcome::kDone;
  uint32_t taken = 0;
  std::string_view text = {};
};

/// Which predicates of a run are known on a host, by their bits, and which of them hold (GANG-1). A bit that several
/// predicates share is known if all of them are, and stands for the parity of those that hold.
struct TakenBranches {
  uint64_t known = 0, chosen = 0, failed = 0;
  /// `verdict`: 0 if it holds, kDead if not, or an error.
  void add(uint32_t bit, uint32_t verdict) {
    const uint64_t mask = uint64_t{1} << bit;
    known |= mask;
    if (verdict == 0) chosen ^= mask;
    if (verdict != 0 && verdict != kDead) failed |= mask;
  }
  uint64_t sure() const { return known & ~failed; }
};

/// Writes this host's share of a value into a slot, and tells the slot which bytes these are.
using WriteValue = std::function<Status(ReadBackSlot)>;

/// What the executor reports to the rest of the cluster. `host/host.h` implements it over rings.
class HostLink {
 public:
  virtual ~HostLink() = default;
  /// This host's part of a buffer is ready, or a task is done.
  virtual void complete(uint32_t client, Handle future) = 0;
  /// This host has written its part of a fetch: these pieces of the block.
  virtual void fetched(uint32_t client, Handle token, std::span<const BlockPiece> /*written*/) {
    complete(client, token);
  }
  virtual void failed(uint32_t client, Handle future, std::string_view text) = 0;
  /// READ-1: lets `write` write this host's share of a result's value to where it belongs, unless nobody will read it.
  /// `write` returns how it went.
  virtual Status read_back(uint32_t /*client*/, Handle /*future*/, const WriteValue& /*write*/) { return Status::kOk; }
  /// A run is over here: this host launched `gangs` of the `expected` gangs that the run has on it (GANG-1).
  /// Gangs of branches that were not taken are not among the expected ones; `taken`: which were.
  virtual void run_done(uint32_t client, uint64_t tag, uint32_t gangs, uint32_t expected, DeviceTime time,
                        const TakenBranches& taken) = 0;
  /// A command of the client, in a record of so many bytes, is done here, and this host keeps nothing of it.
  virtual void command_done(uint32_t /*client*/, uint64_t /*bytes*/) {}
  /// MEM-7: this host keeps nothing for a task of the client any more; `hold` is that of its record, and not 0.
  virtual void hold_over(uint32_t /*client*/, uint64_t /*hold*/) {}
  /// Both, at the end of a command.
  void command_over(const CommandRecord& record) {
    command_done(record.header.client, bytes_of(record));
    if (record.hold != 0) hold_over(record.header.client, record.hold);
  }
  /// The owner's thread may now be in a launch for long. The records that were sent to other hosts before go out now;
  /// for which there is no room, another thread delivers until `come_back` (GANG-2).
  virtual void leave() {}
  virtual void come_back() {}
  virtual void receive_ready(uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> offsets) = 0;
  virtual void receive_done(uint32_t host, uint64_t order, uint32_t node, Outcome outcome, std::string_view text) = 0;
  virtual void exchange_words(uint32_t host, ExchangeWords kind, uint64_t order, uint32_t node,
                              std::span<const uint64_t> words) = 0;
  /// Rows for `host` are written; with an `error`: they are not.
  virtual void exchange_written(uint32_t host, uint64_t order, uint32_t node, std::string_view error) = 0;
  /// Tells `host` what was chosen: `choice` is its number in the program.
  virtual void decided(uint32_t host, uint64_t order, uint32_t choice, const Decision& decision) = 0;
};

}  // namespace pathways
