#include "link/link_hub.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "link/link.h"
#include "messages/records.h"

namespace pathways {

/// The pieces of the value are inside of their slot, and end with the record.
bool is_completion(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(FutureDoneRecord)) return false;
  const auto record = read_record<FutureDoneRecord>(bytes);
  const size_t size = record.is_large != 0 ? ReadBackArea::kLargeBytes : ReadBackArea::kSmallBytes;
  auto rest = bytes.subspan(sizeof record);
  for (uint32_t i = 0; i < record.runs; ++i) {
    if (rest.size() < sizeof(ValueRun)) return false;
    const auto run = read_record<ValueRun>(rest);
    if (run.offset > size || run.bytes > size - run.offset) return false;
    const size_t whole = padded(sizeof run + size_t{run.bytes});
    if (rest.size() < whole) return false;
    rest = rest.subspan(whole);
  }
  return rest.empty();
}

void complete_future(const ClientView& client, std::span<const std::byte> bytes) {
  const auto record = read_record<FutureDoneRecord>(bytes);
  bytes = bytes.subspan(sizeof record);
  const Handle future{record.handle};
  ReadBackSlot slot;
  if (record.runs != 0 && client.read_back().is_there() &&
      client.read_back().begin_write(client.futures(), future, &slot)) {
    std::byte* to = record.is_large != 0 ? slot.large : slot.small;
    for (uint32_t i = 0; i < record.runs && to != nullptr; ++i) {
      const auto run = read_record<ValueRun>(bytes);
      std::memcpy(to + run.offset, bytes.data() + sizeof run, run.bytes);
      bytes = bytes.subspan(padded(sizeof run + size_t{run.bytes}));
    }
    client.read_back().end_write(future);
  }
  (void)client.futures().complete(future);
}

void LinkHub::add_client(uint32_t client, const ClientView& view, std::shared_ptr<const void> keep,
                         const std::shared_ptr<Link>& link) {
  const std::lock_guard lock(mutex_);
  clients_.insert_or_assign(client, Client{view, std::move(keep), link});
}

void LinkHub::remove_client(uint32_t client) {
  decltype(clients_)::node_type gone;  // it may be the last owner of a link, which takes locks when it goes
  const std::lock_guard lock(mutex_);
  gone = clients_.extract(client);
}

void LinkHub::add_group(uint32_t group, std::vector<uint32_t> hosts) {
  const std::lock_guard lock(mutex_);
  groups_[group] = std::move(hosts);
}

void LinkHub::add_destination(uint32_t host, int32_t incarnation, const std::shared_ptr<Link>& link) {
  const std::lock_guard lock(mutex_);
  destinations_[host] = {incarnation, link, link.get()};
}

void LinkHub::remove_destination(uint32_t host, const Link* link) {
  const std::lock_guard lock(mutex_);
  const auto found = destinations_.find(host);
  if (found != destinations_.end() && found->second.name == link) destinations_.erase(found);
}

std::shared_ptr<Link> LinkHub::link_to(uint32_t host, int32_t incarnation) {
  const std::lock_guard lock(mutex_);
  const auto found = destinations_.find(host);
  if (found == destinations_.end() || found->second.incarnation != incarnation) return nullptr;
  return found->second.link.lock();
}

bool LinkHub::has_room_for(uint64_t bytes, uint64_t mine, const Link& link) {
  const auto fits = [bytes](uint64_t taken, uint64_t most) { return bytes <= most && taken <= most - bytes; };
  if (fits(received_, most_received_)) return true;
  const std::lock_guard lock(mutex_);
  uint64_t count = 0;
  bool has_joined = false;
  for (const auto& [number, client] : clients_) {
    if (client.link != nullptr) ++count;
    has_joined = has_joined || client.link.get() == &link;
  }
  return has_joined && fits(mine, most_received_ / (count * (count + 1)));
}

std::vector<uint32_t> LinkHub::group(uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(number);
  return found == groups_.end() ? std::vector<uint32_t>() : found->second;
}

void LinkHub::complete(std::span<const std::byte> bytes) {
  std::shared_ptr<Link> link;
  {
    const std::lock_guard lock(mutex_);
    const auto found = clients_.find(read_record<FutureDoneRecord>(bytes).header.client);
    if (found == clients_.end()) return;  // the client is gone: nobody waits
    if (found->second.link == nullptr) return complete_future(found->second.view, bytes);
    link = found->second.link;
  }
  // Its sender may hold the queue while it copies a block: only who speaks to this client waits for that.
  (void)link->enqueue(FrameKind::kFutureDone, 0, 0, bytes);
}

bool LinkHub::write(uint32_t client, uint64_t offset, uint64_t at, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end() || at > UINT64_MAX - bytes.size() || !found->second.view.arena().is_there()) return false;
  std::byte* block = found->second.view.arena().find(offset, at + bytes.size());
  if (block == nullptr) return false;
  std::memcpy(block + at, bytes.data(), bytes.size());
  return true;
}

bool LinkHub::read(uint32_t client, uint64_t offset, uint64_t at, std::span<std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end() || at > UINT64_MAX - bytes.size() || !found->second.view.arena().is_there()) return false;
  const std::byte* block = found->second.view.arena().find(offset, at + bytes.size());
  if (block == nullptr) return false;
  std::memcpy(bytes.data(), block + at, bytes.size());
  return true;
}

bool LinkHub::is_leased(uint32_t client, uint64_t offset, uint64_t bytes, uint32_t host) {
  const std::lock_guard lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end() || !found->second.view.arena().is_there()) return false;
  const ArenaView& arena = found->second.view.arena();
  return (host < Arena::kBorrowers ? arena.find_leased(offset, bytes, host) : arena.find(offset, bytes)) != nullptr;
}

void LinkHub::return_lease(uint32_t client, uint64_t offset, uint32_t host) {
  const std::lock_guard lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end() || !found->second.view.arena().is_there()) return;
  const ArenaView& arena = found->second.view.arena();
  (void)(host < Arena::kBorrowers ? arena.return_lease(offset, host) : arena.release(offset));
}

}  // namespace pathways
