/// A ServerConnection at a socket: one thread receives, any thread answers.
///
/// What the receiving thread answers is written when it receives again, so that answers to requests that came together
/// share a system call. What other threads answer is written at once.
///
/// * GRPC-3: `receive` returns for all that came, that became possible by other threads' answers, and at the end, which
///   a peer that is silent does not put off.
///
/// Threading: one thread calls `receive`; any thread may call all else.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "http2/server_connection.h"

namespace pathways::http2 {

/// How long a peer may be silent.
struct Patience {
  std::chrono::milliseconds begin{20'000};   ///< until it says that it speaks HTTP/2
  std::chrono::milliseconds idle{120'000};   ///< without a call
  std::chrono::milliseconds silent{30'000};  ///< until it is asked whether it is there
  std::chrono::milliseconds answer{60'000};  ///< until it answers that
};

class SocketConnection {
 public:
  /// Takes the socket over. Throws Error when there are no descriptors.
  SocketConnection(int descriptor, const Limits& limits, const Patience& patience);
  ~SocketConnection();
  SocketConnection(const SocketConnection&) = delete;
  SocketConnection& operator=(const SocketConnection&) = delete;

  /// Waits until something has happened, or `wake` was called, and tells it in order. False: it is over, and nothing
  /// comes after this.
  bool receive(std::vector<Event>& events);
  void wake();
  /// Ends the connection: `receive` tells it.
  void end();

  size_t respond(uint32_t call, std::string_view message);
  void finish(uint32_t call, uint32_t code, std::string_view text);
  void resume(uint32_t call);
  void hold(uint32_t call);

  /// Why it is over.
  std::string why();

 private:
  using Clock = std::chrono::steady_clock;

  class Descriptor {
   public:
    explicit Descriptor(int number) : number_(number) {}
    ~Descriptor();
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int number() const { return number_; }

   private:
    int number_;
  };

  bool take(std::vector<Event>& events);
  void wait();
  bool read();
  void flush();
  void flush_if_foreign();
  void ring();
  void close(std::string_view why);
  void look(Clock::time_point now);
  Clock::time_point next_look() const;

  const Patience patience_;
  const Descriptor socket_, bell_;
  std::mutex mutex_;  ///< guards all below but what says otherwise
  ServerConnection connection_;
  std::thread::id receiver_;
  bool is_woken_ = false, is_ended_ = false, is_blocked_ = false;
  std::string why_;
  Clock::time_point heard_, busy_;          ///< when the last bytes came, and when there was a call
  std::optional<Clock::time_point> asked_;  ///< when a ping was sent that is not answered
  std::unique_ptr<std::byte[]> buffer_;     ///< the receiving thread's
};

}  // namespace pathways::http2
