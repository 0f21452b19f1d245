// Every interleaving of the rings.
//   RING-1, RING-3, RING-4   ModelByteRing.*
//   (the checker itself)     ModelBrokenRing.*: it finds each mistake that a ring can have
#include <cstring>

#include "broken.h"
#include "expect.h"
#include "sync/byte_ring.h"

namespace pathways::model {
namespace {

/// Pushes `items` records of `bytes` bytes through a ring of 4096, publishing every `batch`.
void byte_ring_program(Program& program, int items, std::uint32_t bytes, int batch) {
  ByteRing* ring = ByteRing::create(program.memory(ByteRing::bytes_for(4096)), 4096);
  auto* producer = new ByteRing::Producer(ring->claim_producer());
  auto* consumer = new ByteRing::Consumer(ring->claim_consumer());
  program.thread([=] {
    for (int i = 0; i < items; ++i) {
      std::span<std::byte> record = producer->try_reserve(bytes);
      while (record.empty()) {
        producer->publish();
        cpu_relax();
        record = producer->try_reserve(bytes);
      }
      model_write(record.data());
      record[0] = static_cast<std::byte>(i);
      if ((i + 1) % batch == 0) producer->publish();
    }
    producer->publish();
    delete producer;
  });
  program.thread([=] {
    for (int i = 0; i < items; ++i) {
      std::span<const std::byte> record = consumer->try_front();
      for (; record.empty(); record = consumer->try_front()) cpu_relax();
      require(record.size() == bytes, "a record is whole");
      model_read(record.data());
      require(record[0] == static_cast<std::byte>(i), "records come in order");
      consumer->pop();
    }
    delete consumer;
  });
  program.finally([ring] { ring->validate(); });
}

TEST(ModelByteRing, FourRecords) {
  expect_holds([](Program& program) { byte_ring_program(program, 4, 100, 1); });
}
TEST(ModelByteRing, FourRecordsThroughRoomForTwo) {
  expect_holds([](Program& program) { byte_ring_program(program, 4, 2040, 1); });
}
TEST(ModelByteRing, SkipsAtTheEnd) {
  expect_holds([](Program& program) { byte_ring_program(program, 4, 1500, 1); });
}
TEST(ModelByteRing, InBatchesOfTwo) {
  expect_holds([](Program& program) { byte_ring_program(program, 4, 1000, 2); });
}

TEST(ModelByteRing, HandsARoleOver) {
  expect_holds([](Program& program) {
    ByteRing* ring = ByteRing::create(program.memory(ByteRing::bytes_for(4096)), 4096);
    for (int t = 0; t < 2; ++t) {
      program.thread([ring, t] {
        try {
          ByteRing::Producer producer = ring->claim_producer();
          const auto record = producer.try_reserve(8);
          model_write(record.data());
          record[0] = static_cast<std::byte>(t);
          producer.publish();
        } catch (const Error&) {
          // the other one holds it
        }
      });
    }
    program.finally([ring] {
      ring->validate();
      ByteRing::Consumer consumer = ring->claim_consumer();
      int records = 0;
      for (; !consumer.try_front().empty(); consumer.pop()) ++records;
      require(records == 1 || records == 2, "each that had the role wrote its record beside the other's");
    });
  });
}

template <class Ring>
void int_ring_program(Program& program, Ring& ring, int producers, int each) {
  auto& popped = program.make<std::uint32_t>(0U);
  for (int p = 0; p < producers; ++p) {
    program.thread([&ring, p, each] {
      for (int i = 0; i < each; ++i) {
        while (!ring.try_push(16 * p + i)) cpu_relax();
      }
    });
  }
  program.thread([&ring, &popped, producers, each] {
    int next[2] = {0, 0};
    for (int n = 0; n < producers * each; ++n) {
      int value = -1;
      while (!ring.try_pop(value)) cpu_relax();
      require(value >= 0 && value / 16 < producers, "what is popped was pushed");
      require(value % 16 == next[value / 16 & 1]++, "each producer's records come in order, once");
      ++popped;
    }
  });
  program.finally([&popped, producers, each] {
    require(popped == static_cast<std::uint32_t>(producers * each), "nothing is lost");
  });
}

template <broken::RingMistake kMistake>
void broken_ring(Program& program, int producers) {
  int_ring_program(program, program.make<broken::Ring<kMistake>>(), producers, producers == 1 ? 3 : 1);
}

TEST(ModelBrokenRing, CatchesPublishingBeforeWriting) {
  expect_caught(
      Memory::kInterleaved, [](Program& program) { broken_ring<broken::RingMistake::kPublishesFirst>(program, 1); },
      "data race");
}
TEST(ModelBrokenRing, CatchesARelaxedPublish) {
  expect_caught(
      Memory::kInterleaved, [](Program& program) { broken_ring<broken::RingMistake::kRelaxedPublish>(program, 1); },
      "data race");
}
TEST(ModelBrokenRing, CatchesFreeingBeforeReading) {
  expect_caught(
      Memory::kInterleaved, [](Program& program) { broken_ring<broken::RingMistake::kFreesBeforeReading>(program, 1); },
      "data race");
}
TEST(ModelBrokenRing, CatchesARelaxedFree) {
  expect_caught(
      Memory::kInterleaved, [](Program& program) { broken_ring<broken::RingMistake::kRelaxedFree>(program, 1); },
      "data race");
}
TEST(ModelBrokenRing, CatchesAClaimThatIsNotAtomic) {
  const Result result = explore(Memory::kInterleaved,
                                [](Program& program) { broken_ring<broken::RingMistake::kSharedClaim>(program, 2); });
  EXPECT_NE(result.error, "");  // a race, a lost record, or a consumer that waits for one: whichever comes first
}

}  // namespace
}  // namespace pathways::model
