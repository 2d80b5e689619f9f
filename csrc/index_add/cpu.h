#pragma once

#include <optional>
#include <vector>

#include "accumulate.h"

namespace fusebackend::accumulate {

// How the threads share the work without meeting: by columns of the slice, in cache lines; or, where a slice is too narrow for that, by
// rows of out. Either way a row receives its entries in order, whatever the number of threads.
struct CpuPlan {
  std::optional<int64_t> out_of_range;  // an index that is an error, if there is one: nothing may be run then
  int64_t bounded_by = 0;               // the size of the dimension that it leaves
  const int64_t* target = nullptr;      // the row of each entry, or -1: the indices themselves, or
  std::vector<int64_t> resolved;        // what they point at
  std::vector<int64_t> order;           // of 16-bit floats, whose sums are rounded once: the entries, stably sorted by row,
  bool wide = false;                    // or, for very narrow slices, all of out as fp32,
  bool sparse = false;                  // or, where they are few as well, each entry as it comes
  bool by_rows = false;
  int64_t units = 0, grain = 1;
};
CpuPlan cpu_plan(const Params& p, int threads);
void cpu_accumulate(const Params& p, const CpuPlan& plan, int64_t begin, int64_t end);

// out = initial, bytes [begin, end) of its dense storage; for p.initial != p.out.
void cpu_initialise(const Params& p, int64_t begin, int64_t end);

// Fills the plan of p.index; calls out_of_range(index, size), which throws, for an index that is an error.
void cpu_index_plan(const Params& p, int32_t* plan, void (*out_of_range)(int64_t, int64_t));

}  // namespace fusebackend::accumulate
