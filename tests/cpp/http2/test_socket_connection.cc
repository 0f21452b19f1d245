// GRPC-3: a connection at a socket: who waits is told, whatever thread answers, and a silent peer is not waited for.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "http2/peer.h"
#include "http2/socket_connection.h"
#include "support.h"

namespace pathways::test_socket_connection {
namespace {

using namespace std::chrono_literals;
using http2::Event;
using http2::Patience;
using http2::SocketConnection;
using Kind = Event::Kind;

/// Both ends of a socket: a connection, and its peer.
class Ends {
 public:
  explicit Ends(const Patience& patience = {}, const http2::Limits& limits = {}) {
    int both[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, both), 0);
    peer_ = both[1];
    connection = std::make_unique<SocketConnection>(both[0], limits, patience);
  }
  ~Ends() { hang_up(); }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  void say(std::string_view bytes) const {
    ASSERT_EQ(::send(peer_, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  /// Frames of `kind` that come until one is there.
  void hear(char kind) {
    while (true) {
      for (size_t at = 0; at + 9 <= heard_.size(); at += 9 + size(at)) {
        if (heard_[at + 3] == kind) return;
      }
      char buffer[4096];
      const ssize_t got = ::recv(peer_, buffer, sizeof buffer, 0);
      ASSERT_GT(got, 0) << "no frame " << static_cast<int>(kind);
      heard_.append(buffer, static_cast<size_t>(got));
    }
  }
  void forget() { heard_.clear(); }
  void hang_up() {
    if (peer_ >= 0) ::close(peer_);
    peer_ = -1;
  }

  std::unique_ptr<SocketConnection> connection;

 private:
  size_t size(size_t at) const {
    size_t bytes = 0;
    for (size_t byte = 0; byte != 3; ++byte) bytes = (bytes << 8) | static_cast<uint8_t>(heard_[at + byte]);
    return bytes;
  }

  int peer_ = -1;
  std::string heard_;
};

TEST(SocketConnection, ASilentPeerIsEnded) {
  const test::Watchdog watchdog("a silent peer", 60s);
  for (const std::string& said : {std::string(), test::kHello.substr(0, 5)}) {
    Ends ends({.begin = 50ms});
    ends.say(said);
    std::vector<Event> events;
    EXPECT_FALSE(ends.connection->receive(events));
    EXPECT_EQ(ends.connection->why(), "the peer does not say what it speaks");
  }
  Ends ends({.silent = 20ms, .answer = 50ms});
  ends.say(test::kHello + test::begin_call(1));
  std::vector<Event> events;
  EXPECT_TRUE(ends.connection->receive(events));
  EXPECT_TRUE(ends.connection->receive(events));
  EXPECT_EQ(events.at(0).kind, Kind::kReset);
  EXPECT_FALSE(ends.connection->receive(events));
  EXPECT_EQ(ends.connection->why(), "the peer does not answer");
}

TEST(SocketConnection, APeerThatAnswersStays) {
  const test::Watchdog watchdog("a peer that answers", 60s);
  Ends ends({.silent = 5ms, .answer = 20s});
  ends.say(test::kHello + test::begin_call(1));
  std::thread peer([&] {
    for (int turn = 0; turn != 5; ++turn) {
      ends.hear(6);
      ends.forget();
      ends.say(test::frame(6, 1, 0, "pathways"));
    }
    ends.say(test::frame(0, 1, 1, ""));
  });
  std::vector<Event> events;
  EXPECT_TRUE(ends.connection->receive(events));
  EXPECT_TRUE(ends.connection->receive(events));
  EXPECT_EQ(events.at(0).kind, Kind::kEnd);
  peer.join();
}

TEST(SocketConnection, APeerWithoutACallIsEnded) {
  const test::Watchdog watchdog("a peer without a call", 60s);
  Ends ends({.idle = 50ms});
  ends.say(test::kHello);
  std::vector<Event> events;
  EXPECT_FALSE(ends.connection->receive(events));
  EXPECT_EQ(ends.connection->why(), "no call for long");
  ends.hear(7);
}

TEST(SocketConnection, AnyThreadAnswersAndWakes) {
  const test::Watchdog watchdog("any thread", 120s);
  Ends ends({}, {.room_bytes = 100'000});
  ends.say(test::kHello + test::begin_call(1) + test::window(0, 1 << 30) + test::window(1, 1 << 30));
  std::vector<Event> events;
  ASSERT_TRUE(ends.connection->receive(events));
  std::atomic<int> rooms = 0, empty = 0;
  std::thread receiver([&] {
    while (ends.connection->receive(events)) {
      empty += events.empty();
      for (const Event& each : events) rooms += each.kind == Kind::kRoom;
    }
  });
  // More than the socket takes: the receiving thread writes the rest, when the peer reads.
  std::thread answers([&] {
    const std::string message(1000, 'm');
    for (int turn = 0; turn != 2000; ++turn) ends.connection->respond(1, message);
    ends.connection->finish(1, 0, "");
  });
  answers.join();
  std::thread wakes([&] {
    while (empty == 0) ends.connection->wake();
  });
  ends.hear(3);
  wakes.join();
  EXPECT_EQ(rooms, 1);
  ends.connection->end();
  receiver.join();
  EXPECT_EQ(ends.connection->why(), "it was ended here");
}

TEST(SocketConnection, APeerThatHangsUp) {
  const test::Watchdog watchdog("a peer that hangs up", 60s);
  Ends ends;
  ends.say(test::kHello + test::begin_call(1));
  std::vector<Event> events;
  ASSERT_TRUE(ends.connection->receive(events));
  ends.hang_up();
  ends.connection->respond(1, "to nobody");
  ASSERT_TRUE(ends.connection->receive(events));
  EXPECT_EQ(events.at(0).kind, Kind::kReset);
  EXPECT_FALSE(ends.connection->receive(events));
}

}  // namespace
}  // namespace pathways::test_socket_connection
