#include "host/client_ends.h"

#include <array>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "messages/records.h"

namespace pathways {
namespace {

class InMemory final : public ClientEnds {
 public:
  bool attach(uint32_t client, const ClientView& view) override {
    if (client >= clients_.size()) clients_.resize(client + 1);
    const bool is_new = !clients_[client].futures.is_there();
    clients_[client] = {view.futures(), view.read_back()};
    return is_new;
  }
  bool forget(uint32_t client) override {
    if (client >= clients_.size() || !clients_[client].futures.is_there()) return false;
    clients_[client] = {};
    return true;
  }
  void complete(uint32_t client, Handle future) override {
    if (client >= clients_.size() || !clients_[client].futures.is_there()) return;
    (void)clients_[client].futures.complete(future);
  }
  void fetched(uint32_t client, Handle token, std::span<const BlockPiece>) override { complete(client, token); }
  Status read_back(uint32_t client, Handle future, const WriteValue& write) override {
    if (client >= clients_.size() || !clients_[client].futures.is_there()) return Status::kOk;
    const Client& to = clients_[client];
    ReadBackSlot slot;
    if (!to.read_back.is_there() || !to.read_back.begin_write(to.futures, future, &slot)) return Status::kOk;
    const Status status = write(slot);
    to.read_back.end_write(future);
    return status;
  }

 private:
  struct Client {
    FutureView futures;  ///< not there: no such client, or it is gone
    ReadBackView read_back;
  };
  std::vector<Client> clients_;  ///< by number
};

class ByRecord final : public ClientEnds {
 public:
  explicit ByRecord(Outbox& to_controller) : to_controller_(to_controller) {
    // The longest one: every other byte of the value is this host's.
    constexpr size_t kMost = sizeof(FutureDoneRecord) + ReadBackArea::kLargeBytes / 2 * (sizeof(ValueRun) + 8);
    if (to_controller.max_record() >= kMost) return;
    throw Error(Status::kInvalid, "a host whose machine has a link needs a ring to the controller of records of " +
                                      std::to_string(kMost) + " bytes");
  }

  bool attach(uint32_t client, const ClientView& /*view*/) override { return clients_.insert(client).second; }
  bool forget(uint32_t client) override { return clients_.erase(client) != 0; }

  void complete(uint32_t client, Handle future) override {
    if (!clients_.contains(client)) return;
    if (future.raw != future_.raw) written_.runs.clear();
    const FutureDoneRecord record{{RecordKind::kFutureDone, 0, client},
                                  future.raw,
                                  static_cast<uint32_t>(written_.runs.size()),
                                  written_.is_large ? 1u : 0u};
    uint64_t bytes = sizeof record;
    for (const ValueRun& run : written_.runs) bytes += sizeof run + padded(uint64_t{run.bytes});
    to_controller_.send(static_cast<uint32_t>(bytes), [&](std::byte* out) {
      std::memcpy(out, &record, sizeof record);
      out += sizeof record;
      for (const ValueRun& run : written_.runs) {
        std::memcpy(out, &run, sizeof run);
        std::memcpy(out + sizeof run, (written_.is_large ? large_.data() : small_.data()) + run.offset, run.bytes);
        out += sizeof run + padded(run.bytes);
      }
    });
    written_.runs.clear();
  }

  void fetched(uint32_t client, Handle token, std::span<const BlockPiece> written) override {
    if (!clients_.contains(client)) return;
    const FetchDoneRecord record{
        {RecordKind::kFetchDone, 0, client}, token.raw, static_cast<uint32_t>(written.size()), 0};
    to_controller_.send(static_cast<uint32_t>(sizeof record + written.size_bytes()), [&](std::byte* out) {
      std::memcpy(out, &record, sizeof record);
      if (!written.empty()) std::memcpy(out + sizeof record, written.data(), written.size_bytes());
    });
  }

  /// The value goes with the completion, which follows.
  Status read_back(uint32_t client, Handle future, const WriteValue& write) override {
    if (!clients_.contains(client)) return Status::kOk;
    future_ = future;
    written_ = {};
    return write({small_.data(), future.index() < ReadBackArea::kLargeSlots ? large_.data() : nullptr, &written_});
  }

 private:
  Outbox& to_controller_;
  std::unordered_set<uint32_t> clients_;
  Handle future_{0};  ///< whose value is in the slots, as far as `written_` says
  WrittenRuns written_;
  std::array<std::byte, ReadBackArea::kSmallBytes> small_{};
  std::array<std::byte, ReadBackArea::kLargeBytes> large_{};
};

}  // namespace

std::unique_ptr<ClientEnds> ClientEnds::make(const HostView& own, Outbox& to_controller) {
  if (own.to_link().is_there()) return std::make_unique<ByRecord>(to_controller);
  return std::make_unique<InMemory>();
}

}  // namespace pathways
