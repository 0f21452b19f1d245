/// Which client's run enters the order next, so that clients share device time by weight and priority.
///
/// Pure: no thread, no clock, no I/O. The caller passes the time in, and asks. It is used before the order is drawn;
/// what has entered the order is not changed any more (ORD-1, GANG-1).
///
/// A pool is a set of devices whose time is shared. A run takes time on one pool or on several. Each client offers at
/// most one run, its oldest. `pick` says which client's run enters now.
///
///   SHARE-1 (fair)    among clients of equal priority that have work, each gets time on a pool in proportion to its
///                     weight. Method: start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996), per pool and
///                     priority. A client has a finish tag per pool: what it was charged there, divided by its weight.
///                     An offer's start tag is the finish tag, but not less than the virtual time of its priority on
///                     the pool. That virtual time is the least start tag among the offers of this priority there. So a
///                     client that comes late, or comes back, gets no credit for the time in which it had no work. An
///                     offer's lag is how far its start tag is ahead of the virtual time, on the pool where that is
///                     most. The least lag is picked. A client whose weight or priority changes keeps its debt: the
///                     device time by which its finish tag is ahead of the virtual time. So it neither pays for the
///                     share that it had before, nor gets the others' share until they have caught up.
///   SHARE-2 (bounded) a run enters only while little device time is outstanding on its pools: estimated time of runs
///                     that have entered and are not over. A pool is open when, by the clock, its outstanding runs end
///                     within its horizon. It is closed when they end after twice the horizon or later. The devices
///                     may stand still, as when a gang waits for its other pools. So a pool with two runs or more is
///                     also not open with 3 horizons outstanding, and closed with 5. A run may enter when one of its
///                     pools is open and none is closed: it need not find all of them open in the same moment.
///                     When no run has entered or ended for a while, one more run enters. For the outstanding runs may
///                     wait for their client to answer a callback, and the offered run may keep the answer back.
///   SHARE-3 (busy)    an open pool takes any offer that delays nobody before it in the line. The policy keeps no
///                     device idle for a client that has no offer. An offer that may not enter holds back those behind
///                     it in the line. Its pools that are not open take no run before its own. If one of its pools is
///                     closed, its open pools are reserved for the moment at which none is closed any more. Until then
///                     they take only runs that leave them unclosed at that moment (backfilling: Lifka, JSSPP 1995).
///                     When a pool has nothing left to do while an offer waits for it, its horizon was too short: it
///                     is doubled. It shrinks slowly with each run.
///   SHARE-4 (classes) a higher priority goes first. A waiting offer rises by one class per `aging_ns`, so a lower
///                     priority waits for a bounded time.
///   SHARE-5 (charged) a run is charged its estimate when it enters, and what it took when it is over. What is given
///                     back then, because the run took less, is not lost to the rule for those who come late: until it
///                     is used up, the start tag may be that much less than the virtual time.
///
/// Cost: pick is O(offers x (pools of an offer + log offers)), and without the logarithm when no offer may enter.
/// Everything else is O(pools of a run). Threading: one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace pathways {

using PoolId = uint32_t;

/// Device time on one pool, in nanoseconds.
struct PoolTime {
  PoolId pool = 0;
  int64_t ns = 0;
};

/// How a cluster decides whose run is next.
enum class PolicyKind : uint8_t {
  kFifo,      ///< what comes first runs first: SharePolicy is not used
  kShare,     ///< by weight
  kPriority,  ///< by priority, and by weight among clients of equal priority; offers rise (SHARE-4)
};

class SharePolicy {
 public:
  struct Options {
    int64_t horizon_ns = 2'000'000;        ///< of each pool, in the beginning
    int64_t least_horizon_ns = 1'000'000;  ///< it never shrinks below this
    int64_t most_horizon_ns = 16'000'000;  ///< it never grows beyond this
    int64_t aging_ns = 0;                  ///< 0: offers do not rise
  };

  /// SHARE-2: without a run that enters or ends, one more enters after this time.
  static constexpr int64_t kStandstill_ns = 20'000'000;

  explicit SharePolicy(Options options) : options_(options) {}

  /// Adds a client, or changes its weight (above 0) and its priority: both act from the next `pick` on.
  void set_client(uint32_t client, double weight, int32_t priority);
  /// The client's offer goes. Its runs that are not over stay outstanding until `over`.
  void remove_client(uint32_t client);

  /// The client has a run that takes `estimate`, on at least one pool. It replaces an earlier offer of the client.
  void offer(uint32_t client, std::span<const PoolTime> estimate, int64_t now);
  void withdraw(uint32_t client);
  bool has_offer(uint32_t client) const;
  uint64_t offers() const { return offering_.size(); }

