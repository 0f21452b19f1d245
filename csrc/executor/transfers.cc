/// The executor's half of cross-slice transfers: post where to write, send when the source is ready, count arrivals.
///
/// A destination takes room when its run is prepared and tells each source where to write (a post); a source writes
/// straight there once its value is ready, so each byte is copied once, and says so (an arrival). Posts and arrivals
/// may come before the run itself is prepared here: the exchange is then made by whoever comes first.
#include "base/check.h"
#include "executor/executor.h"

namespace pathways {

void Executor::prepare_transfer(uint32_t slot, uint32_t index) {
  Run& run = *runs_[slot];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(index);
  if (is_local(plan, node)) return;
  const uint64_t key = exchange_key(run.order, node.global_node);
  Exchange& exchange = exchanges_[key];
  PW_CHECK(!exchange.is_prepared);
  exchange.is_prepared = true;
  exchange.run = slot;
  exchange.node = index;
  exchange.sends_left += node.destination_count;
  exchange.arrivals_left += node.source_count;
  if (node.output_count == 0) return;
  // Room is given in the order of the runs: a younger receive that took the last room could wait for an older one's
  // consumer, which waits for room.
  if (!stalled_receives_.empty() || !post_receive(key)) stalled_receives_.push_back(key);
}

bool Executor::is_local(const Plan& plan, const NodeRecord& node) const {
  const auto sources = plan.sources(node), destinations = plan.destinations(node);
  return node.spread == 0 && sources.size() == 1 && sources[0] == options_.host && destinations.size() == 1 &&
         destinations[0] == options_.host;
}

void Executor::start_transfer(NodeRef ref) {
  Run& run = *runs_[ref.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(ref.node);
  const uint32_t input = plan.inputs(node)[0];
  const uint32_t error = run.poison[ref.node];
  if (error == 0 && is_local(plan, node) && !has_room(run, node)) {
    throttled_.push_back(ref);
    return;
  }
  ++stats_.transfers;
  if (is_local(plan, node)) {
    const uint32_t output = plan.outputs(node)[0];
    Value moved = nullptr;
    if (error != 0) {
      poison(ref.run, output, error);
    } else if (backend_.transfer(context(run, ref.node), run.values[input], &moved) == Status::kOk) {
      book(run, node, moved);
      deliver(ref.run, output, moved, node.devices, ++age_);
    } else {
      poison(ref.run, output, new_error(std::string(backend_.last_error())));
    }
    read_done(run, plan.inputs(node));
    close_step(ref.run);
    return;
  }
  const uint64_t key = exchange_key(run.order, node.global_node);
  Exchange& exchange = exchanges_.at(key);
  if (error != 0) {
    exchange.source_ready = true;
    exchange.source_error = error;
  } else {
    exchange.source = retain(run.values[input]);
    watch(node.input_devices, {Watch::Kind::kSend, false, ref.run, ref.node, retain(exchange.source), key, age_});
  }
  read_done(run, plan.inputs(node));
  if (error != 0) try_send(key);
}

bool Executor::post_receive(uint64_t key) {
  Exchange& exchange = exchanges_.at(key);
  Run& run = *runs_[exchange.run];
  const NodeRecord& node = run.plan->plan.node(exchange.node);
  std::vector<Landing> landings;
  const Status status = backend_.begin_receive(context(run, exchange.node), &landings);
  if (status == Status::kNoMemory) return false;
  exchange.has_room = status == Status::kOk;
  if (status != Status::kOk) {
    // The sources still hear from us, with nowhere to write, so that they are done with it.
    exchange.receive_error = new_error(std::string(backend_.last_error()));
    landings.clear();
    for (uint32_t source : run.plan->plan.sources(node)) landings.push_back({source, {}});
  }
  const uint64_t order = run.order;
  const uint32_t global = node.global_node;
  for (Landing& landing : landings) {
    if (landing.source == options_.host) {
      exchange.posts.push_back(std::move(landing));
    } else {
      link_.post(landing.source, order, global, landing.offsets);
    }
  }
  try_send(key);
  return true;
}

void Executor::on_post(uint64_t order, uint32_t node, uint32_t host, std::span<const uint64_t> offsets) {
  const uint64_t key = exchange_key(order, node);
  exchanges_[key].posts.push_back({host, {offsets.begin(), offsets.end()}});
  try_send(key);
  drain();
}

void Executor::try_send(uint64_t key) {
  Exchange& exchange = exchanges_.at(key);
  if (!exchange.is_prepared || !exchange.source_ready) return;
  if (exchange.posts.empty()) {
    finish_exchange(key);
    return;
  }
  const std::vector<Landing> posts = std::move(exchange.posts);
  exchange.posts.clear();
  Run& run = *runs_[exchange.run];
  const NodeContext where = context(run, exchange.node);
  const uint32_t global = run.plan->plan.node(exchange.node).global_node;
  bool to_self = false, self_failed = false;
  std::string self_error;
  for (const Landing& post : posts) {
    bool failed = false;
    std::string text;
    if (exchange.source_error != 0) {
      failed = true;
      text = error_text(exchange.source_error);
    } else if (!post.offsets.empty() &&
               backend_.send(where, exchange.source, post.source, post.offsets) != Status::kOk) {
      failed = true;
      text = backend_.last_error();
    }
    --exchange.sends_left;
    exchange.sent.push_back(post.source);
    if (post.source == options_.host) {
      to_self = true;
      self_failed = failed;
      self_error = text;
    } else {
      link_.arrived(post.source, where.order, global, failed, text);
    }
  }
  if (exchange.sends_left == 0 && exchange.source != nullptr) {
    drop(exchange.source);
    exchange.source = nullptr;
  }
  if (to_self) {
    on_arrived(where.order, global, options_.host, self_failed, self_error);
  } else {
    finish_exchange(key);
  }
}

void Executor::on_arrived(uint64_t order, uint32_t node, uint32_t host, bool failed, std::string_view text) {
  const uint64_t key = exchange_key(order, node);
  Exchange& exchange = exchanges_.at(key);  // we posted, so we are prepared
  PW_CHECK(exchange.arrivals_left > 0);
  exchange.arrived.push_back(host);
  if (failed && exchange.receive_error == 0) exchange.receive_error = new_error(std::string(text));
  if (--exchange.arrivals_left == 0) receive_done(key);
  finish_exchange(key);
  drain();
}

void Executor::receive_done(uint64_t key) {
  Exchange& exchange = exchanges_.at(key);
  Run& run = *runs_[exchange.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(exchange.node);
  const NodeContext where = context(run, exchange.node);
  const uint32_t output = plan.outputs(node)[0];
  Value landed = nullptr;
  if (exchange.receive_error != 0) {
    if (exchange.has_room) backend_.abandon_receive(where);
    poison(exchange.run, output, exchange.receive_error);
  } else if (backend_.finish_receive(where, &landed) == Status::kOk) {
    book(run, node, landed);
    deliver(exchange.run, output, landed, node.devices, ++age_);
  } else {
    poison(exchange.run, output, new_error(std::string(backend_.last_error())));
  }
}

void Executor::finish_exchange(uint64_t key) {
  const auto at = exchanges_.find(key);
  if (at == exchanges_.end()) return;
  Exchange& exchange = at->second;
  if (!exchange.is_prepared || exchange.sends_left != 0 || exchange.arrivals_left != 0) return;
  const uint32_t slot = exchange.run;
  // Where all destinations are lost, the source is still to come.
  if (!exchange.source_ready && runs_[slot]->plan->plan.node(exchange.node).input_count != 0) return;
  if (exchange.source != nullptr) drop(exchange.source);
  exchanges_.erase(at);
  close_step(slot);
}

}  // namespace pathways
