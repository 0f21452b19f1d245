// A link with its threads: a sender and a receiver at each end, a controller, a host, and somebody who adds and removes
// other hosts meanwhile.
//
//   LINK-1   LinkThreads.EchoesAndLeases
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "link/link_ends.h"
#include "link/link_pool.h"

namespace pathways::test::test_link_threads {
namespace {

/// The bytes from one end to the other.
class Pipe {
 public:
  void send(std::span<const std::byte> bytes) {
    {
      const std::lock_guard lock(mutex_);
      bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    }
    came_.notify_one();
  }
  /// What has come; empty: the pipe was closed.
  Bytes receive() {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [this] { return is_closed_ || !bytes_.empty(); });
    return std::exchange(bytes_, {});
  }
  void close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    came_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  Bytes bytes_;
  bool is_closed_ = false;
};

/// One end, with its two threads.
class RunningEnd {
 public:
  RunningEnd(LinkHub& hub, MachineLink::End end, Pipe& out, Pipe& in)
      : link(MachineLink::open(hub, end, monotonic_ns, pool)), in_(in) {
    pool->resume(link->slot());
    sender_ = std::thread([this, &out] {
      Bytes buffer(size_t{1} << 20);
      while (!is_over_.load()) {
        const auto found = pool->collect(buffer);
        found ? out.send(std::span(buffer).first(found->bytes)) : pool->wait(500ms);
      }
    });
    receiver_ = std::thread([this] {
      for (Bytes bytes = in_.receive(); !bytes.empty(); bytes = in_.receive()) link->deliver(bytes);
    });
  }
  ~RunningEnd() {
    is_over_.store(true);
    in_.close();
    pool->wake();
    sender_.join();
    receiver_.join();
    link->close();
  }
  const std::shared_ptr<LinkPool> pool = std::make_shared<LinkPool>();
  const std::shared_ptr<MachineLink> link;

