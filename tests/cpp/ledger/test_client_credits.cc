// One client's credits: ClientCredits.
//   FLOW-1  at each bound the client is behind, and it is not any more when work is done or a host is lost
#include "ledger/client_credits.h"

#include <gtest/gtest.h>

namespace pathways::test::test_client_credits {
namespace {

TEST(ClientCredits, CommandsOnOneHostBoundTheClient) {
  ClientCredits credits(2);
  credits.commands_done(1, 1, 64);  // of nothing
  for (uint64_t i = 0; i + 1 < kMostCommands; ++i) credits.command_sent(1, 64);
  EXPECT_FALSE(credits.is_behind());
  credits.command_sent(0, 64);
  EXPECT_FALSE(credits.is_behind());
  credits.command_sent(1, 64);
  EXPECT_TRUE(credits.is_behind());
  credits.command_sent(1, 64);
  credits.validate();
  credits.commands_done(1, 1, 64);
  EXPECT_TRUE(credits.is_behind());
  credits.commands_done(1, 1, 64);
  EXPECT_FALSE(credits.is_behind());
  credits.validate();
}

TEST(ClientCredits, SoDoTheirBytes) {
  ClientCredits credits(1);
  credits.command_sent(0, kMostCommandBytes);
  EXPECT_TRUE(credits.is_behind());
  credits.commands_done(0, 1, kMostCommandBytes);
  EXPECT_FALSE(credits.is_behind());
}

TEST(ClientCredits, ALostHostHasNoCommands) {
  ClientCredits credits(3);
  credits.host_lost(1);  // before anything was sent
  credits.command_sent(0, kMostCommandBytes);
  credits.command_sent(1, kMostCommandBytes);
  credits.host_lost(2);
  credits.host_lost(1);
  credits.validate();
  EXPECT_TRUE(credits.is_behind());
  credits.host_lost(0);
  EXPECT_FALSE(credits.is_behind());
}

TEST(ClientCredits, RunsAndWaitingRecordsBoundItToo) {
  ClientCredits credits(1);
  for (uint64_t i = 0; i < kMostRuns; ++i) credits.run_admitted();
  EXPECT_TRUE(credits.is_behind());
  credits.run_over();
  EXPECT_FALSE(credits.is_behind());
  EXPECT_EQ(credits.in_flight(), kMostRuns - 1);
  credits.record_waits(kMostWaitingBytes);
  EXPECT_TRUE(credits.is_behind());
  credits.record_goes(kMostWaitingBytes);
  EXPECT_FALSE(credits.is_behind());
}

}  // namespace
}  // namespace pathways::test::test_client_credits
