/// ClientEnds: how a host completes the futures of clients. Chosen once, when the host is made: in the clients' memory,
/// which this host maps; or, when its machine has a link to the controller's, by a record that the link takes off the
/// host's ring to the controller (FutureDoneRecord). Nobody asks afterwards which it is.
///
/// Threading: the host's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "messages/outbox.h"
#include "messages/shared_segments.h"
#include "runs/host_link.h"

namespace pathways {

class ClientEnds {
 public:
  /// Throws Error(kInvalid) when the longest completion does not fit into the ring to the controller.
  static std::unique_ptr<ClientEnds> make(const HostView& own, Outbox& to_controller);
  virtual ~ClientEnds() = default;

  /// False: the client is attached already; it has new memory then.
  virtual bool attach(uint32_t client, const ClientView& view) = 0;
  /// False: it is not attached.
  virtual bool forget(uint32_t client) = 0;
  // See HostLink; for a client that is not attached, nothing happens.
  virtual void complete(uint32_t client, Handle future) = 0;
  virtual void fetched(uint32_t client, Handle token, std::span<const BlockPiece> written) = 0;
  virtual Status read_back(uint32_t client, Handle future, const WriteValue& write) = 0;
};

}  // namespace pathways
