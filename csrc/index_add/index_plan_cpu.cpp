// The plan of an index on the CPU: a counting sort where rows are not many more than entries, else a stable sort.
#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu.h"

namespace fusebackend::accumulate {
namespace {

int64_t index_at(const RowVector& v, int64_t n) {
  return v.is64 ? static_cast<const int64_t*>(v.data)[n * v.stride] : static_cast<const int32_t*>(v.data)[n * v.stride];
}

}  // namespace

void cpu_index_plan(const Params& p, int32_t* words, void (*out_of_range)(int64_t, int64_t)) {
  const PlanView<int32_t> plan = view_plan(p, words);
  std::vector<int32_t> row(p.n);
  for (int64_t n = 0; n < p.n; ++n) {
    const int64_t given = index_at(p.index, n), meant = given < 0 && p.bounds == Bounds::kWrap ? given + p.rows : given;
    const bool outside = meant < 0 || meant >= p.rows, ignored = p.has_ignore && given == p.ignore;
    if (outside && !ignored && p.bounds != Bounds::kDrop) out_of_range(given, p.rows);
    row[n] = int32_t(outside || ignored ? p.rows : meant);
  }
  std::fill_n(plan.offsets, p.rows + 1, 0);
  for (const int32_t r : row)
    if (r < p.rows) ++plan.offsets[r + 1];
  std::partial_sum(plan.offsets, plan.offsets + p.rows + 1, plan.offsets);
  if (p.rows > 8 * p.n) {
    std::iota(plan.entries, plan.entries + p.n, 0);
    std::stable_sort(plan.entries, plan.entries + p.n, [&](int32_t a, int32_t b) { return row[a] < row[b]; });
  } else {
    std::vector<int32_t> next(plan.offsets, plan.offsets + p.rows + 1);  // those that are left out go behind all rows
    for (int64_t n = 0; n < p.n; ++n) plan.entries[next[row[n]]++] = int32_t(n);
  }
  for (int64_t k = 0; k < p.n; k += kChunk) plan.chunk_rows[k / kChunk] = row[plan.entries[k]];
  for (int64_t k = 0; plan.from && k < p.n; ++k) {
    const int64_t given = index_at(p.source_index, plan.entries[k]), from = given < 0 && p.source_wraps ? given + p.source_rows : given;
    if (from < 0 || from >= p.source_rows) out_of_range(given, p.source_rows);
    plan.from[k] = int32_t(from);
  }
}

}  // namespace fusebackend::accumulate
