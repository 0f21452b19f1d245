// What goes: answers, windows, frames.
#include <algorithm>
#include <utility>

#include "http2/frames.h"
#include "http2/server_connection.h"

namespace pathways::http2 {
namespace {

constexpr size_t kOutput = size_t{256} << 10;  // of data that wait to be written

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
  const size_t bytes = out_.size() - start - kFrameHeaderBytes;
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
