// What hosts say to each other about an exchange, damaged by chance: it is refused, or harmless. The seed is printed.
//
//   EXCH-3  AnyDecision, AnyReport, DecisionAlongKnownRoutes
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/text.h"
#include "exchange/coordinator.h"
#include "exchange/host_exchange.h"
#include "support.h"

namespace pathways::test::test_exchange_messages {
namespace {

using Random = std::mt19937_64;

/// Changes a word, or cuts some off.
std::vector<uint64_t> damaged(std::vector<uint64_t> words, Random& random) {
  if (random() % 8 == 0) {
    words.resize(random() % words.size());
    return words;
  }
  for (size_t left = 1 + random() % 2; left != 0; --left) {
    uint64_t& word = words[random() % words.size()];
    const uint64_t small = random() % 6;
    const uint64_t choices[] = {
        small, word + 1, word - 1, small << 32 | small, random(), word ^ uint64_t{1} << random() % 64};
    word = choices[random() % 6];
  }
  return words;
}

TEST(ExchangeMessages, AnyDecision) {
  Random random(test::seed() + 3);
  const ExchangeShape shape{{4, {{0, 0}, {2, 1}}}, {4, {{0, 1}, {2, 2}}}, 5, Overflow::kDrop};
  const std::vector<int32_t> destinations{0, 1, 1, 3, 2, 0};
  HostExchange part(shape, 1);
  part.add_source({2, destinations, 4});
  part.add_source({3, destinations, 4});
  part.add_rooms({{0, 1, 2}, {1, 3, 4}});
  HostDecision decision;
  decision.ranges = {{2, 0, 0, 2}, {2, 1, 3, 2}, {3, 3, 0, 1}};
  decision.rooms = {{0, 1, 2}, {1, 3, 4}, {3, 9, 9}};
  decision.writers = {0, 1};
  decision.arrivals = {{0, 2, 2}, {1, 5, 7}};
  const std::vector<uint64_t> words = encode(decision);
  size_t taken = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    HostExchange here = part;
    try {
      here.decide(parse_decision(round == 0 ? words : damaged(words, random)));
    } catch (const Error& error) {
      ASSERT_EQ(error.status(), Status::kInvalid);
      ASSERT_NE(round, 0);
      ++refused;
      continue;
    }
    ++taken;
    std::set<std::pair<uint32_t, uint32_t>> rows;
    for (const uint32_t host : here.target_hosts()) {
      for (const HostExchange::Move& move : here.moves(host)) {
        ASSERT_TRUE(move.source == 2 || move.source == 3);
        ASSERT_LT(move.row, destinations.size());
        ASSERT_EQ(destinations[move.row], static_cast<int32_t>(move.target));
        ASSERT_LT(move.slot, shape.capacity);
        ASSERT_TRUE(rows.emplace(move.source, move.row).second);
      }
    }
    ASSERT_EQ(here.slots_of(2).size(), destinations.size());
  }
  EXPECT_GT(taken, 1000u);
  EXPECT_GT(refused, 5000u);
}

/// A target takes only what its known routes bring.
TEST(ExchangeMessages, DecisionAlongKnownRoutes) {
  const ExchangeShape shape{{2, {{0, 0}, {1, 1}}}, {1, {{0, 2}}}, 4, Overflow::kError, {}, Routes::kKnown, 3};
  const std::vector<int32_t> origins{4, -1, 0, 5};
  HostExchange part(shape, 2);
  part.expect(0, origins);
  part.add_rooms({{0, 1, 2}});
  const HostDecision good{{}, {}, {}, {0, 1}, {{0, 3, 3}}};
  const auto takes = [&](auto&& change) {
    HostExchange here = part;
    HostDecision decision = good;
    change(decision);
    try {
      here.decide(decision);
    } catch (const Error&) {
      return false;
    }
    return true;
  };
  EXPECT_TRUE(takes([](HostDecision&) {}));
  EXPECT_FALSE(takes([](HostDecision& d) { d.writers = {0}; }));
  EXPECT_FALSE(takes([](HostDecision& d) { d.arrivals[0].kept = 2; }));
  EXPECT_FALSE(takes([](HostDecision& d) { d.arrivals.clear(); }));
  EXPECT_FALSE(takes([](HostDecision& d) { d.arrivals.push_back(d.arrivals[0]); }));
}

/// A text that is too long ends at the end of a character.
TEST(ExchangeMessages, CutText) {
  const std::string characters[] = {"a", "\u00e9", "\u20ac", "\U0001f600"};
  for (const std::string& character : characters) {
    for (size_t before = 0; before < 4; ++before) {
      std::string text(before, 'x');
      while (text.size() < 5000) text += character;
      const HostReport report{1, {ExchangeFault::Kind::kSourceFailed, 0, 0, 0, text}};
      const std::string cut = parse_report(encode(report)).fault.text;
      ASSERT_EQ(cut, text.substr(0, cut.size()));
      ASSERT_EQ((cut.size() - before) % character.size(), 0u);
      ASSERT_LE(cut.size(), 4096u);
      ASSERT_GT(cut.size() + character.size(), 4096u);
    }
  }
  EXPECT_EQ(cut_text(std::string(9, '\x80'), 6).size(), 6u);  // no UTF-8
  EXPECT_EQ(cut_text("\u20ac", 2), "");
  EXPECT_EQ(cut_text("short", 9), "short");
}

TEST(ExchangeMessages, AnyReport) {
  Random random(test::seed() + 4);
  const ExchangeShape shape{{4, {{0, 0}, {2, 1}}}, {4, {{0, 1}, {2, 0}}}, 5, Overflow::kDrop};
  const HostReport good{1, {}, {{2, 0, 3}, {2, 3, 1}, {3, 0, 9}}, {{0, 1, 2}, {1, 3, 4}}};
  const HostReport other{0, {}, {{0, 0, 2}}, {{2, 5, 6}, {3, 7, 8}}};
  const std::vector<uint64_t> words = encode(good);
  size_t taken = 0, refused = 0;
  HostReport without_memory = good;
  without_memory.rooms.pop_back();
  EXPECT_THROW(ExchangeCoordinator(shape).take(without_memory), Error);
  for (int round = 0; round < 20000; ++round) {
    ExchangeCoordinator coordinator(shape);
    coordinator.take(other);
    EXPECT_THROW(coordinator.take(other), Error);
    try {
      coordinator.take(parse_report(round == 0 ? words : damaged(words, random)));
    } catch (const Error& error) {
      ASSERT_EQ(error.status(), Status::kInvalid);
      ASSERT_NE(round, 0);
      ++refused;
      continue;
    }
    ++taken;
    std::map<uint32_t, uint32_t> filled;
    for (const auto& decision : coordinator.decide()) {
      for (const SlotRange& range : decision.second.ranges) {
        ASSERT_LE(range.first + range.rows, shape.capacity);
        ASSERT_EQ(shape.sources.host_of(range.source), decision.first);
        filled[range.target] += range.rows;
      }
    }
    for (const auto& shard : filled) ASSERT_LE(shard.second, shape.capacity);
  }
  EXPECT_GT(taken, 1000u);
  EXPECT_GT(refused, 5000u);
}

}  // namespace
}  // namespace pathways::test::test_exchange_messages
