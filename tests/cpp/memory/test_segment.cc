// memory/segment.h
//   shared     both views see one memory                    Segment.TwoViewsShareMemory
//   no name    nothing is left after the last user          Segment.NothingIsLeftAfterTheLastUser
//   kill -9    also when it was killed                      Segment.NothingIsLeftAfterAKill
//   sealed     nobody can shrink it under a reader          Segment.CannotBeResized
//   FORK-1     a forked child has a private copy             Segment.AForkedChildOfAHiddenOneWritesToItself
//   errors     each says what came                          Segment.Refuses*
#include "memory/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "base/status.h"
#include "support.h"

namespace pathways::test::test_segment {
namespace {

/// Descriptors and mappings of this process whose name has `tag`.
int uses_of(const std::string& tag) {
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    found += std::filesystem::read_symlink(entry.path(), gone).string().find(tag) != std::string::npos ? 1 : 0;
  }
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  char line[512];
  while (std::fgets(line, sizeof line, maps) != nullptr) found += std::strstr(line, tag.c_str()) != nullptr ? 1 : 0;
  std::fclose(maps);
  return found;
}

template <class Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return std::string(to_string(error.status())) + ": " + error.what();
  }
  return "nothing was thrown";
}

TEST(Segment, IsZeroedAndPageSized) {
  for (const Segment& segment : {Segment::create("zeroed", 100), Segment::heap(100)}) {
    ASSERT_NE(segment.data(), nullptr);
    EXPECT_EQ(segment.size() % 4096, 0U);
    for (std::size_t i = 0; i < segment.size(); ++i) ASSERT_EQ(segment.data()[i], std::byte{0});
  }
  EXPECT_EQ(Segment::heap(1).fd(), -1);
  EXPECT_EQ(Segment().data(), nullptr);
}

TEST(Segment, TwoViewsShareMemory) {
  const Segment one = Segment::create("two-views", 8192);
  const Segment two = test::second_view(one);
  EXPECT_EQ(two.size(), one.size());
  EXPECT_NE(two.data(), one.data());
  one.data()[4097] = std::byte{42};
  EXPECT_EQ(two.data()[4097], std::byte{42});
  test::Child child([&] {
    one.data()[1] = std::byte{7};
    return 0;
  });
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(two.data()[1], std::byte{7});
}

TEST(Segment, MovesItsOwnership) {
  Segment one = Segment::create("moved", 4096);
  std::byte* data = one.data();
  Segment two = std::move(one);
  EXPECT_EQ(two.data(), data);
  EXPECT_EQ(one.data(), nullptr);  // NOLINT: what moving leaves is what is tested
  two = Segment::create("moved-again", 4096);
  EXPECT_EQ(uses_of("memfd:moved ("), 0);
  EXPECT_EQ(uses_of("memfd:moved-again"), 2);
}

TEST(Segment, AForkedChildOfAHiddenOneWritesToItself) {
  Segment shared = Segment::create("shared-with-children", 8192);
  Segment hidden = Segment::create("hidden-from-children", 8192);
  hidden.hide_from_children();
  hidden.hide_from_children();
  Segment moved = std::move(hidden);
  moved.data()[0] = std::byte{1};
  const pid_t child = ::fork();
  if (child == 0) {
    const bool sees = moved.data()[0] == std::byte{1};
    moved.data()[0] = std::byte{2};
    moved.data()[5000] = std::byte{2};
    shared.data()[0] = std::byte{2};
    ::_exit(sees ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(moved.data()[0], std::byte{1});
  EXPECT_EQ(moved.data()[5000], std::byte{0});
  EXPECT_EQ(shared.data()[0], std::byte{2});
  Segment::heap(4096).hide_from_children();
  moved = Segment();  // and no later fork maps anything where it was
  const pid_t later = ::fork();
  if (later == 0) ::_exit(uses_of("hidden-from-children"));
  ASSERT_EQ(::waitpid(later, &status, 0), later);
  EXPECT_EQ(status, 0);
}

TEST(Segment, NothingIsLeftAfterTheLastUser) {
  {
    const Segment segment = Segment::create("last-user", 1 << 20);
    EXPECT_EQ(uses_of("memfd:last-user"), 2);
    const Segment again = test::second_view(segment);
    EXPECT_EQ(uses_of("memfd:last-user"), 4);
  }
  EXPECT_EQ(uses_of("memfd:last-user"), 0);
}

/// Sends the descriptor over a socket, as processes that are no family do.
void send_fd(int socket, int fd) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  ::sendmsg(socket, &message, 0);
}

int receive_fd(int socket) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (::recvmsg(socket, &message, 0) != 1 || CMSG_FIRSTHDR(&message) == nullptr) return -1;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
  return fd;
}

TEST(Segment, NothingIsLeftAfterAKill) {
  int sockets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  test::Child child([&] {
    const Segment made = Segment::create("killed-user", 1 << 20);
    std::memset(made.data(), 5, made.size());
    send_fd(sockets[1], made.fd());
    ::pause();
    return 0;
  });
  {
    const test::Watchdog watchdog("NothingIsLeftAfterAKill");
    const Segment mine = Segment::attach(receive_fd(sockets[0]));
    child.kill();
    EXPECT_EQ(mine.data()[mine.size() - 1], std::byte{5}) << "the memory lives as long as its last user";
    struct stat info{};
    EXPECT_EQ(::fstat(mine.fd(), &info), 0);
    EXPECT_EQ(info.st_nlink, 0U) << "no file system knows it";
  }
  EXPECT_EQ(uses_of("memfd:killed-user"), 0);
  ::close(sockets[0]);
  ::close(sockets[1]);
}

TEST(Segment, CannotBeResized) {
  const Segment segment = Segment::create("sealed", 8192);
  EXPECT_NE(::ftruncate(segment.fd(), 4096), 0);
  EXPECT_NE(::ftruncate(segment.fd(), 1 << 20), 0);
}

TEST(Segment, RefusesWhatItCannotMap) {
  EXPECT_EQ(message_of([] { Segment::create("none", 0); }).rfind("Invalid: Segment::create: expected a size", 0), 0U);
  EXPECT_EQ(message_of([] { Segment::heap(0); }).rfind("Invalid: Segment::heap: expected a size", 0), 0U);
#if !defined(PATHWAYS_SANITIZED)
  const std::string huge = message_of([] { Segment::create("huge", std::size_t{1} << 62); });
  EXPECT_EQ(huge.rfind("NoMemory: ", 0), 0U) << huge;
  EXPECT_NE(huge.find(std::to_string(std::size_t{1} << 62)), std::string::npos) << huge;
#endif
}

TEST(Segment, RefusesDescriptorsThatAreNoSegments) {
  EXPECT_EQ(message_of([] { Segment::attach(-1); }).rfind("Invalid: Segment::attach: descriptor -1", 0), 0U);
  const int empty = ::memfd_create("empty-file", MFD_CLOEXEC);
  EXPECT_NE(message_of([&] { Segment::attach(empty); }).find("got 0 bytes"), std::string::npos);
  EXPECT_EQ(::fcntl(empty, F_GETFD), -1) << "attach owns the descriptor also when it throws";
  const int unsealed = ::memfd_create("unsealed-file", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(unsealed, 4096), 0);
  EXPECT_NE(message_of([&] { Segment::attach(unsealed); }).find("sealed against shrinking"), std::string::npos);
}

}  // namespace
}  // namespace pathways::test::test_segment
