// What a client submits on buffers that were lost with a host, while no successor is there.
//
//   ERR-2  all of it: it fails at once, nothing of it waits, what names no lost buffer waits or goes on
//          LostBuffers.RandomOrders: against a model; prints its seed
//          RenamesThatWait*: of several names and buffers that change hands, each run names the right one
//   FUT-3  OneThatAWaitingRunDonates*: the buffer is lost to the run that donates it, and not to a later use of its
//   index
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "controller/played_loss.h"
#include "support.h"

namespace pathways::test::test_lost_buffers {
namespace {

struct LostBuffers : Loss {
  uint64_t run(GroupId group, std::vector<uint64_t> arguments) {
    uint64_t result = 0;
    EXPECT_EQ(good->submit({5, group, {group}}, arguments, &result), Status::kOk);
    return result;
  }
  uint64_t ready(GroupId group) {
    const uint64_t handle = put(group);
    pass();
    for (int part = 0; part < 1 + (group == 2 ? 1 : 0); ++part) complete(handle);
    return handle;
  }
  void rename(GroupId group, uint64_t name, uint64_t fresh) {
    const uint64_t pair[] = {name, fresh};
    EXPECT_EQ(good->command(CommandKind::kRename, group, {}, {}, std::as_bytes(std::span{pair})), Status::kOk);
  }
  /// Reads and drops all records that a host has.
  std::vector<std::vector<std::byte>> all_of(uint32_t host) {
    std::vector<std::vector<std::byte>> found;
    for (auto bytes = hosts[host]->next(); !bytes.empty(); bytes = hosts[host]->next()) found.push_back(bytes);
    return found;
  }
};

TEST_F(LostBuffers, WhatNamesOneFailsAtOnce) {
  const uint64_t lost = ready(3), other = ready(1);
  lose(1);
  const uint64_t result = run(3, {lost}), second = run(3, {result}), token = fetch(lost, 3), late = fetch(second, 3);
  pass();
  for (const uint64_t each : {result, second, token, late}) EXPECT_EQ(why(each), kWhy);
  EXPECT_EQ(good->in_flight(), 0u);
  EXPECT_EQ(controller->stats().waiting, 2u);  // the fetches: their leases must come back
  EXPECT_EQ(controller->stats().dropped, 2u);
  const uint64_t waits = run(3, {}), goes_on = run(1, {other});
  pass();
  EXPECT_EQ(state(waits), FutureState::kPending);
  (void)all_of(0);
  restore(1);
  pass();
  for (const uint64_t each : {fetch(lost, 3), run(3, {second}), run(3, {lost})}) {  // it stays lost
    pass();
    EXPECT_EQ(why(each), kWhy);
  }
  EXPECT_EQ(state(waits), FutureState::kPending);
  EXPECT_EQ(state(goes_on), FutureState::kPending);
}

TEST_F(LostBuffers, ARunAcrossHoldsNobodyUp) {
  PlanMemory memory;
  memory.results.push_back({2, kNoSpaceSet, 0, -1, -1});
  controller->set_plan_memory(6, memory);
  const uint64_t lost = ready(2), here = ready(1);
  lose(1);
  uint64_t across = 0;
  ASSERT_EQ(good->submit({6, 2, {2}}, std::array{here, lost}, &across), Status::kOk);
  pass();
  EXPECT_EQ(why(across), kWhy);
  (void)run(1, {here});
  pass();
  const auto heard = all_of(0);  // two puts, the loss, the failure, the run
  ASSERT_EQ(heard.size(), 5u);
  const auto failed = read_record<CommandRecord>(heard[3]);
  EXPECT_TRUE(failed.header.detail == static_cast<uint16_t>(CommandKind::kFail) && failed.handle == across);
  EXPECT_EQ(read_record<RecordHeader>(heard[4]).kind, RecordKind::kRun);
  EXPECT_EQ(controller->stats().waiting, 0u);
  restore(1);
  pass();
  EXPECT_TRUE(hosts[1]->next().empty());
}

TEST_F(LostBuffers, WhatWaitedInTheOrderFailsToo) {
  const uint64_t lost = ready(3), name = ready(3);
  for (int i = 0; i < 2; ++i) submit(3);  // the window is 2: the others wait behind these
  const uint64_t first = run(3, {lost}), second = run(3, {first}), token = fetch(first, 3), saved = put(3),
                 waits = run(3, {saved}), renamed = run(3, {});
  rename(3, name, renamed);  // from here on the name is not of a lost buffer
  const uint64_t behind = run(3, {name});
  pass();
  EXPECT_EQ(controller->stats().waiting, 8u);
  lose(1);
  pass();
  for (const uint64_t each : {first, second, token}) EXPECT_EQ(why(each), kWhy);
  const uint64_t later = run(3, {name}), later_lost = run(3, {second});
  pass();
  EXPECT_EQ(why(later_lost), kWhy);
  for (const uint64_t each : {saved, waits, behind, later}) EXPECT_EQ(state(each), FutureState::kPending);
  EXPECT_EQ(good->in_flight(), 4u);
  restore(1);
  pass();
  size_t runs = 0;
  for (const auto& bytes : all_of(1)) runs += read_record<RecordHeader>(bytes).kind == RecordKind::kRun ? 1U : 0U;
  EXPECT_EQ(runs, 2u);
}

TEST_F(LostBuffers, RenamesThatWaitAreFollowedInTheirOrder) {
  for (int i = 0; i < 5; ++i) submit(3);  // when these are over, later entries have descending numbers
  pass();
  for (int i = 0; i < 5; ++i, pass()) hosts[1]->done(hosts[1]->next_run());
  const uint64_t twice = ready(3), first = ready(3), second = ready(3), name = ready(3), other = ready(3),
                 third = ready(3);
  for (int i = 0; i < 3; ++i) submit(3);  // the window is 2: the others wait behind these
  rename(3, twice, first);
  rename(3, twice, second);
  rename(3, other, third);
  rename(3, name, other);
  const uint64_t reader = run(3, {twice}), behind = run(3, {name});
  pass();
  lose(1);
  const uint64_t later = run(3, {twice}), last = run(3, {name});
  pass();
  for (const uint64_t each : {reader, behind, later, last}) EXPECT_EQ(why(each), kWhy);
}

TEST_F(LostBuffers, OneThatAWaitingRunDonatesIsLostToItAlone) {
  PlanMemory memory;
  memory.results.push_back({3, kNoSpaceSet, 0, -1, -1});
  memory.donated = {0};
  controller->set_plan_memory(6, memory);
  const uint64_t lost = ready(3);
  for (int i = 0; i < 2; ++i) submit(3);  // the window is 2: the others wait behind these
  uint64_t taker = 0;
  ASSERT_EQ(good->submit({6, 3, {1}}, std::array{lost}, &taker), Status::kOk);
  good->donated(Handle{lost});
  const uint64_t younger = put(3), reader = run(3, {younger}), behind = run(3, {taker});
  ASSERT_EQ(Handle{younger}.index(), Handle{lost}.index());  // FUT-3
  pass();
  lose(1);
  pass();
  for (const uint64_t each : {taker, behind}) EXPECT_EQ(why(each), kWhy);
  for (const uint64_t each : {younger, reader}) EXPECT_EQ(state(each), FutureState::kPending);
  restore(1);
  pass();
  std::vector<CommandKind> kinds;
  size_t runs = 0;
  for (const auto& bytes : all_of(1)) {
    const auto header = read_record<RecordHeader>(bytes);
    runs += header.kind == RecordKind::kRun ? 1U : 0U;
    if (header.kind == RecordKind::kCommand) kinds.push_back(static_cast<CommandKind>(header.detail));
  }
  EXPECT_EQ(runs, 1u);
  EXPECT_EQ(std::count(kinds.begin(), kinds.end(), CommandKind::kPut), 1);
}

TEST_F(LostBuffers, AHandleThatIsUsedAgainIsNotLost) {
  const uint64_t lost = ready(3);
  lose(1);
  good->release(Handle{lost}, 3, uint64_t{1} << 30);
  uint64_t again = 0;
  do {
    again = put(3);
    pass();
  } while (Handle{again}.index() != Handle{lost}.index());
  const uint64_t result = run(3, {again});
  pass();
  EXPECT_EQ(state(result), FutureState::kPending);
}

/// One place of 100 bytes on host 1.
struct HeldLost : Cluster {
  HeldLost() : Cluster(2, 2, {100}) {
    controller->add_group(3, {1});
    set = controller->add_space_set({0});
  }
  uint64_t put(uint64_t bytes) {
    Handle handle;
    EXPECT_EQ(good->allocate(1, &handle), Status::kOk);
    EXPECT_EQ(good->command(CommandKind::kPut, 3, handle, {}, {}, set, bytes), Status::kOk);
    pass();
    return handle.raw;
  }
  uint64_t run(std::vector<uint64_t> arguments) {
    uint64_t result = 0;
    EXPECT_EQ(good->submit({5, 3, {3}}, arguments, &result), Status::kOk);
    pass();
    return result;
  }
  SpaceSetId set = 0;
};

TEST_F(HeldLost, WhatIsHeldFailsToo) {
  const uint64_t lost = put(60), held = put(60), fails = run({lost}), behind = run({fails}), waits = run({held});
  EXPECT_EQ(controller->stats().held, 4u);
  controller->lose_hosts({1}, kWhy);
  const uint64_t later = run({lost}), later_waits = run({});
  good->poll_inbox();
  for (const uint64_t each : {fails, behind, later}) EXPECT_EQ(good->error_of(Handle{each}), kWhy);
  for (const uint64_t each : {held, waits, later_waits}) EXPECT_EQ(good->poll(Handle{each}), FutureState::kPending);
  EXPECT_EQ(good->in_flight(), 2u);
}

// ---------------------------------------------------------------------------------------------------------- random

bool is_put(std::span<const std::byte> bytes) {
  const auto header = read_record<RecordHeader>(bytes);
  return header.kind == RecordKind::kCommand && header.detail == static_cast<uint16_t>(CommandKind::kPut);
}

/// What the client must see, by the rules alone.
struct Model {
  struct Buffer {
    uint32_t hosts = 0;             ///< a bit each
    std::vector<size_t> arguments;  ///< numbers of buffers
    bool is_run = false;            ///< else it was put
    bool is_lost = false;           ///< or cannot be made without what is lost
    bool was_granted = false;       ///< a host has heard of it
    bool may_wait = false;  ///< it may be known to be lost only when its successor says so (Recovery::fail_futures)
  };
  bool names_lost(const Buffer& buffer) const {
    return std::ranges::any_of(buffer.arguments, [&](size_t number) { return buffers[number].is_lost; });
  }
  bool names_unsure(const Buffer& buffer) const {
    return std::ranges::any_of(buffer.arguments, [&](size_t number) { return buffers[number].may_wait; });
  }
  bool is_across(uint32_t hosts) const { return (hosts & lost_hosts) != 0 && (hosts & ~lost_hosts) != 0; }
  void add(uint64_t raw, Buffer buffer) {
    buffer.is_lost = names_lost(buffer);
    buffer.may_wait = names_unsure(buffer);
    made[raw] = means[raw] = buffers.size();
    buffers.push_back(std::move(buffer));
  }
  void lose(uint32_t host) {
    lost_hosts |= 1u << host;
    for (Buffer& buffer : buffers) {
      if (buffer.was_granted) {
        buffer.is_lost = buffer.is_lost || ((buffer.hosts >> host) & 1) != 0;
      } else if (buffer.is_run) {
        buffer.is_lost = buffer.is_lost || is_across(buffer.hosts) || names_lost(buffer);
        buffer.may_wait =
            buffer.may_wait || names_unsure(buffer) ||
            std::ranges::any_of(buffer.arguments, [&](size_t number) { return renamed.contains(number); });
      }
    }
  }
  std::vector<Buffer> buffers;             ///< in the order in which they were submitted
  std::map<uint64_t, size_t> made, means;  ///< by handle: the buffer that it was made for; what it means now
  std::set<size_t> renamed;                ///< buffers whose name was given to another one
  uint32_t lost_hosts = 0;
};

TEST_F(LostBuffers, RandomOrders) {
  constexpr uint32_t kHostsOf[] = {0, 0b001, 0b011, 0b010, 0b100};
  std::random_device device;
  for (int round = 0; round < 40; ++round) {
    const uint64_t seed = round == 0 ? 1 : device();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return random() % n; };
    struct World : Cluster {
      World() : Cluster(2, 3) {}
      void TestBody() override {}
    } world;
    world.controller->add_group(3, {1});
    world.controller->add_group(4, {2});
    Model model;
    const auto hear = [&](uint32_t h, std::span<const std::byte> bytes) {
      if (read_record<RecordHeader>(bytes).kind == RecordKind::kRun) {
        const auto run = read_record<RunRecord>(bytes);
        uint64_t result = 0;
        std::memcpy(&result, bytes.data() + sizeof run + run.arguments * sizeof result, sizeof result);
        model.buffers[model.made.at(result)].was_granted = true;
        world.hosts[h]->done(run);
      } else if (is_put(bytes)) {
        model.buffers[model.made.at(read_record<CommandRecord>(bytes).handle)].was_granted = true;
      }
    };
    const auto serve = [&] {  // hosts that are there do at once what they are told
      bool is_quiet = false;
      while (!std::exchange(is_quiet, true)) {
        world.pass();
        for (uint32_t h = 0; h < 3; ++h) {
          if (((model.lost_hosts >> h) & 1) != 0) continue;
          for (auto bytes = world.hosts[h]->next(); !bytes.empty(); bytes = world.hosts[h]->next()) {
            hear(h, bytes);
            is_quiet = false;
          }
        }
      }
      world.good->poll_inbox();
    };
    const auto any = [&]() -> uint64_t {
      if (model.means.empty()) return 0;
      auto at = model.means.begin();
      std::advance(at, below(model.means.size()));
      return at->first;
    };
    for (int step = 0; step < 250; ++step) {
      const auto group = static_cast<GroupId>(1 + below(4));
      switch (below(9)) {
        case 0:
        case 1: {
          Handle handle;
          if (world.good->allocate(1, &handle) != Status::kOk) break;
          ASSERT_EQ(world.good->command(CommandKind::kPut, group, handle, {}, {}), Status::kOk);
          model.add(handle.raw, {kHostsOf[group], {}});
          break;
        }
        case 2:
        case 3:
        case 4: {
          const uint64_t first = any(), second = any();
          if (first == 0) break;
          const auto lies_there = [&](uint64_t raw) {  // a run has the hosts of all its arguments
            return (model.buffers[model.means[raw]].hosts & ~kHostsOf[group]) == 0;
          };
          if (!lies_there(first) || !lies_there(second)) break;
          const Model::Buffer buffer{kHostsOf[group], {model.means[first], model.means[second]}, true};
          const bool is_refused = model.names_lost(buffer) && !model.names_unsure(buffer);
          if (model.is_across(buffer.hosts) && !is_refused) break;  // its client would wait with it
          uint64_t result = 0;
          if (world.good->submit({5, group, {group}}, std::array{first, second}, &result) != Status::kOk) break;
          model.add(result, buffer);
          break;
        }
        case 5: {
          const uint64_t handle = any();
          if (handle == 0) break;
          world.good->release(Handle{handle}, group, uint64_t{1} << 30);
          model.means.erase(handle);
          break;
        }
        case 6: {  // on the same hosts, as a move to other devices of them
          const uint64_t name = any(), fresh = any();
          if (name == 0 || name == fresh) break;
          const uint32_t there = model.buffers[model.means[fresh]].hosts;
          if (there != model.buffers[model.means[name]].hosts || model.is_across(there)) break;
          const auto same = static_cast<GroupId>(std::ranges::find(kHostsOf, there) - kHostsOf);
          const uint64_t pair[] = {name, fresh};
          ASSERT_EQ(world.good->command(CommandKind::kRename, same, {}, {}, std::as_bytes(std::span{pair})),
                    Status::kOk);
          model.renamed.insert(model.means[name]);
          model.means[name] = model.means[fresh];
          model.means.erase(fresh);
          break;
        }
        case 7: {
          const auto h = static_cast<uint32_t>(below(3));
          if (((model.lost_hosts >> h) & 1) != 0) break;
          world.controller->lose_hosts({h}, kWhy);
          model.lose(h);
          break;
        }
        default: {
          const auto h = static_cast<uint32_t>(below(3));
          if (((model.lost_hosts >> h) & 1) == 0) break;
          auto fresh = std::make_unique<PlayedHost>(h, 3, world.block);
          world.controller->restore_host(h, fresh->block);
          world.hosts[h] = std::move(fresh);
          model.lost_hosts &= ~(1u << h);
          break;
        }
      }
      serve();
      ASSERT_TRUE(world.is_up()) << world.block->failure();
      for (const auto& [raw, now] : model.means) {
        const Model::Buffer& buffer = model.buffers[model.made.at(raw)];
        const std::string told = world.good->error_of(Handle{raw});
        if (buffer.is_lost && buffer.may_wait && told.empty()) continue;
        ASSERT_EQ(told, buffer.is_lost ? kWhy : "") << "step " << step;
      }
    }
  }
}

}  // namespace
}  // namespace pathways::test::test_lost_buffers
