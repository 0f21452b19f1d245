#include "sync/ring_block.h"

#include <string>

#include "base/status.h"

namespace pathways {

RingBlock::RecordHeader RingBlock::behind_skip(RecordHeader header, std::uint64_t& position, std::uint64_t tail) const {
  if (header.mark != kSkip) throw_corrupt_ring("record mark", header.mark);
  // A skip is followed by the record that caused it, at the start of the block.
  const std::uint64_t rest = capacity - offset_of(position);
  if (position + rest >= tail) throw_corrupt_ring("skip mark at position", position);
  position += rest;
  header = copy_header(position);
  if (header.mark == kSkip) throw_corrupt_ring("skip mark at position", position);
  if (header.mark != kRecord) throw_corrupt_ring("record mark", header.mark);
  return header;
}

void RingBlock::validate(std::uint64_t head, std::uint64_t tail) const {
  for (std::uint64_t position = head; position != tail;) position += footprint(checked_length(position, tail));
}

void throw_corrupt_ring(const char* what, std::uint64_t got) {
  throw Error(Status::kInvalid, std::string("corrupt ring: unexpected ") + what + ' ' + std::to_string(got));
}

}  // namespace pathways
