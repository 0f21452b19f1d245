#include "memory/segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status.h"

namespace pathways {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#ifdef F_SEAL_FUTURE_WRITE
constexpr int kReadOnlySeal = F_SEAL_FUTURE_WRITE;
#else
constexpr int kReadOnlySeal = 0x0010;  // since Linux 5.1
#endif

std::size_t page_rounded(std::size_t bytes, const char* who) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (bytes == 0 || bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) - page) {
    throw Error(Status::kInvalid,
                std::string(who) + ": expected a size of 1 byte to 2^63, got " + std::to_string(bytes));
  }
  return (bytes + page - 1) / page * page;
}

/// Closes the descriptor unless released: for paths that throw.
struct OwnedFd {
  explicit OwnedFd(int descriptor) noexcept : fd(descriptor) {}
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  ~OwnedFd() {
    if (fd >= 0) ::close(fd);
  }
  int release() noexcept { return std::exchange(fd, -1); }
  int fd;
};

Status status_of(int error) noexcept {
  return error == ENOMEM || error == ENOSPC || error == EFBIG ? Status::kNoMemory : Status::kFailed;
}

std::byte* map(std::size_t bytes, int flags, int fd, const char* who, int protection = PROT_READ | PROT_WRITE) {
  void* data = ::mmap(nullptr, bytes, protection, flags, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    throw_errno(status_of(error), std::string(who) + ": mapping " + std::to_string(bytes) + " bytes", error);
  }
  return static_cast<std::byte*>(data);
}

/// The mappings that a forked child gets as private ones. Never destroyed: a fork may happen while the process ends.
struct HiddenMappings {
  struct Mapping {
    std::byte* data;
    std::size_t size;
    int fd;
  };
  std::mutex mutex;  // held during a fork
  std::vector<Mapping> all;
};

HiddenMappings& hidden_mappings() {
  static auto* const mappings = new HiddenMappings;
  return *mappings;
}

/// FORK-1. Runs in the child inside fork(), where only one thread exists; so it makes system calls only.
void map_privately() {
  HiddenMappings& mappings = hidden_mappings();
  for (const auto& [data, size, fd] : mappings.all) {
    constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    PW_CHECK(::mmap(data, size, PROT_READ | PROT_WRITE, kFlags, fd, 0) == data);
  }
  mappings.mutex.unlock();
}

}  // namespace

Segment Segment::create(std::string_view name, std::size_t bytes, Others others) {
  const std::size_t size = page_rounded(bytes, "Segment::create");
  OwnedFd file(::memfd_create(std::string(name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.fd < 0) throw_errno(Status::kFailed, "Segment::create: memfd_create", errno);
  if (::ftruncate(file.fd, static_cast<off_t>(size)) != 0) {
    const int error = errno;
    throw_errno(status_of(error), "Segment::create: no room for " + std::to_string(size) + " bytes of shared memory",
                error);
  }
  std::byte* data = map(size, MAP_SHARED, file.fd, "Segment::create");
  Segment segment(data, size, file.release());
  const bool is_sealed = (others == Others::kRead && ::fcntl(segment.fd_, F_ADD_SEALS, kSeals | kReadOnlySeal) == 0) ||
                         ::fcntl(segment.fd_, F_ADD_SEALS, kSeals) == 0;
  if (!is_sealed) throw_errno(Status::kFailed, "Segment::create: sealing", errno);
  return segment;
}

Segment Segment::attach(int fd) {
  OwnedFd file(fd);
  struct stat info{};
  if (::fstat(file.fd, &info) != 0)
    throw_errno(Status::kInvalid, "Segment::attach: descriptor " + std::to_string(fd), errno);
  if (info.st_size <= 0) {
    throw Error(Status::kInvalid,
                "Segment::attach: expected a sized file, got " + std::to_string(info.st_size) + " bytes");
  }
  const int seals = ::fcntl(file.fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(Status::kInvalid, "Segment::attach: expected memory sealed against shrinking, descriptor " +
                                      std::to_string(fd) + " is not");
  }
  if (info.st_blksize != ::sysconf(_SC_PAGESIZE)) {
    throw Error(Status::kInvalid, "Segment::attach: expected memory of common pages, got pages of " +
                                      std::to_string(info.st_blksize) + " bytes");
  }
  const auto size = static_cast<std::size_t>(info.st_size);
  const bool is_read_only = (seals & kReadOnlySeal) != 0;
  std::byte* data =
      map(size, MAP_SHARED, file.fd, "Segment::attach", is_read_only ? PROT_READ : PROT_READ | PROT_WRITE);
  return {data, size, file.release()};
}

Segment Segment::heap(std::size_t bytes) {
  const std::size_t size = page_rounded(bytes, "Segment::heap");
  return {map(size, MAP_PRIVATE | MAP_ANONYMOUS, -1, "Segment::heap"), size, -1};
}

void Segment::hide_from_children() {
  if (fd_ < 0 || is_hidden_) return;
  HiddenMappings& mappings = hidden_mappings();
  static const int registered =
      ::pthread_atfork([] { hidden_mappings().mutex.lock(); }, [] { hidden_mappings().mutex.unlock(); }, map_privately);
  if (registered != 0) throw_errno(Status::kNoMemory, "Segment::hide_from_children: pthread_atfork", registered);
  const std::lock_guard lock(mappings.mutex);
  mappings.all.push_back({data_, size_, fd_});
  is_hidden_ = true;
}

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      fd_(std::exchange(other.fd_, -1)),
      is_hidden_(std::exchange(other.is_hidden_, false)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  Segment taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  std::swap(fd_, taken.fd_);
  std::swap(is_hidden_, taken.is_hidden_);
  return *this;
}

Segment::~Segment() {
  if (is_hidden_) {
    HiddenMappings& mappings = hidden_mappings();
    const std::lock_guard lock(mappings.mutex);
    std::erase_if(mappings.all, [this](const auto& mapping) { return mapping.data == data_; });
  }
  if (data_ != nullptr) ::munmap(data_, size_);
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace pathways
