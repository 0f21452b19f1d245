// A head with two machines, to whose hosts a client leases memory.
#pragma once

#include "link/link_ends.h"

namespace pathways::test {

/// A client's blocks that are leased to hosts 0 and 1 of one machine, and to host 2 of another.
struct Leases : Head {
  Leases() : Head(2) {
    for (uint32_t host = 0; host < 3; ++host) (*this)[host / 2].add_host(host, 5);
    hub.add_group(kGroup, {0, 1, 2});
    for (size_t m = 0; m < 2; ++m) (*this)[m].twin_client(kClient, arena_bytes());
  }
  ArenaView there(size_t machine) { return ClientView((*this)[machine].clients.at(kClient)).arena(); }
  void order(uint32_t host, const Bytes& record) { put((*this)[host / 2].hosts.at(host).orders, record); }
  uint64_t block(size_t bytes, uint64_t borrowers, uint64_t stamp) {
    uint64_t offset = 0;
    EXPECT_EQ(arena().allocate(bytes, &offset), Status::kOk);
    if (borrowers != 0) arena().lease_out(offset, borrowers, stamp);
    return offset;
  }
  bool is_lent(uint64_t offset, unsigned host) { return ClientView(client).arena().find_leased(offset, 1, host); }
  /// Where the block of the host's next command lies on its machine.
  uint64_t place(uint32_t host) {
    const Bytes record = next((*this)[host / 2].hosts.at(host).inbox);
    return record.empty() ? 0 : read_record<CommandRecord>(record).lease_at;
  }
  /// The host has written these bytes of the fetch's block.
  void complete(uint32_t host, Handle token, uint64_t at, uint64_t bytes) {
    put((*this)[host / 2].hosts.at(host).outgoing,
        joined(FetchDoneRecord{{RecordKind::kFetchDone, 0, Head::kClient}, token.raw, 1, 0}, BlockPiece{at, bytes}));
  }
};

}  // namespace pathways::test
