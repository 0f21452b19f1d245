#include "policy/share_policy.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace pathways {

SharePolicy::Pool& SharePolicy::pool(PoolId id) {
  while (id >= pools_.size()) pools_.emplace_back().horizon_ns = options_.horizon_ns;
  return pools_[id];
}

/// Where the clients of a class stand on a pool.
SharePolicy::Level& SharePolicy::level(PoolId id, size_t its_class) {
  auto& levels = pool(id).levels;
  if (its_class >= levels.size()) levels.resize(its_class + 1);
  return levels[its_class];
}

/// The class of a priority, which has one client more.
size_t SharePolicy::join_class(int32_t priority) {
  const auto same = std::find_if(classes_.begin(), classes_.end(),
                                 [&](const Class& each) { return each.clients != 0 && each.priority == priority; });
  const auto free = std::find_if(classes_.begin(), classes_.end(), [](const Class& each) { return each.clients == 0; });
  const auto at = static_cast<size_t>((same != classes_.end() ? same : free) - classes_.begin());
  if (at == classes_.size()) classes_.emplace_back();
  if (classes_[at].clients++ != 0) return at;
  classes_[at].priority = priority;
  for (Pool& each : pools_) {
    if (at < each.levels.size()) each.levels[at] = {};
  }
  return at;
}

void SharePolicy::set_client(uint32_t id, double weight, int32_t priority) {
  PW_CHECK(weight > 0);
  const auto [found, is_new] = clients_.try_emplace(id);
  Client& client = found->second;
  if (!is_new) {
    change(client, weight, priority);
    return;
  }
  client.id = id;
  client.weight = weight;
  client.its_class = join_class(priority);
}

/// SHARE-1: the client keeps its debt on each pool, in nanoseconds.
void SharePolicy::change(Client& client, double weight, int32_t priority) {
  const size_t old_class = client.its_class;
  const size_t new_class = join_class(priority);
  for (PoolId id = 0; id < client.finish.size(); ++id) {
    const double debt = std::max(0.0, client.finish[id] - level(id, old_class).virtual_time) * client.weight;
    client.finish[id] = level(id, new_class).virtual_time + debt / weight;
    client.refunded[id] = 0;
  }
  client.weight = weight;
  client.its_class = new_class;
  if (client.has_offer) {
    for (const PoolTime& each : client.offer) (void)level(each.pool, new_class);
  }
  --classes_[old_class].clients;  // last, so that the position keeps its levels until here
}

void SharePolicy::remove_client(uint32_t id) {
  withdraw(id);
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  --classes_[found->second.its_class].clients;
  clients_.erase(found);
}

void SharePolicy::offer(uint32_t id, std::span<const PoolTime> estimate, int64_t now) {
  PW_DCHECK(!estimate.empty() && clients_.contains(id));
  Client& client = clients_.at(id);
  client.offer.assign(estimate.begin(), estimate.end());
  for (const PoolTime& each : estimate) (void)level(each.pool, client.its_class);
  if (client.has_offer) return;
  client.has_offer = true;
  client.offered_ns = now;
  client.number = next_number_++;
  offering_.push_back(&client);
}

void SharePolicy::withdraw(uint32_t id) {
  if (!has_offer(id)) return;
  Client& client = clients_.at(id);
  client.has_offer = false;
  std::erase(offering_, &client);
}

bool SharePolicy::has_offer(uint32_t id) const {
  const auto found = clients_.find(id);
  return found != clients_.end() && found->second.has_offer;
}

/// SHARE-2
bool SharePolicy::may_enter(const Client& client, int64_t now) const {
  bool has_open = false;
  for (const PoolTime& each : client.offer) {
    const Pool& at = pools_[each.pool];
    if (now < at.uncloses_ns()) return false;
    has_open = has_open || now >= at.opens_ns();
  }
  return has_open;
}

