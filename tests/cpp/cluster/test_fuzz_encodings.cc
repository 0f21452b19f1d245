// TRUST-1 by mutation of what is checked as a whole before it is used: it is refused, or what is read of it stays in
// bounds. See fuzz.h for how long, and how to repeat a run.
//
//   Fuzz.Blocks            headers of shared segments, when somebody attaches
//   Fuzz.Plans             encoded plans
//   Fuzz.CopyPlans         copy plans
//   Fuzz.NetworkTransfer   chunks from other machines
#include <cstring>
#include <memory>

#include "bulk/network_transfer.h"
#include "fuzz.h"
#include "messages/shared_segments.h"
#include "simulate/program.h"

namespace pathways::test::test_fuzz_encodings {
namespace {

FUZZ(Blocks) {
  Segment client = ClientBlock::make({64, 4096, 1u << 14}, false);
  Segment host = HostBlock::make(0, 3, {4096, 4096, 1u << 14, 4096}, false);
  Guarded memory(std::max(client.size(), host.size()));
  uint64_t taken = 0;
  while (fuzz.next()) {
    const bool is_client = fuzz.below(2) == 0;
    const Segment& from = is_client ? client : host;
    std::byte* at = memory.data() + memory.size() - from.size();
    std::memcpy(at, from.data(), from.size());
    const auto* offsets = reinterpret_cast<const uint64_t*>(from.data()) + (is_client ? 1 : 2);
    const size_t part = fuzz.below(3) == 0 ? 0 : offsets[fuzz.below(is_client ? 6 : 7)];
    if (part < from.size()) {
      fuzz.mutate(std::span(at + part, std::min<size_t>(from.size() - part, 256)));
    }
    if (fuzz.below(2) == 0) fuzz.mutate(std::span(at, sizeof(ClientBlock)));
    try {
      if (is_client) {
        const ClientView view(at, from.size());
        auto consumer = view.from_client();
        auto producer = view.to_client();
        (void)producer.try_reserve(64);
        std::vector<std::byte> scratch;
        for (int i = 0; i < 100 && !consumer.try_take(scratch).empty(); ++i) consumer.pop();
        const Handle handle = Handle::make(static_cast<uint32_t>(fuzz.odd_number()), 1);
        (void)view.futures().complete(handle);
        (void)view.futures().fail(handle);
        ReadBackSlot place;
        if (view.read_back().is_there() && view.read_back().begin_write(view.futures(), handle, &place)) {
          if (place.small != nullptr) std::memset(place.small, 1, ReadBackArea::kSmallBytes);
          if (place.large != nullptr) std::memset(place.large, 1, ReadBackArea::kLargeBytes);
          view.read_back().end_write(handle);
        }
        const uint64_t offset = fuzz.odd_number() & ~uint64_t{63}, bytes = fuzz.odd_number();
        if (std::byte* found = view.arena().is_there() ? view.arena().find(offset, bytes) : nullptr) {
          std::memset(found, 1, bytes);
        }
        if (view.arena().is_there()) (void)(view.arena().return_lease(offset, 3) || view.arena().release(offset));
      } else {
        const HostView view(at, from.size());
        for (uint32_t peer = 0; peer < view.peers() && peer < 16; ++peer) {
          auto consumer = view.from(peer).consumer();
          std::vector<std::byte> scratch;
          (void)consumer.try_take(scratch);
        }
        for (const BlockPart& far : {view.to_link(), view.from_link()}) {
          std::vector<std::byte> scratch;
          if (far.is_there()) (void)far.consumer().try_take(scratch);
        }
        auto consumer = view.from_host();
        auto producer = view.to_host();
        (void)producer.try_reserve(100);
      }
      ++taken;
    } catch (const Error&) {
    }
  }
  fuzz.must_reach(taken);
}

FUZZ(Plans) {
  std::vector<std::vector<std::byte>> good;
  for (uint64_t i = 0; i < 8; ++i) {
    const auto program = make_random_program({{{0}, 1}, {{1}, 3}, {{0, 1}, 1}}, 8, {0, 1, 2}, fuzz.draw());
    for (uint32_t h : {0u, 1u}) good.push_back(program.plan_of(h, 2));
  }
  PlanBuilder exchanging(1, 2, 7);
  exchanging.set_arguments({0, 1});
  PlanBuilder::Node node;
  node.inputs = {0, 1};
  node.outputs = {2, 3, 4, 5, 6};
  node.input_devices = 1;
  node.devices = 3;
  exchanging.add(node, {{3, {{0, 0}, {2, 1}}}, {4, {{0, 1}, {2, 2}}}, 5, Overflow::kDrop, {}, Routes::kChosen, 4});
  for (int i = 0; i < 4; ++i) good.push_back(exchanging.finish());
  uint64_t taken = 0;
  while (fuzz.next()) {
    std::vector<std::byte> bytes = good[fuzz.below(good.size())];
    fuzz.mutate(bytes, bytes.size() + 64);
    try {
      const Plan plan = Plan::parse(std::vector<std::byte>(bytes));
      uint64_t sum = 0;  // what a host reads of it
      for (const NodeRecord& node : plan.nodes()) {
        if (is_exchange(node.kind)) sum += plan.exchanges().shape(node.computation).hosts().size();
        for (const auto& list : {plan.inputs(node), plan.outputs(node), plan.sources(node), plan.destinations(node)}) {
          for (const uint32_t number : list) sum += number;
        }
        for (const uint32_t value : plan.outputs(node)) {
          for (const uint32_t consumer : plan.consumers(value)) sum += plan.node(consumer).input_count;
          for (const uint32_t result : plan.results_of(value)) sum += result;
        }
      }
      ++taken;
      EXPECT_LT(plan.nodes().size(), bytes.size()) << sum;
    } catch (const Error&) {
    }
  }
  fuzz.must_reach(taken);
}

/// A copy plan that is right: rectangles of 2 sources into 2 blocks.
std::vector<uint64_t> good_copy_plan(Fuzzer& fuzz) {
  const uint64_t rows = 1 + fuzz.below(8), row = 1 + fuzz.below(40);
  return {
      0,  2, rows * row * 2, 64, 2, rows * row * 3, 64, 2, 0, 0, 0, row, row, 1, rows, row * 2, row * 3, 1, 1, 8, 16,
      16, 0};
}

FUZZ(CopyPlans) {
  uint64_t taken = 0;
  while (fuzz.next()) {
    std::vector<uint64_t> words = good_copy_plan(fuzz);
    for (size_t i = fuzz.below(4); i != 0; --i)
      words[fuzz.below(words.size())] = fuzz.below(3) ? fuzz.below(130) : fuzz.odd_number();
    if (fuzz.below(8) == 0) words.resize(fuzz.below(words.size() + 4));
    try {
      const CopyPlan copy_plan = CopyPlan::parse(words);
      std::vector<std::vector<std::byte>> sources, blocks;
      std::vector<const std::byte*> from;
      std::vector<std::byte*> to;
      const auto make = [](auto& all, auto& at, uint64_t bytes) {
        if (bytes > 1u << 20) return false;
        all.emplace_back(bytes);
        at.push_back(all.back().data());
        return true;
      };
      bool fits = copy_plan.bytes() < 1u << 22;
      for (const uint64_t bytes : copy_plan.source_bytes()) fits = fits && make(sources, from, bytes);
      for (const uint64_t bytes : copy_plan.block_bytes()) fits = fits && make(blocks, to, bytes);
      if (!fits) continue;
      std::vector<std::byte> packed(copy_plan.bytes());
      CopyWalk in(copy_plan), out(copy_plan);
      EXPECT_EQ(gather(in, from, packed), copy_plan.bytes());
      scatter(out, to, packed);
      EXPECT_TRUE(in.is_over() && out.is_over());
      ++taken;
    } catch (const Error&) {
    }
  }
  fuzz.must_reach(taken);
}

FUZZ(NetworkTransfer) {
  uint64_t taken = 0;
  while (fuzz.next()) {
    const auto copy_plan = std::make_shared<const CopyPlan>(CopyPlan::parse(good_copy_plan(fuzz)));
    std::vector<std::byte> sources[2] = {pattern(copy_plan->source_bytes()[0], 1),
                                         pattern(copy_plan->source_bytes()[1], 2)};
    OutgoingTransfer outgoing(7, 1, 0, copy_plan, {sources[0].data(), sources[1].data()});
    std::vector<std::byte> message(outgoing.room());
    message.resize(outgoing.pack(message));
    if (fuzz.below(3) != 0) fuzz.mutate(message, message.size() + 64);
    std::vector<std::byte> blocks[2] = {std::vector<std::byte>(copy_plan->block_bytes()[0]),
                                        std::vector<std::byte>(copy_plan->block_bytes()[1])};
    IncomingTransfer incoming({blocks[0].data(), blocks[1].data()}, {blocks[0].size(), blocks[1].size()});
    try {
      std::span<const std::byte> left(message);
      while (!left.empty() && !incoming.is_over()) {
        const auto [chunk, bytes] = first_chunk(left);
        incoming.take(chunk);
        left = left.subspan(bytes);
      }
      taken += incoming.is_over() ? 1u : 0u;
    } catch (const Error&) {
    }
  }
  fuzz.must_reach(taken);
}

}  // namespace
}  // namespace pathways::test::test_fuzz_encodings
