// Which route is taken. The thresholds were measured on an H200.
#include "index_add/plan.h"

#include "index_add/shapes.h"

namespace fusebackend::index_add {
namespace {

int64_t row_bytes(const Params& p) { return p.columns() * element_size(p.dtype); }

// Atomic additions move half of what memory gives. In the bytes of source rows that they would move meanwhile: sorting takes `sort`, and
// reading and writing all of out `write`. Wide rows that meet seldom are added about as fast as memory allows.
bool bucket_sum_pays(const Params& p, const Device& device) {
  constexpr int64_t kBytesPerEntry = 32;  // what the sort of an entry takes
  if (wide_row_atomic_add_fits(p, 16 / element_size(p.dtype))) return false;
  const bool looks_up = p.source_index.data || p.weight.data, half = is_half(p.dtype);
  const int64_t sort = half ? (looks_up ? 80'000'000 : 66'000'000) : 56'000'000, write = p.rows * row_bytes(p) * (half ? 8 : 5) / 4;
  return p.n * (row_bytes(p) - kBytesPerEntry) >= sort + write && bucket_sum_fits(p, device);
}

// 16-bit sums that are rounded once: wide rows are worth sorting for, unless they are few and there is little to sum.
Route route_rounded_once(const Params& p, const Device& device) {
  constexpr int64_t kMinSourceBytes = 32 << 20, kMinSourceElements = 1 << 25, kMinEntries = 32768;
  if (p.n * row_bytes(p) >= kMinSourceBytes && p.n >= 2 * p.rows && bucket_sum_fits(p, device)) return Route::kBucketSum;
  const bool much = p.n * p.columns() >= kMinSourceElements;
  const bool sorting_pays = row_bytes(p) >= 256 ? much || p.n < 64 * p.rows : much && row_bytes(p) >= 128;
  return p.n >= kMinEntries && sorting_pays ? Route::kSegmentedSum : Route::kAtomicAddFp32;
}

Route choose_route(const Params& p, const Device& device) {
  if (p.sorted_index) return Route::kSegmentedSum;
  const bool half = is_half(p.dtype);
  const bool contended = p.n >= 32 * p.rows;  // atomic additions to one row queue up
  // Sums of integers do not depend on the order, but 8- and 16-bit ones are added atomically by compare and swap.
  const bool slow_atomics =
      element_size(p.dtype) < 4 && p.n * p.columns() >= 1 << 21 && p.n < INT32_MAX && p.source_rows < UINT32_MAX;
  const bool in_order =
      is_floating(p.dtype) ? p.deterministic : (p.deterministic || slow_atomics) && p.n >= 4 * p.rows && row_bytes(p) >= 32;
  if (in_order || (half && p.precise)) {
    constexpr int64_t kMinRowBytes = 1024, kVeryFew = 32;
    if (is_floating(p.dtype) && few_entries_fits(p) && (p.n <= kVeryFew || row_bytes(p) >= kMinRowBytes)) return Route::kFewEntries;
    if (contended && (p.n * row_bytes(p) >= 1 << 20 || p.n >= 2048 * p.rows)) {
      if (block_tables_fit(p, device)) return Route::kBlockTables;
      if (thread_tables_blocks_per_sm(p, device) >= 1) return Route::kThreadTables;
    }
    return !in_order && p.rows <= 2 * p.n ? route_rounded_once(p, device) : Route::kSegmentedSum;
  }
  // A second kernel pays where much is read, or where the atomic additions to a row, some ten nanoseconds each, would queue up.
  if (contended && (p.n * p.columns() >= 1 << 24 || p.n >= (half ? 256 : 512) * p.rows)) {
    if (block_tables_fit(p, device)) return Route::kBlockTables;
    if (thread_tables_blocks_per_sm(p, device) >= 2) return Route::kThreadTables;
  }
  if (half && p.n >= 16 * p.rows)  // rounding at each addition would add up
    return few_entries_fits(p) ? Route::kFewEntries : route_rounded_once(p, device);
  if (bucket_sum_pays(p, device)) return Route::kBucketSum;
  if (p.n >= 16 * p.rows && p.n >= 1 << 17 && row_bytes(p) >= 1024) return Route::kSegmentedSum;
  return Route::kAtomicAdd;
}

size_t workspace_bytes(Route route, const Params& p, const Device& device) {
  switch (route) {
    case Route::kAtomicAddFp32: return atomic_add_fp32_bytes(p);
    case Route::kThreadTables: return thread_tables_bytes(p, device);
    case Route::kBlockTables: return block_tables_bytes(p, device);
    case Route::kBucketSum: return bucket_sum_bytes(p, device);
    case Route::kSegmentedSum: return segmented_sum_bytes(p, device);
    default: return 0;
  }
}

}  // namespace

Plan make_plan(const Params& p, const Device& device) {
  if (p.n == 0) return {Route::kAtomicAdd, 0};
  const Route route = choose_route(p, device);
  return {route, workspace_bytes(route, p, device)};
}

}  // namespace fusebackend::index_add
