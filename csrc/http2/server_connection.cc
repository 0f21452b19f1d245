#include "http2/server_connection.h"

#include <algorithm>
#include <utility>

namespace pathways::http2 {
namespace {

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kHeaderBytes = 9, kPrefixBytes = 5;
constexpr size_t kOutput = size_t{256} << 10;   // of data that wait to be written
constexpr int64_t kConnectionWindow = 1 << 30;  // each call has its own: this one is never in the way
constexpr int64_t kMostWindow = (int64_t{1} << 31) - 1;

enum Kind : uint8_t {
  kData = 0,
  kHeaders = 1,
  kPriority = 2,
  kReset = 3,
  kSettings = 4,
  kPush = 5,
  kPing = 6,
  kGoAway = 7,
  kWindowUpdate = 8,
  kContinuation = 9,
};
enum Flag : uint8_t { kAck = 1, kEndStream = 1, kEndHeaders = 4, kPadded = 8, kWithPriority = 32 };
enum Code : uint32_t {
  kNoError = 0,
  kProtocolError = 1,
  kFlowControlError = 3,
  kFrameSizeError = 6,
  kRefusedStream = 7,
  kCompressionError = 9,
  kCalm = 11,
};
enum Setting : uint16_t { kMaxCalls = 3, kFirstWindowSize = 4, kMaxFrameSize = 5, kMaxFieldBytes = 6 };
// Codes of gRPC.
constexpr uint32_t kResourceExhausted = 8, kUnimplemented = 12;

void put(std::string& out, uint64_t number, unsigned bytes) {
  while (bytes-- != 0) out += static_cast<char>(number >> (8 * bytes));
}

template <typename Byte>
uint32_t number_of(std::span<Byte> bytes) {
  uint32_t number = 0;
  for (const auto byte : bytes) number = (number << 8) | static_cast<uint8_t>(byte);
  return number;
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// A text as gRPC writes it into a field: what is no printable ASCII, and '%', as %XX.
std::string encoded(std::string_view text) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char each : text) {
    const auto byte = static_cast<uint8_t>(each);
    if (byte >= 0x20 && byte <= 0x7e && byte != '%') {
      out += each;
    } else {
      out += '%';
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    }
  }
  return out;
}

void write_answer(std::string& block) {
  block += static_cast<char>(0x88);  // ":status: 200" of the static table
  write_header(block, "content-type", "application/grpc");
}

}  // namespace

ServerConnection::ServerConnection(const Limits& limits) : limits_(limits) {
  std::string settings;
  const std::pair<Setting, size_t> said[] = {{kMaxCalls, limits.calls},
                                             {kFirstWindowSize, kFirstWindow},
                                             {kMaxFrameSize, kMostFrame},
                                             {kMaxFieldBytes, kMostFields}};
  for (const auto& [setting, value] : said) {
    put(settings, setting, 2);
    put(settings, value, 4);
  }
  frame(kSettings, 0, 0, settings);
  std::string window;
  put(window, static_cast<uint64_t>(kConnectionWindow - 65535), 4);
  frame(kWindowUpdate, 0, 0, window);
}

bool ServerConnection::fail(uint32_t code, std::string_view why) {
  if (state_ == State::kOver) return false;
  state_ = State::kOver;
  why_ = why;
  std::string said;
  put(said, last_call_, 4);
  put(said, code, 4);
  said += why;
  frame(kGoAway, 0, 0, said);
  for (const auto& [number, call] : calls_) emit(Event::Kind::kReset, number);
  calls_.clear();
  ready_.clear();
  return false;
}

std::vector<Event> ServerConnection::take_events() { return std::exchange(events_, {}); }

// ---- what comes

bool ServerConnection::feed(std::span<const std::byte> bytes) {
  while (!bytes.empty() && state_ != State::kOver) {
    bytes = bytes.subspan(step(bytes));
    if (out_.size() - written_ > kMostControl) fail(kCalm, "the answers are not read");
  }
  return state_ != State::kOver;
}

