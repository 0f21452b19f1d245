// TRUST-1 in the executor: a client may name its buffers as it should not. It gets what it asked for or an error, and
// every run ends: one that waited for ever would hold up the devices for everybody.
//
//   Names.ARunThatTakesWhatItMakes            it would wait for itself
//   Names.EachNameServesWhoWaitsForIt         a handle named again and again before it was defined
//   Names.AFailureThatComesBackToItsName      a failure passes on to who named the same handle again
//   Names.APutThatFailsUnderATakenName        the put alone fails
//   Names.RenamedBeforeItIsThere              who waits for it goes on
#include "executor/bench_host.h"

namespace pathways::test::test_names {
namespace {

struct Names : Bench {
  /// Plan 0 makes a buffer, plan 1 one of another; neither is compiled yet, so that everything waits.
  Names() {
    host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), false);
    host.add_plan(1, plan_of({0}, {call({0}, {1})}, {1}, 2), false);
  }
  void compile(const std::optional<std::string>& error = std::nullopt) {
    host.executor.set_compiled(0, error);
    host.executor.set_compiled(1);
    pass();
  }
  void expect_over(uint64_t runs) {
    for (uint64_t run = 1; run <= runs; ++run) EXPECT_EQ(host.link.runs.count(run), 1u) << "run " << run;
  }
};

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

TEST_F(Names, ARunThatTakesWhatItMakes) {
  host.run(1, 1, {A}, {A});
  host.put(B, 7);
  host.run(2, 1, {B}, {C});  // on the same device, behind it
  compile();
  expect_over(2);
  EXPECT_NE(host.link.failure(A).find("makes itself"), std::string::npos) << host.link.failure(A);
  EXPECT_EQ(host.link.completions(C), 1u);
  drop({A, B, C});
}

TEST_F(Names, EachNameServesWhoWaitsForIt) {
  for (uint64_t run = 1; run <= 7; run += 2) {
    host.run(run, 0, {}, {A});
    host.run(run + 1, 1, {A}, {handle(10 + static_cast<uint32_t>(run))});
  }
  uint64_t out = 0;
  host.fetch(A, D, &out);
  compile();
  expect_over(8);
  for (uint32_t run = 1; run <= 7; run += 2) EXPECT_EQ(host.link.completions(handle(10 + run)), 1u) << run;
  EXPECT_EQ(host.link.completions(D), 1u);
  drop({A, handle(11), handle(13), handle(15), handle(17)});
}

TEST_F(Names, AFailureThatComesBackToItsName) {
  host.run(1, 0, {}, {A});
  host.run(2, 1, {A}, {B});
  host.run(3, 1, {B}, {A});
  host.run(4, 1, {A}, {C});
  compile("no such computation");
  expect_over(4);
  EXPECT_NE(host.link.failure(C).find("no such computation"), std::string::npos) << host.link.failure(C);
  drop({A, B, C});
}

TEST_F(Names, APutThatFailsUnderATakenName) {
  ModelledFaults faults;
  faults.fail_put = 1;
  host.backend.set_faults(faults);
  host.run(1, 0, {}, {A});
  host.run(2, 1, {A}, {B});
  host.put(A, 7);
  host.run(3, 1, {A}, {C});
  compile();
  expect_over(3);
  EXPECT_EQ(host.link.completions(B), 1u);
  EXPECT_NE(host.link.failure(C), "");
  drop({A, B, C});
}

TEST_F(Names, RenamedBeforeItIsThere) {
  host.run(1, 0, {}, {A});
  host.run(2, 1, {A}, {B});
  const uint64_t pair[] = {C, A};
  host.command(CommandKind::kRename, 0, 0, std::as_bytes(std::span{pair}));
  host.run(3, 1, {C}, {D});
  compile();
  expect_over(3);
  EXPECT_EQ(host.link.completions(B), 1u);
  EXPECT_NE(host.link.failure(D).find("renamed before it was there"), std::string::npos) << host.link.failure(D);
  drop({B, C, D});
}

}  // namespace
}  // namespace pathways::test::test_names
