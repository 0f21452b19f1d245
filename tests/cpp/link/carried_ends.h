// A head, a relay, and machines that the relay carries, in one thread: for tests of carriers (carrier.h).
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "link/carrier.h"
#include "link/link_ends.h"
#include "link/relay_link.h"

namespace pathways::test {

/// As strict as a cipher, but no secret: a stream of numbers hides a message, and a sum finds what was changed.
class TestSealer final : public Sealer {
 public:
  TestSealer(uint64_t out, uint64_t in) : out_(out), in_(in) {}

  void seal(uint64_t number, std::span<std::byte> message) override {
    const auto text = message.first(message.size() - kBytes);
    mix(out_, number, text, text);
    std::ranges::copy(tag_of(out_, number, text), message.last(kBytes).begin());
  }
  bool open(uint64_t number, std::span<const std::byte> message, std::span<std::byte> out) override {
    const auto text = message.first(out.size());
    if (!std::ranges::equal(tag_of(in_, number, text), message.last(kBytes))) return false;
    mix(in_, number, text, out);
    return true;
  }

 private:
  static void mix(uint64_t key, uint64_t number, std::span<const std::byte> from, std::span<std::byte> to) {
    std::minstd_rand stream(static_cast<uint32_t>(1000 * number + key + 1));
    for (size_t i = 0; i < to.size(); ++i) to[i] = from[i] ^ static_cast<std::byte>(stream() >> 8);
  }
  static Bytes tag_of(uint64_t key, uint64_t number, std::span<const std::byte> text) {
    uint64_t sum = 1000 * number + key;
    for (const std::byte each : text) sum = (sum ^ static_cast<uint64_t>(each)) * 0x100000001b3;
    return joined(sum, key);
  }

  const uint64_t out_, in_;
};

/// A head, a relay, and machines that it carries, each with one host that has the machine's number.
struct Tree : Head {
  explicit Tree(uint32_t machines) : Head(machines) {
    trunk = relay->open_trunk();
    for (uint32_t m = 0; m < machines; ++m) {
      (*this)[m].add_host(m, 5);
      carrier->add(m, (*this)[m].at_head, std::make_shared<TestSealer>(2 * m, 2 * m + 1), "m" + std::to_string(m));
      ends.push_back(std::make_shared<Carrier>(agent_clock));
      ends[m]->add(m, (*this)[m].here, std::make_shared<TestSealer>(2 * m + 1, 2 * m), "");
      branches.push_back(relay->open_branch(m));
      carrier->start(m);
      ends[m]->start(m);
    }
  }
  ~Tree() {
    carrier->close();
    trunk->close();
    for (size_t m = 0; m < ends.size(); ++m) ends[m]->close(), branches[m]->close();
  }

  Bytes collected(Link& link) {
    buffer.resize(kMostFrame);
    const size_t bytes = link.collect(buffer);
    return {buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(bytes)};
  }
  /// What an end says, until it has nothing.
  Bytes all(Link& link) {
    Bytes said;
    for (Bytes more = collected(link); !more.empty(); more = collected(link)) said = said + more;
    return said;
  }
  /// Everything that is said goes to its end, but by no branch of `stuck`.
  void exchange(size_t stuck = SIZE_MAX) {
    for (bool goes_on = true; goes_on;) {
      goes_on = move(*carrier, *trunk);
      goes_on = move(*trunk, *carrier) || goes_on;
      for (size_t m = 0; m < ends.size(); ++m) {
        goes_on = move(*ends[m], *branches[m]) || goes_on;
        if (m != stuck) goes_on = move(*branches[m], *ends[m]) || goes_on;
      }
      if (!goes_on && trunk->queued_bytes() != 0) {
        pass_time(RelayHub::kGathers.count());
        goes_on = true;
      }
    }
  }
  bool move(Link& from, Link& to) {
    const Bytes bytes = collected(from);
    if (!bytes.empty()) to.deliver(bytes);
    return !bytes.empty();
  }
  void order(uint32_t m, uint64_t tag) { put((*this)[m].hosts.at(m).orders, record(tag)); }
  void report(uint32_t m, uint64_t tag) { put((*this)[m].hosts.at(m).outgoing, record(tag)); }
  Bytes ordered(uint32_t m) { return next((*this)[m].hosts.at(m).inbox); }
  Bytes reported(uint32_t m) { return next((*this)[m].hosts.at(m).reports); }
  static Bytes record(uint64_t tag) { return joined(RunDoneRecord{{RecordKind::kRunDone, 0, 0}, tag, 1, 1, 0}); }

  std::shared_ptr<RelayHub> relay = std::make_shared<RelayHub>(nullptr, head_clock);
  std::shared_ptr<Carrier> carrier = std::make_shared<Carrier>(head_clock);
  std::shared_ptr<RelayLink> trunk;
  std::vector<std::shared_ptr<RelayLink>> branches;
  std::vector<std::shared_ptr<Carrier>> ends;
  Bytes buffer;
};

}  // namespace pathways::test
