/// ExecutorStats: what an executor has done, and what is under way, for people and tests to read.
///
/// Threading: values.
#pragma once

#include <cstdint>

namespace pathways {

struct ExecutorStats {
  uint64_t runs = 0;
  uint64_t launches = 0;
  uint64_t gangs = 0;
  uint64_t transfers = 0;
  uint64_t objects = 0;
  uint64_t live_runs = 0;
  uint64_t waiting = 0;           ///< pending values
  uint64_t exchanges = 0;         ///< transfers to or from other hosts, and exchanges of rows, under way
  uint64_t exchange_records = 0;  ///< sent to other hosts for exchanges of rows, ever (EXCH-1)
  uint64_t overfull = 0;  ///< launches and puts made without enough memory: no work under way would have freed any
  uint64_t tasks = 0;     ///< under way in the backend
};

}  // namespace pathways
