/// What each client holds on each memory space, and the quotas that bound it, by class of spaces (MEM-8,
/// sequencer/space_classes.h). A part of Admission.
///
///   MEM-5 (quota)  With a quota, a client's runs and puts are admitted only while they fit the quota beside what the
///                  client itself holds and runs, on each space that quotas count. An account per class
///                  (sequencer/memory_account.h) keeps the same sums as for the whole space (MEM-2), for this client
///                  alone. A client's quota depends on nobody else: it keeps nobody out, and nobody keeps it out. A
///                  smaller quota takes nothing away. It only keeps the client from more until it has released enough.
///
/// A client that gets a quota while runs of it are under way gets accounts without these runs: they are not counted
/// until they are over. What needs no memory on a space always fits the quota there.
///
/// Cost: O(1) per class of a block, and for a client with a quota per class of a run; when a class is made, O(clients).
/// No search over blocks.
///
/// Invariants: `held[id].bytes` is the sum of the client's blocks on each space of the class that are not offloaded.
/// `holders_[id]` lists exactly the clients for which it is not 0, and `held[id].position` is the client's place in
/// that list. A client with a quota has an account for each class.
///
/// Pure: no thread, no clock, no I/O. Threading: one thread.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "sequencer/by_class.h"
#include "sequencer/memory_account.h"

namespace pathways {

class ClientMemory {
 public:
  /// A verdict, and the first class for which it holds; of no meaning for kFits.
  struct WorstOf {
    Verdict verdict = Verdict::kFits;
    ClassId id = kNoClass;
    void look_at(Verdict here, ClassId at) {
      if (here > verdict) *this = {here, at};
    }
  };

  /// The next class: it was split off class `from`, where it has the same as there, or nothing is held on it
  /// (kNoClass). `is_counted`: quotas count it, because its spaces are devices.
  void add_class(ClassId from, bool is_counted);

  /// kUnlimited: no quota. `next_number`: the number of the next run.
  void set_quota(uint32_t client, uint64_t bytes, uint64_t next_number);
  uint64_t quota(uint32_t client) const;
  /// The client is gone, and holds nothing.
  void forget(uint32_t client);

  void add(uint32_t client, std::span<const ClassPart> classes, uint64_t bytes, bool is_early);
  void remove(uint32_t client, std::span<const ClassPart> classes, uint64_t bytes);
  void enter(uint32_t client, std::span<const ClassNeed> needs, uint64_t number);
  void leave(uint32_t client, std::span<const ClassNeed> needs, uint64_t number);

  /// Whether some client has a quota. Without one, the answer of `check` and `check_block` is kFits, and `enter` and
  /// `leave` do nothing.
  bool has_quotas() const { return quotas_ != 0; }
  /// Whether a run, or a put of `bytes` bytes on each space, fits the client's quota.
  WorstOf check(uint32_t client, std::span<const ClassNeed> needs) const;
  WorstOf check_block(uint32_t client, std::span<const ClassPart> classes, uint64_t bytes) const;

  uint64_t held(uint32_t client, ClassId id) const;
  /// The most that the client holds on any one space that quotas count.
  uint64_t most_held(uint32_t client) const;
  /// The clients that hold something on each space of a class, in no order.
  std::span<const uint32_t> holders(ClassId id) const { return holders_[id]; }

  void validate() const;

 private:
  struct Held {
    uint64_t bytes = 0;
    uint32_t position = 0;  ///< in `holders_`
  };
  struct Client {
    std::vector<Held> held;  ///< by class; what is missing is nothing
    uint64_t quota = kUnlimited;
    uint64_t first_number = 0;            ///< runs before it are not in the accounts
    std::vector<MemoryAccount> accounts;  ///< by class; empty without a quota
    bool has_quota() const { return quota != kUnlimited; }
  };
  const Client* with_quota(uint32_t client) const;

  std::vector<std::vector<uint32_t>> holders_;  ///< by class
  std::vector<uint8_t> is_counted_;             ///< by class
  std::unordered_map<uint32_t, Client> clients_;
  uint32_t quotas_ = 0;  ///< of `clients_`, those that have one
};

}  // namespace pathways