/// Takes the next bytes, and says how many.
size_t ServerConnection::step(std::span<const std::byte> bytes) {
  if (state_ == State::kData) {
    const size_t taken = std::min<size_t>(bytes.size(), reads_padding_    ? 1
                                                        : data_left_ != 0 ? data_left_
                                                                          : padding_left_);
    const auto part = bytes.first(taken);
    if (reads_padding_) {
      reads_padding_ = false;
      padding_left_ = static_cast<uint8_t>(part[0]);
      if (padding_left_ > data_left_ - 1) {
        fail(kProtocolError, "more padding than the frame has bytes");
        return taken;
      }
      data_left_ -= 1 + padding_left_;
    } else if (data_left_ != 0) {
      data_left_ -= static_cast<uint32_t>(taken);
      take_data(part);
    } else {
      padding_left_ -= static_cast<uint32_t>(taken);
    }
    if (state_ == State::kData && data_left_ == 0 && padding_left_ == 0 && !reads_padding_) end_of_data();
    return taken;
  }
  const size_t expected = state_ == State::kPreface  ? kPreface.size()
                          : state_ == State::kHeader ? kHeaderBytes
                                                     : frame_.bytes;
  // A whole one is taken where it lies; a part is kept.
  if (in_.empty() && bytes.size() >= expected && expected != 0) {
    const auto whole = bytes.first(expected);
    if (state_ == State::kPreface) {
      state_ = State::kHeader;
      if (text_of(whole) != kPreface) fail(kProtocolError, "no HTTP/2 client");
    } else if (state_ == State::kHeader) {
      begin_frame(whole);
    } else {
      state_ = State::kHeader;
      take_frame(whole);
    }
    return expected;
  }
  const size_t taken = std::min(bytes.size(), expected - in_.size());
  in_ += text_of(bytes.first(taken));
  if (state_ == State::kPreface && kPreface.substr(0, in_.size()) != in_) fail(kProtocolError, "no HTTP/2 client");
  if (in_.size() == expected && state_ != State::kOver) {
    const std::string whole = std::exchange(in_, {});
    step(std::as_bytes(std::span(whole)));
  }
  return taken;
}

bool ServerConnection::begin_frame(std::span<const std::byte> header) {
  frame_ = {number_of(header.first(3)), static_cast<uint8_t>(header[3]), static_cast<uint8_t>(header[4]),
            number_of(header.subspan(5, 4)) & 0x7fffffffu};
  if (frame_.bytes > kMostFrame) return fail(kFrameSizeError, "a frame that is too long");
  if (!has_settings_ && (frame_.kind != kSettings || (frame_.flags & kAck) != 0)) {
    return fail(kProtocolError, "the first frame has no settings");
  }
  if (block_call_ != 0 && (frame_.kind != kContinuation || frame_.call != block_call_)) {
    return fail(kProtocolError, "another frame within the fields of a call");
  }
  if (frame_.kind != kData) {
    if (frame_.bytes != 0) {
      state_ = State::kPayload;
      return true;
    }
    return take_frame({});
  }
  if (frame_.call == 0 || frame_.call > last_call_) return fail(kProtocolError, "data of a call that has not begun");
  received_ += frame_.bytes;
  if (received_ > kConnectionWindow) return fail(kFlowControlError, "more data than the connection has room for");
  if (received_ > kConnectionWindow / 2) {
    std::string window;
    put(window, static_cast<uint64_t>(received_), 4);
    frame(kWindowUpdate, 0, 0, window);
    received_ = 0;
  }
  if (Call* call = find(frame_.call)) {
    if (call->has_ended) return fail(kProtocolError, "data of a call after its end");
    call->may_receive -= frame_.bytes;
    if (call->may_receive < 0) return fail(kFlowControlError, "more data than the call has room for");
  }
  data_left_ = frame_.bytes;
  padding_left_ = 0;
  reads_padding_ = (frame_.flags & kPadded) != 0;
  if (reads_padding_ && data_left_ == 0) return fail(kFrameSizeError, "padding without its length");
  state_ = State::kData;
  if (data_left_ == 0) end_of_data();
  return true;
}

