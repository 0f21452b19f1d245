#include "dispatch/run_parts.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace pathways {
namespace {

using Positions = std::map<GroupId, std::vector<uint32_t>>;

void append(const Positions& from, GroupId group, std::vector<uint32_t>& to) {
  if (const auto found = from.find(group); found != from.end()) {
    to.insert(to.end(), found->second.begin(), found->second.end());
  }
}

}  // namespace

std::unique_ptr<const RunParts> RunParts::make(const PlanMemory& memory, GroupId group, const Sequencer& sequencer) {
  if (!memory.argument_groups) return nullptr;
  const std::vector<GroupId>& group_of = *memory.argument_groups;
  Positions arguments, results;
  for (uint32_t i = 0; i < group_of.size(); ++i) arguments[group_of[i]].push_back(i);
  for (uint32_t i = 0; i < memory.results.size(); ++i) results[memory.results[i].group].push_back(i);
  std::vector<GroupId> groups;
  for (const auto& each : arguments) groups.push_back(each.first);
  for (const auto& each : results) groups.push_back(each.first);
  std::sort(groups.begin(), groups.end());
  groups.erase(std::unique(groups.begin(), groups.end()), groups.end());

  const auto hosts = sequencer.hosts_of(group);
  std::vector<std::vector<GroupId>> groups_of(hosts.size());  // by index of the host
  for (const GroupId each : groups) {
    for (const uint32_t host : sequencer.hosts_of(each)) {
      const auto at = std::lower_bound(hosts.begin(), hosts.end(), host);
      if (at != hosts.end() && *at == host) groups_of[static_cast<size_t>(at - hosts.begin())].push_back(each);
    }
  }
  std::map<std::vector<GroupId>, uint32_t> number_of;
  std::vector<Part> parts;
  std::vector<uint32_t> part_of;
  for (const auto& of_host : groups_of) {
    const auto [found, is_new] = number_of.try_emplace(of_host, static_cast<uint32_t>(parts.size()));
    part_of.push_back(found->second);
    if (!is_new) continue;
    Part& part = parts.emplace_back();
    for (const GroupId each : of_host) {
      append(arguments, each, part.arguments);
      append(results, each, part.results);
    }
    std::sort(part.arguments.begin(), part.arguments.end());
    std::sort(part.results.begin(), part.results.end());
  }
  const bool is_whole = parts.size() == 1 && parts[0].arguments.size() == group_of.size() &&
                        parts[0].results.size() == memory.results.size();
  if (is_whole) return nullptr;
  return std::unique_ptr<const RunParts>(new RunParts(memory.client, std::move(parts), std::move(part_of)));
}

RunRecord RunParts::with_counts(RunRecord head, const Part& part) {
  head.arguments = static_cast<uint32_t>(part.arguments.size());
  head.results = static_cast<uint32_t>(part.results.size());
  return head;
}

uint32_t RunParts::bytes(size_t index, const RunRecord& head) const {
  const RunRecord record = with_counts(head, parts_[part_of_[index]]);
  return static_cast<uint32_t>(sizeof record + words_behind(record) * sizeof(uint64_t));
}

void RunParts::write(size_t index, RunRecord head, std::span<const std::byte> whole, std::byte* out) const {
  const Part& part = parts_[part_of_[index]];
  const auto counts = read_record<RunRecord>(whole);
  head = with_counts(head, part);
  std::memcpy(out, &head, sizeof head);
  out += sizeof head;
  const std::byte* const arguments = whole.data() + sizeof head;
  const std::byte* const results = arguments + size_t{counts.arguments} * sizeof(uint64_t);
  const auto copy = [&](const std::byte* from, std::span<const uint32_t> positions) {
    for (const uint32_t position : positions) {
      std::memcpy(out, from + size_t{position} * sizeof(uint64_t), sizeof(uint64_t));
      out += sizeof(uint64_t);
    }
  };
  copy(arguments, part.arguments);
  copy(results, part.results);
  if ((head.header.detail & kRunWanted) != 0) {
    const std::byte* const mask = results + size_t{counts.results} * sizeof(uint64_t);
    for (size_t first = 0; first < part.results.size(); first += 64) {
      uint64_t bits = 0;
      for (size_t i = first; i < std::min(first + 64, part.results.size()); ++i) {
        uint64_t word;
        std::memcpy(&word, mask + part.results[i] / 64 * sizeof word, sizeof word);
        bits |= (word >> (part.results[i] % 64) & 1) << (i - first);
      }
      std::memcpy(out, &bits, sizeof bits);
      out += sizeof bits;
    }
  }
  if ((head.header.detail & kRunHasDeadline) != 0) {
    std::memcpy(out, whole.data() + whole.size() - sizeof(uint64_t), sizeof(uint64_t));
  }
}

}  // namespace pathways
