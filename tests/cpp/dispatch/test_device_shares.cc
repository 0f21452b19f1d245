// DeviceShares in a controller whose clients and hosts the test plays: when a run enters the order, and what it costs.
//
//   SHARE-1  Shares.ByWeight, Shares.OnDevicesThatOverlap
//   SHARE-2  Shares.OneClientIsNotHeldBack, Shares.AClientWithoutAPlanHoldsNobodyBack, Shares.AFloodIsHeldBack,
//            Shares.APlanIsMeasuredFirst
//   SHARE-5  Shares.EndsThatWereNoticedTogether, Shares.ByWeight, Shares.OnAGangWhoseHostsNoticeEndsUnevenly,
//            Shares.RunsOfOnePlanNoticedTogetherTellItsTime
//   OWN-1    Shares.WhoLeavesHoldsNobodyBack
#include "dispatch/device_shares.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <utility>

#include "controller/played.h"
#include "support.h"

namespace pathways::test::test_device_shares {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr GroupId kFirstHost = 1, kBothHosts = 2;

struct Shares : Cluster {
  Shares() : Cluster(64, 2, {}, PolicyKind::kPriority) {}
  ~Shares() override { controller.reset(); }  // before the second client's memory

  /// A second client.
  Client& other(double weight, int32_t priority = 0) {
    controller->add_client(1, second_memory.block, nullptr, {.weight = weight, .priority = priority});
    second = std::make_unique<Client>(Client::Options{1, 8}, second_memory.block, block);
    controller->register_plan(5, 0, kFirstHost, {{0, 0}});
    controller->register_plan(6, 1, kFirstHost, {{0, 0}});
    return *second;
  }
  /// What the runs of a client took.
  int64_t device_ns(uint32_t client) {
    for (const ClientUse& use : controller->client_uses()) {
      if (use.client == client) return static_cast<int64_t>(use.device_ns);
    }
    return -1;
  }
  /// Keeps the client's ring full.
  void flood(Client& client, uint32_t plan, GroupId group = kFirstHost) {
    for (int i = 0; i < 16; ++i) {
      if (client.submit({plan, group, {}}, {}, nullptr) != Status::kOk) return;
    }
  }
  /// What the host was granted since the last call: its runs. Other records are skipped, and told as done.
  std::vector<RunRecord> granted(uint32_t h = 0) {
    std::vector<RunRecord> runs;
    for (auto bytes = hosts[h]->next(); !bytes.empty(); bytes = hosts[h]->next()) {
      const auto header = read_record<RecordHeader>(bytes);
      if (header.kind == RecordKind::kRun) runs.push_back(read_record<RunRecord>(bytes));
      if (header.kind == RecordKind::kCommand) {
        hosts[h]->say(CommandsDoneRecord{{RecordKind::kCommandsDone, 0, header.client}, 1, bytes.size()});
      }
    }
    hosts[h]->inbox.release();
    return runs;
  }

  /// So many times: `submit()`, then the oldest run of the first host ends, having taken `takes(run)` nanoseconds.
  template <typename Submit, typename Takes>
  void serve(int rounds, Submit&& submit, Takes&& takes) {
    for (int i = 0; i < rounds; ++i) {
      submit();
      pass();
      for (const RunRecord& run : granted()) under_way.push_back(run);
      ASSERT_FALSE(under_way.empty());
      ++done[under_way.front().header.client];
      hosts[0]->done(under_way.front(), 0, 0, ++looks, takes(under_way.front()));
      under_way.pop_front();
      pass();
    }
  }

