// A client on a machine of its own, and both ends of its link, joined by bytes in memory.
#pragma once

#include <unistd.h>

#include <memory>
#include <vector>

#include "client/client.h"
#include "link/client_link_at_client.h"
#include "link/client_link_at_home.h"
#include "link/link_hub.h"
#include "messages/shared_segments.h"

namespace pathways::test {

struct FarClient {
  FarClient(LinkHub& hub, Client::Options options, ClientBlock::Sizes sizes, Clock home_clock = monotonic_ns,
            Clock client_clock = monotonic_ns)
      : twin(ClientBlock::make(sizes, true)),
        own(ClientBlock::make(sizes, true)),
        at_home(std::make_shared<ClientLinkAtHome>(hub, same(twin), same(home_bell), same(home_status), home_clock)),
        at_client(std::make_shared<ClientLinkAtClient>(same(own), same(client_bell), StatusBlock::attach(client_status),
                                                       client_clock)),
        client(options, block(), StatusBlock::attach(client_status), &BellBlock::attach(client_bell)->doorbell) {}
  ~FarClient() {
    at_home->close();
    at_client->close();
  }

  static Segment same(const Segment& segment) { return Segment::attach(::dup(segment.fd())); }
  ClientBlock* block() { return ClientBlock::attach(own); }
  ClientView view() { return ClientView(twin); }
  DoorbellWord* bell() { return &BellBlock::attach(home_bell)->doorbell; }
  StatusBlock* cluster() { return StatusBlock::attach(home_status); }

  Segment home_bell = BellBlock::make(true), client_bell = BellBlock::make(true);
  Segment home_status = StatusBlock::make(true), client_status = StatusBlock::make(true);
  Segment twin, own;
  std::shared_ptr<ClientLinkAtHome> at_home;
  std::shared_ptr<ClientLinkAtClient> at_client;
  Client client;
  std::vector<std::byte> out, in;  ///< on their way to home, to the client
};

}  // namespace pathways::test