 private:
  Pipe& in_;
  std::atomic<bool> is_over_{false};
  std::thread sender_, receiver_;
};

TEST(LinkThreads, EchoesAndLeases) {
  const Watchdog watchdog("the threads of a link");
  constexpr uint32_t kClient = 3, kGroup = 7;
  constexpr uint64_t kRuns = 400 * kStressScale, kBytes = 10'000;
  Segment head_controller = ControllerBlock::make(false), agent_controller = ControllerBlock::make(false);
  Segment client = ClientBlock::make({4096, 4096, size_t{4} << 20}, false);
  Segment twin = HostBlock::make(0, 4, Machine::kSizes, false), own = HostBlock::make(0, 4, Machine::kSizes, false);
  LinkHub head_hub, agent_hub;
  head_hub.add_client(kClient, ClientView(client));
  head_hub.add_group(kGroup, {0});
  Pipe there, back;
  RunningEnd head(head_hub, MachineLink::End::kHead, there, back),
      agent(agent_hub, MachineLink::End::kAgent, back, there);
  head.link->add_host(0, 5, HostView(twin), ControllerBlock::attach(head_controller));
  agent.link->add_host(0, 5, HostView(own), ControllerBlock::attach(agent_controller));
  Segment memory = agent.link->twin_client(kClient, ClientView(client).arena().bytes());
  std::atomic<bool> is_over{false};

  // The host returns what is put, fills what is fetched, and says that it is done.
  std::thread host([&] {
    const HostView view(own);
    ByteRing::Consumer inbox = view.inbox();
    Outbox outgoing(view.outgoing(), &ControllerBlock::attach(agent_controller)->doorbell);
    const ArenaView arena = ClientView(memory).arena();
    while (!is_over.load()) {
      const uint32_t ticket = view.doorbell()->ticket();
      const Bytes record = next(inbox);
      if (record.empty()) {
        (void)outgoing.flush();
        (void)view.doorbell()->wait(ticket, 1ms, SpinPolicy::sleep_at_once());
        continue;
      }
      const auto command = read_record<CommandRecord>(record);
      std::byte* block = arena.find_leased(command.lease_at, kBytes, 0);
      ASSERT_NE(block, nullptr);
      if (command.header.detail == static_cast<uint16_t>(CommandKind::kPut)) {
        EXPECT_EQ(block[0], static_cast<std::byte>(command.handle));
        EXPECT_EQ(block[kBytes - 1], static_cast<std::byte>(command.handle));
      } else {
        std::memset(block, static_cast<int>(command.handle % 256), kBytes);
      }
      EXPECT_TRUE(arena.return_lease(command.lease_at, 0));
      const uint64_t answer = command.token != 0 ? command.token : command.handle;
      const bool is_fetch = command.token != 0;
      const FutureDoneRecord put{{RecordKind::kFutureDone, 0, kClient}, answer, 0, 0};
      const FetchDoneRecord fetch{{RecordKind::kFetchDone, 0, kClient}, answer, 1, 0};
      const Bytes done = is_fetch ? joined(fetch, BlockPiece{0, kBytes}) : joined(put);
      outgoing.send(static_cast<uint32_t>(done.size()), [&](std::byte* out) { std::ranges::copy(done, out); });
      (void)outgoing.flush();
    }
  });
  std::thread churn([&] {
    for (int32_t i = 0; !is_over.load(); ++i) {
      auto block = std::make_shared<Segment>(HostBlock::make(1, 4, Machine::kSizes, false));
      head.link->add_host(1, i, HostView(*block), ControllerBlock::attach(head_controller), block);
      (void)head.link->stats();
      std::this_thread::sleep_for(1ms);
      head.link->remove_host(1);
    }
  });

  const HostView view(twin);
  ReadyBell& marks = head.pool->hosts();
  Outbox orders(view.to_host(), &marks.doorbell, &marks.bitmap, 0);
  Arena& arena = *ClientBlock::attach(client)->client_arena();
  FutureTable& futures = *ClientBlock::attach(client)->futures();
  struct Open {
    Handle token;
    uint64_t handle, offset;
    bool is_fetch;
  };
  std::deque<Open> open;
  for (uint64_t run = 1; run <= kRuns || !open.empty(); ++run) {
    if (run <= kRuns && open.size() < 16) {
      Open next{{}, run, 0, run % 2 == 0};
      ASSERT_EQ(futures.allocate(1, &next.token), Status::kOk);
      if (!next.is_fetch) next.handle = next.token.raw;  // a put completes the future of its buffer
      // What is released comes back with its lease, which may lag behind: then the arena is full for a while.
      while (arena.allocate(kBytes, &next.offset) != Status::kOk) {
        (void)orders.flush();
        std::this_thread::sleep_for(1ms);
      }
      arena.lease_out(next.offset, 1, run);
      if (!next.is_fetch) std::memset(arena.at(next.offset), static_cast<int>(next.handle % 256), kBytes);
      const auto kind = next.is_fetch ? CommandKind::kFetch : CommandKind::kPut;
      CommandRecord record{{RecordKind::kCommand, static_cast<uint16_t>(kind), kClient}, next.handle, 0, kGroup, 0};
      if (next.is_fetch) record.token = next.token.raw;
      record.lease_stamp = run;
      record.lease_at = next.offset;
      record.lease_bytes = kBytes;
      orders.send(sizeof record, [&](std::byte* out) { std::memcpy(out, &record, sizeof record); });
      (void)orders.flush();
      open.push_back(next);
      continue;
    }
    (void)orders.flush();
    const Open first = open.front();
    while (futures.wait(first.token, 10ms, SpinPolicy::sleep_at_once()) == FutureState::kPending) (void)orders.flush();
    if (first.is_fetch) {
      EXPECT_EQ(arena.at(first.offset)[0], static_cast<std::byte>(first.handle));
      EXPECT_EQ(arena.at(first.offset)[kBytes - 1], static_cast<std::byte>(first.handle));
    }
    (void)futures.release(first.token);
    arena.release(first.offset);
    open.pop_front();
  }
  while (arena.bytes_in_use() != 0) std::this_thread::sleep_for(1ms);  // the last leases are on their way
  is_over.store(true);
  host.join();
  churn.join();
  EXPECT_EQ(head.link->stats().dropped + agent.link->stats().dropped, 0u);
}

}  // namespace
}  // namespace pathways::test::test_link_threads
