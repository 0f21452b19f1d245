// What a client is told when its ring is full: it comes as soon as there is room, and who waits for it sleeps.
//
//   ASY-1   Told.*: the controller waits for no client
//   PARK-1  Told.*: a client that has read all that is in its ring sleeps until there is more
#include <thread>

#include "controller/played.h"
#include "support.h"

namespace pathways::test::test_delivery {
namespace {

/// A client whose ring takes two errors at a time.
struct Told : Cluster {
  Told() : Cluster(1u << 14), memory(1u << 12), client({1, 1u << 14}, memory.block, block) {
    controller->add_client(1, memory.block);
  }
  ~Told() override { controller->remove_client(1); }  // before its memory goes
  RawClient memory;
  Client client;
};

TEST_F(Told, ErrorsThatDoNotFitComeAsRoomIsMade) {
  // At one ring's worth per look of 100 ms this would take 20 s, and spin meanwhile.
  const Watchdog watchdog("a client that is told more than fits its ring", std::chrono::seconds(60));
  constexpr uint32_t kRuns = 200;
  std::vector<uint64_t> results(kRuns);
  for (uint64_t& result : results) {
    while (client.submit({5, 1, {1}}, {}, &result) != Status::kOk) pass();
  }
  pass();
  controller->start();
  const std::string text(1500, 'x');
  std::vector<std::byte> bytes(sizeof(FailedRecord) + padded(text.size()));
  std::memcpy(bytes.data() + sizeof(FailedRecord), text.data(), text.size());
  for (const uint64_t result : results) {
    const FailedRecord record{{RecordKind::kFailed, 0, 1}, result, static_cast<uint32_t>(text.size()), 0};
    std::memcpy(bytes.data(), &record, sizeof record);
    hosts[0]->outbox.send(static_cast<uint32_t>(bytes.size()),
                          [&](std::byte* out) { std::memcpy(out, bytes.data(), bytes.size()); });
  }
  while (hosts[0]->outbox.flush()) std::this_thread::yield();
  const Handle last{results.back()};
  uint64_t waits = 0;
  while (client.wait(last, std::chrono::seconds(10), SpinPolicy::sleep_at_once()) == FutureState::kPending) {
    client.poll_inbox();
    ++waits;
  }
  std::printf("%u errors in %llu waits\n", kRuns, static_cast<unsigned long long>(waits));
  EXPECT_LT(waits, 20 * kRuns);
  for (const uint64_t result : results) {
    EXPECT_EQ(client.poll(Handle{result}), FutureState::kFailed);
    EXPECT_EQ(client.error_of(Handle{result}), text);
  }
  controller->stop();
}

}  // namespace
}  // namespace pathways::test::test_delivery