  /// The client whose run enters now; its offer is over. Nothing: no offer may enter now.
  std::optional<uint32_t> pick(int64_t now);
  /// When `pick` may find something although no run is over before; INT64_MAX: never, as there is no offer.
  int64_t next_ns() const;

  /// A run of the client has entered the order.
  void entered(uint32_t client, std::span<const PoolTime> estimate, int64_t now);
  /// The run is over on a pool. `estimate`: as it entered. `took_ns`: what it is charged; 0 for a run that was dropped.
  void over(uint32_t client, PoolTime estimate, int64_t took_ns, int64_t now);

  /// Some devices of pool `from` are pool `to` from now on; runs that are outstanding count on `from` only.
  void split(PoolId from, PoolId to);

  int64_t horizon_ns(PoolId pool) const { return pool < pools_.size() ? pools_[pool].horizon_ns : options_.horizon_ns; }
  int64_t outstanding_ns(PoolId pool) const { return pool < pools_.size() ? pools_[pool].outstanding_ns : 0; }
  /// Places for priorities that clients have, or had: it is bounded by the clients that there were at once.
  size_t class_count() const { return classes_.size(); }
  void validate() const;

 private:
  static constexpr int64_t kNotOpen = 3, kClosed = 5;  ///< horizons outstanding, in two runs or more
  /// The clients of one priority on one pool.
  struct Level {
    double virtual_time = 0;  ///< ns of device time of a client of weight 1
    double least_start = 0;   ///< scratch of pick(): among the offers
    uint64_t looked = 0;      ///< scratch of pick(): the pick that wrote `least_start`
  };
  struct Pool {
    std::vector<Level> levels;   ///< by class; missing ones are at 0
    int64_t outstanding_ns = 0;  ///< estimates of the runs that are not over
    uint32_t outstanding = 0;    ///< their number
    int64_t busy_until = 0;      ///< when they are over by the estimates
    int64_t stirred_ns = 0;      ///< when a run entered or ended last
    int64_t horizon_ns = 0;
    bool is_barred = false;      ///< scratch of pick(): an offer before in the line waits until it is open
    int64_t reserved_ns = 0;     ///< scratch of pick(): it must not be closed at this time; 0: it is not reserved
    bool is_waited_for = false;  ///< an offer found it not open at the last pick
    /// The times from which it is open, and no longer closed, if no run ends before.
    int64_t opens_ns() const { return is_full(kNotOpen) ? still_ns() : busy_until - horizon_ns + 1; }
    int64_t uncloses_ns() const { return is_full(kClosed) ? still_ns() : busy_until - 2 * horizon_ns + 1; }
    int64_t still_ns() const { return std::max(busy_until, stirred_ns) + kStandstill_ns; }
    bool is_full(int64_t horizons) const { return outstanding >= 2 && outstanding_ns >= horizons * horizon_ns; }
  };
  struct Client {
    uint32_t id = 0;
    double weight = 1;
    size_t its_class = 0;  ///< position in `classes_`
    bool has_offer = false;
    int64_t offered_ns = 0;
    uint64_t number = 0;  ///< of the offer
    std::vector<PoolTime> offer;
    std::vector<double> finish;    ///< finish tags by pool; missing ones are 0
    std::vector<double> refunded;  ///< by pool, as long as `finish`: given back and not used up
  };
  /// A priority that clients have.
  struct Class {
    int32_t priority = 0;
    uint32_t clients = 0;  ///< 0: this position is free
  };
  /// An offer's place in the line.
  struct Place {
    int64_t rank;
    double lag;
    Client* client;
    bool operator<(const Place& other) const {
      if (rank != other.rank) return rank > other.rank;
      return lag < other.lag || (lag <= other.lag && client->number < other.client->number);
    }
  };
  static constexpr int64_t kShrinkPart = 256;  ///< a horizon shrinks by this part per run

  Pool& pool(PoolId id);
  Level& level(PoolId pool, size_t its_class);
  size_t join_class(int32_t priority);
  void change(Client& client, double weight, int32_t priority);
  void advance_virtual_times(int64_t now);
  bool may_enter(const Client& client, int64_t now) const;
  bool delays_nobody(const Client& client, int64_t now) const;
  void hold_back_others(const Client& client, int64_t now);
  double start(const Client& client, PoolId id) const;
  double lag(const Client& client) const;
  int64_t rank(const Client& client, int64_t now) const;
  static double& finish_tag(Client& client, PoolId pool);

  const Options options_;
  std::vector<Pool> pools_;
  std::vector<Class> classes_;
  std::unordered_map<uint32_t, Client> clients_;
  std::vector<Client*> offering_;  ///< clients that have an offer
  std::vector<Place> line_;        ///< scratch of pick()
  uint64_t next_number_ = 1;
  uint64_t picks_ = 0;
  int64_t picked_ns_ = 0;  ///< the time of the last pick
};

}  // namespace pathways
