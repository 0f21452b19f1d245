// One client's held records: HeldRecords.
//   MEM-2   a release takes effect behind the last held record that names the buffer, not behind all: Releases.*
//   MEM-5   a fetch passes the line when nothing in it names its buffer, or the index of its token: Fetches.*
//   MEM-7   the steps of a save that read no buffer pass the line, when no other step is in it: Steps.*
//   ARENA-5 what leases memory is sent in the order of the stamps: Fetches.ThatLeaseDoNotPassWhatLeases
//   FLOW-1  what is held is counted, also while a record is tried and put back: HeldRecords.CountsWhatItHolds
#include "ledger/held_records.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "messages/records.h"

namespace pathways::test::test_held_records {
namespace {

std::vector<std::byte> run_of(uint64_t tag, std::vector<uint64_t> arguments, std::vector<uint64_t> results) {
  RunRecord record{};
  record.header = {RecordKind::kRun, 0, 0};
  record.tag = tag;
  record.arguments = static_cast<uint32_t>(arguments.size());
  record.results = static_cast<uint32_t>(results.size());
  arguments.insert(arguments.end(), results.begin(), results.end());
  std::vector<std::byte> bytes(sizeof record + arguments.size() * sizeof(uint64_t));
  std::memcpy(bytes.data(), &record, sizeof record);
  if (!arguments.empty()) std::memcpy(bytes.data() + sizeof record, arguments.data(), bytes.size() - sizeof record);
  return bytes;
}

std::vector<std::byte> command_of(CommandKind kind, uint64_t buffer, uint64_t token, uint64_t stamp = 0) {
  CommandRecord record{};
  record.header = {RecordKind::kCommand, static_cast<uint16_t>(kind), 0};
  record.handle = buffer;
  record.token = token;
  record.lease_stamp = stamp;
  std::vector<std::byte> bytes(sizeof record);
  std::memcpy(bytes.data(), &record, sizeof record);
  return bytes;
}

std::vector<std::byte> fetch_of(uint64_t buffer, uint64_t token, uint64_t stamp = 0) {
  return command_of(CommandKind::kFetch, buffer, token, stamp);
}

using Due = std::vector<std::pair<GroupId, uint64_t>>;

TEST(HeldRecords, CountsWhatItHolds) {
  HeldRecords held;
  held.push(run_of(1, {10}, {11}));
  held.push(run_of(2, {11}, {12}));
  EXPECT_EQ(held.size(), 2u);
  held.validate();
  HeldRecords::Held first = held.take_front();
  EXPECT_EQ(held.size(), 1u);
  EXPECT_TRUE(held.names(10));  // its fate is not known yet
  held.put_back(std::move(first.record));
  held.validate();
  EXPECT_EQ(held.size(), 2u);
  EXPECT_FALSE(held.is_full());
  const auto small = run_of(3, {}, {});
  while (held.size() < kMostHeld) held.push(small);
  EXPECT_TRUE(held.is_full());
}

TEST(HeldRecords, FindsARunUntilItIsDropped) {
  HeldRecords held;
  held.push(run_of(1, {}, {11}));
  held.push(run_of(2, {}, {12}));
  EXPECT_EQ(held.find_run(3), nullptr);
  HeldRecords::Held* run = held.find_run(2);
  ASSERT_NE(run, nullptr);
  run->dropped = "cancelled";
  EXPECT_EQ(held.find_run(2), nullptr);
  EXPECT_TRUE(held.front().dropped.empty());
}

TEST(Releases, OfABufferThatNobodyNamesAreDueAtOnce) {
  HeldRecords held;
  held.push(run_of(1, {10}, {11}));
  held.release(20, 5);
  EXPECT_EQ(held.take_due_releases(), (Due{{5, 20}}));
  EXPECT_TRUE(held.take_due_releases().empty());
}

TEST(Releases, WaitForTheLastRecordThatNamesTheBuffer) {
  HeldRecords held;
  held.push(run_of(1, {10, 10}, {11}));
  held.push(run_of(2, {10}, {12}));
  held.push(run_of(3, {}, {13}));
  held.release(10, 5);
  held.release(11, 4);
  EXPECT_TRUE(held.take_due_releases().empty());
  held.validate();
  held.forget(held.take_front().record);
  EXPECT_EQ(held.take_due_releases(), (Due{{4, 11}}));
  held.forget(held.take_front().record);
  EXPECT_EQ(held.take_due_releases(), (Due{{5, 10}}));
  EXPECT_FALSE(held.empty());  // not behind all of them
  held.validate();
}

TEST(Releases, ComeSortedByGroup) {
  HeldRecords held;
  for (uint64_t handle = 20; handle < 24; ++handle) held.release(handle, handle % 2 == 0 ? 9u : 3u);
  EXPECT_EQ(held.take_due_releases(), (Due{{3, 21}, {3, 23}, {9, 20}, {9, 22}}));
}

std::vector<std::byte> put_of(uint64_t buffer, uint64_t stamp) {
  return command_of(CommandKind::kPut, buffer, 0, stamp);
}

TEST(Fetches, ThatLeaseDoNotPassWhatLeases) {
  const auto handle = [](uint32_t index) { return Handle::make(index, 1).raw; };
  const auto small = fetch_of(handle(20), handle(30)), big = fetch_of(handle(20), handle(30), 6);
  HeldRecords held;
  held.push(put_of(handle(10), 0));
  EXPECT_TRUE(held.lets_pass(small) && held.lets_pass(big));
  held.push(put_of(handle(11), 5));
  EXPECT_TRUE(held.lets_pass(small));
  EXPECT_FALSE(held.lets_pass(big));  // if the host is lost, stamp 6 says that stamp 5 was sent there, too
  held.forget(held.take_front().record);
  EXPECT_FALSE(held.lets_pass(big));
  held.validate();
  HeldRecords::Held put = held.take_front();
  EXPECT_FALSE(held.lets_pass(big));  // it may be put back
  held.put_back(std::move(put.record));
  held.validate();
  held.forget(held.take_front().record);
  EXPECT_TRUE(held.lets_pass(big));
  held.validate();
}

TEST(Fetches, PassWhatDoesNotNameTheirBuffer) {
  const auto handle = [](uint32_t index, uint32_t generation) { return Handle::make(index, generation).raw; };
  HeldRecords held;
  held.push(run_of(1, {handle(10, 1)}, {handle(11, 1)}));
  EXPECT_TRUE(held.lets_pass(fetch_of(handle(20, 1), handle(30, 1))));
  EXPECT_FALSE(held.lets_pass(fetch_of(handle(10, 1), handle(30, 1))));  // the run may donate it
  EXPECT_FALSE(held.lets_pass(fetch_of(handle(11, 1), handle(30, 1))));  // it is not made yet
  EXPECT_FALSE(held.lets_pass(fetch_of(handle(20, 1), handle(11, 2))));  // the index means the run's result first
  EXPECT_FALSE(held.lets_pass(fetch_of(handle(20, 1), handle(10, 2))));
  held.push(fetch_of(handle(11, 1), handle(30, 1)));
  EXPECT_FALSE(held.lets_pass(fetch_of(handle(20, 1), handle(30, 2))));
  held.validate();
  held.forget(held.take_front().record);
  EXPECT_TRUE(held.lets_pass(fetch_of(handle(10, 1), handle(31, 1))));
  held.forget(held.take_front().record);
  EXPECT_TRUE(held.lets_pass(fetch_of(handle(20, 1), handle(30, 2))));
  held.validate();
}

TEST(Steps, PassUnlessOtherStepsAreInLine) {
  const uint64_t token = Handle::make(30, 1).raw, other = Handle::make(31, 1).raw, array = Handle::make(10, 1).raw;
  const auto write = command_of(CommandKind::kTask, 0, token), end = command_of(CommandKind::kBackend, 0, 0);
  HeldRecords held;
  held.push(run_of(1, {array}, {Handle::make(11, 1).raw}));
  EXPECT_TRUE(held.lets_pass(write) && held.lets_pass(end));
  EXPECT_FALSE(held.lets_pass(command_of(CommandKind::kTask, 0, Handle::make(11, 2).raw)));  // the index of the result
  EXPECT_FALSE(held.lets_pass(command_of(CommandKind::kTask, Handle::make(12, 1).raw, token)));  // it reads a buffer
  EXPECT_FALSE(held.lets_pass(command_of(CommandKind::kBackend, 0, 7)));  // a plan is dropped behind its last run
  EXPECT_FALSE(held.lets_pass(command_of(CommandKind::kBackend, 7, 0)));  // a placement is described before its puts
  EXPECT_FALSE(held.lets_pass(run_of(2, {}, {})));
  for (const auto& before : {command_of(CommandKind::kTask, array, other), command_of(CommandKind::kTask, array, 0),
                             command_of(CommandKind::kTask, 0, other), end}) {
    held.push(before);
    EXPECT_FALSE(held.lets_pass(write) || held.lets_pass(end));  // they may be of the same save
    held.validate();
    held.forget(held.take_front().record);
    held.forget(held.take_front().record);
    held.push(run_of(1, {array}, {}));
    EXPECT_TRUE(held.lets_pass(write) && held.lets_pass(end));
  }
}

}  // namespace
}  // namespace pathways::test::test_held_records
