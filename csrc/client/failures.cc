#include "client/failures.h"

#include <algorithm>
#include <utility>

namespace pathways {

/// The failure that a future which fails now with this text has.
std::shared_ptr<Failures::Failure> Failures::failure_of(std::string text, int64_t now_ns) {
  std::shared_ptr<Failure>& known = recent_[text];
  if (known == nullptr || now_ns - known->first_ns > kTogether.count()) {
    known = std::make_shared<Failure>();
    known->is_read = text.starts_with(kCancelled);
    known->text = std::move(text);
    known->first_ns = now_ns;
  }
  ++known->futures;
  return known;
}

void Failures::settle(Handle handle) {
  if (settled_.size() == kRemembered) settled_.pop_front();
  settled_.push_back(handle.raw);
}

void Failures::add(Handle handle, std::string text, int64_t now_ns) {
  if (by_handle_.contains(handle.raw)) return;
  const std::shared_ptr<Failure> failure = failure_of(std::move(text), now_ns);
  ++failure->live;
  by_handle_.emplace(handle.raw, failure);
}

void Failures::add_released(Handle handle, std::string text, int64_t now_ns) {
  if (std::find(settled_.rbegin(), settled_.rend(), handle.raw) != settled_.rend()) return;
  settle(handle);
  const std::shared_ptr<Failure> failure = failure_of(std::move(text), now_ns);
  if (failure->live == 0 && std::find(over_.begin(), over_.end(), failure) == over_.end()) over_.push_back(failure);
}

std::string Failures::read(Handle handle) {
  const auto found = by_handle_.find(handle.raw);
  if (found == by_handle_.end()) return {};
  const std::shared_ptr<Failure> failure = found->second;
  if (!failure->is_read) mark_read(failure->text);
  return failure->text;
}

std::string Failures::text_of(Handle handle) const {
  const auto found = by_handle_.find(handle.raw);
  return found == by_handle_.end() ? std::string() : found->second->text;
}

void Failures::mark_read(const std::string& text) {
  for (const auto& [raw, each] : by_handle_) each->is_read |= each->text == text;
  for (const auto& each : over_) each->is_read |= each->text == text;
}

void Failures::release(Handle handle) {
  const auto found = by_handle_.find(handle.raw);
  if (found == by_handle_.end()) return;
  const std::shared_ptr<Failure> failure = std::move(found->second);
  by_handle_.erase(found);
  settle(handle);
  if (--failure->live == 0) over_.push_back(failure);
}

void Failures::forget(Handle token, bool is_pending) {
  if (is_pending) settle(token);
  const auto found = by_handle_.find(token.raw);
  if (found == by_handle_.end()) return;
  --found->second->futures;
  // What only tokens had is of no use to anybody.
  if (--found->second->live == 0 && found->second->futures != 0) over_.push_back(found->second);
  by_handle_.erase(found);
}

std::vector<Failures::Unread> Failures::take_unread(int64_t now_ns, bool all) {
  std::vector<Unread> unread;
  const auto tell = [&](Failure& failure) {
    if (!failure.is_read) unread.push_back({failure.text, failure.futures});
    failure.is_read = true;  // UNREAD-1
  };
  const auto is_done = [&](const std::shared_ptr<Failure>& failure) {
    if (failure->live != 0) return true;  // a further future has joined it: its release comes here again
    if (!all && now_ns - failure->first_ns <= kTogether.count()) return false;
    tell(*failure);
    return true;
  };
  std::erase_if(over_, is_done);
  std::erase_if(recent_, [&](const auto& each) { return now_ns - each.second->first_ns > kTogether.count(); });
  if (all) {
    for (const auto& [raw, failure] : by_handle_) tell(*failure);
  }
  return unread;
}

}  // namespace pathways
