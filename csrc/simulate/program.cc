#include "simulate/program.h"

#include <algorithm>
#include <random>
#include <set>

#include "base/check.h"

namespace pathways {

uint32_t ModelledProgram::add_slice(ModelledSlice slice) {
  PW_CHECK(!slice.hosts.empty() && std::is_sorted(slice.hosts.begin(), slice.hosts.end()));
  slices_.push_back(std::move(slice));
  return static_cast<uint32_t>(slices_.size() - 1);
}

uint32_t ModelledProgram::add_argument(uint32_t slice) {
  values_.push_back({slice});
  arguments_.push_back(value_count() - 1);
  return value_count() - 1;
}

uint32_t ModelledProgram::add_call(uint32_t slice, std::vector<uint32_t> inputs, uint32_t outputs) {
  for (const uint32_t input : inputs) PW_CHECK(slice_of(input) == slice);
  Step step{NodeKind::kCall, slice, slice, Pattern::kPairwise, std::move(inputs), {}};
  const uint32_t first = value_count();
  for (uint32_t i = 0; i < outputs; ++i) {
    values_.push_back({slice});
    step.outputs.push_back(first + i);
  }
  steps_.push_back(std::move(step));
  return first;
}

uint32_t ModelledProgram::add_transfer(uint32_t value, uint32_t slice, Pattern pattern) {
  values_.push_back({slice});
  steps_.push_back({NodeKind::kTransfer, slice, slice_of(value), pattern, {value}, {value_count() - 1}});
  return value_count() - 1;
}

bool ModelledProgram::holds(uint32_t slice, uint32_t host) const {
  return std::binary_search(slices_[slice].hosts.begin(), slices_[slice].hosts.end(), host);
}

std::vector<uint32_t> ModelledProgram::hosts() const {
  std::set<uint32_t> used;
  for (const ValueInfo& value : values_) used.insert(value.slice);
  for (const Step& step : steps_) used.insert(step.slice);
  std::vector<uint32_t> hosts;
  for (const uint32_t slice : used) hosts.insert(hosts.end(), slices_[slice].hosts.begin(), slices_[slice].hosts.end());
  std::sort(hosts.begin(), hosts.end());
  hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
  return hosts;
}

std::vector<uint32_t> ModelledProgram::result_parts() const {
  std::vector<uint32_t> parts;
  for (const uint32_t value : results_) {
    parts.push_back(static_cast<uint32_t>(slices_[slice_of(value)].hosts.size()));
  }
  return parts;
}

std::vector<std::byte> ModelledProgram::plan_of(uint32_t host, uint32_t devices, bool own_handles) const {
  std::vector<uint32_t> local(values_.size(), kNoValue);
  uint32_t count = 0;
  for (uint32_t v = 0; v < values_.size(); ++v) {
    if (holds(values_[v].slice, host)) local[v] = count++;
  }
  const auto localized = [&](const std::vector<uint32_t>& values) {
    std::vector<uint32_t> out;
    out.reserve(values.size());
    for (const uint32_t v : values) out.push_back(local[v]);
    return out;
  };
  PlanBuilder builder(host, devices, count);
  const auto named = [&](const std::vector<uint32_t>& values) {
    std::vector<uint32_t> out = localized(values);
    if (own_handles) std::erase(out, kNoValue);
    return out;
  };
  builder.set_arguments(named(arguments_));
  builder.set_results(named(results_));
  for (uint32_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    PlanBuilder::Node node;
    node.kind = step.kind;
    node.global_node = i + 1;
    if (step.kind == NodeKind::kCall) {
      if (!holds(step.slice, host)) continue;
      node.gang = slices_[step.slice].hosts.size() > 1;
      node.inputs = localized(step.inputs);
      node.outputs = localized(step.outputs);
      node.devices = slices_[step.slice].devices;
    } else {
      const auto &sources = slices_[step.source_slice].hosts, &destinations = slices_[step.slice].hosts;
      const bool sends = holds(step.source_slice, host), receives = holds(step.slice, host);
      if (!sends && !receives) continue;
      for (uint32_t d = 0; d < destinations.size(); ++d) {
        for (uint32_t s = 0; s < sources.size(); ++s) {
          if (step.pattern == Pattern::kPairwise && s != d % sources.size()) continue;
          if (sources[s] == host) node.destinations.push_back(destinations[d]);
          if (destinations[d] == host) node.sources.push_back(sources[s]);
        }
      }
      node.spread = sources.size() > 1 || destinations.size() > 1;
      if (!node.destinations.empty()) {
        node.inputs = localized(step.inputs);
        node.input_devices = slices_[step.source_slice].devices;
      }
      if (receives) {
        node.outputs = localized(step.outputs);
        node.devices = slices_[step.slice].devices;
      }
      if (node.inputs.empty() && node.outputs.empty()) continue;
    }
    builder.add(std::move(node));
  }
  return builder.finish();
}

std::vector<uint32_t> ModelledProgram::communicators_of(uint32_t host, std::span<const uint32_t> by_slice) const {
  const Plan plan = Plan::parse(plan_of(host, kMaxLocalDevices));
  std::vector<uint32_t> out;
  for (const NodeRecord& n : plan.nodes()) {
    out.push_back(n.gang != 0 ? by_slice[steps_[n.global_node - 1].slice] : Fabric::kNoCommunicator);
  }
  return out;
}

std::vector<uint64_t> ModelledProgram::evaluate(uint32_t plan_id, std::span<const uint64_t> arguments) const {
  PW_CHECK(arguments.size() == arguments_.size());
  std::vector<uint64_t> hashes(values_.size(), 0);
  for (size_t i = 0; i < arguments.size(); ++i) hashes[arguments_[i]] = arguments[i];
  std::vector<uint64_t> inputs;
  for (uint32_t i = 0; i < steps_.size(); ++i) {
    inputs.clear();
    for (const uint32_t v : steps_[i].inputs) inputs.push_back(hashes[v]);
    for (uint32_t o = 0; o < steps_[i].outputs.size(); ++o) {
      hashes[steps_[i].outputs[o]] = modelled_hash(plan_id, i + 1, o, inputs);
    }
  }
  std::vector<uint64_t> out;
  for (const uint32_t v : results_) out.push_back(hashes[v]);
  return out;
}

uint32_t ModelledProgram::gangs_of(uint32_t host) const {
  uint32_t gangs = 0;
  for (const Step& step : steps_) {
    gangs += step.kind == NodeKind::kCall && slices_[step.slice].hosts.size() > 1 && holds(step.slice, host) ? 1U : 0U;
  }
  return gangs;
}

// ----------------------------------------------------------------------------------------------------- generators

ModelledProgram make_chain(ModelledSlice slice, uint32_t calls) {
  ModelledProgram program;
  const uint32_t s = program.add_slice(std::move(slice));
  uint32_t value = program.add_argument(s);
  for (uint32_t i = 0; i < calls; ++i) value = program.add_call(s, {value});
  program.add_result(value);
  return program;
}

ModelledProgram make_pipeline(std::vector<ModelledSlice> slices, ModelledProgram::Pattern pattern) {
  ModelledProgram program;
  uint32_t value = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const uint32_t s = program.add_slice(std::move(slices[i]));
    value = i == 0 ? program.add_argument(s) : program.add_transfer(value, s, pattern);
    value = program.add_call(s, {value});
  }
  program.add_result(value);
  return program;
}

