// Both ends of links between machines, joined by bytes in memory. The test is the controller, the hosts and the
// clients: it writes and reads their rings itself.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "link/machine_link.h"
#include "messages/peer_records.h"
#include "messages/shared_segments.h"
#include "support.h"

namespace pathways::test {

using Bytes = std::vector<std::byte>;

template <typename... Parts>
Bytes joined(const Parts&... parts) {
  Bytes all;
  const auto add = [&](const auto& part) {
    const auto* from = reinterpret_cast<const std::byte*>(&part);
    all.insert(all.end(), from, from + sizeof part);
  };
  (add(parts), ...);
  return all;
}

inline void put(ByteRing::Producer& ring, std::span<const std::byte> bytes) {
  const auto room = ring.try_reserve(static_cast<uint32_t>(bytes.size()));
  ASSERT_FALSE(room.empty());
  std::memcpy(room.data(), bytes.data(), bytes.size());
  ring.publish();
}

/// The next record, which is taken; empty: there is none.
inline Bytes next(ByteRing::Consumer& ring) {
  Bytes scratch;
  const auto bytes = ring.try_take(scratch);
  const Bytes record(bytes.begin(), bytes.end());
  ring.pop();
  ring.release();
  return record;
}

/// A frame as it lies on the connection.
inline Bytes frame(FrameKind kind, uint32_t a, int32_t b, const Bytes& payload) {
  Bytes bytes(FrameWriter::room_for(payload.size()));
  FrameWriter writer(bytes);
  std::byte* at = writer.begin(kind, a, b, payload.size());
  if (!payload.empty()) std::memcpy(at, payload.data(), payload.size());
  return bytes;
}

/// A record between hosts, without its PeerHeader.
inline Bytes peer_record(uint64_t what, uint32_t bytes = 0) {
  Bytes record = joined(PeerRecord{RecordKind::kReceiveReady, 0, 0, what, 0, bytes});
  record.resize(record.size() + padded(bytes));
  return record;
}
inline Bytes operator+(Bytes first, const Bytes& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// What a link says of bytes that it refuses.
inline std::string refusal(Link& link, const Bytes& bytes) {
  try {
    link.deliver(bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalid);
    return error.what();
  }
  return "taken";
}

/// Two clocks that have nothing in common.
inline int64_t head_clock_ns = 1'000'000'000'000, agent_clock_ns = 5'000;
inline int64_t head_clock() { return head_clock_ns; }
inline int64_t agent_clock() { return agent_clock_ns; }
inline void pass_time(int64_t ns) {
  head_clock_ns += ns;
  agent_clock_ns += ns;
}

/// What one end has said and the other has not heard yet.
struct Wire {
  Bytes bytes;
  size_t at = 0;
  size_t left() const { return bytes.size() - at; }
};

/// A machine with some hosts, and its link to the head.
struct Machine {
  static constexpr HostBlock::Sizes kSizes{1u << 16, 4096, 0, 1u << 15};
  struct End {
    Segment twin, own;
    ByteRing::Producer orders;    ///< of the controller, at the head
    ByteRing::Consumer reports;   ///< to the controller, at the head
    ByteRing::Consumer inbox;     ///< of the host
    ByteRing::Producer outgoing;  ///< of the host
    ByteRing::Consumer from_far;
    ByteRing::Producer to_far;
  };

  Machine(LinkHub& head, ControllerBlock* controller) : head_controller(controller) {
    at_head = MachineLink::open(head, MachineLink::End::kHead, head_clock);
    here = MachineLink::open(hub, MachineLink::End::kAgent, agent_clock);
  }
  ~Machine() {
    at_head->close();
    here->close();
  }

  void add_host(uint32_t number, int32_t incarnation) {
    Segment twin = HostBlock::make(number, 4, kSizes, false), own = HostBlock::make(number, 4, kSizes, false);
    const HostView far(twin), near(own);
    at_head->add_host(number, incarnation, far, head_controller);
    here->add_host(number, incarnation, near, ControllerBlock::attach(controller_segment));
    hosts.insert_or_assign(number, End{std::move(twin), std::move(own), far.to_host(), far.from_host(), near.inbox(),
                                       near.outgoing(), near.from_link().consumer(), near.to_link().producer()});
  }
  void remove_host(uint32_t number) {
    at_head->remove_host(number);
    here->remove_host(number);
    hosts.erase(number);
  }
  Segment& twin_client(uint32_t client, size_t arena_bytes) {
    return clients[client] = here->twin_client(client, arena_bytes);
  }

  void collect() {
    for (const auto& [end, wire] : {std::pair{at_head, &out}, std::pair{here, &in}}) {
      const size_t count = end->collect(buffer);
      wire->bytes.insert(wire->bytes.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(count));
    }
  }
  /// Delivers at most so many bytes of a wire, in one piece.
  void deliver(Link& to, Wire& wire, size_t most) {
    const size_t count = std::min(most, wire.left());
    const std::span<const std::byte> piece(wire.bytes.data() + wire.at, count);
    wire.at += count;
    to.deliver(piece);
    if (wire.left() == 0) wire = {};
  }
  void deliver_all() {
    deliver(*here, out, out.left());
    deliver(*at_head, in, in.left());
  }
  /// Until nothing is left to be said.
  void transmit() {
    do {
      collect();
      deliver_all();
      pass_time(10'000'000);
      collect();
    } while (out.left() != 0 || in.left() != 0);
  }

  ControllerBlock* head_controller;
  LinkHub hub;
  Segment controller_segment = ControllerBlock::make(false);
  std::shared_ptr<MachineLink> at_head, here;
  std::map<uint32_t, End> hosts;
  std::map<uint32_t, Segment> clients;
  Wire out, in;  ///< from the head, to the head
  Bytes buffer = Bytes(size_t{1} << 20);
};

/// The head, with a client, and machines.
struct Head {
  static constexpr uint32_t kClient = 3, kGroup = 7;

  explicit Head(uint32_t machines) {
    hub.add_client(kClient, ClientView(client));
    for (uint32_t m = 0; m < machines; ++m) {
      this->machines.push_back(std::make_unique<Machine>(hub, ControllerBlock::attach(controller_segment)));
    }
  }
  Machine& operator[](size_t number) { return *machines[number]; }
  Arena& arena() { return *ClientBlock::attach(client)->client_arena(); }
  FutureTable& futures() { return *ClientBlock::attach(client)->futures(); }
  size_t arena_bytes() { return ClientView(client).arena().bytes(); }
  Handle future(uint32_t parts = 1) {
    Handle made;
    EXPECT_EQ(futures().allocate(parts, &made), Status::kOk);
    return made;
  }
  /// A command of the client that leases a block of its arena.
  Bytes command(CommandKind kind, uint64_t handle, uint64_t token, uint64_t at, uint64_t bytes, uint64_t stamp) {
    CommandRecord record{{RecordKind::kCommand, static_cast<uint16_t>(kind), kClient}, handle, token, kGroup, 0};
    record.lease_stamp = stamp;
    record.lease_at = at;
    record.lease_bytes = bytes;
    return joined(record);
  }
  /// The host is sent what it answers by completing its part of the future.
  void ask(size_t machine, uint32_t host, Handle future) {
    put((*this)[machine].hosts.at(host).orders, command(CommandKind::kFetch, 0, future.raw, 0, 0, 0));
    (*this)[machine].transmit();
    EXPECT_FALSE(next((*this)[machine].hosts.at(host).inbox).empty());
  }
  void transmit() {
    for (int i = 0; i < 3; ++i) {
      for (auto& machine : machines) machine->transmit();
    }
  }

  Segment controller_segment = ControllerBlock::make(false);
  Segment client = ClientBlock::make({64, 4096, size_t{4} << 20}, false);
  LinkHub hub;
  std::vector<std::unique_ptr<Machine>> machines;
};

}  // namespace pathways::test
