// A read of an array, while the array ends in every way and at every moment.
//
//   END-1   Reads.*: a read ends with its bytes or with its array, whichever ends first
//   END-1a  Reads.EveryOrder, Reads.NoRingIsLost
//   END-1b  Reads.AFailedArrayDecides
//   END-1c  Reads.AReleasedArraySaysNothing
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "client/client.h"
#include "support.h"

namespace pathways::test::test_client_reads {
namespace {

/// A client without a controller: the test ends its futures itself.
struct Reads : ::testing::Test {
  Reads() {
    client = std::make_unique<Client>(Client::Options{0, 1 << 12}, block, controller);
    EXPECT_EQ(client->allocate(1, &token), Status::kOk);
    EXPECT_EQ(client->submit({5, 0, {1}, {0}}, {}, &array.raw), Status::kOk);
  }
  /// As a thread of the client waits for a read.
  FutureState read() {
    while (true) {
      if (client->poll(array) == FutureState::kFailed) return FutureState::kFailed;
      if (const FutureState state = client->poll(token); state != FutureState::kPending) return state;
      (void)client->wait(token, std::chrono::hours(1), SpinPolicy::sleep_at_once(), array);
    }
  }
  void cancel() { ASSERT_EQ(client->cancel(client->last_tag(), {&array.raw, 1}, "CancelledError: so"), Status::kOk); }

  Segment controller_segment = ControllerBlock::make(false),
          client_segment = ClientBlock::make({1 << 10, 1 << 16, 0}, false);
  ControllerBlock* controller = ControllerBlock::attach(controller_segment);
  ClientBlock* block = ClientBlock::attach(client_segment);
  std::unique_ptr<Client> client;
  Handle token{}, array{};
};

/// What can happen to the two futures of a read.
enum class Event { kBytesCome, kBytesFail, kArrayReady, kArrayFails, kArrayReleased };
constexpr Event kEvents[] = {Event::kBytesCome, Event::kBytesFail, Event::kArrayReady, Event::kArrayFails,
                             Event::kArrayReleased};

struct EveryOrder : Reads {
  void play(Event event) {
    switch (event) {
      case Event::kBytesCome:
        (void)client->futures().complete(token);
        break;
      case Event::kBytesFail:
        (void)client->futures().fail(token);
        break;
      case Event::kArrayReady:
        (void)client->futures().complete(array);
        break;
      case Event::kArrayFails:
        cancel();
        break;
      case Event::kArrayReleased:
        client->release(array, 0, 1 << 20);
        client->flush();
        break;
    }
  }
};

/// The outcome of a read before which `events` came, in this order; kPending: it still waits.
FutureState outcome(std::initializer_list<Event> events) {
  bool is_released = false, is_ready = false;
  FutureState bytes = FutureState::kPending;
  bool failed = false;
  for (const Event event : events) {
    if (event == Event::kBytesCome && bytes == FutureState::kPending) bytes = FutureState::kReady;
    if (event == Event::kBytesFail && bytes == FutureState::kPending) bytes = FutureState::kFailed;
    if (event == Event::kArrayReady && !failed && !is_released) is_ready = true;
    if (event == Event::kArrayFails && !is_ready && !is_released) failed = true;
    if (event == Event::kArrayReleased) {
      is_released = true;
      failed = false;
    }
  }
  return failed ? FutureState::kFailed : bytes;
}

TEST(ReadOrders, EveryOrder) {
  const Watchdog watchdog("reads in every order");
  for (const Event first : kEvents) {
    for (const Event second : kEvents) {
      for (const Event third : kEvents) {
        const FutureState want = outcome({first, second, third});
        if (want == FutureState::kPending) continue;
        for (const int before : {0, 1, 2, 3}) {  // how many come before the read begins
          struct Case : EveryOrder {
            void TestBody() override {}
          } each;
          const Event events[] = {first, second, third};
          for (int i = 0; i < before; ++i) each.play(events[i]);
          std::atomic<bool> begins{false};
          FutureState got = FutureState::kFree;
          std::thread reader([&] {
            begins.store(true);
            got = each.read();
          });
          while (!begins.load()) std::this_thread::yield();
          for (int i = before; i < 3; ++i) each.play(events[i]);
          reader.join();
          // A read that saw an earlier state may have ended with that one.
          bool is_right = got == want;
          if (before <= 1) is_right |= got == outcome({first});
          if (before <= 2) is_right |= got == outcome({first, second});
          EXPECT_TRUE(is_right) << static_cast<int>(first) << static_cast<int>(second) << static_cast<int>(third)
                                << " after " << before << ": " << static_cast<int>(got);
        }
      }
    }
  }
}

TEST_F(Reads, AFailedArrayDecides) {
  (void)client->futures().complete(token);
  cancel();
  EXPECT_EQ(read(), FutureState::kFailed);
  EXPECT_EQ(client->error_of(array), "CancelledError: so");
}

TEST_F(Reads, AReleasedArraySaysNothing) {
  cancel();
  client->release(array, 0, 1 << 20);
  client->flush();
  (void)client->futures().complete(token);
  EXPECT_EQ(read(), FutureState::kReady);
}

/// Several threads read while another one cancels, at a moment drawn anew each time.
TEST(ReadRaces, NoRingIsLost) {
  const Watchdog watchdog("reads against cancels");
  std::mt19937_64 random(seed());
  for (int round = 0; round < 300; ++round) {
    struct Case : Reads {
      void TestBody() override {}
    } each;
    std::vector<std::thread> readers;
    std::atomic<int> failed{0};
    for (int i = 0; i < 3; ++i) {
      readers.emplace_back([&] { failed += each.read() == FutureState::kFailed ? 1 : 0; });
    }
    for (uint64_t spins = random() % 20'000; spins > 0; --spins) cpu_relax();
    each.cancel();
    for (std::thread& reader : readers) reader.join();
    EXPECT_EQ(failed.load(), 3);
  }
}

}  // namespace
}  // namespace pathways::test::test_client_reads
