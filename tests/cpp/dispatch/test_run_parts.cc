// What each host gets of a run's record, against the plainest way to say it.
//
//   COST-3  RunParts.*: a host gets the handles of its own arguments and results, in the program's order, and no other;
//           hosts that hold everything get the record as it is
#include "dispatch/run_parts.h"

#include <algorithm>
#include <random>

#include "support.h"

namespace pathways::test::test_run_parts {
namespace {

constexpr GroupId kRunGroup = 1;

/// A plan of random arguments and results on random groups, and runs of it.
struct RandomPlan {
  explicit RandomPlan(std::mt19937_64& random) : random(random), sequencer(kHosts, 8) {
    hosts = subset(kHosts, 1);
    sequencer.add_group(kRunGroup, hosts);
    for (GroupId group = 2; group < 2 + kGroups; ++group) {
      std::vector<uint32_t> members;
      for (const uint32_t index : subset(static_cast<uint32_t>(hosts.size()), 1)) members.push_back(hosts[index]);
      sequencer.add_group(group, members);
    }
    memory.client = 3;
    auto& groups = memory.argument_groups.emplace();
    for (uint64_t i = random() % 6; i > 0; --i) groups.push_back(some_group());
    for (uint64_t i = random() % 150; i > 0; --i) memory.results.push_back({.group = some_group()});
  }
  std::vector<uint32_t> subset(uint32_t count, size_t least) {
    std::vector<uint32_t> all(count), out;
    for (uint32_t i = 0; i < count; ++i) all[i] = i;
    std::sample(all.begin(), all.end(), std::back_inserter(out),
                static_cast<std::ptrdiff_t>(least + random() % (count - least + 1)), random);
    return out;
  }
  GroupId some_group() { return random() % 4 == 0 ? kRunGroup : static_cast<GroupId>(2 + random() % kGroups); }
  bool holds(GroupId group, uint32_t host) const {
    const auto members = sequencer.hosts_of(group);
    return std::find(members.begin(), members.end(), host) != members.end();
  }

