/// The hosts' rings at the controller: one from each host and one to each host, and which hosts are lost.
///
/// Inbox reads `from_host`, and says which host has sent what makes no sense: nothing more of it is read (FAULT-1).
/// Who started the host asks for such hosts, and ends them; then they are lost as others are. Grants and Recovery send
/// through `outbox_of`. Recovery takes lost hosts out and puts their successors in. The Controller flushes at the end
/// of each pass.
///
///   COST-3  a pass flushes only the hosts that it wrote to, and rings each of them once.
///
/// Invariants: `dirty_` lists exactly the hosts whose `is_dirty` is true, each once, and none of them is lost; `lost_`
/// counts the hosts that are lost.
///
/// Threading: the controller's stepping thread only; `count` and `take_faults` any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "dispatch/controller_options.h"
#include "messages/outbox.h"
#include "messages/ready_bell.h"
#include "messages/shared_segments.h"

namespace pathways {

/// How often to look at a ring that is full: nobody rings when it has room again.
inline constexpr std::chrono::microseconds kOverflowLook{100};

class HostRings {
 public:
  /// `hosts`: a host without a block is lost. `readers`: see ControllerOptions. Throws Error(kInvalid) for no hosts, or
  /// too many.
  HostRings(const ControllerBlock* block, std::span<const HostView> hosts, const ControllerOptions& options);

  uint32_t count() const { return static_cast<uint32_t>(hosts_.size()); }
  /// How many hosts are lost now.
  uint32_t lost() const { return lost_; }
  bool is_lost(uint32_t host) const { return hosts_[host].is_lost; }
  /// Whether something of the host makes no sense: it is about to be lost.
  bool has_fault(uint32_t host) const { return hosts_[host].has_fault; }
  /// Nothing more of the host is read. Throws Error(kInvalid) unless somebody ends hosts with faults.
  void fault(uint32_t host, std::string what);
  struct Fault {
    uint32_t host;
    std::string what;
  };
  /// The faults since the last call, of hosts that are not lost yet: whoever comes in their place has done nothing.
  std::vector<Fault> take_faults();
  /// The longest record that fits every host's ring, also those of hosts that come later.
  uint32_t max_record() const { return max_record_; }

  /// The ring from a host that is not lost.
  ByteRing::Consumer& from_host(uint32_t host) { return hosts_[host].inbox; }
  /// A host's outbox, which will be flushed at the end of the pass.
  Outbox& outbox_of(uint32_t h) {
    Host& host = hosts_[h];
    if (!host.is_dirty) {
      host.is_dirty = true;
      dirty_.push_back(h);
    }
    return host.outbox;
  }
  void flush();
  /// Some outbox has something to flush. After a flush: some record waits for room in a host's ring.
  bool has_unsent() const { return !dirty_.empty(); }
  /// How long to wait before records that are kept in some outbox may be sent.
  std::chrono::nanoseconds next_look() const;

  void lose(std::span<const uint32_t> hosts);
  /// The successor of a lost host, with a block of its own.
  void restore(uint32_t host, const HostView& block);

  void validate() const;

 private:
  struct Host {
    ByteRing::Consumer inbox;
    Outbox outbox;
    bool is_dirty = false;  ///< it is listed in dirty_
    bool is_lost = false;
    bool has_fault = false;
  };

  Outbox outbox_to(uint32_t host, const HostView& block) const;

  const ControllerBlock* block_;
  ReadyBell* const readers_;
  const bool ends_hosts_with_faults_;
  const Clock clock_;
  std::vector<Host> hosts_;
  std::vector<uint32_t> dirty_;  ///< hosts whose outbox has something to flush
  uint32_t max_record_ = UINT32_MAX;
  uint32_t lost_ = 0;
  std::atomic<bool> has_faults_ = false;  ///< faults_ is not empty; a hint
  std::mutex mutex_;                      ///< guards faults_
  std::vector<Fault> faults_;
};

}  // namespace pathways
