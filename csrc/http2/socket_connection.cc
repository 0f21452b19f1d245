#include "http2/socket_connection.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/status.h"

namespace pathways::http2 {
namespace {

constexpr size_t kBuffer = size_t{256} << 10;

int bell() {
  const int descriptor = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (descriptor < 0) throw_errno(Status::kFailed, "an eventfd for a connection", errno);
  return descriptor;
}

}  // namespace

SocketConnection::Descriptor::~Descriptor() { ::close(number_); }

SocketConnection::SocketConnection(int descriptor, const Limits& limits, const Patience& patience)
    : patience_(patience),
      socket_(descriptor),
      bell_(bell()),
      connection_(limits),
      heard_(Clock::now()),
      busy_(heard_),
      buffer_(new std::byte[kBuffer]) {}

SocketConnection::~SocketConnection() = default;

bool SocketConnection::receive(std::vector<Event>& events) {
  events.clear();
  {
    const std::lock_guard lock(mutex_);
    receiver_ = std::this_thread::get_id();
    flush();
    if (take(events)) return true;
  }
  while (true) {
    wait();
    const std::lock_guard lock(mutex_);
    if (take(events)) return true;
    if (is_ended_) return false;
  }
}

/// Whether there is something to tell.
bool SocketConnection::take(std::vector<Event>& events) {
  events = connection_.take_events();
  return std::exchange(is_woken_, false) || !events.empty();
}

/// Waits for the socket, the bell or the time, and does what is to be done.
void SocketConnection::wait() {
  pollfd watched[] = {{socket_.number(), POLLIN, 0}, {bell_.number(), POLLIN, 0}};
  int patience = 0;
  {
    const std::lock_guard lock(mutex_);
    if (is_ended_) return;
    if (is_blocked_) watched[0].events |= POLLOUT;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_look() - Clock::now());
    patience = static_cast<int>(std::max<int64_t>(left.count(), 0));
  }
  if (::poll(watched, 2, patience) < 0 && errno != EINTR) {
    const std::lock_guard lock(mutex_);
    close(std::string("poll: ") + std::strerror(errno));
    return;
  }
  if (watched[1].revents != 0) {
    uint64_t rings = 0;
    [[maybe_unused]] const ssize_t got = ::read(bell_.number(), &rings, sizeof rings);
  }
  const bool is_readable = (watched[0].revents & ~POLLOUT) != 0;
  const ssize_t got = is_readable ? ::recv(socket_.number(), buffer_.get(), kBuffer, MSG_DONTWAIT) : -1;
  const int error = errno;
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (is_ended_) return;
  if (got > 0) {
    heard_ = now;
    asked_.reset();
    const bool goes_on = connection_.feed({buffer_.get(), static_cast<size_t>(got)});
    if (!goes_on || !connection_.has_events()) flush();  // else with the answers to what has happened
    if (!goes_on) close(connection_.why());
  } else if (is_readable && got == 0) {
    close("the peer has closed the connection");
  } else if (is_readable && error != EAGAIN && error != EINTR) {
    close(std::strerror(error));
  }
  if ((watched[0].revents & POLLOUT) != 0) flush();
  if (connection_.calls() != 0) busy_ = now;
  look(now);
}

/// Ends it when the peer is silent for too long, and asks before.
void SocketConnection::look(Clock::time_point now) {
  if (is_ended_ || now < next_look()) return;
  if (!connection_.has_begun()) {
    close("the peer does not say what it speaks");
  } else if (connection_.calls() == 0 && now - busy_ >= patience_.idle) {
    connection_.go_away();
    flush();
    close("no call for long");
  } else if (asked_) {
    close("the peer does not answer");
  } else {
    asked_ = now;
    connection_.ping();
    flush();
  }
}

SocketConnection::Clock::time_point SocketConnection::next_look() const {
  if (!connection_.has_begun()) return heard_ + patience_.begin;
  const auto answer = asked_ ? *asked_ + patience_.answer : heard_ + patience_.silent;
  return connection_.calls() == 0 ? std::min(answer, busy_ + patience_.idle) : answer;
}

void SocketConnection::wake() {
  const std::lock_guard lock(mutex_);
  is_woken_ = true;
  ring();
}

void SocketConnection::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t rung = ::write(bell_.number(), &one, sizeof one);
}

void SocketConnection::end() {
  {
    const std::lock_guard lock(mutex_);
    connection_.go_away();
    flush();
    close("it was ended here");
  }
  wake();
}

size_t SocketConnection::respond(uint32_t call, std::string_view message) {
  const std::lock_guard lock(mutex_);
  const size_t unsent = connection_.respond(call, message);
  flush_if_foreign();
  return unsent;
}

void SocketConnection::finish(uint32_t call, uint32_t code, std::string_view text) {
  const std::lock_guard lock(mutex_);
  connection_.finish(call, code, text);
  flush_if_foreign();
}

void SocketConnection::resume(uint32_t call) {
  const std::lock_guard lock(mutex_);
  connection_.resume(call);
  flush_if_foreign();
}

void SocketConnection::hold(uint32_t call) {
  const std::lock_guard lock(mutex_);
  connection_.hold(call);
}

std::string SocketConnection::why() {
  const std::lock_guard lock(mutex_);
  return why_;
}

void SocketConnection::flush_if_foreign() {
  if (std::this_thread::get_id() == receiver_) return;
  const bool was_blocked = is_blocked_;
  flush();
  // The receiving thread writes the rest, and tells what has happened.
  if ((is_blocked_ && !was_blocked) || connection_.has_events()) ring();
}

/// Writes what the socket takes.
void SocketConnection::flush() {
  while (!is_ended_) {
    const std::string_view output = connection_.output();
    if (output.empty()) {
      is_blocked_ = false;
      return;
    }
    const ssize_t sent = ::send(socket_.number(), output.data(), output.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      connection_.written(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      is_blocked_ = true;
      return;
    } else if (errno != EINTR) {
      close(std::strerror(errno));
    }
  }
}

void SocketConnection::close(std::string_view why) {
  if (std::exchange(is_ended_, true)) return;
  why_ = why;
  connection_.go_away();  // its calls are told as over
  ::shutdown(socket_.number(), SHUT_RDWR);
}

}  // namespace pathways::http2
