/// The modelled device: the executor's backend without JAX, for stress tests, simulations and measurements.
///
/// Each local device runs its launches in FIFO order, a fixed time per step. A value holds no data, only a checksum of
/// how it was made. So a test can compare any buffer with a sequential computation of the same checksum:
/// `modelled_hash(plan, node, output, inputs)`. Records of values are pooled and reference-counted; `live_values()` is
/// zero when nothing leaked.
///
/// What it checks:
///   ORD-1   the calls on each device come in the cluster's order (order, node). Each call out of order is counted in
///           `order_violations()`.
///   GANG-1  the k-th launch on a communicator is the same call on all its hosts (`Fabric`). Crossed gangs are counted,
///           and give wrong values, as real collectives do without an error.
///   MEM-4   a reference dropped twice aborts.
///   LOOK-1  a value that is read before its launch has run aborts. A launch deletes the inputs that `donate` names, as
///           XLA does: afterwards their readiness is unknown.
/// A transfer passes the checksum through memory. The address of that memory is sent as the offset of the receive
/// buffer, since all hosts are in one process. So ThreadSanitizer checks that the messages "receive ready" and "receive
/// done" order the writes.
///
/// Threading: a backend belongs to its host's thread. Call `learn` and set the options before that thread starts. Any
/// thread may use `Fabric` and `ModelClock`.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/backend.h"
#include "plan/plan.h"
#include "simulate/fabric.h"

namespace pathways {

/// The checksum of output `output` of node `node` (its number in the whole program).
uint64_t modelled_hash(uint32_t plan, uint32_t node, uint32_t output, std::span<const uint64_t> inputs);

struct ModelledFaults {
  uint64_t fail_launch = 0;    ///< the n-th launch is refused; 0: none
  uint64_t fail_value = 0;     ///< the outputs of the n-th launch fail when they should be ready
  uint32_t no_room_early = 0;  ///< the first n transfers that come early are refused
  uint32_t no_memory = 0;      ///< the first n calls of begin_receive find no memory
  uint64_t fail_receive = 0;   ///< the n-th begin_receive fails
  uint64_t fail_send = 0;      ///< the n-th send fails
  int64_t send_ns = 0;         ///< how long a send is under way; 0: it is done at once
  uint64_t fail_put = 0;       ///< the n-th put fails
  bool fail_read_back = false;
  bool fail_tasks = false;      ///< no task can be started
  bool refuse_offload = false;  ///< offload() finds no memory for the values that leave the devices
};

class ModelledBackend final : public Device, public Mover, public ClientWork {
 public:
  struct Options {
    uint32_t host = 0;
    uint32_t devices = 1;
    int64_t step_ns = 0;      ///< of one launch; 0: its outputs are ready as soon as its inputs are
    int64_t transfer_ns = 0;  ///< from the end of the receive to a ready value
    bool gangs_wait = false;  ///< a gang on one local device waits in its launch for its other hosts (GANG-2)
  };
  /// Payload of a put: the checksum of the buffer, and its devices.
  struct Put {
    uint64_t hash;
    uint64_t devices;
  };
  /// Payload of a fetch: each host writes the checksum that it holds to `out[host]`.
  struct Fetch {
    uint64_t* out;
  };

  ModelledBackend(Options options, const ModelClock& clock, Fabric* fabric);
  ~ModelledBackend() override;

  /// Registers a plan. `communicators`: one per node, kNoCommunicator where the node is no gang; empty: gangs are not
  /// paired.
  void learn(uint32_t plan_id, const Plan& plan, std::span<const uint32_t> communicators);
  /// The call at `node` of a plan donates (deletes) its inputs at `positions`.
  void donate(uint32_t plan_id, uint32_t node, std::vector<uint32_t> positions) {
    plans_[plan_id][node].donated = std::move(positions);
  }
  /// Launches of that plan are attended: see Device::launch. The test itself must end each launch in `attended`.
  void attend(uint32_t plan_id) { attends_.push_back(plan_id); }
  struct Attended {
    uint64_t order;
    uint32_t node;
    std::vector<Value> inputs;  ///< with references of their own
  };
  std::vector<Attended>& attended() { return attended_; }
  void set_cases(uint32_t cases) { cases_ = cases; }
  /// A scalar that decides is read by a copy, which takes so long; 0: it is read where it is.
  void set_scalar_ns(int64_t ns) { scalar_ns_ = ns; }
  void set_faults(ModelledFaults faults) { faults_ = faults; }
  /// From now on that host is on another machine: what is sent there takes `send_ns`, and it sees by itself what has
  /// come (FAR-3).
  void open_stream(uint32_t host, ModelledBackend* there) { streams_[host] = there; }
  /// From now on a send to an offset outside `receive` is refused, as hosts with arenas refuse an offset outside one.
  void bound_sends(std::span<uint64_t> receive) { landing_ = receive; }

  uint64_t live_values() const { return live_; }
  uint64_t launches() const { return launches_; }
  uint64_t gangs() const { return gangs_; }
  uint64_t order_violations() const { return order_violations_; }
  uint64_t open_receives() const { return receives_.size(); }
  uint64_t commands() const { return commands_; }
  uint64_t looks() const { return looks_; }                              ///< calls of readiness()
  uint64_t offloaded() const { return offloaded_; }                      ///< values that are offloaded now
  const std::vector<uint32_t>& forgotten() const { return forgotten_; }  ///< plans
  const std::vector<uint32_t>& gone() const { return gone_; }            ///< clients

  /// A task that was started. It holds a reference to its value; the test that ends the task must drop it.
  struct Task {
    uint32_t client;
    uint64_t number;
    Value value;
  };
  std::vector<Task>& tasks() { return tasks_; }
  /// Makes a value as a task does, ready `after_ns` from now.
  Value make_value(uint64_t hash, int64_t after_ns = 0) { return make(hash, clock_.now_ns() + after_ns, false); }