ModelledProgram make_random_program(const std::vector<ModelledSlice>& slices, uint32_t calls,
                                    const std::vector<uint32_t>& argument_slices, uint64_t seed) {
  std::mt19937_64 generator(seed);
  const auto below = [&](size_t n) { return static_cast<uint32_t>(generator() % n); };
  ModelledProgram program;
  for (const ModelledSlice& slice : slices) program.add_slice(slice);
  for (const uint32_t slice : argument_slices) program.add_argument(slice);
  for (uint32_t i = 0; i < calls; ++i) {
    const uint32_t slice = below(slices.size());
    std::vector<uint32_t> inputs;
    for (uint32_t k = below(4); k > 0 && program.value_count() > 0; --k) {
      // Mostly recent values, so that chains form. The same value may be chosen twice.
      const uint32_t reach = std::min<uint32_t>(program.value_count(), 6);
      uint32_t value = program.value_count() - 1 - below(reach);
      if (program.slice_of(value) != slice) {
        value = program.add_transfer(
            value, slice, below(2) == 0 ? ModelledProgram::Pattern::kAllToAll : ModelledProgram::Pattern::kPairwise);
      }
      inputs.push_back(value);
    }
    program.add_call(slice, std::move(inputs), 1 + below(3) % 2);
  }
  for (uint32_t i = 1 + below(3); i > 0; --i) program.add_result(below(program.value_count()));
  program.add_result(program.value_count() - 1);
  if (below(3) == 0) program.add_result(program.results().back());
  return program;
}

}  // namespace pathways
