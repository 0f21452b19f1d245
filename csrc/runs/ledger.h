/// The memory in use on this host's devices: bytes by device, by client and by plan (MEM-1).
///
/// XLA owns the memory; the ledger counts what the executor refers to. A value is counted once, however many references
/// it has, from its first reference until its last one is dropped. A donated value is no longer counted after the
/// launch that took it over. The ledger does not know values of unknown size (of a plan without sizes, or
/// placeholders); a call for one of them costs a lookup.
///
/// Threading: the executor's thread only.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "device/device.h"

namespace pathways {

/// The bytes that a compiled plan's values take, on each local device that holds them.
struct PlanSizes {
  struct Launch {
    uint64_t temporary = 0;         ///< while it runs, beside its inputs and outputs
    std::vector<uint32_t> donated;  ///< positions of the inputs that its outputs take over
    bool moves = false;             ///< it copies its one input to another memory, beside the computations
  };
  std::vector<uint64_t> values;  ///< by local value
  std::vector<Launch> launches;  ///< by launchable
};

class Ledger {
 public:
  using AccountId = uint32_t;

  struct Account {
    uint32_t client = 0;
    uint32_t plan = 0;   ///< kPuts: what the client put here itself
    uint64_t bytes = 0;  ///< on all local devices
    uint64_t high_water = 0;
    bool is_open = false;
    uint32_t offloaded = 0;  ///< values off the devices, booked on it again when restored
  };
  struct Device {
    uint64_t bytes = 0;
    uint64_t high_water = 0;
    uint64_t limit = UINT64_MAX;
  };
  static constexpr uint32_t kPuts = 0xffffffffu;

  explicit Ledger(uint32_t devices) : devices_(devices), slots_(kSlots) {}

  void set_limit(uint64_t bytes) {
    for (Device& device : devices_) device.limit = bytes;
  }

  AccountId open(uint32_t client, uint32_t plan) {
    for (AccountId id = 0; id < accounts_.size(); ++id) {
      if (accounts_[id].is_open || accounts_[id].bytes != 0 || accounts_[id].offloaded != 0) continue;
      accounts_[id] = {client, plan, 0, 0, true, 0};
      return id;
    }
    accounts_.push_back({client, plan, 0, 0, true, 0});
    return static_cast<AccountId>(accounts_.size() - 1);
  }
  /// Nothing new is booked on it. It may be reused once none of its values is left.
  void close(AccountId account) { accounts_[account].is_open = false; }

  uint64_t all_devices() const { return devices_.size() < 64 ? (uint64_t{1} << devices_.size()) - 1 : ~uint64_t{0}; }
  /// Whether `bytes` more fit on each device of a mask.
  bool fits(uint64_t mask, uint64_t bytes) const {
    for (; mask != 0; mask &= mask - 1) {
      const Device& device = devices_[static_cast<size_t>(std::countr_zero(mask))];
      if (bytes > device.limit || device.bytes > device.limit - bytes) return false;
    }
    return true;
  }
  /// Counts `bytes` more in the high water only: they are in use for a moment, as a computation's temporaries are.
  void touch(uint64_t mask, uint64_t bytes) {
    for (; mask != 0; mask &= mask - 1) {
      Device& device = devices_[static_cast<size_t>(std::countr_zero(mask))];
      device.high_water = std::max(device.high_water, device.bytes + bytes);
    }
  }

  /// Books a value with one reference. A value that is booked already gets one more reference.
  void add(Value value, AccountId account, uint64_t mask, uint64_t bytes) {
    if (bytes == 0) return;
    if ((count_ + 1) * 2 > slots_.size()) grow();
    Slot& slot = find_slot(value);
    if (slot.value != nullptr) {
      ++slot.references;
      return;
    }
    slot = {value, mask, bytes, account, 1, false};
    ++count_;
    book(account, mask, bytes);
  }
  void retain(Value value) {
    if (Slot* slot = find(value)) ++slot->references;
  }
  void drop(Value value) {
    Slot* slot = find(value);
    if (slot == nullptr || --slot->references != 0) return;
    unbook(*slot);
    erase(slot);
  }
  /// Replaces one reference of a value by one of `stand_in`, which stands for the value while it is off the devices
  /// (SUSP-1). The stand-in's bytes are booked nowhere.
  void offload(Value value, Value stand_in) {
    const Slot* known = find(value);
    if (known == nullptr || known->is_offloaded) return;
    Slot offloaded = *known;
    drop(value);
    if (Slot* slot = find(stand_in)) {
      ++slot->references;
      return;
    }
    if ((count_ + 1) * 2 > slots_.size()) grow();
    offloaded.value = stand_in;
    offloaded.references = 1;
    offloaded.is_offloaded = true;
    ++accounts_[offloaded.account].offloaded;
    insert(offloaded);
  }
  /// Replaces one reference of the stand-in by one of `value`, which is booked as before.
  void restore(Value stand_in, Value value) {
    const Slot* known = find(stand_in);
    if (known == nullptr || !known->is_offloaded) return;
    const Slot offloaded = *known;
    drop(stand_in);
    add(value, offloaded.account, offloaded.mask, offloaded.bytes);
  }
  /// The value was donated: an output has its memory now.
  void consume(Value value) {
    if (Slot* slot = find(value)) {
      unbook(*slot);
      slot->bytes = 0;
    }
  }

