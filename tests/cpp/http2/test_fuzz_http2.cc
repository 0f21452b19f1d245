// GRPC-1, GRPC-2: a conversation of a client, changed on its way and cut anywhere, ends at most its connection.
#include <deque>

#include "fuzz.h"
#include "http2/peer.h"
#include "http2/server_connection.h"

namespace pathways::test {
namespace {

std::string conversation(Fuzzer& fuzz) {
  std::string all = kHello;
  uint32_t last = 1;
  for (size_t turn = 1 + fuzz.below(24); turn != 0; --turn) {
    const uint32_t call = static_cast<uint32_t>(fuzz.below(last + 2)) | 1;
    switch (fuzz.below(9)) {
      case 0:
      case 1:
        all += begin_call(last += 2, fuzz.below(4) == 0);
        break;
      case 2:
      case 3:
        all += frame(0, fuzz.below(4) == 0, call, prefixed(std::string(fuzz.below(300), 'x')));
        break;
      case 4:
        all += window(fuzz.below(2) == 0 ? 0 : call, static_cast<uint32_t>(fuzz.odd_number()));
        break;
      case 5:
        all += frame(4, 0, 0, big_endian(1 + fuzz.below(6), 2) + big_endian(fuzz.odd_number(), 4));
        break;
      case 6:
        all += frame(3, 0, call, big_endian(fuzz.below(14), 4));
        break;
      case 7: {
        const std::string block = fields({{":path", "/x"}, {"a", std::string(fuzz.below(100), 'y')}});
        const size_t cut = fuzz.below(block.size());
        last += 2;
        all += frame(1, fuzz.below(2) == 0 ? 0 : 1, last, block.substr(0, cut));
        all += frame(9, 4, last, block.substr(cut));
        break;
      }
      default:
        all += frame(static_cast<uint8_t>(fuzz.below(12)), static_cast<uint8_t>(fuzz.draw()), call,
                     std::string(fuzz.below(40), static_cast<char>(fuzz.draw())));
    }
  }
  return all;
}

}  // namespace

FUZZ(Http2) {
  uint64_t messages = 0, ends = 0;
  while (fuzz.next()) {
    const std::string all = conversation(fuzz);
    std::vector<std::byte> bytes(bytes_of(all).begin(), bytes_of(all).end());
    if (fuzz.below(3) != 0) fuzz.mutate(bytes, 8192);
    const http2::Limits limits{1 + fuzz.below(6), 1 + fuzz.below(400), 1 + fuzz.below(500)};
    http2::ServerConnection connection(limits);
    std::deque<uint32_t> open;
    for (size_t at = 0; at < bytes.size();) {
      const size_t count = std::min(bytes.size() - at, 1 + fuzz.below(fuzz.below(3) == 0 ? 4 : 4096));
      // In memory of its own, so that nothing is read behind it.
      const std::vector<std::byte> part(bytes.begin() + static_cast<ptrdiff_t>(at),
                                        bytes.begin() + static_cast<ptrdiff_t>(at + count));
      at += count;
      if (!connection.feed(part)) break;
      for (const http2::Event& event : connection.take_events()) {
        if (event.kind == http2::Event::Kind::kCall) open.push_back(event.call);
        messages += event.kind == http2::Event::Kind::kMessage;
        EXPECT_LE(event.message.size(), limits.message_bytes);
      }
      EXPECT_LE(connection.calls(), limits.calls);
      if (!open.empty()) {
        const uint32_t call = open[fuzz.below(open.size())];
        switch (fuzz.below(5)) {
          case 0:
            connection.respond(call, std::string(fuzz.below(2000), 'z'));
            break;
          case 1:
            connection.finish(call, static_cast<uint32_t>(fuzz.below(17)), "why");
            break;
          case 2:
            connection.resume(call);
            break;
          case 3:
            connection.hold(call);
            break;
          default:
            break;
        }
      }
      const std::string_view output = connection.output();
      if (!output.empty() && fuzz.below(4) != 0) connection.written(1 + fuzz.below(output.size()));
    }
    ends += connection.is_over();
    (void)connection.take_events();
  }
  fuzz.must_reach(messages);
  fuzz.must_reach(ends);
}

}  // namespace pathways::test