bool ServerConnection::take_frame(std::span<const std::byte> payload) {
  switch (frame_.kind) {
    case kHeaders:
      return take_headers(payload);
    case kContinuation:
      if (block_call_ == 0) return fail(kProtocolError, "fields that continue nothing");
      if (block_.size() + payload.size() > kMostFields) return fail(kCalm, "a call with too many fields");
      block_ += text_of(payload);
      return (frame_.flags & kEndHeaders) == 0 || take_block();
    case kReset:
      if (payload.size() != 4) return fail(kFrameSizeError, "a reset that is no number");
      if (frame_.call == 0 || frame_.call > last_call_) return fail(kProtocolError, "a reset of no call");
      if (calls_.erase(frame_.call) != 0) emit(Event::Kind::kReset, frame_.call);
      return true;
    case kSettings:
      return take_settings(payload);
    case kPush:
      return fail(kProtocolError, "a push by a client");
    case kPing:
      if (payload.size() != 8 || frame_.call != 0) return fail(kFrameSizeError, "a ping that is none");
      if ((frame_.flags & kAck) == 0) frame(kPing, kAck, 0, text_of(payload));
      return true;
    case kWindowUpdate:
      return take_window(payload);
    default:  // priorities, and what later versions of the protocol may have
      return true;
  }
}

bool ServerConnection::take_headers(std::span<const std::byte> payload) {
  const size_t before = ((frame_.flags & kPadded) != 0 ? 1u : 0u) + ((frame_.flags & kWithPriority) != 0 ? 5u : 0u);
  if (payload.size() < before) return fail(kFrameSizeError, "fields that are cut off");
  const size_t padding = (frame_.flags & kPadded) != 0 ? static_cast<uint8_t>(payload[0]) : 0;
  payload = payload.subspan(before);
  if (padding > payload.size()) return fail(kProtocolError, "more padding than the frame has bytes");
  payload = payload.first(payload.size() - padding);
  if (payload.size() > kMostFields) return fail(kCalm, "a call with too many fields");
  if (frame_.call % 2 == 0) return fail(kProtocolError, "a call with a number of the server's");
  block_call_ = frame_.call;
  block_ends_call_ = (frame_.flags & kEndStream) != 0;
  block_ = text_of(payload);
  return (frame_.flags & kEndHeaders) == 0 || take_block();
}

/// The fields of a call, or those at its end.
bool ServerConnection::take_block() {
  const uint32_t number = std::exchange(block_call_, 0);
  auto fields = decoder_.decode(std::as_bytes(std::span(block_)));
  block_.clear();
  if (!fields) return fail(kCompressionError, "fields that cannot be read");
  if (number <= last_call_) {
    Call* call = find(number);
    if (call == nullptr) return true;  // it is over here; the peer does not know as yet
    if (!block_ends_call_ || call->has_ended) return fail(kProtocolError, "fields of a call twice");
    end_of_call(number, *call);
    return true;
  }
  last_call_ = number;
  if (calls_.size() >= limits_.calls) {
    reset(number, kRefusedStream);
    return true;
  }
  Call& call = calls_[number];
  call.may_send = first_window_;
  events_.push_back({Event::Kind::kCall, number, std::move(*fields), {}});
  if (block_ends_call_) end_of_call(number, call);
  return true;
}

bool ServerConnection::take_settings(std::span<const std::byte> payload) {
  has_settings_ = true;
  if (frame_.call != 0 || payload.size() % 6 != 0) return fail(kFrameSizeError, "settings that are none");
  if ((frame_.flags & kAck) != 0) return payload.empty() || fail(kFrameSizeError, "settings in an answer");
  for (; !payload.empty(); payload = payload.subspan(6)) {
    const uint32_t setting = number_of(payload.first(2)), value = number_of(payload.subspan(2, 4));
    if (setting == kMaxFrameSize) {
      if (value < (16u << 10) || value >= (1u << 24)) return fail(kProtocolError, "frames of no such size");
      most_frame_ = std::min(value, kMostFrame);
    } else if (setting == kFirstWindowSize) {
      if (value > kMostWindow) return fail(kFlowControlError, "a window that is too large");
      for (auto& [number, call] : calls_) {
        call.may_send += value - first_window_;
        if (call.may_send > kMostWindow) return fail(kFlowControlError, "a window that is too large");
        wait_for_window(number, call);
      }
      first_window_ = value;
    }
  }
  frame(kSettings, kAck, 0, {});
  return true;
}

