// GRPC-1, GRPC-2: the server's end of a connection, by a client that writes frames by hand.
#include <gtest/gtest.h>

#include "http2/peer.h"
#include "http2/server_connection.h"
#include "support.h"

namespace pathways::test_server_connection {
namespace {

using http2::Event;
using http2::Limits;
using http2::ServerConnection;
using test::begin_call;
using test::big_endian;
using test::bytes_of;
using test::frame;
using test::kHello;
using test::prefixed;
using test::window;
using Kind = Event::Kind;

std::string told(ServerConnection& connection) {
  static constexpr const char* kNames[] = {"call", "message", "end", "reset", "room"};
  std::string all;
  for (const Event& event : connection.take_events()) {
    all += std::string(kNames[static_cast<size_t>(event.kind)]) + std::to_string(event.call);
    if (event.kind == Kind::kMessage) all += "=" + event.message;
    all += " ";
  }
  return all;
}

bool feed(ServerConnection& connection, const std::string& bytes) { return connection.feed(bytes_of(bytes)); }

TEST(Http2, ACallHoweverItsBytesAreCut) {
  const std::string all = kHello + begin_call(1) + frame(0, 0, 1, prefixed("one") + prefixed("")) +
                          frame(0, 8, 1, std::string(1, '\3') + prefixed("two").substr(0, 4) + "pad") +
                          frame(0, 1, 1, prefixed("two").substr(4));
  for (size_t step = 1; step != all.size(); ++step) {
    ServerConnection connection{Limits{}};
    for (size_t at = 0; at < all.size(); at += step) {
      ASSERT_TRUE(feed(connection, all.substr(at, step))) << connection.why();
    }
    ASSERT_EQ(told(connection), "call1 message1=one message1= message1=two end1 ") << step;
  }
}

TEST(Http2, FieldsInSeveralFrames) {
  ServerConnection connection{Limits{}};
  const std::string block = test::fields({{":path", "/a"}, {"key-bin", "AAE"}});
  ASSERT_TRUE(feed(connection, kHello +
                                   frame(1, 8 | 32, 3, std::string(1, '\2') + "12345" + block.substr(0, 7) + "pp") +
                                   frame(9, 0, 3, block.substr(7, 3)) + frame(9, 4, 3, block.substr(10))));
  const auto events = connection.take_events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].fields, (std::vector<http2::Header>{{":path", "/a"}, {"key-bin", "AAE"}}));
}

TEST(Http2, AnAnswerWithinTheWindows) {
  ServerConnection connection{Limits{.room_bytes = 1000}};
  ASSERT_TRUE(feed(connection, kHello + frame(4, 0, 0, big_endian(4, 2) + big_endian(100, 4)) + begin_call(1, true)));
  const std::string message(3000, 'm');
  EXPECT_EQ(connection.respond(1, message), 3005u);
  connection.finish(1, 5, "caf\xc3\xa9 100%");
  const std::string all = prefixed(message);
  auto frames = test::take_frames(connection);
  EXPECT_EQ(test::data_of(frames, 1), all.substr(0, 100));
  EXPECT_EQ(told(connection), "call1 end1 ");
  ASSERT_TRUE(feed(connection, window(1, 2500)));
  frames = test::take_frames(connection);
  EXPECT_EQ(test::data_of(frames, 1), all.substr(100, 2500));
  EXPECT_EQ(told(connection), "room1 ");
  ASSERT_TRUE(feed(connection, frame(4, 0, 0, big_endian(4, 2) + big_endian(1000, 4))));  // 900 more
  frames = test::take_frames(connection);
  EXPECT_EQ(test::data_of(frames, 1), all.substr(2600));
  http2::HeaderDecoder decoder(1 << 16);
  const auto end = decoder.decode(bytes_of(frames.back().payload));
  EXPECT_EQ(end, (std::vector<http2::Header>{{"grpc-status", "5"}, {"grpc-message", "caf%C3%A9 100%25"}}));
  EXPECT_EQ(frames.back().flags, 5);
  EXPECT_EQ(connection.calls(), 0u);
}

