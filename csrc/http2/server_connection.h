/// The server's end of one HTTP/2 connection that carries gRPC calls (RFC 9113, gRPC over HTTP/2): bytes in, events
/// out; answers in, bytes out. It knows no socket, so that tests give it any bytes.
///
///   client --feed--> frames -> header blocks, messages -> events -> who answers
///   client <-output-- frames <- windows <- messages of each call <-respond, finish--
///
/// * GRPC-1: whatever the bytes are, the peer gets at most an error, and only its connection ends.
/// * GRPC-2: what a peer can make this end keep is bounded: calls, the fields of a block, a message, what is written
///   and not read. A call may send `kFirstWindow` bytes until `resume`, and from then on as much as is taken.
///
/// Threading: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "http2/hpack.h"

namespace pathways::http2 {

inline constexpr uint32_t kFirstWindow = 16u << 10;  ///< bytes that a call may send before it is accepted
inline constexpr uint32_t kWindow = 4u << 20;        ///< and afterwards, ahead of what was taken
inline constexpr uint32_t kMostFrame = 1u << 20;     ///< payload of a frame that this end reads
inline constexpr size_t kMostFields = 64u << 10;     ///< bytes of the fields of a call
inline constexpr size_t kMostControl = 4u << 20;     ///< bytes of answers to control frames that the peer does not read

struct Limits {
  size_t calls = 1u << 14;                 ///< of the connection at a time
  size_t message_bytes = size_t{1} << 30;  ///< of the longest message
  size_t room_bytes = 4u << 20;            ///< of answers of a call that are not written: past it, `kRoom` is told
};

struct Event {
  enum class Kind : uint8_t {
    kCall,     ///< a call begins, with `fields`
    kMessage,  ///< a whole message of it
    kEnd,      ///< it sends no more
    kReset,    ///< it is over: the peer has given it up, what came is refused, or the connection has ended
    kRoom,     ///< at most half of `room_bytes` are left unwritten, after there were more than `room_bytes`
  };
  Kind kind;
  uint32_t call;
  std::vector<Header> fields;
  std::string message;
};

class ServerConnection {
 public:
  explicit ServerConnection(const Limits& limits);

  /// Takes bytes from the peer. False: the connection is over, and `why` says it; the output has the peer's answer.
  bool feed(std::span<const std::byte> bytes);
  /// What has happened since, in order.
  std::vector<Event> take_events();
  /// Bytes for the peer. `written` says how many of them are gone, and makes new ones.
  std::string_view output();
  void written(size_t bytes);

  /// A message to a call's peer. Returns how many bytes of the call are not written. Nothing for a call that is over.
  size_t respond(uint32_t call, std::string_view message);
  /// Ends a call after what was responded: a code of gRPC, and its text.
  void finish(uint32_t call, uint32_t code, std::string_view text);
  /// The peer of a call may send: `kWindow` ahead of what is taken. `hold`: no more than it was allowed already.
  void resume(uint32_t call);
  void hold(uint32_t call);

  void ping();
  /// Tells the peer that no call is served any more.
  void go_away();

  bool has_begun() const { return state_ != State::kPreface; }
  bool is_over() const { return state_ == State::kOver; }
  bool has_events() const { return !events_.empty(); }
  size_t calls() const { return calls_.size(); }
  const std::string& why() const { return why_; }

 private:
  enum class State : uint8_t { kPreface, kHeader, kPayload, kData, kOver };

  struct Call {
    int64_t may_receive = kFirstWindow, may_send = 0;
    bool is_held = true, has_ended = false, is_waiting = false, is_full = false;
    bool has_answered = false;            ///< the fields of the answer are out
    std::string prefix, message;          ///< of the message that is coming
    std::optional<size_t> message_bytes;  ///< how many it has, when its prefix is there
    std::deque<std::string> unsent;       ///< messages with their prefixes
    size_t sent = 0, unsent_bytes = 0;    ///< of the first one, and in all without that
    std::optional<std::string> trailers;  ///< the block that ends the call
  };

  struct Frame {
    uint32_t bytes = 0;
    uint8_t kind = 0, flags = 0;
    uint32_t call = 0;
  };

  bool fail(uint32_t code, std::string_view why);
  size_t step(std::span<const std::byte> bytes);
  bool begin_frame(std::span<const std::byte> header);
  bool take_frame(std::span<const std::byte> payload);
  bool take_headers(std::span<const std::byte> payload);
  bool take_block();
  bool take_settings(std::span<const std::byte> payload);
  bool take_window(std::span<const std::byte> payload);
  void take_data(std::span<const std::byte> data);
  void end_of_data();
  bool take_message(uint32_t number, Call& call);
  void refuse(uint32_t number, uint32_t code, std::string_view why);
  void end_of_call(uint32_t number, Call& call);
  void give_window(uint32_t number, Call& call);
  void wait_for_window(uint32_t number, Call& call);
  void pump();
  bool pump(uint32_t number, Call& call);
  void send_data(uint32_t number, Call& call);
  void frame(uint8_t kind, uint8_t flags, uint32_t call, std::string_view payload);
  void reset(uint32_t call, uint32_t code);
  Call* find(uint32_t number);
  void emit(Event::Kind kind, uint32_t call) { events_.push_back({kind, call, {}, {}}); }

  const Limits limits_;
  State state_ = State::kPreface;
  std::string why_;
  HeaderDecoder decoder_{kMostFields};

  std::string in_;  ///< a part of a frame
  Frame frame_;
  uint32_t data_left_ = 0, padding_left_ = 0;
  bool reads_padding_ = false;  ///< the next byte of the data says how much follows them
  bool has_settings_ = false;
  uint32_t block_call_ = 0;  ///< whose block is coming; 0: none's
  bool block_ends_call_ = false;
  std::string block_;
  uint32_t last_call_ = 0;
  int64_t received_ = 0;  ///< bytes of data since the peer's window was last widened

  std::map<uint32_t, Call> calls_;
  std::deque<uint32_t> ready_;  ///< calls with something that may be sent
  int64_t may_send_ = 65535, first_window_ = 65535;
  uint32_t most_frame_ = 16u << 10;
  std::string out_;
  size_t written_ = 0;
  std::vector<Event> events_;
};

}  // namespace pathways::http2
