// Segment: a block of memory that several processes can map. Use it under rings, tables and arenas.
//
// The memory has no name in any file system: create() makes an anonymous file (memfd), whose descriptor is handed to
// the other process over a Unix socket, which attach()es it. So the kernel frees it with its last user, whatever dies.
// heap() gives private memory behind the same interface, for the embedded cluster.
//
// Threading: a Segment is owned by one thread at a time; the memory is everybody's. The mapping ends with the object,
// so it must outlive whatever was placed in it.
//
// Invariant
//   FORK-1 (private)  what a forked child does to a segment of hide_from_children() reaches no other process. Why: the
//                     child inherits objects that write to shared memory when they end (views of blocks, rings), and
//                     they end at moments that nobody chooses. So the child maps the same pages privately, at the same
//                     address, before fork() returns in it. What it may still read is kept by ForkHolds.
#pragma once

#include <cstddef>
#include <string_view>

namespace pathways {

class Segment {
 public:
  /// What whoever attaches a segment may do with it.
  enum class Others : unsigned char { kWrite, kRead };

  /// Zeroed shared memory of `bytes` bytes (rounded up to pages), sealed against resizing. `name` is for /proc only.
  /// With Others::kRead it is sealed against every other writable mapping (where the kernel cannot, Linux before 5.1,
  /// attach() maps it writable). Throws Error(kInvalid) for 0 bytes, Error(kNoMemory) if it does not fit,
  /// Error(kFailed) otherwise.
  static Segment create(std::string_view name, std::size_t bytes, Others others = Others::kWrite);
  /// Maps all of `fd`, which it owns from here on, also when it throws; read-only where its maker says so. Throws
  /// Error(kInvalid) if fd is no sized file of common pages whose size is sealed: a peer that shrank it, or pages that
  /// run out, could end this process by SIGBUS.
  static Segment attach(int fd);
  /// Zeroed private memory; fd() is -1. A forked child gets a copy.
  static Segment heap(std::size_t bytes);

  /// From now on a forked child gets a private copy of the pages (FORK-1). Nothing to do for heap().
  void hide_from_children();

  Segment() noexcept = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  /// Page aligned; nullptr for an empty or moved-from segment.
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  /// Bytes mapped: what was asked for, rounded up to pages.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// Stays the segment's: duplicate it to keep it. -1 for heap().
  [[nodiscard]] int fd() const noexcept { return fd_; }

 private:
  Segment(std::byte* data, std::size_t size, int fd) noexcept : data_(data), size_(size), fd_(fd) {}

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  int fd_ = -1;
  bool is_hidden_ = false;
};

}  // namespace pathways