/// SHARE-3: whether the offer takes nothing from those before it in the line.
bool SharePolicy::delays_nobody(const Client& client, int64_t now) const {
  return std::all_of(client.offer.begin(), client.offer.end(), [&](const PoolTime& each) {
    const Pool& at = pools_[each.pool];
    if (at.is_barred || at.reserved_ns == 0) return !at.is_barred;
    const bool would_be_full = at.outstanding >= 1 && at.outstanding_ns + each.ns >= kClosed * at.horizon_ns;
    return !would_be_full && std::max(at.busy_until, now) + each.ns - 2 * at.horizon_ns < at.reserved_ns;
  });
}

/// SHARE-3: the offer may not enter now. The moment for which its pools are reserved never moves away: the pools that
/// are closed are barred, so their time only becomes less. A full pool may open at any moment.
void SharePolicy::hold_back_others(const Client& client, int64_t now) {
  int64_t unclosed = 0;
  bool is_closed = false;
  for (const PoolTime& each : client.offer) {
    const Pool& at = pools_[each.pool];
    is_closed = is_closed || now < at.uncloses_ns();
    if (!at.is_full(kClosed)) unclosed = std::max(unclosed, at.uncloses_ns());
  }
  for (const PoolTime& each : client.offer) {
    Pool& at = pools_[each.pool];
    at.is_barred = at.is_barred || now < at.opens_ns();
    const int64_t until = std::max(unclosed, now);
    if (is_closed && (at.reserved_ns == 0 || at.reserved_ns > until)) at.reserved_ns = until;
  }
}

double SharePolicy::start(const Client& client, PoolId id) const {
  const double virtual_time = pools_[id].levels[client.its_class].virtual_time;
  if (id >= client.finish.size()) return virtual_time;
  return std::max(client.finish[id], virtual_time - client.refunded[id]);
}

double SharePolicy::lag(const Client& client) const {
  double lag = std::numeric_limits<double>::lowest();
  for (const PoolTime& each : client.offer) {
    const double virtual_time = pools_[each.pool].levels[client.its_class].virtual_time;
    lag = std::max(lag, start(client, each.pool) - virtual_time);
  }
  return lag;
}

/// SHARE-4
int64_t SharePolicy::rank(const Client& client, int64_t now) const {
  const int64_t risen = options_.aging_ns > 0 ? (now - client.offered_ns) / options_.aging_ns : 0;
  return classes_[client.its_class].priority + risen;
}

/// SHARE-1: the virtual time of a class on a pool follows the offers that wait there.
void SharePolicy::advance_virtual_times(int64_t now) {
  ++picks_;
  for (const Client* client : offering_) {
    for (const PoolTime& each : client->offer) {
      Pool& at = pools_[each.pool];
      Level& level = at.levels[client->its_class];
      const double tag = start(*client, each.pool);
      level.least_start = level.looked == picks_ ? std::min(level.least_start, tag) : tag;
      level.looked = picks_;
      at.is_barred = false;
      at.reserved_ns = 0;
      at.is_waited_for = now < at.opens_ns();
    }
  }
  for (const Client* client : offering_) {
    for (const PoolTime& each : client->offer) {
      Level& level = pools_[each.pool].levels[client->its_class];
      level.virtual_time = std::max(level.virtual_time, level.least_start);
    }
  }
}

std::optional<uint32_t> SharePolicy::pick(int64_t now) {
  if (offering_.empty()) return std::nullopt;
  picked_ns_ = now;
  advance_virtual_times(now);
  if (std::none_of(offering_.begin(), offering_.end(), [&](const Client* each) { return may_enter(*each, now); })) {
    return std::nullopt;
  }
  line_.clear();
  for (Client* client : offering_) line_.push_back({rank(*client, now), lag(*client), client});
  std::sort(line_.begin(), line_.end());
  for (const Place& place : line_) {
    if (may_enter(*place.client, now) && delays_nobody(*place.client, now)) {
      for (const PoolTime& each : place.client->offer) pools_[each.pool].is_waited_for = false;
      withdraw(place.client->id);
      return place.client->id;
    }
    hold_back_others(*place.client, now);
  }
  return std::nullopt;
}

