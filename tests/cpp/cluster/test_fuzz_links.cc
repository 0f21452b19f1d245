// TRUST-1 by mutation of what machines send each other: whatever comes, an end of a link breaks with an error or goes
// on; it reads and writes nothing out of bounds. See fuzz.h for how long, and how to repeat a run.
//
//   Fuzz.Links     frames in both directions (LINK-4)
//   Fuzz.Relayed   what a relay, a machine that it carries and the head send each other (CARRY-1)
#include "fuzz.h"
#include "link/carried_ends.h"

namespace pathways::test::test_fuzz_links {
namespace {

/// A client that leases blocks to the hosts of two machines, which talk to each other.
struct Scene : Head {
  Scene() : Head(2) {
    for (uint32_t host = 0; host < 3; ++host) (*this)[host / 2].add_host(host, 5);
    hub.add_group(kGroup, {0, 1});
    for (size_t m = 0; m < 2; ++m) (*this)[m].twin_client(kClient, arena_bytes());
  }
  static bool try_put(ByteRing::Producer& ring, std::span<const std::byte> bytes) {
    const auto room = ring.try_reserve(static_cast<uint32_t>(bytes.size()));
    if (!room.empty()) std::memcpy(room.data(), bytes.data(), bytes.size());
    ring.publish();
    return !room.empty();
  }
};

/// Begins of the frames of a wire that are whole.
std::vector<size_t> frames_of(const Wire& wire) {
  std::vector<size_t> all;
  for (size_t at = wire.at; at + sizeof(FrameHeader) <= wire.bytes.size();) {
    all.push_back(at);
    at += FrameWriter::room_for(read_record<FrameHeader>(std::span(wire.bytes).subspan(at)).bytes);
  }
  return all;
}

/// Whole frames change their places, come twice or never, and bytes are missing or added between any two: what follows
/// is read from another beginning.
void rearrange(Fuzzer& fuzz, Wire& wire, const std::vector<size_t>& frames) {
  const auto at = [&wire](size_t offset) { return wire.bytes.begin() + static_cast<std::ptrdiff_t>(offset); };
  const size_t from = frames[fuzz.below(frames.size())];
  const size_t end =
      std::min(wire.bytes.size(),
               from + FrameWriter::room_for(read_record<FrameHeader>(std::span(wire.bytes).subspan(from)).bytes));
  const Bytes frame(at(from), at(end));
  switch (fuzz.below(5)) {
    case 0:
      wire.bytes.erase(at(from), at(end));
      break;
    case 1:
      wire.bytes.insert(at(frames[fuzz.below(frames.size())]), frame.begin(), frame.end());
      break;
    case 2:
      wire.bytes.erase(at(from), at(end));
      wire.bytes.insert(wire.bytes.end(), frame.begin(), frame.end());
      break;
    case 3:
      wire.bytes.erase(at(from), at(from + std::min(fuzz.below(40), wire.bytes.size() - from)));
      break;
    default: {
      const Bytes more(1 + fuzz.below(40), static_cast<std::byte>(fuzz.draw()));
      wire.bytes.insert(at(from), more.begin(), more.end());
    }
  }
}

FUZZ(Links) {
  auto scene = std::make_unique<Scene>();
  uint64_t broken = 0, taken = 0, stamp = 0;
  while (fuzz.next()) {
    const auto host = static_cast<uint32_t>(fuzz.below(3));
    Machine& machine = (*scene)[host / 2];
    Machine::End& end = machine.hosts.at(host);
    uint64_t offset = 0;
    if (scene->arena().allocate(1 + fuzz.below(3000), &offset) == Status::kOk) {
      scene->arena().lease_out(offset, 1u << host, ++stamp);
      const auto kind = fuzz.below(2) == 0 ? CommandKind::kPut : CommandKind::kFetch;
      (void)Scene::try_put(end.orders, scene->command(kind, stamp, stamp, offset, 64 + fuzz.below(2) * 2000, stamp));
      if (fuzz.below(2) == 0) {
        (void)ClientView(machine.clients.at(Head::kClient)).arena().return_lease(offset, host);
      }
    }
    const uint64_t value = fuzz.draw();
    Handle future;
    (void)scene->futures().allocate(1, &future);
    (void)Scene::try_put(end.orders, scene->command(CommandKind::kFetch, 0, future.raw, 0, 0, 0));
    (void)Scene::try_put(end.outgoing, joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Head::kClient},
                                                               future.raw,
                                                               1,
                                                               static_cast<uint32_t>(fuzz.below(2))},
                                              ValueRun{static_cast<uint32_t>(fuzz.below(8)) * 8, 8}, value));
    (void)Scene::try_put(
        end.outgoing,
        joined(FutureDoneRecord{
            {RecordKind::kFutureDone, 0, Head::kClient}, stamp - std::min<uint64_t>(stamp, fuzz.below(4)), 0, 0}));
    (void)Scene::try_put(end.to_far, joined(PeerHeader{host / 2 == 0 ? 2u : 0u, 5}) + peer_record(value, 8));
    if (fuzz.below(32) == 0) {
      (void)Scene::try_put(end.orders, joined(ClientGoneRecord{{RecordKind::kClientGone, 0, Head::kClient}}));
    }
    try {
      pass_time(5'000'000);
      machine.collect();
      for (auto* wire : {&machine.out, &machine.in}) {
        const std::vector<size_t> frames = frames_of(*wire);
        if (frames.empty() || fuzz.below(2) == 0) continue;
        if (fuzz.below(4) == 0) {
          rearrange(fuzz, *wire, frames);
          continue;
        }
        const size_t at = frames[fuzz.below(frames.size())], most = fuzz.below(3) == 0 ? 16 : 80;
        fuzz.mutate(std::span(wire->bytes).subspan(at, std::min(most, wire->bytes.size() - at)));
      }
      machine.deliver(*machine.here, machine.out, fuzz.below(2) == 0 ? machine.out.left() : fuzz.below(500));
      machine.deliver(*machine.at_head, machine.in, fuzz.below(2) == 0 ? machine.in.left() : fuzz.below(500));
      for (ByteRing::Consumer* ring : {&end.inbox, &end.reports, &end.from_far}) {
        for (Bytes record = next(*ring); !record.empty(); record = next(*ring)) ++taken;
      }
      if (fuzz.below(200) != 0) continue;
    } catch (const Error&) {
      ++broken;
    }
    scene = std::make_unique<Scene>();
  }
  fuzz.must_reach(taken);
}

