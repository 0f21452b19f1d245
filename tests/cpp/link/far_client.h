// A client on a machine of its own, and both ends of its link, joined by bytes in memory.
#pragma once

#include <unistd.h>

#include <memory>
#include <vector>

#include "client/client.h"
#include "link/client_link_at_client.h"
#include "link/client_link_at_head.h"
#include "link/link_hub.h"
#include "messages/shared_segments.h"

namespace pathways::test {

struct FarClient {
  FarClient(LinkHub& hub, Client::Options options, ClientBlock::Sizes sizes, Clock head_clock = monotonic_ns,
            Clock client_clock = monotonic_ns)
      : twin(ClientBlock::make(sizes, true)),
        own(ClientBlock::make(sizes, true)),
        at_head(std::make_shared<ClientLinkAtHead>(hub, same(twin), same(head_bell), same(head_status), head_clock)),
        at_client(std::make_shared<ClientLinkAtClient>(same(own), same(client_bell), StatusBlock::attach(client_status),
                                                       client_clock)),
        client(options, block(), StatusBlock::attach(client_status), &BellBlock::attach(client_bell)->doorbell) {}
  ~FarClient() {
    at_head->close();
    at_client->close();
  }

  static Segment same(const Segment& segment) { return Segment::attach(::dup(segment.fd())); }
  ClientBlock* block() { return ClientBlock::attach(own); }
  ClientView view() { return ClientView(twin); }
  DoorbellWord* bell() { return &BellBlock::attach(head_bell)->doorbell; }
  StatusBlock* cluster() { return StatusBlock::attach(head_status); }

  Segment head_bell = BellBlock::make(true), client_bell = BellBlock::make(true);
  Segment head_status = StatusBlock::make(true), client_status = StatusBlock::make(true);
  Segment twin, own;
  std::shared_ptr<ClientLinkAtHead> at_head;
  std::shared_ptr<ClientLinkAtClient> at_client;
  Client client;
  std::vector<std::byte> out, in;  ///< on their way to the head, to the client
};

}  // namespace pathways::test