  const std::vector<Device>& devices() const { return devices_; }
  const std::vector<Account>& accounts() const { return accounts_; }
  size_t count() const { return count_; }
  /// Checks MEM-1: the bytes of devices and of accounts are the sums of their values. For tests and debug builds.
  void validate() const {
    std::vector<uint64_t> devices(devices_.size()), accounts(accounts_.size());
    size_t count = 0;
    for (const Slot& slot : slots_) {
      if (slot.value == nullptr) continue;
      ++count;
      if (slot.is_offloaded) continue;
      for (uint64_t mask = slot.mask; mask != 0; mask &= mask - 1) {
        devices[static_cast<size_t>(std::countr_zero(mask))] += slot.bytes;
        accounts[slot.account] += slot.bytes;
      }
    }
    PW_CHECK(count == count_);
    for (size_t i = 0; i < devices.size(); ++i) PW_CHECK(devices[i] == devices_[i].bytes);
    for (size_t i = 0; i < accounts.size(); ++i) PW_CHECK(accounts[i] == accounts_[i].bytes);
  }

 private:
  static constexpr size_t kSlots = 256;  ///< at first; a power of two

  /// Open addressing, linear probing; a slot without a value is empty.
  struct Slot {
    Value value = nullptr;
    uint64_t mask = 0;
    uint64_t bytes = 0;
    AccountId account = 0;
    uint32_t references = 0;
    bool is_offloaded = false;
  };

  size_t home(Value value) const {
    // Fibonacci hashing; the low bits of an address do not vary.
    const uint64_t mixed = (reinterpret_cast<uintptr_t>(value) >> 4) * uint64_t{0x9e3779b97f4a7c15};
    return static_cast<size_t>(mixed >> shift_);
  }
  /// Where a value is, or would be.
  Slot& find_slot(Value value) {
    size_t at = home(value);
    while (slots_[at].value != value && slots_[at].value != nullptr) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }
  Slot* find(Value value) {
    Slot& slot = find_slot(value);
    return slot.value != nullptr ? &slot : nullptr;
  }
  void insert(const Slot& slot) {
    find_slot(slot.value) = slot;
    ++count_;
  }
  /// Empties a slot, and moves values that were probed past it into the gap.
  void erase(Slot* slot) {
    size_t gap = static_cast<size_t>(slot - slots_.data());
    const size_t last = slots_.size() - 1;
    for (size_t at = (gap + 1) & last; slots_[at].value != nullptr; at = (at + 1) & last) {
      if (((at - home(slots_[at].value)) & last) < ((at - gap) & last)) continue;  // its home is behind the gap
      slots_[gap] = slots_[at];
      gap = at;
    }
    slots_[gap] = Slot{};
    --count_;
  }
  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    --shift_;
    count_ = 0;
    for (const Slot& slot : old) {
      if (slot.value != nullptr) insert(slot);
    }
  }
  void book(AccountId account, uint64_t mask, uint64_t bytes) {
    Account& owner = accounts_[account];
    for (; mask != 0; mask &= mask - 1) {
      Device& device = devices_[static_cast<size_t>(std::countr_zero(mask))];
      device.bytes += bytes;
      device.high_water = std::max(device.high_water, device.bytes);
      owner.bytes += bytes;
    }
    owner.high_water = std::max(owner.high_water, owner.bytes);
  }
  void unbook(const Slot& slot) {
    if (slot.is_offloaded) {
      --accounts_[slot.account].offloaded;
      return;
    }
    for (uint64_t mask = slot.mask; mask != 0; mask &= mask - 1) {
      devices_[static_cast<size_t>(std::countr_zero(mask))].bytes -= slot.bytes;
      accounts_[slot.account].bytes -= slot.bytes;
    }
  }

  std::vector<Device> devices_;
  std::vector<Account> accounts_;
  std::vector<Slot> slots_;
  int shift_ = 64 - std::countr_zero(kSlots);  ///< from a mixed address to its home: 64 - log2(slots_.size())
  size_t count_ = 0;
};

}  // namespace pathways