  static constexpr uint32_t kHosts = 7, kGroups = 4;
  std::mt19937_64& random;
  Sequencer sequencer;
  std::vector<uint32_t> hosts;
  PlanMemory memory;
};

std::vector<uint64_t> words_of(std::span<const std::byte> record) {
  std::vector<uint64_t> words((record.size() - sizeof(RunRecord)) / sizeof(uint64_t));
  if (!words.empty()) std::memcpy(words.data(), record.data() + sizeof(RunRecord), words.size() * sizeof(uint64_t));
  return words;
}

/// What the host should get behind the fixed fields.
std::vector<uint64_t> expected(const RandomPlan& plan, const RunRecord& record, std::span<const uint64_t> words,
                               uint32_t host) {
  std::vector<uint64_t> out;
  for (uint32_t i = 0; i < record.arguments; ++i) {
    if (plan.holds((*plan.memory.argument_groups)[i], host)) out.push_back(words[i]);
  }
  std::vector<bool> wanted;
  for (uint32_t i = 0; i < record.results; ++i) {
    if (!plan.holds(plan.memory.results[i].group, host)) continue;
    out.push_back(words[record.arguments + i]);
    if ((record.header.detail & kRunWanted) != 0) {
      wanted.push_back((words[record.arguments + record.results + i / 64] >> (i % 64) & 1) != 0);
    }
  }
  const size_t mask = out.size();
  out.resize(mask + (wanted.size() + 63) / 64);
  for (size_t i = 0; i < wanted.size(); ++i) out[mask + i / 64] |= uint64_t{wanted[i]} << (i % 64);
  if ((record.header.detail & kRunHasDeadline) != 0) out.push_back(words.back());
  return out;
}

TEST(RunParts, AHostGetsItsOwnHandles) {
  uint32_t in_parts = 0;
  for (uint32_t round = 0; round < 300 * kStressScale && !HasFailure(); ++round) {
    SCOPED_TRACE("seed " + std::to_string(seed() + round));
    std::mt19937_64 random(seed() + round);
    const RandomPlan plan(random);
    const auto parts = RunParts::make(plan.memory, kRunGroup, plan.sequencer);
    const auto has_all = [&](uint32_t host) {
      return std::all_of(plan.memory.results.begin(), plan.memory.results.end(),
                         [&](const PlanMemory::Result& result) { return plan.holds(result.group, host); }) &&
             std::all_of(plan.memory.argument_groups->begin(), plan.memory.argument_groups->end(),
                         [&](GroupId group) { return plan.holds(group, host); });
    };
    EXPECT_EQ(parts == nullptr, std::all_of(plan.hosts.begin(), plan.hosts.end(), has_all));
    if (parts == nullptr) continue;
    EXPECT_EQ(parts->client(), 3u);
    ++in_parts;
    for (uint16_t detail = 0; detail < 16; ++detail) {
      RunRecord record{{RecordKind::kRun, static_cast<uint16_t>(detail & (kRunWanted | kRunHasDeadline)), 3},
                       11,
                       12,
                       5,
                       kRunGroup,
                       static_cast<uint32_t>(plan.memory.argument_groups->size()),
                       static_cast<uint32_t>(plan.memory.results.size())};
      std::vector<uint64_t> words(words_behind(record));
      for (uint64_t& word : words) word = random();
      std::vector<std::byte> whole(sizeof record + words.size() * sizeof(uint64_t));
      std::memcpy(whole.data(), &record, sizeof record);
      if (!words.empty()) std::memcpy(whole.data() + sizeof record, words.data(), words.size() * sizeof(uint64_t));
      RunRecord head = record;
      head.tag = 77;
      for (size_t i = 0; i < plan.hosts.size(); ++i) {
        const uint32_t bytes = parts->bytes(i, head);
        std::vector<std::byte> out(bytes + 8, std::byte{0xee});
        parts->write(i, head, whole, out.data());
        EXPECT_TRUE(std::all_of(out.end() - 8, out.end(), [](std::byte b) { return b == std::byte{0xee}; }));
        out.resize(bytes);
        const auto got = read_record<RunRecord>(out);
        EXPECT_EQ(bytes, sizeof got + words_behind(got) * sizeof(uint64_t));
        EXPECT_EQ(got.tag, 77u);
        EXPECT_EQ(got.plan, 5u);
        EXPECT_EQ(got.header.detail, record.header.detail);
        EXPECT_EQ(words_of(out), expected(plan, record, words, plan.hosts[i]));
      }
    }
  }
  EXPECT_GT(in_parts, 100u);
}

/// The bytes that a run sends grow with its hosts, and not with their square.
TEST(RunParts, ARunOfManyHostsIsSmall) {
  constexpr uint32_t kMany = 2000;
  Sequencer sequencer(kMany, 8);
  PlanMemory memory;
  memory.argument_groups.emplace();
  std::vector<uint32_t> all;
  for (uint32_t host = 0; host < kMany; ++host) {
    all.push_back(host);
    memory.argument_groups->push_back(kOneHost | host);
    memory.results.push_back({.group = kOneHost | host});
  }
  sequencer.add_group(kRunGroup, all);
  const auto parts = RunParts::make(memory, kRunGroup, sequencer);
  ASSERT_NE(parts, nullptr);
  for (uint32_t host = 0; host < kMany; ++host) EXPECT_EQ(parts->bytes(host, RunRecord{}), sizeof(RunRecord) + 16);
}

TEST(RunParts, WhatIsNotKnownIsWhole) {
  Sequencer sequencer(2, 8);
  sequencer.add_group(kRunGroup, {0, 1});
  PlanMemory memory;
  memory.results.push_back({.group = kOneHost | 0});
  EXPECT_EQ(RunParts::make(memory, kRunGroup, sequencer), nullptr);
  memory.argument_groups.emplace();
  EXPECT_NE(RunParts::make(memory, kRunGroup, sequencer), nullptr);  // a plan without arguments
}

}  // namespace
}  // namespace pathways::test::test_run_parts
