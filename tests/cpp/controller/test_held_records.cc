// One client's held records: HeldRecords.
//   MEM-2   a release takes effect behind the last held record that names the buffer, not behind all: Releases.*
//   MEM-5   a fetch passes the line when nothing in it names its buffer, or the index of its token: Fetches.*
//   ARENA-5 what leases memory is sent in the order of the stamps: Fetches.ThatLeaseDoNotPassWhatLeases
//   FLOW-1  what is held is counted, also while a record is tried and put back: HeldRecords.CountsWhatItHolds
#include "controller/held_records.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "messages/records.h"

namespace pathways {
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

CommandRecord fetch_of(uint64_t buffer, uint64_t token) {
  CommandRecord record{};
  record.header = {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kFetch), 0};
  record.handle = buffer;
  record.token = token;
  return record;
}

std::vector<std::byte> bytes_of_fetch(uint64_t buffer, uint64_t token) {
  const CommandRecord record = fetch_of(buffer, token);
  std::vector<std::byte> bytes(sizeof record);
  std::memcpy(bytes.data(), &record, sizeof record);
  return bytes;
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
  CommandRecord record{};
  record.header = {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kPut), 0};
  record.handle = buffer;
  record.lease_stamp = stamp;
  std::vector<std::byte> bytes(sizeof record);
  std::memcpy(bytes.data(), &record, sizeof record);
  return bytes;
}

TEST(Fetches, ThatLeaseDoNotPassWhatLeases) {
  const auto handle = [](uint32_t index) { return Handle::make(index, 1).raw; };
  CommandRecord small = fetch_of(handle(20), handle(30)), big = small;
  big.lease_stamp = 6;
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
  held.push(bytes_of_fetch(handle(11, 1), handle(30, 1)));
  EXPECT_FALSE(held.lets_pass(fetch_of(handle(20, 1), handle(30, 2))));
  held.validate();
  held.forget(held.take_front().record);
  EXPECT_TRUE(held.lets_pass(fetch_of(handle(10, 1), handle(31, 1))));
  held.forget(held.take_front().record);
  EXPECT_TRUE(held.lets_pass(fetch_of(handle(20, 1), handle(30, 2))));
  held.validate();
}

}  // namespace
}  // namespace pathways
