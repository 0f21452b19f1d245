// What comes: frames, fields, messages.
#include "http2/server_connection.h"

#include <algorithm>
#include <utility>

#include "http2/frames.h"

namespace pathways::http2 {
namespace {

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr int64_t kConnectionWindow = 1 << 30;  // each call has its own: this one is never in the way
constexpr int64_t kMostWindow = (int64_t{1} << 31) - 1;
// Codes of gRPC.
constexpr uint32_t kResourceExhausted = 8, kUnimplemented = 12;

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
                          : state_ == State::kHeader ? kFrameHeaderBytes
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
  if (call != nullptr && call->trailers) return;  // it has its answer
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
      refuse(number, kUnimplemented, "compressed messages are not read here");
      return false;
    }
    if (bytes > limits_.message_bytes) {
      refuse(number, kResourceExhausted,
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

/// Ends a call because of what has come; whoever answers is told.
void ServerConnection::refuse(uint32_t number, uint32_t code, std::string_view why) {
  finish(number, code, why);
  emit(Event::Kind::kReset, number);
}

void ServerConnection::end_of_call(uint32_t number, Call& call) {
  call.has_ended = true;
  emit(Event::Kind::kEnd, number);
}

}  // namespace pathways::http2
