// FAULT-1, SPEAK-1: what a host says that makes no sense, or is not its to say.
#include <string>

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
