// Segment: a block of memory that several processes can map. Use it under rings, tables and arenas.
//
// The memory has no name in any file system: create() makes an anonymous file (memfd). Its descriptor is sent to the
// other process over a Unix socket, and the other process attach()es it. So the kernel frees the memory when its last
// user is gone, whichever process dies. heap() gives private memory with the same interface, for the embedded cluster.
//
// Threading: a Segment is owned by one thread at a time; any process that maps the memory may use it. The mapping ends
// with the object, so the Segment must outlive whatever was placed in it.
//
// Invariant
//   FORK-1 (private)  what a forked child writes to a segment of hide_from_children() reaches no other process. Why:
//                     the child inherits objects that write to shared memory in their destructors (views of blocks,
//                     rings), and nobody controls when these run. So the child maps the same pages privately, at the
//                     same address, before fork() returns in it. ForkHolds keeps what the child may still read.
#pragma once

#include <cstddef>
#include <string_view>

namespace pathways {

class Segment {
 public:
  /// What a process that attaches the segment may do with it.
  enum class Others : unsigned char { kWrite, kRead };

  /// Zeroed shared memory of `bytes` bytes (rounded up to pages), sealed against resizing. `name` is for /proc only.
  /// With Others::kRead it is sealed against every other writable mapping. A kernel before Linux 5.1 cannot do that:
  /// there attach() maps it writable. Throws Error(kInvalid) for 0 bytes, Error(kNoMemory) if it does not fit,
  /// Error(kFailed) otherwise.
  static Segment create(std::string_view name, std::size_t bytes, Others others = Others::kWrite);
  /// Maps all of `fd`, read-only if the creator asked for that. The call owns `fd` from here on, also when it throws.
  /// Throws Error(kInvalid) unless `fd` is a sized file of common pages, sealed against shrinking. With any other file,
  /// SIGBUS could end this process when a peer shrinks the file or when its pages run out.
  static Segment attach(int fd);
  /// Zeroed private memory; fd() is -1. A forked child gets a copy.
  static Segment heap(std::size_t bytes);

  /// From now on a forked child gets a private copy of the pages (FORK-1). Does nothing for heap().
  void hide_from_children();

  Segment() noexcept = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  /// Page aligned; nullptr for an empty or moved-from segment.
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  /// Bytes mapped: what was asked for, rounded up to pages.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// The segment owns the descriptor: duplicate it to keep it. -1 for heap().
  [[nodiscard]] int fd() const noexcept { return fd_; }

 private:
  Segment(std::byte* data, std::size_t size, int fd) noexcept : data_(data), size_(size), fd_(fd) {}

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  int fd_ = -1;
  bool is_hidden_ = false;
};

}  // namespace pathways