bool ServerConnection::take_window(std::span<const std::byte> payload) {
  if (payload.size() != 4) return fail(kFrameSizeError, "a window that is no number");
  const uint32_t more = number_of(payload) & 0x7fffffffu;
  if (more == 0) return fail(kProtocolError, "a window of nothing");
  if (frame_.call == 0) {
    may_send_ += more;
    return may_send_ <= kMostWindow || fail(kFlowControlError, "a window that is too large");
  }
  if (frame_.call > last_call_) return fail(kProtocolError, "a window of no call");
  if (Call* call = find(frame_.call)) {
    call->may_send += more;
    if (call->may_send > kMostWindow) return fail(kFlowControlError, "a window that is too large");
    wait_for_window(frame_.call, *call);
  }
  return true;
}

void ServerConnection::take_data(std::span<const std::byte> data) {
  Call* call = find(frame_.call);
  while (call != nullptr && !data.empty()) {
    if (!take_message(frame_.call, *call)) return;
    const size_t taken =
        call->message_bytes ? *call->message_bytes - call->message.size() : kPrefixBytes - call->prefix.size();
    const auto part = text_of(data.first(std::min(taken, data.size())));
    data = data.subspan(part.size());
    if (!call->message_bytes) {
      call->prefix += part;
    } else {
      call->message += part;
    }
    if (!take_message(frame_.call, *call)) return;
  }
}

/// Looks whether a prefix or a message is whole. False: the call is over.
bool ServerConnection::take_message(uint32_t number, Call& call) {
  if (!call.message_bytes && call.prefix.size() == kPrefixBytes) {
    const size_t bytes = number_of(std::span(call.prefix).subspan(1));
    if (call.prefix[0] != 0) {
      finish(number, kUnimplemented, "compressed messages are not read here");
      return false;
    }
    if (bytes > limits_.message_bytes) {
      finish(number, kResourceExhausted,
             "a message of " + std::to_string(bytes) + " bytes; the most is " + std::to_string(limits_.message_bytes));
      return false;
    }
    call.message_bytes = bytes;
    call.message.reserve(std::min<size_t>(bytes, call.is_held ? kFirstWindow : kWindow));
  }
  if (call.message_bytes && call.message.size() == *call.message_bytes) {
    events_.push_back({Event::Kind::kMessage, number, {}, std::exchange(call.message, {})});
    call.message_bytes.reset();
    call.prefix.clear();
  }
  return true;
}

/// The bytes of a frame of data are all there.
void ServerConnection::end_of_data() {
  state_ = State::kHeader;
  Call* call = find(frame_.call);
  if (call == nullptr) return;
  if ((frame_.flags & kEndStream) != 0) {
    end_of_call(frame_.call, *call);
  } else if (!call->is_held && call->may_receive < kWindow / 2) {
    give_window(frame_.call, *call);
  }
}

void ServerConnection::end_of_call(uint32_t number, Call& call) {
  call.has_ended = true;
  emit(Event::Kind::kEnd, number);
}

// ---- what goes

size_t ServerConnection::respond(uint32_t number, std::string_view message) {
  Call* call = find(number);
  if (call == nullptr || call->trailers) return 0;
  std::string framed;
  framed.reserve(kPrefixBytes + message.size());
  put(framed, 0, 1);
  put(framed, message.size(), 4);
  framed += message;
  call->unsent_bytes += framed.size();
  call->unsent.push_back(std::move(framed));
  call->is_full = call->is_full || call->unsent_bytes > limits_.room_bytes;
  wait_for_window(number, *call);
  return call->unsent_bytes;
}

void ServerConnection::finish(uint32_t number, uint32_t code, std::string_view why) {
  Call* call = find(number);
  if (call == nullptr || call->trailers) return;
  std::string& block = call->trailers.emplace();
  write_header(block, "grpc-status", std::to_string(code));
  if (!why.empty()) write_header(block, "grpc-message", encoded(why));
  wait_for_window(number, *call);
}

void ServerConnection::resume(uint32_t number) {
  if (Call* call = find(number)) {
    call->is_held = false;
    if (call->may_receive < kWindow / 2 && !call->has_ended) give_window(number, *call);
  }
}

void ServerConnection::hold(uint32_t number) {
  if (Call* call = find(number)) call->is_held = true;
}