  std::deque<RunRecord> under_way;    ///< on the first host
  std::map<uint32_t, uint32_t> done;  ///< runs by client
  uint32_t looks = 0;
  RawClient second_memory{1u << 14};
  std::unique_ptr<Client> second;
};

TEST_F(Shares, OneClientIsNotHeldBack) {
  controller->register_plan(5, 0, kFirstHost, {{0, 0}});
  for (int i = 0; i < 8; ++i) submit(kFirstHost);
  pass();
  EXPECT_EQ(granted().size(), 8u);
}

TEST_F(Shares, AClientWithoutAPlanHoldsNobodyBack) {
  controller->add_client(1, second_memory.block, nullptr, {});
  controller->register_plan(5, 0, kFirstHost, {{0, 0}});
  for (int i = 0; i < 4; ++i) submit(kFirstHost);
  pass();
  EXPECT_EQ(granted().size(), 4u);
  controller->register_plan(6, 1, kFirstHost, {{0, 0}});
  for (int i = 0; i < 4; ++i) submit(kFirstHost);
  pass();
  EXPECT_EQ(granted().size(), 1u);  // now the plan is measured first
}

TEST_F(Shares, APlanIsMeasuredFirst) {
  other(1);
  for (int i = 0; i < 8; ++i) submit(kFirstHost);
  pass();
  auto runs = granted();
  ASSERT_EQ(runs.size(), 1u);
  hosts[0]->done(runs[0], 0, 0, 1, 100'000);
  pass();
  EXPECT_EQ(granted().size(), 7u);  // 0.7 ms are within any horizon
}

TEST_F(Shares, AFloodIsHeldBack) {
  other(1);
  size_t most = 0;
  serve(
      100, [&] { flood(*second, 6); },
      [&](const RunRecord&) {
        most = std::max(most, under_way.size());
        return 10 * kMs;
      });
  EXPECT_LE(most, 2u);  // of 10 ms each
}

TEST_F(Shares, ByWeight) {
  other(3);
  const auto flood_both = [&] {
    flood(*good, 5);
    flood(*second, 6);
  };
  serve(800, flood_both, [&](const RunRecord& run) { return run.header.client == 0 ? kMs : kMs / 2; });
  // Three times the time, in runs that take half of it.
  EXPECT_NEAR(static_cast<double>(done[1]) / done[0], 6.0, 0.6);
  EXPECT_EQ(device_ns(0), done[0] * kMs);
  EXPECT_EQ(device_ns(1), done[1] * kMs / 2);
}

TEST_F(Shares, OnDevicesThatOverlap) {
  // Client 0 runs on both hosts; client 1 on the second host only, with the same weight. So each has half of that host.
  other(1);
  controller->add_group(3, {1});
  controller->register_plan(7, 0, kBothHosts, {{0, 0}, {1, 1}});
  controller->register_plan(8, 1, 3, {{1, 1}});
  uint32_t batch = 0;
  std::deque<RunRecord> first, second_runs;
  for (int i = 0; i < 600; ++i) {
    flood(*good, 7, kBothHosts);
    flood(*second, 8, 3);
    pass();
    for (const RunRecord& run : granted(0)) first.push_back(run);
    for (const RunRecord& run : granted(1)) second_runs.push_back(run);
    ASSERT_FALSE(second_runs.empty());
    if (second_runs.front().header.client == 0) {
      hosts[0]->done(first.front(), 0, 0, ++batch, kMs);
      first.pop_front();
    }
    ++done[second_runs.front().header.client];
    hosts[1]->done(second_runs.front(), 0, 0, ++batch, kMs);
    second_runs.pop_front();
    pass();
  }
  EXPECT_NEAR(static_cast<double>(done[1]) / done[0], 1.0, 0.1);
}

TEST_F(Shares, OnAGangWhoseHostsNoticeEndsUnevenly) {
  // A run of client 0 takes 1 ms, one of client 1 takes 0.2 ms, and each host notices an end up to 0.2 ms early or
  // late. The greatest of a run's two times would charge the shorter runs too much.
  other(1);
  controller->register_plan(7, 0, kBothHosts, {{0, 20}, {1, 21}});  // one pool
  controller->register_plan(8, 1, kBothHosts, {{0, 20}, {1, 21}});
  std::deque<RunRecord> running[2];
  uint32_t batch = 0;
  for (int i = 0; i < 3000; ++i) {
    flood(*good, 7, kBothHosts);
    flood(*second, 8, kBothHosts);
    pass();
    for (uint32_t h = 0; h < 2; ++h) {
      for (const RunRecord& run : granted(h)) running[h].push_back(run);
      ASSERT_FALSE(running[h].empty());
    }
    const uint32_t client = running[0].front().header.client;
    ++done[client];
    const int64_t took = client == 0 ? kMs : kMs / 5, off = i % 2 == 0 ? kMs / 5 : -kMs / 5;
    for (uint32_t h = 0; h < 2; ++h) {
      hosts[h]->done(running[h].front(), 0, 0, ++batch, h == 0 ? took + off : took - off);
      running[h].pop_front();
    }
    pass();
  }
  EXPECT_NEAR(static_cast<double>(done[1]) / done[0], 5.0, 0.3);
}

TEST_F(Shares, EndsThatWereNoticedTogether) {
  // The host notices two runs at once, and reports the time of both with the one of client 0. Each is charged its part.
  other(1);
  serve(2, [&] { flood(*good, 5); }, [](const RunRecord&) { return kMs; });
  serve(2, [&] { flood(*second, 6); }, [](const RunRecord&) { return kMs; });  // the usual times, measured alone
  done.clear();
  uint32_t batch = 1000;
  for (int i = 0; i < 400; ++i) {
    flood(*good, 5);
    flood(*second, 6);
    pass();
    for (const RunRecord& run : granted()) under_way.push_back(run);
    ++batch;
    const size_t together = std::min<size_t>(2, under_way.size());
    std::sort(under_way.begin(), under_way.begin() + static_cast<std::ptrdiff_t>(together),
              [](const RunRecord& a, const RunRecord& b) { return a.header.client < b.header.client; });
    int64_t busy = static_cast<int64_t>(together) * kMs;
    for (size_t n = 0; n < together; ++n) {
      ++done[under_way.front().header.client];
      hosts[0]->done(under_way.front(), 0, 0, batch, std::exchange(busy, 0));
      under_way.pop_front();
    }
    pass();
  }
  EXPECT_NEAR(static_cast<double>(done[1]) / done[0], 1.0, 0.1);
}

TEST_F(Shares, RunsOfOnePlanNoticedTogetherTellItsTime) {
  // The first run of client 0 was slow. Later ones take 0.1 ms, but the host notices them in twos.
  other(1);
  const auto run = [&](Client& client, uint32_t plan) {
    ASSERT_EQ(client.submit({plan, kFirstHost, {}}, {}, nullptr), Status::kOk);
  };
  const auto end_together = [&](size_t count, int64_t busy) {
    pass();
    const auto runs = granted();
    ASSERT_EQ(runs.size(), count);
    ++looks;
    for (const RunRecord& each : runs) hosts[0]->done(each, 0, 0, looks, std::exchange(busy, 0));
    pass();
  };
  run(*good, 5);
  end_together(1, kMs);
  run(*second, 6);
  end_together(1, kMs);
  for (int i = 0; i < 50; ++i) {
    run(*good, 5);
    run(*good, 5);
    end_together(2, kMs / 5);
  }
  const int64_t before = device_ns(0);
  run(*good, 5);
  run(*second, 6);
  end_together(2, kMs + kMs / 10);
  const auto took = static_cast<double>(device_ns(0) - before);
  EXPECT_NEAR(took, kMs / 10, kMs / 100);
}

TEST_F(Shares, AHigherPriorityGoesFirst) {
  other(1, 1);
  const auto flood_both = [&] {
    flood(*good, 5);
    flood(*second, 6);
  };
  serve(200, flood_both, [](const RunRecord&) { return kMs; });
  EXPECT_LE(done[0], 5u);
}

TEST_F(Shares, AFailedRunSaysNothingAboutItsPlan) {
  other(1);
  flood(*second, 6);
  pass();
  for (const RunRecord& run : granted()) hosts[0]->done(run, 0, 0, 1, 0);  // it was not launched
  pass();
  EXPECT_LE(granted().size(), 3u);  // guessed: 1 ms each
}

TEST_F(Shares, TwoPoolsAreSplitAtOnce) {
  other(1);
  controller->add_group(3, {1});
  controller->register_plan(7, 0, kBothHosts, {{0, 10}, {0, 11}});
  controller->register_plan(8, 1, kBothHosts, {{1, 12}, {1, 13}});
  controller->register_plan(9, 0, kBothHosts, {{0, 10}, {0, 11}, {1, 12}, {1, 13}});
  controller->register_plan(10, 1, kBothHosts, {{0, 11}, {1, 12}});
  flood(*good, 9, kBothHosts);
  flood(*second, 10, kBothHosts);
  pass();
  EXPECT_EQ(granted(0).size(), 2u);  // one of each client, to be measured
  EXPECT_EQ(granted(1).size(), 2u);
}

TEST_F(Shares, ARunIsNotHeldBackForEver) {
  // The first run of a plan does not end, because it waits for the second one.
  other(1);
  submit(kFirstHost);
  submit(kFirstHost);
  pass();
  ASSERT_EQ(granted().size(), 1u);
  let_pass(30ms);
  pass();
  EXPECT_EQ(granted().size(), 1u);
}

TEST_F(Shares, WhoLeavesHoldsNobodyBack) {
  other(100);
  flood(*good, 5);
  flood(*second, 6);
  pass();
  controller->remove_client(1);
  pass();
  const auto runs = granted();
  EXPECT_EQ(std::count_if(runs.begin(), runs.end(), [](const RunRecord& run) { return run.header.client == 0; }), 8);
}

TEST_F(Shares, ASuspendedClientHasNoTurn) {
  other(100);
  flood(*second, 6);
  pass();
  controller->suspend(1);
  const auto flood_first = [&] { flood(*good, 5); };
  serve(30, flood_first, [](const RunRecord&) { return kMs; });
  EXPECT_LE(done[1], 1u);  // what had entered before
  controller->resume(1);
  serve(30, flood_first, [](const RunRecord&) { return kMs; });
  EXPECT_EQ(done[1], 8u);  // all that it has submitted
}

}  // namespace
}  // namespace pathways::test::test_device_shares
