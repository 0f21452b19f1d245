// FAULT-1, SPEAK-1, GANG-1: what a host says that makes no sense, or is not its to say.
#include <algorithm>
#include <string>
#include <vector>

#include "controller/played.h"

namespace pathways::test::test_host_faults {
namespace {

/// Nobody ends hosts with faults.
struct Played : Cluster {};

TEST_F(Played, HostsMakeSenseOrTheErrorIsThrown) {
  const auto refused = [&](const std::string& why) {
    try {
      pass();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      return;
    }
    ADD_FAILURE() << "accepted: " << why;
  };
  hosts[1]->say(RecordHeader{RecordKind::kReceiveReady, 0, 0});
  refused("host 1 sent a record of a kind");
  hosts[0]->say(RunDoneRecord{{RecordKind::kRunDone, 0, 0}, 17, 0, 0, 0, 0});
  refused("host 0 sent a completion of a run that does not run");
}

/// Somebody ends hosts with faults.
struct Faults : Cluster {
  Faults() : Cluster(2, 2, {}, PolicyKind::kFifo, false, 250ms, false, test_clock, true) {}
};

TEST_F(Faults, TheHostIsReadNoMoreAndTheOthersGoOn) {
  submit();
  pass();
  hosts[1]->say(RecordHeader{RecordKind::kReceiveReady, 0, 0});
  hosts[1]->done(hosts[1]->next_run());  // counts no more
  pass();
  const auto faults = controller->take_faults();
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_EQ(faults[0].host, 1u);
  EXPECT_NE(faults[0].what.find("host 1 sent a record of a kind"), std::string::npos) << faults[0].what;
  EXPECT_TRUE(controller->take_faults().empty());
  hosts[0]->done(hosts[0]->next_run());
  submit(1);
  pass();
  hosts[0]->done(hosts[0]->next_run());
  pass();
  EXPECT_TRUE(is_up());
  EXPECT_FALSE(controller->is_idle()) << "it waits for the host that is about to be lost";
  (void)controller->lose_hosts({1}, "it made no sense");
  pass();
  EXPECT_TRUE(controller->is_idle());
  EXPECT_TRUE(is_up());
}

TEST_F(Faults, AFaultOfALostHostIsNotItsSuccessors) {
  hosts[1]->say(RecordHeader{RecordKind::kReceiveReady, 0, 0});
  hosts[0]->say(RecordHeader{RecordKind::kReceiveReady, 0, 0});
  pass();
  (void)controller->lose_hosts({1}, "its machine is lost");  // before anybody has asked for faults
  const auto faults = controller->take_faults();
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_EQ(faults[0].host, 0u);
}

TEST_F(Faults, LastWordsThatMakeNoSenseAreNoFaultOfTheSuccessor) {
  hosts[1]->say(RecordHeader{RecordKind::kReceiveReady, 0, 0});
  (void)controller->lose_hosts({1}, "its machine is lost");
  EXPECT_TRUE(controller->take_faults().empty());
}

/// Three hosts: 0 and 1 have gangs, host 2 works alone.
struct BrokenGangs : Cluster {
  BrokenGangs() : Cluster(2, 3, {}, PolicyKind::kFifo, false, 250ms, false, test_clock, true) {
    controller->add_group(3, {2});
  }
  std::vector<uint32_t> faults() {
    pass();
    std::vector<uint32_t> found;
    for (const auto& each : controller->take_faults()) {
      EXPECT_NE(each.what.find("GANG-1 broken in run"), std::string::npos) << each.what;
      found.push_back(each.host);
    }
    std::ranges::sort(found);
    return found;
  }
  /// Host 2's runs go on, and so does the cluster when the hosts with faults are lost.
  void others_go_on(const std::vector<uint32_t>& lost) {
    submit(3);
    pass();
    hosts[2]->done(hosts[2]->next_run());
    pass();
    (void)controller->lose_hosts(lost, "it made no sense");
    pass();
    EXPECT_TRUE(controller->is_idle());
    EXPECT_TRUE(is_up());
  }
};

TEST_F(BrokenGangs, SomeGangsAreThatHostsFault) {
  submit(2);
  pass();
  hosts[0]->done(hosts[0]->next_run(), 1, 2);
  EXPECT_EQ(faults(), std::vector{0u});
  hosts[1]->done(hosts[1]->next_run(), 2, 2);
  EXPECT_TRUE(faults().empty());
  others_go_on({0});
}

TEST_F(BrokenGangs, WhenTwoDisagreeAllHostsOfTheRunHaveAFault) {
  submit(2);
  pass();
  hosts[0]->done(hosts[0]->next_run(), 2, 2);
  hosts[1]->done(hosts[1]->next_run(), 0, 2);
  EXPECT_EQ(faults(), (std::vector{0u, 1u}));
  others_go_on({0, 1});
}

TEST_F(BrokenGangs, SoItIsWithBranches) {
  submit(2);
  pass();
  for (const uint32_t host : {1u, 0u}) {
    const RunRecord run = hosts[host]->next_run();
    hosts[host]->say(RunDoneRecord{{RecordKind::kRunDone, 0, 0}, run.tag, 0, 0, host, 0, 0, 1, host});
  }
  EXPECT_EQ(faults(), (std::vector{0u, 1u}));
  others_go_on({0, 1});
}

TEST_F(Faults, AHostFailsOnlyWhatItHasAPartIn) {
  const auto fail = [&](uint32_t host, uint64_t handle) {
    struct {
      FailedRecord record;
      char text[8];
    } const failed{{{RecordKind::kFailed, 0, 0}, handle, 8, 0}, {'i', 't', ' ', 'l', 'i', 'e', 's', '.'}};
    hosts[host]->say(failed);
    pass();
    good->poll_inbox();
    return !good->error_of(Handle{handle}).empty();
  };
  const uint64_t own = submit(1), shared = submit(2);
  pass();
  EXPECT_FALSE(fail(1, own));
  EXPECT_FALSE(fail(1, shared + (uint64_t{1} << 32))) << "a handle of another generation";
  EXPECT_TRUE(fail(1, shared));
  EXPECT_TRUE(fail(0, own));
  EXPECT_TRUE(controller->take_faults().empty());
}

}  // namespace
}  // namespace pathways::test::test_host_faults
