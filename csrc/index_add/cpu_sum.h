// The CPU side's interface to the bindings, which bring the threads.
#pragma once

#include <vector>

#include "index_add/params.h"

namespace fusebackend::index_add {

enum class CpuMethod {
  kInOrder,    // each entry is added as it comes
  kSorted,     // 16-bit floats: entries are sorted by row, so that a row is summed in fp32 and rounded once
  kFp32Copy,   // 16-bit floats, rows of a few elements: all of out is held in fp32 and rounded once
  kRoundEach,  // the same with few entries, which seldom meet: each is added, and rounded, as it comes
};

// How the threads share the work without meeting: by columns, in cache lines; or, where rows are too narrow for that, by rows of out.
// Either way a row gets its entries in order, whatever the number of threads.
struct CpuPlan {
  CpuMethod method = CpuMethod::kInOrder;
  const int64_t* target = nullptr;  // the row of each entry, or -1: the indices themselves, or
  std::vector<int64_t> resolved;    // what they mean
  std::vector<int64_t> order;       // of kSorted: the entries that add something, stably sorted by row
  bool by_rows = false;
  int64_t units = 0, grain = 1;  // the work, and how much of it a thread takes at least
};

// Throws std::out_of_range if an index is out of range.
CpuPlan make_cpu_plan(const Params& p, int threads);
void cpu_sum(const Params& p, const CpuPlan& plan, int64_t begin, int64_t end);  // units [begin, end)

// out = initial, bytes [begin, end) of its dense storage; for p.initial != p.out.
void cpu_initialise(const Params& p, int64_t begin, int64_t end);

// Writes the SortedIndex of p. Throws std::out_of_range if an index is out of range.
void cpu_sort_index(const Params& p, uint32_t* words);

}  // namespace fusebackend::index_add