  Status launch(const NodeContext& context, std::span<const Value> inputs, std::span<Value> outputs) override;
  Value placeholder(const NodeContext& context, uint32_t input) override;
  Readiness readiness(Value value) override;
  Value begin_scalar(Value value) override;
  /// The checksum if it is below 256, else a number below `set_cases`.
  Status read_scalar(Value value, int64_t* out) override;
  Value retain(Value value) override;
  void drop(Value value) override;
  Status transfer(const NodeContext& context, Value input, Value* output) override;
  Status begin_receive(const NodeContext& context, std::vector<ReceiveBuffers>* receives) override;
  void send(const NodeContext& context, Value input, std::span<const ReceiveBuffers> posts, uint64_t key,
            std::span<SendState> states) override;
  void take_sent(std::vector<Sent>* out) override;
  uint64_t early_bytes(const NodeContext& context, uint32_t destination, std::vector<uint64_t>* offsets) override;
  void take_arrived(std::vector<Arrived>* out) override;
  Status place_early(const NodeContext& context, uint32_t source, std::span<const std::byte> chunk) override;
  void stop_sends() override { under_way_.clear(); }
  Status finish_receive(const NodeContext& context, Value* output) override;
  void abandon_receive(const NodeContext& context) override;
  Status put(uint32_t client, std::span<const std::byte> payload, const Leased& leased, const Booked& booked,
             Value* output, uint64_t* devices) override;
  uint64_t devices_of_put(uint32_t client, std::span<const std::byte> payload) override;
  Status fetch(uint32_t client, Value value, std::span<const std::byte> payload, const Leased& leased,
               std::vector<BlockPiece>* written) override;
  Status read_back(Value value, const ReadBackSlot& place) override;
  Status start_task(uint32_t client, uint64_t task, Value value, std::span<const std::byte> payload,
                    const Booked& booked) override;
  void command(uint32_t client, uint64_t plan, std::span<const std::byte> payload) override;
  Status offload(uint32_t client, std::span<Value> values, std::span<const std::byte> payload, Offload where) override;
  void forget_plan(uint32_t plan) override { forgotten_.push_back(plan); }
  void forget_client(uint32_t client) override { gone_.push_back(client); }
  std::string_view last_error() const override { return last_error_; }
  void explain(const NodeContext& maker) override { last_error_ += " of plan " + std::to_string(maker.plan); }

 private:
  struct Record {
    uint32_t references = 0;
    bool fails = false;
    uint64_t hash = 0;
    int64_t ready_ns = 0;
    bool is_deleted = false;
  };
  struct Node {
    uint32_t global_node = 0;
    uint32_t communicator = Fabric::kNoCommunicator;
    bool gang = false;
    uint64_t devices = 0;
    std::vector<uint32_t> sources;
    std::vector<uint32_t> donated = {};
  };
  struct Receive {
    uint64_t order = 0;
    uint32_t global_node = 0;
    std::vector<uint32_t> sources = {};
    std::vector<uint64_t> slots = {};  ///< one per source; the source writes the checksum there
  };
  /// A send under way. Its value is read at the end of the send, as a copier on another thread would do.
  struct UnderWay {
    Sent sent;
    Value input;
    uint64_t* slot;
    int64_t done_ns;
    ModelledBackend* there;  ///< nullptr: on this machine
    uint32_t node;           ///< its number in the whole program
    std::string error;
  };
  static constexpr uint64_t kNothing = 0;
  static constexpr uint64_t kOffDevices = uint64_t{1} << 63;  ///< set in the hash of an offloaded value

  Record& at(Value value) const { return *static_cast<Record*>(value); }
  Value make(uint64_t hash, int64_t ready_ns, bool fails);
  const Node& node_of(const NodeContext& context) const { return plans_[context.plan][context.node]; }
  Receive* receive_of(uint64_t order, uint32_t global_node);
  bool come(uint64_t order, uint32_t global_node, uint32_t source, uint64_t hash);
  static uint64_t receive_key(const NodeContext& context) { return context.order << 20 | context.node; }
  void check_order(const NodeContext& context, uint64_t devices);
  Status refuse(std::string text) {
    last_error_ = std::move(text);
    return Status::kFailed;
  }

  const Options options_;
  const ModelClock& clock_;
  Fabric* fabric_;
  ModelledFaults faults_;
  int64_t scalar_ns_ = 0;
  uint32_t cases_ = 2;
  std::optional<std::span<uint64_t>> landing_;
  std::vector<std::vector<Node>> plans_;
  std::deque<Record> records_;
  std::vector<Record*> free_;
  std::vector<int64_t> device_free_ns_;                     ///< per device: when its last launch ends
  std::vector<std::pair<uint64_t, uint32_t>> last_launch_;  ///< per device: (order, node)
  std::unordered_map<uint64_t, std::unique_ptr<Receive>> receives_;
  std::vector<Task> tasks_;
  std::vector<uint32_t> attends_;  ///< plans
  std::vector<Attended> attended_;
  std::deque<UnderWay> under_way_;
  std::unordered_map<uint32_t, ModelledBackend*> streams_;
  std::vector<Arrived> arrived_;
  std::vector<uint64_t> hashes_;  ///< scratch of launch()
  std::string last_error_;
  uint64_t live_ = 0, launches_ = 0, gangs_ = 0, order_violations_ = 0, commands_ = 0, looks_ = 0, offloaded_ = 0;
  std::vector<uint32_t> forgotten_, gone_;
  uint64_t receive_calls_ = 0, send_calls_ = 0, put_calls_ = 0;
};

}  // namespace pathways