/// Two machines that a relay carries, and what each end has been told and not read yet.
struct RelayedScene : Tree {
  RelayedScene() : Tree(2) {}

  /// One end speaks, and what it says comes to the other end changed or not.
  void pass(Fuzzer& fuzz, Link& from, Link& to) {
    Wire wire{collected(from)};
    const std::vector<size_t> frames = frames_of(wire);
    if (!frames.empty() && fuzz.below(4) == 0) {
      if (fuzz.below(2) == 0) {
        rearrange(fuzz, wire, frames);
      } else {
        const size_t at = frames[fuzz.below(frames.size())];
        fuzz.mutate(std::span(wire.bytes).subspan(at, std::min(size_t{80}, wire.bytes.size() - at)));
      }
    }
    if (!wire.bytes.empty()) to.deliver(wire.bytes);
  }
  void say(Fuzzer& fuzz, uint64_t tag) {
    const auto m = static_cast<uint32_t>(fuzz.below(2));
    auto& [orders, reports] = told[m];
    if (fuzz.below(2) == 0 && Scene::try_put((*this)[m].hosts.at(m).orders, record(tag))) orders.push_back(record(tag));
    if (Scene::try_put((*this)[m].hosts.at(m).outgoing, record(tag))) reports.push_back(record(tag));
  }
  /// Reads what has come, which is what was said, in its order, and counts it.
  uint64_t read() {
    uint64_t count = 0;
    for (uint32_t m = 0; m < 2; ++m) {
      auto& [orders, reports] = told[m];
      for (Bytes got = ordered(m); !got.empty(); got = ordered(m), ++count) expect_next(orders, got);
      for (Bytes got = reported(m); !got.empty(); got = reported(m), ++count) expect_next(reports, got);
    }
    return count;
  }
  static void expect_next(std::deque<Bytes>& said, const Bytes& got) {
    ASSERT_FALSE(said.empty()) << "nobody has said this";
    ASSERT_EQ(got, said.front());
    said.pop_front();
  }

  std::pair<std::deque<Bytes>, std::deque<Bytes>> told[2];
};

/// Guided, a run could be led to a sum that fits: the test's sealer is no cipher. So only memory is watched then.
FUZZ(Relayed) {
  auto scene = std::make_unique<RelayedScene>();
  uint64_t taken = 0, tag = 0;
  while (fuzz.next()) {
    bool is_broken = false;
    try {
      scene->say(fuzz, ++tag);
      pass_time(5'000'000);
      for (size_t leg = 0; leg < 4; ++leg) {
        const size_t m = fuzz.below(2);
        switch (fuzz.below(4)) {
          case 0:
            scene->pass(fuzz, *scene->carrier, *scene->trunk);
            break;
          case 1:
            scene->pass(fuzz, *scene->trunk, *scene->carrier);
            break;
          case 2:
            scene->pass(fuzz, *scene->ends[m], *scene->branches[m]);
            break;
          default:
            scene->pass(fuzz, *scene->branches[m], *scene->ends[m]);
        }
      }
      is_broken = !scene->carrier->take_broken().empty() || !scene->ends[0]->take_broken().empty() ||
                  !scene->ends[1]->take_broken().empty() || fuzz.below(200) == 0;
    } catch (const Error&) {
      is_broken = true;
    }
    if (!fuzz.is_guided()) taken += scene->read();
    if (is_broken) scene = std::make_unique<RelayedScene>();
  }
  fuzz.must_reach(taken);
}

}  // namespace
}  // namespace pathways::test::test_fuzz_links
