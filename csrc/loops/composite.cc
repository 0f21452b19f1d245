#include "loops/composite.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

CompositeWalk::CompositeWalk(const Composite& composite, std::span<const uint64_t> arguments)
    : composite_(composite), named_(composite.values, kNone) {
  for (uint32_t i = 0; i < composite.arguments; ++i) name(i, add(arguments[i], false));
  for (const uint32_t i : composite.donated) buffers_[named_[i]].is_owned = true;
}

uint32_t CompositeWalk::add(uint64_t handle, bool is_owned) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(buffers_.size()));
    buffers_.emplace_back();
  }
  const uint32_t buffer = free_.back();
  free_.pop_back();
  buffers_[buffer] = {handle, 0, 0, is_owned, false};
  return buffer;
}

void CompositeWalk::name(uint32_t value, uint32_t buffer) {
  ++buffers_[buffer].names;
  forget(value);
  named_[value] = buffer;
}

void CompositeWalk::unname(uint32_t at) {
  Buffer& buffer = buffers_[at];
  if (--buffer.names != 0) return;
  if (buffer.is_owned && !buffer.is_taken) released_.push_back(buffer.handle);  // WALK-1
  free_.push_back(at);
}

void CompositeWalk::forget(uint32_t value) {
  if (named_[value] == kNone) return;
  const uint32_t buffer = named_[value];
  named_[value] = kNone;
  unname(buffer);
}

void CompositeWalk::forget_unread(const CompositeStep& step) {
  for (const uint32_t value : step.unread) forget(value);
}

const CompositeStep* CompositeWalk::next() {
  while (!is_over() && !is_waiting()) {
    const CompositeStep& step = composite_.steps[at_];
    if (step.kind == CompositeStep::Kind::kRun) return &step;
    if (step.kind == CompositeStep::Kind::kLoop) {
      begin_loop(step);
    } else {
      end_iteration(step);
    }
  }
  if (wrong_ == nullptr && !is_waiting()) {
    for (uint32_t value = 0; value < composite_.values; ++value) forget(value);
  }
  return nullptr;
}

/// At the end of an iteration, before the next one.
bool CompositeWalk::is_far_ahead() const {
  if (is_over() || composite_.steps[at_].kind != CompositeStep::Kind::kEnd || !is_within_ahead()) return false;
  const uint64_t most = std::min<uint64_t>(composite_.parallel, ahead_.known + kAhead);
  return !ahead_.is_over && ahead_.unknown >= most && turns_.back().left > 1;
}

void CompositeWalk::tell(uint64_t number, bool did_something) {
  if (number == 0 || number != ahead()) return;
  PW_DCHECK(ahead_.unknown != 0);
  --ahead_.unknown;
  if (did_something) {
    ++ahead_.known;
  } else {
    ahead_.is_over = true;
  }
}

void CompositeWalk::begin_loop(const CompositeStep& step) {
  const bool is_skipped = step.is_decided && !step.is_ahead && !goes_on_;
  const auto& bound = is_skipped ? composite_.steps[step.partner].outputs : step.outputs;
  for (size_t i = 0; i < step.inputs.size(); ++i) {
    if (named_[step.inputs[i]] == kNone) {
      wrong_ = "a loop carries a value that is not there";
      return;
    }
    name(bound[i], named_[step.inputs[i]]);
  }
  forget_unread(step);
  if (is_skipped) {
    forget_unread(composite_.steps[step.partner]);
    at_ = step.partner + 1;
    return;
  }
  turns_.push_back({static_cast<uint32_t>(at_), step.count});
  if (step.is_ahead) ahead_ = {ahead_.number + 1, 0, 0, false};
  if (step.count > 1 && !step.is_decided) ++many_left_;
  ++at_;
}

void CompositeWalk::end_iteration(const CompositeStep& step) {
  carry_.clear();
  for (const uint32_t value : step.inputs) {
    if (named_[value] == kNone) {
      wrong_ = "a loop carries a value that its body does not make";
      return;
    }
    carry_.push_back(named_[value]);
  }
  for (const uint32_t buffer : carry_) ++buffers_[buffer].names;
  for (const uint32_t value : step.locals) forget(value);
  Turns& turns = turns_.back();
  PW_DCHECK(turns.loop == step.partner && turns.left != 0);
  const CompositeStep& loop = composite_.steps[turns.loop];
  const bool may_go_on = loop.is_ahead ? !ahead_.is_over : !loop.is_decided || goes_on_;
  const bool goes_on = --turns.left != 0 && may_go_on;
  if (goes_on && turns.left == 1 && !loop.is_decided) --many_left_;
  const auto& bound = goes_on ? loop.outputs : step.outputs;
  at_ = goes_on ? turns.loop + 1 : at_ + 1;
  if (!goes_on) turns_.pop_back();
  for (size_t i = 0; i < carry_.size(); ++i) name(bound[i], carry_[i]);
  for (const uint32_t buffer : carry_) unname(buffer);
  if (!goes_on) forget_unread(step);
}

std::span<const uint64_t> CompositeWalk::inputs() {
  inputs_.clear();
  for (const uint32_t value : composite_.steps[at_].inputs) {
    const uint32_t buffer = named_[value];
    if (buffer == kNone || buffers_[buffer].is_taken) {  // WALK-2
      wrong_ = "a run reads a value that is not there, or that an earlier run has taken";
      return {};
    }
    inputs_.push_back(buffers_[buffer].handle);
  }
  const CompositeStep& step = composite_.steps[at_];
  for (const uint32_t value : step.inputs) ++buffers_[named_[value]].reads;
  for (const uint32_t position : step.donated) {
    const Buffer& buffer = buffers_[named_[step.inputs[position]]];
    if (buffer.is_owned && buffer.reads == 1) continue;
    wrong_ = "a run takes a value that is a kept argument or a result of the whole, or that it also reads otherwise";
    break;
  }
  for (const uint32_t value : step.inputs) buffers_[named_[value]].reads = 0;
  if (wrong_ != nullptr) inputs_.clear();
  return inputs_;
}

void CompositeWalk::ran(std::span<const uint64_t> outputs) {
  const CompositeStep& step = composite_.steps[at_];
  for (const uint32_t position : step.donated) {
    Buffer& buffer = buffers_[named_[step.inputs[position]]];
    buffer.is_taken = true;
    taken_.push_back(buffer.handle);
  }
  for (uint32_t i = 0; i < step.outputs.size(); ++i) name(step.outputs[i], add(outputs[i], result_of(i) < 0));
  forget_unread(step);
  is_waiting_ = step.decides;
  if (is_within_ahead()) ++ahead_.unknown;
  ++at_;
}

}  // namespace pathways
