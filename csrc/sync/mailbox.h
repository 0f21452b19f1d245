/// Mailbox: functions that other threads leave for the stepping thread (of a controller or a host). That thread calls
/// all of them at its next read(), in the order in which they were posted. Use it for registrations, which are rare;
/// frequent messages come as records on rings.
///
/// Threading: any thread calls `post` and `has_mail`; the stepping thread calls `read`.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "sync/doorbell.h"

namespace pathways {

class Mailbox {
 public:
  /// `doorbell` wakes the stepping thread.
  explicit Mailbox(DoorbellWord* doorbell) : doorbell_(doorbell) {}

  void post(std::function<void()> mail) {
    {
      const std::lock_guard lock(mutex_);
      mail_.push_back(std::move(mail));
      // SYNC mailbox/post: pairs with has_mail().
      has_mail_.store(true, std::memory_order_release);
    }
    doorbell_->ring();
  }

  bool has_mail() const {
    // SYNC mailbox/post: pairs with post(). A thread that sees what the poster wrote after post() also sees its mail.
    return has_mail_.load(std::memory_order_acquire);
  }

  void read() {
    if (!has_mail()) return;
    std::vector<std::function<void()>> mail;
    {
      const std::lock_guard lock(mutex_);
      mail.swap(mail_);
      has_mail_.store(false, std::memory_order_relaxed);
    }
    for (auto& item : mail) item();
  }

 private:
  DoorbellWord* const doorbell_;
  std::mutex mutex_;  // guards mail_
  std::vector<std::function<void()>> mail_;
  std::atomic<bool> has_mail_{false};
};

}  // namespace pathways
