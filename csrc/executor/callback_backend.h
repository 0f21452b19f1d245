/// The JAX side of the seam: a `Backend` made of plain functions, so that Cython can be one.
///
/// Each function gets `self` first and returns a Status as a number; texts of errors go through `set_error`. The
/// functions are called with Python's lock held, by whoever calls `Host::step`.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "executor/backend.h"

namespace pathways {

struct BackendCallbacks {
  void* self = nullptr;
  int (*launch)(void*, const NodeContext*, const Value*, size_t, Value*, size_t) = nullptr;
  Value (*placeholder)(void*, const NodeContext*, uint32_t) = nullptr;
  int (*readiness)(void*, Value) = nullptr;
  void (*retain)(void*, Value) = nullptr;
  void (*drop)(void*, Value) = nullptr;
  int (*transfer)(void*, const NodeContext*, Value, Value*) = nullptr;
  int (*begin_receive)(void*, const NodeContext*, std::vector<Landing>*) = nullptr;
  int (*send)(void*, const NodeContext*, Value, uint32_t, const uint64_t*, size_t) = nullptr;
  int (*finish_receive)(void*, const NodeContext*, Value*) = nullptr;
  void (*abandon_receive)(void*, const NodeContext*) = nullptr;
  int (*put)(void*, uint32_t, const std::byte*, size_t, Value*, uint64_t*) = nullptr;
  int (*fetch)(void*, uint32_t, Value, const std::byte*, size_t) = nullptr;
  int (*read_back)(void*, Value, std::byte*, std::byte*) = nullptr;
  void (*refuse_fetch)(void*, uint32_t, const std::byte*, size_t) = nullptr;
  void (*note)(void*, uint32_t, const std::byte*, size_t) = nullptr;
  void (*explain)(void*, const NodeContext*) = nullptr;
  int (*park)(void*, uint32_t, Value*, size_t, const std::byte*, size_t, bool) = nullptr;
  void (*forget_plan)(void*, uint32_t) = nullptr;
};

class CallbackBackend final : public Backend {
 public:
  explicit CallbackBackend(const BackendCallbacks& callbacks) : c_(callbacks) {}
  void set_error(std::string text) { error_ = std::move(text); }

  Status launch(const NodeContext& where, std::span<const Value> in, std::span<Value> out) override {
    return static_cast<Status>(c_.launch(c_.self, &where, in.data(), in.size(), out.data(), out.size()));
  }
  Value placeholder(const NodeContext& where, uint32_t input) override {
    return c_.placeholder(c_.self, &where, input);
  }
  Readiness readiness(Value value) override { return static_cast<Readiness>(c_.readiness(c_.self, value)); }
  Value retain(Value value) override {
    c_.retain(c_.self, value);
    return value;
  }
  void drop(Value value) override { c_.drop(c_.self, value); }
  Status transfer(const NodeContext& where, Value in, Value* out) override {
    return static_cast<Status>(c_.transfer(c_.self, &where, in, out));
  }
  Status begin_receive(const NodeContext& where, std::vector<Landing>* landings) override {
    return static_cast<Status>(c_.begin_receive(c_.self, &where, landings));
  }
  Status send(const NodeContext& where, Value in, uint32_t destination, std::span<const uint64_t> offsets) override {
    return static_cast<Status>(c_.send(c_.self, &where, in, destination, offsets.data(), offsets.size()));
  }
  Status finish_receive(const NodeContext& where, Value* out) override {
    return static_cast<Status>(c_.finish_receive(c_.self, &where, out));
  }
  void abandon_receive(const NodeContext& where) override { c_.abandon_receive(c_.self, &where); }
  Status put(uint32_t client, std::span<const std::byte> payload, Value* out, uint64_t* devices) override {
    return static_cast<Status>(c_.put(c_.self, client, payload.data(), payload.size(), out, devices));
  }
  Status fetch(uint32_t client, Value value, std::span<const std::byte> payload) override {
    return static_cast<Status>(c_.fetch(c_.self, client, value, payload.data(), payload.size()));
  }
  void refuse_fetch(uint32_t client, std::span<const std::byte> payload) override {
    c_.refuse_fetch(c_.self, client, payload.data(), payload.size());
  }
  Status read_back(Value value, const ReadBackPlace& place) override {
    return static_cast<Status>(c_.read_back(c_.self, value, place.small, place.large));
  }
  Status park(uint32_t client, std::span<Value> values, std::span<const std::byte> payload) override {
    return static_cast<Status>(
        c_.park(c_.self, client, values.data(), values.size(), payload.data(), payload.size(), true));
  }
  Status unpark(uint32_t client, std::span<Value> values, std::span<const std::byte> payload) override {
    return static_cast<Status>(
        c_.park(c_.self, client, values.data(), values.size(), payload.data(), payload.size(), false));
  }
  void forget_plan(uint32_t plan) override { c_.forget_plan(c_.self, plan); }
  void note(uint32_t client, std::span<const std::byte> payload) override {
    c_.note(c_.self, client, payload.data(), payload.size());
  }
  std::string_view last_error() const override { return error_; }
  void explain(const NodeContext& maker) override { c_.explain(c_.self, &maker); }

 private:
  BackendCallbacks c_;
  std::string error_;
};

}  // namespace pathways
