// What a host keeps for a client is in the ledger, whatever records the client writes: a real controller, real
// executors, and a backend that counts the bytes that it keeps.
//
//   MEM-7   KeptMemory.*: on each device, the hosts keep at most the bytes that the ledger books
//   OWN-1   KeptMemory.*: an innocent client beside the culprit keeps its buffers, and is not evicted
#include "cluster/kept_memory.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <random>

namespace pathways::test::test_kept_memory {
namespace {

const Handle kA = Handle::make(1, 1), kB = Handle::make(2, 1), kC = Handle::make(3, 1);
const Handle kNothing{};
Handle younger(Handle handle) { return Handle::make(handle.index(), handle.generation() + 1); }

TEST_F(KeptMemory, AReleaseThatNamesOtherHosts) {  // it goes to the hosts that hold the buffer
  put(kA, kBoth);
  release(kFirst, {kA});
  put(kB, kFirst);
  run(1, {}, kC);
  release(kSecond, {kB, kC, kA});
  settle();
  const auto live = controller->stats().live_bytes;
  EXPECT_EQ(live, (std::vector<uint64_t>{kWorth / 2, 0, kWorth / 2, 0}));
  expect_kept_and_counted();
}

TEST_F(KeptMemory, ARenameThatNamesOtherHosts) {
  put(kA, kBoth);
  put(kB, kFirst);
  settle();
  rename(kFirst, kA, kB);
  expect_evicted();
}

TEST_F(KeptMemory, ARenameOfABufferOnOtherHosts) {  // they would keep it under a name that nobody has
  put(kA, kBoth);
  rename(kFirst, kB, kA);
  release(kBoth, {kB});
  expect_evicted();
}

TEST_F(KeptMemory, ARenameOverAnOlderBuffer) {
  put(kA, kBoth);
  put(kB, kFirst);
  rename(kBoth, younger(kA), kB);
  expect_evicted();
}

TEST_F(KeptMemory, ARenameOfEverythingIsDone) {
  put(kA, kBoth);
  put(kB, kFirst);
  rename(kBoth, kA, kB);
  release(kFirst, {kA});
  expect_kept_and_counted();
}

TEST_F(KeptMemory, ATokenInThePlaceOfABuffer) {
  for (const bool is_task : {false, true}) {
    put(kA, kFirst);
    command(is_task ? CommandKind::kTask : CommandKind::kFetch, kFirst, kA, younger(kA), {});
    expect_evicted();
    join();
  }
}

TEST_F(KeptMemory, AResultInThePlaceOfABuffer) {
  put(kA, kBoth);
  run(0, {}, kA);
  expect_evicted();
}

TEST_F(KeptMemory, APutInThePlaceOfABuffer) {
  for (const CommandKind kind : {CommandKind::kPut, CommandKind::kTask}) {
    put(kA, kBoth);
    put(younger(kA), kFirst, set_of(kFirst), 0, {1, 0}, kind);
    expect_evicted();
    join();
  }
}

TEST_F(KeptMemory, ADonationOfABufferOnOtherHosts) {
  put(kA, kBoth);
  run(2, {kA}, kB);
  expect_evicted();
}

TEST_F(KeptMemory, ADonationOfABufferOnMoreHostsThanTakeIt) {  // the run goes to them, but not as the argument's
  put(kA, kFirst);
  put(kB, kBoth);
  run(6, {kB, kA}, kC);
  expect_kept_and_counted();  // the first argument is only read
  join();
  put(kA, kBoth);
  put(kB, kSecond);
  run(7, {kA, kB}, kC);
  expect_evicted();
}

TEST_F(KeptMemory, ADonationByARunWithTooManyArguments) {
  put(kA, kFirst);
  run(2, {kA, kA}, kB);
  expect_evicted();
}

TEST_F(KeptMemory, AResultNamedAsItsRunsDonatedArgument) {
  put(kB, kBoth);
  run(7, {kA, kB}, kA);  // there is no kA yet; the second host has no part of it, and makes its part of the result
  expect_kept_and_counted();
}

TEST_F(KeptMemory, AReleaseOfAResultNamedAsItsRunsDonatedArgument) {
  put(kB, kBoth);
  run(7, {kA, kB}, kA);
  release(kFirst, {kA});  // it lies on both hosts, and is released there
  expect_kept_and_counted();
}

TEST_F(KeptMemory, AResultInThePlaceOfItsRunsDonatedArgument) {
  put(kA, kFirst);
  run(2, {kA}, kA);
  expect_evicted();
}

TEST_F(KeptMemory, ADonationByARunThatFails) {
  put(kA, kFirst, kWorth / 2);  // its executable was compiled for bigger ones
  run(2, {kA}, kB);
  release(kFirst, {kB});
  expect_kept_and_counted();
}

TEST_F(KeptMemory, OneHandleForSeveralResults) {  // each result goes where it was announced
  const auto task = [&](Handle handle) {
    put(handle, kFirst, set_of(kFirst), kWorth, {1, kWorth}, CommandKind::kTask);
  };
  task(kA);
  for (int i = 0; i < 2; ++i) {
    put(kB, kFirst, set_of(kFirst), kWorth, {1, kWorth}, CommandKind::kTask);
    release(kFirst, {kB});
  }
  put(kB, kFirst, set_of(kFirst), kWorth / 10, {1, kWorth / 10}, CommandKind::kTask);
  expect_kept_and_counted();
}

TEST_F(KeptMemory, ATaskDuringASuspension) {  // its buffer leaves the devices with the others
  put(kA, kFirst);
  put(kB, kBoth, set_of(kBoth), kWorth, {1, kWorth}, CommandKind::kTask);
  pass();
  suspend_and_resume([&] { expect_counted(); });
  expect_kept_and_counted();
}

TEST_F(KeptMemory, APartOnALostHost) {  // the other part stays until the client releases it
  controller->remove_client(0);
  innocent_bytes = 0;
  put(kA, kBoth);
  settle();
  lose(1, [] {});
  settle();
  expect_counted();
  release(kBoth, {kA});
  settle();
  EXPECT_EQ(controller->stats().live_bytes, std::vector<uint64_t>(kDevices, 0));
  expect_kept_and_counted();
}

TEST_F(KeptMemory, WhatWaitsForALostHost) {  // its successor makes it, although another host of it is lost meanwhile
  controller->remove_client(0);
  innocent_bytes = 0;
  lose(1, [&] {
    const Payload what{1, kWorth};
    command(CommandKind::kPut, kBoth, kB, Handle::make(9, 9), std::as_bytes(std::span{&what, 1}), set_of(kBoth),
            kWorth);
    put(kA, kBoth);
    pass();
    lose(0, [] {});
  });
  expect_kept_and_counted();
}

/// Random records, of which many make no sense.
struct Campaign : KeptMemory {
  void play(bool has_losses, int rounds);
};

void Campaign::play(bool has_losses, int rounds) {
  const Watchdog watchdog("the campaign", 280s);
  std::mt19937_64 random(seed());
  const auto below = [&](uint64_t n) { return static_cast<uint32_t>(random() % n); };
  const auto one_of = [&](const auto& from) { return from[below(from.size())]; };
  uint64_t records = 0, evictions = 0, checks = 0, runs = 0, moves = 0, losses = 0;
  if (has_losses) {  // else the innocent client's buffer would be lost too
    controller->remove_client(0);
    innocent_bytes = 0;
  }
  for (int round = 0; round < rounds * kStressScale; ++round) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed() << " round " << round);
    struct Place {
      uint32_t generation = 0;
      GroupId group = 0;  ///< 0: nothing is there
    };
    std::array<Place, 6> places{};
    // One in so many choices is not that of a correct client; so some clients last long, and some do not.
    const uint64_t rarity = std::array<uint64_t, 3>{4, 24, 160}[below(3)];
    const auto odd = [&] { return below(rarity) == 0; };
    const auto any_group = [&] { return GroupId{below(4)}; };
    const auto group_of = [&](GroupId right) { return odd() ? any_group() : right; };
    const auto any = [&] { return Handle::make(below(places.size()), 1 + below(4)); };
    /// A buffer on the hosts of `wanted`, or on any; kNothing: there is none.
    const auto there = [&](GroupId wanted = 0) -> Handle {
      if (odd()) return any();
      const uint32_t first = below(places.size());
      for (uint32_t i = 0; i < places.size(); ++i) {
        const uint32_t at = (first + i) % static_cast<uint32_t>(places.size());
        if (places[at].group == 0 || (wanted != 0 && places[at].group != wanted)) continue;
        return Handle::make(at, places[at].generation);
      }
      return kNothing;
    };
    const auto fresh = [&]() -> std::optional<Handle> {
      if (odd()) return any();
      const uint32_t first = below(places.size());
      for (uint32_t i = 0; i < places.size(); ++i) {
        const uint32_t at = (first + i) % static_cast<uint32_t>(places.size());
        if (places[at].group == 0) return Handle::make(at, places[at].generation + (odd() ? 0 : 1));
      }
      return std::nullopt;
    };
    const auto made = [&](Handle handle, GroupId group) {
      if (handle.index() < places.size()) places[handle.index()] = {handle.generation(), group};
    };
    const auto group_at = [&](Handle handle) {
      return handle.index() < places.size() ? places[handle.index()].group : GroupId{0};
    };
    const auto gone = [&](Handle handle) {
      if (handle.index() < places.size()) places[handle.index()].group = 0;
    };
    for (int step = 0; step < 24; ++step) {
      ++records;
      switch (below(10)) {
        case 0:
        case 1: {
          const auto handle = fresh();
          if (!handle) break;
          const GroupId right = GroupId{1 + below(3)}, group = group_of(right);
          const uint64_t bytes = one_of(std::array<uint64_t, 3>{kWorth, kWorth, kWorth / 10});
          const SpaceSetId set = odd() ? (below(3) == 0 ? kNoSpaceSet : one_of(sets)) : set_of(right);
          const Payload what{odd() ? below(4) : 1u, odd() ? bytes * 2 : bytes};
          put(*handle, group, set, bytes, what, below(3) == 0 ? CommandKind::kTask : CommandKind::kPut);
          made(*handle, group);
          break;
        }
        case 2:
        case 3:
        case 4:
        case 5: {
          const auto result = fresh();
          if (!result) break;
          const uint32_t shape = below(kShapes.size());
          std::vector<Handle> arguments;
          for (const GroupId group : kShapes[shape].arguments) arguments.push_back(there(group));
          if (std::find(arguments.begin(), arguments.end(), kNothing) != arguments.end()) break;
          if (odd()) arguments.push_back(any());
          bool repeats = false;
          for (const uint32_t position : kShapes[shape].donated) {
            for (size_t i = 0; i < arguments.size(); ++i)
              repeats |= i != position && arguments[i] == arguments[position];
          }
          if (repeats && !odd()) break;
          if (below(24) == 0) hosts[below(kHosts)]->backend.fail_launches = 1 + below(3);
          if (below(24) == 0) hosts[below(kHosts)]->backend.fail_values = 1 + below(3);
          run(shape, arguments, *result);
          ++runs;
          if (below(6) == 0) cancel(tag);
          for (const uint32_t position : kShapes[shape].donated) {
            const Handle donated = arguments[position];
            if (!odd()) release(group_of(group_at(donated)), {donated});
            gone(donated);
          }
          made(*result, kShapes[shape].result);
          break;
        }
        case 6: {
          const Handle handle = there();
          if (handle == kNothing) break;
          release(group_of(group_at(handle)), {handle, odd() ? any() : handle});
          gone(handle);
          break;
        }
        case 7: {
          const Handle name = there(), moved = there();
          if (name == kNothing || moved == kNothing) break;
          rename(odd() ? any_group() : kBoth, name, moved);
          const GroupId group = group_at(moved);
          gone(moved);
          made(name, group);
          break;
        }
        case 8: {
          const Handle handle = there();
          if (handle == kNothing) break;
          const Handle token = odd() ? any() : Handle::make(20 + below(8), 1 + below(3));
          command(below(2) == 0 ? CommandKind::kFetch : CommandKind::kTask, group_of(group_at(handle)), handle, token,
                  {});
          break;
        }
        default:
          if (below(2) == 0) hosts[below(kHosts)]->end_task();
          if (below(4) == 0) hosts[below(kHosts)]->answer_tasks();
          if (below(2) == 0) cancel(tag - std::min<uint64_t>(tag, below(4)));
          if (below(6) == 0 && is_there()) {
            suspend_and_resume([&] { expect_counted(); });
            ++moves;
          }
          if (has_losses && below(3) == 0) {
            const auto meanwhile = [&] {
              for (uint32_t i = below(3); i != 0; --i) pass();
            };
            lose(below(kHosts), meanwhile);
            ++losses;
          }
          break;
      }
      if (below(3) == 0) pass();
      if (below(8) == 0) {
        if (below(2) == 0) {
          settle();
        } else {
          settle_but_saves();
        }
        ++checks;
        expect_counted();
        if (HasFatalFailure()) return;
        if (!is_there()) break;
      }
    }
    settle();
    ++checks;
    expect_counted();
    if (HasFatalFailure()) return;
    evictions += is_there() ? 0U : 1U;
    for (auto& host : hosts) host->backend.fail_launches = host->backend.fail_values = 0;
    leave();
    if (HasFatalFailure()) return;
    join();
  }
  const auto say = [](uint64_t count, const char* what) {
    std::printf("%llu %s", static_cast<unsigned long long>(count), what);
  };
  say(records, "records, ");
  say(runs, "of them runs, ");
  say(evictions, "evictions, ");
  say(moves, "suspensions, ");
  say(losses, "lost hosts, ");
  say(checks, "checks\n");
  EXPECT_GT(evictions, 10u);
}

TEST_F(Campaign, OfClients) { play(false, 600); }

TEST_F(Campaign, WithLostHosts) { play(true, 200); }

}  // namespace
}  // namespace pathways::test::test_kept_memory