TEST(Http2, CallsShareTheConnectionInTurns) {
  ServerConnection connection{Limits{}};
  ASSERT_TRUE(feed(connection, kHello + begin_call(1) + begin_call(3) + window(1, 1 << 20) + window(3, 1 << 20)));
  connection.respond(1, std::string(200'000, 'a'));
  connection.respond(3, std::string(200'000, 'b'));
  const auto frames = test::take_frames(connection);
  const size_t one = test::data_of(frames, 1).size(), other = test::data_of(frames, 3).size();
  EXPECT_EQ(one + other, 65535u);  // the connection's own window
  EXPECT_GT(one, 30000u);
  EXPECT_GT(other, 30000u);
  ASSERT_TRUE(feed(connection, window(0, 1 << 20)));
  const auto rest = test::take_frames(connection);
  EXPECT_EQ(test::data_of(rest, 1).size() + one, 200'005u);
  EXPECT_EQ(test::data_of(rest, 3).size() + other, 200'005u);
}

TEST(Http2, AnEndBeforeTheClientsEndStopsTheClient) {
  ServerConnection connection{Limits{}};
  ASSERT_TRUE(feed(connection, kHello + begin_call(1)));
  connection.finish(1, 12, "no such call");
  const auto frames = test::take_frames(connection);
  EXPECT_EQ(frames.back().kind, 3);  // a reset, behind the fields that end the call
  EXPECT_EQ(frames[frames.size() - 2].flags, 5);
  ASSERT_TRUE(feed(connection, frame(0, 1, 1, prefixed("late"))));  // the client did not know as yet
  EXPECT_EQ(told(connection), "call1 ");
}

TEST(Http2, ACallThatIsNotAcceptedSendsLittle) {
  const std::string part(http2::kFirstWindow - 5, 'x');
  ServerConnection connection{Limits{}};
  ASSERT_TRUE(feed(connection, kHello + begin_call(1) + frame(0, 0, 1, prefixed(part))));
  (void)test::take_frames(connection);
  connection.resume(1);
  auto frames = test::take_frames(connection);
  ASSERT_EQ(frames.size(), 1u);
  EXPECT_EQ(frames[0].payload, big_endian(http2::kWindow, 4));
  connection.hold(1);
  ASSERT_TRUE(feed(connection, frame(0, 0, 1, std::string(http2::kMostFrame, '\0'))));
  EXPECT_TRUE(test::take_frames(connection).empty());
  connection.resume(1);
  ASSERT_TRUE(
      feed(connection, frame(0, 0, 1, std::string(http2::kMostFrame, '\0')) + frame(0, 0, 1, std::string(1, '\0'))));
  frames = test::take_frames(connection);
  ASSERT_EQ(frames.size(), 1u);  // as soon as half of it is used
  EXPECT_EQ(frames[0].kind, 8);

  ServerConnection other{Limits{}};
  EXPECT_FALSE(feed(other, kHello + begin_call(1) + frame(0, 0, 1, prefixed(part) + "x")));
  EXPECT_EQ(other.why(), "more data than the call has room for");
}

TEST(Http2, WhatACallMayNotSendEndsTheCall) {
  ServerConnection connection{Limits{.message_bytes = 100}};
  ASSERT_TRUE(feed(connection, kHello + begin_call(1) + begin_call(3) + begin_call(5)));
  ASSERT_TRUE(feed(connection, frame(0, 0, 1, prefixed(std::string(101, 'x')))));
  ASSERT_TRUE(feed(connection, frame(0, 0, 3, std::string(1, '\1') + big_endian(4, 4) + "gzip")));
  ASSERT_TRUE(feed(connection, frame(0, 0, 5, prefixed("right"))));
  EXPECT_EQ(told(connection), "call1 call3 call5 reset1 reset3 message5=right ");
  http2::HeaderDecoder decoder(1 << 16);
  std::string codes;
  for (const auto& each : test::take_frames(connection)) {
    if (each.kind != 1) continue;
    const auto end = decoder.decode(bytes_of(each.payload));
    ASSERT_TRUE(end);
    codes += std::to_string(each.call) + ":" + (*end)[2].value + " ";
  }
  EXPECT_EQ(codes, "1:8 3:12 ");
}

TEST(Http2, MoreCallsThanThereMayBe) {
  ServerConnection connection{Limits{.calls = 2}};
  ASSERT_TRUE(feed(connection, kHello + begin_call(1) + begin_call(3) + begin_call(5)));
  EXPECT_EQ(told(connection), "call1 call3 ");
  EXPECT_EQ(test::take_frames(connection).back().payload, big_endian(7, 4));  // refused
  ASSERT_TRUE(feed(connection, frame(3, 0, 1, big_endian(8, 4)) + begin_call(7)));
  EXPECT_EQ(told(connection), "reset1 call7 ");
}

/// GRPC-1.
TEST(Http2, WhatBreaksTheRulesEndsTheConnection) {
  const std::string open = kHello + begin_call(1);
  for (const auto& [why, bytes] : std::vector<std::pair<std::string, std::string>>{
           {"another protocol", "GET / HTTP/1.1\r\n\r\n"},
           {"no settings first", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(6, 0, 0, "12345678")},
           {"a frame of 16 MB", kHello + "\xff\xff\xff" + std::string(6, '\0')},
           {"data of nothing", kHello + frame(0, 0, 1, "x")},
           {"data of the connection", kHello + frame(0, 0, 0, "x")},
           {"a number of the server's", kHello + begin_call(2)},
           {"fields within fields", kHello + frame(1, 0, 1, "") + frame(6, 0, 0, "12345678")},
           {"fields that continue nothing", open + frame(9, 4, 1, "")},
           {"fields twice", open + begin_call(1)},
           {"fields that cannot be read", kHello + frame(1, 4, 1, "\xff\xff\xff\xff\xff\xff")},
           {"padding", open + frame(0, 8, 1,
                                    "\x05"
                                    "abc")},
           {"no padding", open + frame(0, 8, 1, "")},
           {"padded fields", kHello + frame(1, 8 | 4, 1,
                                            "\x05"
                                            "abc")},
           {"cut fields", kHello + frame(1, 32 | 4, 1, "abc")},
           {"a window of nothing", open + window(1, 0)},
           {"a window too large", open + window(1, 0x7fffffff)},
           {"the connection's window", open + window(0, 0x7fffffff)},
           {"windows too large", open + frame(4, 0, 0, big_endian(4, 2) + big_endian(0x80000000, 4))},
           {"frames too small", open + frame(4, 0, 0, big_endian(5, 2) + big_endian(100, 4))},
           {"settings cut off", open + frame(4, 0, 0, "12345")},
           {"an answer with settings", open + frame(4, 1, 0, "123456")},
           {"a short ping", open + frame(6, 0, 0, "1234")},
           {"a short reset", open + frame(3, 0, 1, "12")},
           {"a reset of nothing", open + frame(3, 0, 3, "1234")},
           {"a push", open + frame(5, 4, 1, "1234")},
           {"data after the end", kHello + begin_call(1, true) + frame(0, 0, 1, "x")},
       }) {
    ServerConnection connection{Limits{}};
    EXPECT_FALSE(feed(connection, bytes)) << why;
    EXPECT_TRUE(connection.is_over());
    EXPECT_FALSE(connection.why().empty());
    EXPECT_EQ(test::take_frames(connection).back().kind, 7) << why;  // the peer is told
    EXPECT_FALSE(feed(connection, begin_call(9))) << why;
    const std::string all = told(connection);
    EXPECT_EQ(all.find("call1") != std::string::npos, all.find("reset1") != std::string::npos) << why;
  }
}

/// GRPC-2.
TEST(Http2, APeerThatDoesNotReadIsEnded) {
  ServerConnection connection{Limits{}};
  ASSERT_TRUE(feed(connection, kHello));
  std::string pings;
  for (int count = 0; count != 1000; ++count) pings += frame(6, 0, 0, "12345678");
  int turns = 0;
  while (feed(connection, pings)) ASSERT_LT(++turns, 1000);
  EXPECT_EQ(connection.why(), "the answers are not read");

  ServerConnection other{Limits{}};
  ASSERT_TRUE(feed(other, kHello + frame(1, 0, 1, "")));
  turns = 0;
  while (feed(other, frame(9, 0, 1, std::string(1000, 'x')))) ASSERT_LT(++turns, 1000);
  EXPECT_EQ(other.why(), "a call with too many fields");
}

TEST(Http2, ManyBytesKeepTheConnectionsWindowOpen) {
  ServerConnection connection{Limits{}};
  ASSERT_TRUE(feed(connection, kHello + begin_call(1)));
  connection.resume(1);
  const std::string part = frame(0, 0, 1, prefixed(std::string((1 << 20) - 5, 'x')));
  int64_t window = 0;
  for (int turn = 0; turn != 600; ++turn) {  // 600 MB
    ASSERT_TRUE(feed(connection, part)) << connection.why();
    (void)connection.take_events();
    for (const auto& each : test::take_frames(connection)) window += each.kind == 8 && each.call == 0 ? 1 : 0;
  }
  EXPECT_GE(window, 1);
}

}  // namespace
}  // namespace pathways::test_server_connection
