/// How the cluster ends: failed or closed, with a text that every client reads.
///
/// Controller::fail and close come here.
///
/// Threading: any thread.
#pragma once

#include <mutex>
#include <string_view>

#include "ledger/clients.h"
#include "messages/shared_segments.h"
#include "sync/mailbox.h"

namespace pathways {

class ClusterEnd {
 public:
  ClusterEnd(StatusBlock* status, Mailbox& mailbox, Clients& clients)
      : status_(status), mailbox_(mailbox), clients_(clients) {}

  void fail(std::string_view text) { finish(ClusterStatus::kFailed, text); }
  void close() { finish(ClusterStatus::kClosed, "the cluster was closed"); }

 private:
  void finish(ClusterStatus status, std::string_view text) {
    const std::lock_guard lock(mutex_);
    status_->set_status(status, text);
    mailbox_.post([this] { clients_.ring_all(); });
  }

  StatusBlock* const status_;
  Mailbox& mailbox_;
  Clients& clients_;  ///< only by mail
  std::mutex mutex_;
};

}  // namespace pathways
