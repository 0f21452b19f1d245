// sync/byte_ring.h
//   RING-1 batch     ByteRingTest.NothingIsVisibleBeforePublish, ByteRingTest.DeadProducerLeavesNoTrace
//   RING-2 whole     ByteRingTest.RecordsAreAlignedAndWhole, ByteRingTest.WrapsAround
//   RING-3 bounds    ByteRingTest.FullAndEmpty, ByteRingTest.LongestRecordAlwaysFitsAnEmptyRing,
//   ByteRingTest.RandomAgainstModel RING-4 order     ByteRingTest.ThreadStress, ByteRingTest.AcrossProcesses,
//   ByteRingTest.DeadConsumerLosesNothing RING-5 trust     ByteRingTest.RefusesACorruptBlock,
//   ByteRingTest.RefusesCorruptRecords, ByteRingTest.EveryCorruptByteIsContained roles ByteRingTest.RolesAreExclusive,
//   ByteRingTest.ResetRolesTakesThemBack
#include "sync/byte_ring.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "base/status.h"
#include "support.h"

namespace pathways::test::test_byte_ring {
namespace {

constexpr std::uint32_t kCapacity = 4096;

class ByteRingTest : public testing::Test {
 protected:
  Segment memory = Segment::create("ring-test", ByteRing::bytes_for(kCapacity));
  ByteRing* ring = ByteRing::create(memory.data(), kCapacity);
};

/// A record of `bytes` bytes that says its number in each of them.
bool push(ByteRing::Producer& producer, std::uint32_t bytes, std::uint32_t number) {
  const auto record = producer.try_reserve(bytes);
  if (record.empty()) return false;
  std::memset(record.data(), static_cast<int>(number & 0xff), record.size());
  return true;
}

bool is_record(std::span<const std::byte> record, std::size_t bytes, std::uint32_t number) {
  if (record.size() != bytes) return false;
  for (const std::byte b : record) {
    if (b != static_cast<std::byte>(number & 0xff)) return false;
  }
  return true;
}

TEST_F(ByteRingTest, RefusesWrongCapacitiesAndMemory) {
  EXPECT_THROW(ByteRing::bytes_for(0), Error);
  EXPECT_THROW(ByteRing::bytes_for(2048), Error);
  EXPECT_THROW(ByteRing::bytes_for(5000), Error);
  EXPECT_THROW(ByteRing::bytes_for(1U << 31), Error);
  EXPECT_THROW(ByteRing::create(memory.data() + 8, kCapacity), Error);
  EXPECT_THROW(ByteRing::create(nullptr, kCapacity), Error);
}

TEST_F(ByteRingTest, RecordsAreAlignedAndWhole) {
  auto producer = ring->claim_producer();
  auto consumer = ring->claim_consumer();
  for (std::uint32_t bytes = 1; bytes < 40; ++bytes) {
    const auto record = producer.try_reserve(bytes);
    ASSERT_EQ(record.size(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(record.data()) % 8, 0U);
    producer.publish();
    EXPECT_EQ(consumer.try_front().size(), bytes);
    consumer.pop();
  }
}

TEST_F(ByteRingTest, NothingIsVisibleBeforePublish) {
  auto producer = ring->claim_producer();
  auto consumer = ring->claim_consumer();
  EXPECT_TRUE(consumer.was_empty());
  for (std::uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(push(producer, 16, i));
  EXPECT_TRUE(consumer.try_front().empty());
  EXPECT_TRUE(consumer.was_empty());
  producer.publish();
  EXPECT_FALSE(consumer.was_empty());
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(is_record(consumer.try_front(), 16, i));
    EXPECT_TRUE(is_record(consumer.try_front(), 16, i)) << "looking twice changes nothing";
    consumer.pop();
  }
  EXPECT_TRUE(consumer.try_front().empty());
  consumer.pop();  // nothing to step over
  EXPECT_TRUE(consumer.try_front().empty());
}

TEST_F(ByteRingTest, FullAndEmpty) {
  auto producer = ring->claim_producer();
  auto consumer = ring->claim_consumer();
  std::uint32_t pushed = 0;
  while (push(producer, 56, pushed)) ++pushed;
  EXPECT_EQ(pushed, kCapacity / 64);
  producer.publish();
  EXPECT_FALSE(push(producer, 1, 0));
  EXPECT_TRUE(is_record(consumer.try_front(), 56, 0));
  consumer.pop();
  EXPECT_FALSE(push(producer, 56, 0)) << "space goes back lazily";
  consumer.release();
  EXPECT_TRUE(push(producer, 56, pushed));
  EXPECT_FALSE(push(producer, 56, 0));
  producer.publish();
  for (std::uint32_t i = 1; i <= pushed; ++i) {
    ASSERT_TRUE(is_record(consumer.try_front(), 56, i));
    consumer.pop();
  }
  EXPECT_TRUE(consumer.try_front().empty());
  ring->validate();
}

TEST_F(ByteRingTest, SpaceComesBackEachEighth) {
  auto producer = ring->claim_producer();
  auto consumer = ring->claim_consumer();
  while (push(producer, 56, 0)) {
  }
  producer.publish();
  for (std::uint32_t i = 0; i < 8; ++i) {
    EXPECT_FALSE(push(producer, 56, 0));
    ASSERT_FALSE(consumer.try_front().empty());
    consumer.pop();
  }
  EXPECT_TRUE(push(producer, 56, 0));
}

TEST_F(ByteRingTest, LongestRecordAlwaysFitsAnEmptyRing) {
  auto producer = ring->claim_producer();
  auto consumer = ring->claim_consumer();
  EXPECT_EQ(producer.max_record(), kCapacity / 2 - 8);
  EXPECT_THROW(producer.try_reserve(producer.max_record() + 1), Error);
  EXPECT_THROW(producer.try_reserve(0), Error);
  // From every position, also those where it does not fit before the end.
  for (std::uint32_t i = 0; i < 600; ++i) {
    ASSERT_TRUE(push(producer, producer.max_record(), i));
    producer.publish();
    ASSERT_TRUE(is_record(consumer.try_front(), producer.max_record(), i));
    consumer.pop();
    ASSERT_TRUE(consumer.try_front().empty());
    ASSERT_TRUE(push(producer, 1, i));
    producer.publish();
    ASSERT_TRUE(is_record(consumer.try_front(), 1, i));
    consumer.pop();
    ASSERT_TRUE(consumer.try_front().empty());
  }
}

TEST_F(ByteRingTest, WrapsAround) {
  auto producer = ring->claim_producer();
  auto consumer = ring->claim_consumer();
  for (std::uint32_t i = 0; i < 10'000; ++i) {
    const std::uint32_t bytes = 1 + (i * 37) % 700;
    ASSERT_TRUE(push(producer, bytes, i));
    producer.publish();
    ASSERT_TRUE(is_record(consumer.try_front(), bytes, i));
    consumer.pop();
  }
}

TEST_F(ByteRingTest, RandomAgainstModel) {
  std::mt19937_64 random(test::seed());
  auto producer = ring->claim_producer();
  auto consumer = ring->claim_consumer();
  struct Record {
    std::uint32_t bytes;
    std::uint32_t number;
  };
  std::deque<Record> reserved;
  std::deque<Record> published;
  std::uint32_t number = 0;
  for (int step = 0; step < 20'000 * test::kStressScale; ++step) {
    switch (random() % 4) {
      case 0:
      case 1: {
        const auto bytes = static_cast<std::uint32_t>(1 + random() % (random() % 8 == 0 ? producer.max_record() : 100));
        if (push(producer, bytes, number)) reserved.push_back({bytes, number++});
        break;
      }
      case 2:
        producer.publish();
        published.insert(published.end(), reserved.begin(), reserved.end());
        reserved.clear();
        break;
      default:
        for (auto n = random() % 4; n != 0; --n) {
          const auto front = consumer.try_front();
          ASSERT_EQ(front.empty(), published.empty());
          if (published.empty()) break;
          ASSERT_TRUE(is_record(front, published.front().bytes, published.front().number));
          published.pop_front();
          consumer.pop();
        }
        if (random() % 2 == 0) consumer.release();
    }
    if (step % 997 == 0) ring->validate();
  }
}

TEST_F(ByteRingTest, RolesAreExclusive) {
  {
    const auto producer = ring->claim_producer();
    const auto consumer = ring->claim_consumer();
    EXPECT_THROW(static_cast<void>(ring->claim_producer()), Error);
    EXPECT_THROW(static_cast<void>(ring->claim_consumer()), Error);
  }
  auto first = ring->claim_producer();
  ByteRing::Producer second = std::move(first);
  EXPECT_TRUE(second.valid());
  EXPECT_FALSE(first.valid());  // NOLINT: what moving leaves is what is tested
  EXPECT_THROW(static_cast<void>(ring->claim_producer()), Error);
  second = ByteRing::Producer();
  EXPECT_TRUE(ring->claim_producer().valid());
}

TEST_F(ByteRingTest, ResetRolesTakesThemBack) {
  auto dead = ring->claim_producer();
  auto dead_consumer = ring->claim_consumer();
  ring->reset_roles();
  const auto alive = ring->claim_producer();
  const auto alive_consumer = ring->claim_consumer();
  dead = ByteRing::Producer();  // hands back only its own claim
  dead_consumer = ByteRing::Consumer();
  EXPECT_THROW(static_cast<void>(ring->claim_producer()), Error);
  EXPECT_THROW(static_cast<void>(ring->claim_consumer()), Error);
}

TEST_F(ByteRingTest, AnOrderlyConsumerConsumesWhatItPopped) {
  auto producer = ring->claim_producer();
  for (std::uint32_t i = 0; i < 3; ++i) push(producer, 8, i);
  producer.publish();
  {
    auto consumer = ring->claim_consumer();
    ASSERT_FALSE(consumer.try_front().empty());
    consumer.pop();
  }
  auto consumer = ring->claim_consumer();
  EXPECT_TRUE(is_record(consumer.try_front(), 8, 1));
}

TEST_F(ByteRingTest, ThreadStress) {
  const test::Watchdog watchdog("ThreadStress");
  const std::uint64_t start = test::seed();
  constexpr std::uint32_t kRecords = 10'000 * test::kStressScale;
  const auto bytes_of = [](std::mt19937_64& random) {
    return static_cast<std::uint32_t>(1 + random() % (random() % 64 == 0 ? kCapacity / 2 - 8 : 64));
  };
  std::thread writer([&] {
    std::mt19937_64 random(start);
    auto producer = ring->claim_producer();
    for (std::uint32_t i = 0; i < kRecords; ++i) {
      const std::uint32_t bytes = bytes_of(random);
      while (!push(producer, bytes, i)) {
        producer.publish();
        std::this_thread::yield();
      }
      if (i % 3 == 0) producer.publish();
    }
    producer.publish();
  });
  std::mt19937_64 random(start);
  auto consumer = ring->claim_consumer();
  for (std::uint32_t i = 0; i < kRecords; ++i) {
    auto front = consumer.try_front();
    for (; front.empty(); front = consumer.try_front()) std::this_thread::yield();
    ASSERT_TRUE(is_record(front, bytes_of(random), i)) << "record " << i;
    consumer.pop();
  }
  writer.join();
}

TEST_F(ByteRingTest, AcrossProcesses) {
  constexpr std::uint32_t kRecords = 10'000;
  test::Child child([&] {
    const Segment mine = test::second_view(memory);
    auto producer = ByteRing::attach(mine.data())->claim_producer();
    for (std::uint32_t i = 0; i < kRecords; ++i) {
      while (!push(producer, 1 + i % 300, i)) ::usleep(10);
      producer.publish();
    }
    return 0;
  });
  const test::Watchdog watchdog("AcrossProcesses");
  auto consumer = ring->claim_consumer();
  for (std::uint32_t i = 0; i < kRecords; ++i) {
    auto front = consumer.try_front();
    for (; front.empty(); front = consumer.try_front()) std::this_thread::yield();
    ASSERT_TRUE(is_record(front, 1 + i % 300, i)) << "record " << i;
    consumer.pop();
  }
  EXPECT_EQ(child.wait(), 0);
}

TEST_F(ByteRingTest, DeadProducerLeavesNoTrace) {
  test::Child child([&] {
    auto producer = ring->claim_producer();
    push(producer, 100, 1);
    producer.publish();
    for (int i = 0; i < 3; ++i) push(producer, 1000, 2);
    ::kill(::getpid(), SIGKILL);
    return 0;
  });
  EXPECT_EQ(child.wait(), -SIGKILL);
  EXPECT_THROW(static_cast<void>(ring->claim_producer()), Error);
  ring->reset_roles();
  auto producer = ring->claim_producer();
  ASSERT_TRUE(push(producer, 200, 3));
  producer.publish();
  auto consumer = ring->claim_consumer();
  EXPECT_TRUE(is_record(consumer.try_front(), 100, 1));
  consumer.pop();
  EXPECT_TRUE(is_record(consumer.try_front(), 200, 3));
  consumer.pop();
  EXPECT_TRUE(consumer.try_front().empty());
}

TEST_F(ByteRingTest, DeadConsumerLosesNothing) {
  auto producer = ring->claim_producer();
  for (std::uint32_t i = 0; i < 4; ++i) push(producer, 8, i);
  producer.publish();
  test::Child child([&] {
    auto consumer = ring->claim_consumer();
    for (int i = 0; i < 2; ++i) {
      if (consumer.try_front().empty()) return 1;
      consumer.pop();
      if (i == 0) consumer.release();
    }
    ::kill(::getpid(), SIGKILL);
    return 0;
  });
  EXPECT_EQ(child.wait(), -SIGKILL);
  ring->reset_roles();
  auto consumer = ring->claim_consumer();
  EXPECT_TRUE(is_record(consumer.try_front(), 8, 1)) << "released ones are gone, popped ones come again";
}

// TRUST-1: the other process changes what this one has checked.
TEST_F(ByteRingTest, ACapacityThatIsChangedLaterMovesNobody) {
  auto producer = ring->claim_producer();
  auto consumer = ring->claim_consumer();
  std::vector<std::byte> scratch;
  auto* words = reinterpret_cast<std::uint32_t*>(memory.data());
  words[3] = 1U << 30;
  for (int round = 0; round < 100; ++round) {
    const auto room = producer.try_reserve(1000);
    ASSERT_FALSE(room.empty());
    ASSERT_TRUE(room.data() >= memory.data() && room.data() + room.size() <= memory.data() + memory.size());
    std::memset(room.data(), round, room.size());
    producer.publish();
    const auto record = consumer.try_take(scratch);
    ASSERT_EQ(record.size(), 1000U);
    std::memset(room.data(), 0xff, room.size());  // too late
    EXPECT_TRUE(record.front() == static_cast<std::byte>(round) && record.back() == static_cast<std::byte>(round));
    consumer.pop();
    consumer.release();
  }
  words[3] = kCapacity;
}

TEST_F(ByteRingTest, ALengthOrPositionThatIsChangedIsRefused) {
  for (const std::uint64_t tail : {std::uint64_t{4}, std::uint64_t{kCapacity} + 8, UINT64_MAX - 7}) {
    auto consumer = ring->claim_consumer();
    *reinterpret_cast<std::uint64_t*>(memory.data() + kCacheLine) = tail;
    std::vector<std::byte> scratch;
    EXPECT_THROW((void)consumer.try_take(scratch), Error) << tail;
    *reinterpret_cast<std::uint64_t*>(memory.data() + kCacheLine) = 0;
  }
  *reinterpret_cast<std::uint64_t*>(memory.data() + kCacheLine) = 4;  // a header there would leave the block
  EXPECT_THROW((void)ring->claim_producer(), Error);
}

TEST_F(ByteRingTest, MustFitWhatIsMapped) {
  EXPECT_THROW((void)ring->claim_consumer(memory.size() - 4096), Error);
  EXPECT_THROW((void)ring->claim_producer(sizeof(ByteRing) - 1), Error);
  EXPECT_THROW(ByteRing::attach(memory.data(), ByteRing::bytes_for(kCapacity) - 1), Error);
  EXPECT_NO_THROW(ByteRing::attach(memory.data(), ByteRing::bytes_for(kCapacity)));
}

TEST_F(ByteRingTest, RefusesACorruptBlock) {
  EXPECT_EQ(ByteRing::attach(memory.data()), ring);
  EXPECT_THROW(ByteRing::attach(nullptr), Error);
  const Segment empty = Segment::heap(ByteRing::bytes_for(kCapacity));
  EXPECT_THROW(ByteRing::attach(empty.data()), Error);
  auto* words = reinterpret_cast<std::uint32_t*>(memory.data());
  for (const int at : {0, 1, 2, 3}) {  // magic, magic, version, capacity
    words[at] ^= 0x11;
    EXPECT_THROW(ByteRing::attach(memory.data()), Error) << "word " << at;
    words[at] ^= 0x11;
  }
  auto* tail = reinterpret_cast<std::uint64_t*>(memory.data() + kCacheLine);
  *tail = kCapacity + 8;
  EXPECT_THROW(ByteRing::attach(memory.data()), Error);
  EXPECT_THROW(ring->validate(), Error);
}

TEST_F(ByteRingTest, RefusesCorruptRecords) {
  auto producer = ring->claim_producer();
  push(producer, 16, 0);
  producer.publish();
  auto* length = reinterpret_cast<std::uint32_t*>(memory.data() + (ByteRing::bytes_for(kCapacity) - kCapacity));
  for (const std::uint32_t bad : {0U, 17U + 8U, 4096U, 0xffffffffU}) {
    auto consumer = ring->claim_consumer();
    *length = bad;
    EXPECT_THROW(static_cast<void>(consumer.try_front()), Error) << "length " << bad;
    EXPECT_THROW(ring->validate(), Error);
  }
  *length = 16;
  auto* tail = reinterpret_cast<std::uint64_t*>(memory.data() + kCacheLine);
  for (const std::uint64_t bad : {std::uint64_t{25}, std::uint64_t{2 * kCapacity}, ~std::uint64_t{7}}) {
    auto consumer = ring->claim_consumer();
    *tail = bad;
    EXPECT_THROW(static_cast<void>(consumer.try_front()), Error) << "tail " << bad;
  }
  auto* head = reinterpret_cast<std::uint64_t*>(memory.data() + 2 * kCacheLine);
  *head = 1 << 20;
  EXPECT_THROW(while (push(producer, 64, 0)){}, Error);
}

TEST_F(ByteRingTest, EveryCorruptByteIsContained) {
  // Whatever a byte of the records becomes, reading ends, in the block, by records or by an Error.
  std::mt19937_64 random(test::seed());
  std::byte* data = memory.data() + (ByteRing::bytes_for(kCapacity) - kCapacity);
  for (int round = 0; round < 500; ++round) {
    ring = ByteRing::create(memory.data(), kCapacity);
    auto producer = ring->claim_producer();
    while (push(producer, static_cast<std::uint32_t>(1 + random() % 300), 7)) {
    }
    producer.publish();
    for (int i = 0; i < 4; ++i) data[random() % kCapacity] = static_cast<std::byte>(random());
    auto consumer = ring->claim_consumer();
    try {
      for (;;) {
        const auto front = consumer.try_front();
        if (front.empty()) break;
        ASSERT_GE(front.data(), data);
        ASSERT_LE(front.data() + front.size(), data + kCapacity);
        consumer.pop();
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalid);
    }
  }
}

}  // namespace
}  // namespace pathways::test::test_byte_ring