void ServerConnection::ping() { frame(kPing, 0, 0, "pathways"); }

void ServerConnection::go_away() { fail(kNoError, "the server ends"); }

void ServerConnection::give_window(uint32_t number, Call& call) {
  std::string window;
  put(window, static_cast<uint64_t>(kWindow - call.may_receive), 4);
  frame(kWindowUpdate, 0, number, window);
  call.may_receive = kWindow;
}

void ServerConnection::wait_for_window(uint32_t number, Call& call) {
  if (call.is_waiting || (call.unsent.empty() && !call.trailers)) return;
  if (!call.unsent.empty() && call.may_send <= 0) return;
  call.is_waiting = true;
  ready_.push_back(number);
}

std::string_view ServerConnection::output() {
  pump();
  return std::string_view(out_).substr(written_);
}

void ServerConnection::written(size_t bytes) {
  written_ += bytes;
  if (written_ == out_.size()) {
    out_.clear();
    written_ = 0;
  } else if (written_ > kOutput) {
    out_.erase(0, std::exchange(written_, 0));
  }
}

/// Makes frames of what the calls have, in turns, as far as the windows allow.
void ServerConnection::pump() {
  while (!ready_.empty() && out_.size() - written_ < kOutput) {
    const uint32_t number = ready_.front();
    Call* call = find(number);
    if (call != nullptr && !call->unsent.empty() && may_send_ <= 0) return;  // all wait for the connection's window
    ready_.pop_front();
    if (call == nullptr) continue;
    call->is_waiting = false;
    if (!call->unsent.empty() && call->may_send <= 0) continue;  // the peer has made its window smaller
    if (pump(number, *call)) wait_for_window(number, *call);
  }
}

/// The next frames of a call. False: it is over.
bool ServerConnection::pump(uint32_t number, Call& call) {
  std::string block;
  if (!std::exchange(call.has_answered, true)) {
    write_answer(block);
    if (!call.unsent.empty()) {
      frame(kHeaders, kEndHeaders, number, block);
      block.clear();
    }
  }
  if (!call.unsent.empty()) send_data(number, call);
  if (!call.unsent.empty() || !call.trailers) return true;
  frame(kHeaders, kEndHeaders | kEndStream, number, block + *call.trailers);
  if (!call.has_ended) reset(number, kNoError);
  calls_.erase(number);
  return false;
}

/// A frame of data: messages share frames.
void ServerConnection::send_data(uint32_t number, Call& call) {
  const size_t start = out_.size();
  frame(kData, 0, number, {});
  size_t room = static_cast<size_t>(std::min({call.may_send, may_send_, int64_t{most_frame_}}));
  while (room != 0 && !call.unsent.empty()) {
    const std::string_view left = std::string_view(call.unsent.front()).substr(call.sent);
    const std::string_view part = left.substr(0, room);
    out_ += part;
    room -= part.size();
    call.sent += part.size();
    if (part.size() == left.size()) {
      call.unsent.pop_front();
      call.sent = 0;
    }
  }
  const size_t bytes = out_.size() - start - kHeaderBytes;
  for (unsigned byte = 0; byte != 3; ++byte) out_[start + byte] = static_cast<char>(bytes >> (8 * (2 - byte)));
  call.may_send -= static_cast<int64_t>(bytes);
  may_send_ -= static_cast<int64_t>(bytes);
  call.unsent_bytes -= bytes;
  if (call.is_full && call.unsent_bytes <= limits_.room_bytes / 2) {
    call.is_full = false;
    emit(Event::Kind::kRoom, number);
  }
}

void ServerConnection::frame(uint8_t kind, uint8_t flags, uint32_t call, std::string_view payload) {
  put(out_, payload.size(), 3);
  out_ += static_cast<char>(kind);
  out_ += static_cast<char>(flags);
  put(out_, call, 4);
  out_ += payload;
}

void ServerConnection::reset(uint32_t call, uint32_t code) {
  std::string said;
  put(said, code, 4);
  frame(kReset, 0, call, said);
}

ServerConnection::Call* ServerConnection::find(uint32_t number) {
  const auto found = calls_.find(number);
  return found == calls_.end() ? nullptr : &found->second;
}

}  // namespace pathways::http2