int64_t SharePolicy::next_ns() const {
  int64_t next = std::numeric_limits<int64_t>::max();
  for (const Client* client : offering_) {
    int64_t opens = std::numeric_limits<int64_t>::max(), unclosed = 0;
    for (const PoolTime& each : client->offer) {
      const Pool& at = pools_[each.pool];
      opens = std::min(opens, at.opens_ns());
      unclosed = std::max(unclosed, at.uncloses_ns());
    }
    const int64_t may = std::max(opens, unclosed);
    // What the last pick held back waits for an offer that is looked at here, too, or for a run to be over.
    if (may > picked_ns_) next = std::min(next, may);
  }
  return next;
}

double& SharePolicy::finish_tag(Client& client, PoolId id) {
  if (id >= client.finish.size()) {
    client.finish.resize(id + 1, 0);
    client.refunded.resize(id + 1, 0);
  }
  return client.finish[id];
}

void SharePolicy::entered(uint32_t id, std::span<const PoolTime> estimate, int64_t now) {
  PW_DCHECK(clients_.contains(id));
  Client& client = clients_.at(id);
  for (const PoolTime& each : estimate) {
    Pool& at = pool(each.pool);
    double& tag = finish_tag(client, each.pool);
    const double virtual_time = level(each.pool, client.its_class).virtual_time;
    tag = start(client, each.pool) + static_cast<double>(each.ns) / client.weight;
    double& refunded = client.refunded[each.pool];
    refunded = std::clamp(virtual_time - tag, 0.0, refunded);
    ++at.outstanding;
    at.stirred_ns = now;
    at.outstanding_ns += each.ns;
    at.busy_until = std::max(at.busy_until, now) + each.ns;
  }
}

void SharePolicy::over(uint32_t id, PoolTime estimate, int64_t took_ns, int64_t now) {
  Pool& at = pool(estimate.pool);
  PW_DCHECK(at.outstanding > 0 && at.outstanding_ns >= estimate.ns);
  --at.outstanding;
  at.stirred_ns = now;
  at.outstanding_ns -= estimate.ns;
  // Only ever sooner: a run may wait for others between its computations, and then more runs are needed to keep the
  // devices busy (SHARE-3).
  at.busy_until = std::min(at.busy_until, now + at.outstanding_ns);
  if (at.outstanding == 0 && at.is_waited_for) {
    at.horizon_ns = std::min(options_.most_horizon_ns, 2 * at.horizon_ns);
  } else {
    at.horizon_ns = std::max(options_.least_horizon_ns, at.horizon_ns - at.horizon_ns / kShrinkPart);
  }
  at.is_waited_for = at.is_waited_for && at.outstanding != 0;
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  Client& client = found->second;
  const double more = static_cast<double>(took_ns - estimate.ns) / client.weight;
  finish_tag(client, estimate.pool) += more;
  if (more < 0) client.refunded[estimate.pool] -= more;
}

void SharePolicy::split(PoolId from, PoolId to) {
  const Pool old = pool(from);
  Pool& made = pool(to);
  made.levels = old.levels;
  made.horizon_ns = old.horizon_ns;
  for (auto& [id, client] : clients_) {
    if (from >= client.finish.size()) continue;
    const double tag = client.finish[from];
    const double refunded = client.refunded[from];
    finish_tag(client, to) = tag;
    client.refunded[to] = refunded;
  }
}

void SharePolicy::validate() const {
  size_t with_offer = 0;
  for (const auto& [id, client] : clients_) with_offer += client.has_offer ? 1U : 0U;
  PW_CHECK(with_offer == offering_.size());
  for (const Client* client : offering_) PW_CHECK(client->has_offer && !client->offer.empty());
  std::vector<uint32_t> members(classes_.size());
  for (const auto& [id, client] : clients_) ++members.at(client.its_class);
  for (size_t i = 0; i < classes_.size(); ++i) PW_CHECK(members[i] == classes_[i].clients);
  for (const Pool& at : pools_) {
    PW_CHECK(at.outstanding_ns >= 0 && (at.outstanding != 0 || at.outstanding_ns == 0));
    PW_CHECK(at.horizon_ns >= std::min(options_.horizon_ns, options_.least_horizon_ns));
    PW_CHECK(at.horizon_ns <= std::max(options_.horizon_ns, options_.most_horizon_ns));
  }
}

}  // namespace pathways
