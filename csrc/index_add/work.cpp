#include "index_add/work.h"

#include <algorithm>

#include "common/facts.h"
#include "index_add/shapes.h"

namespace fusebackend::index_add {
namespace {

struct Work {
  const char* route = "";
  double launches = 0, vector = 0, blocks = 0, steps = 0, atomics = 0, queue = 0, scratch = 0, sorted = 0, syncs = 0;
};

// Blocks that take tiles of entries, each group of threads some of a tile.
void describe_tiling(Work& w, const BlockTiling& t) {
  w.blocks = double(t.row_blocks) * t.column_blocks;
  w.steps = double(t.per_group) * double(ceil_div(t.tiles, t.row_blocks));
}

void describe_sort(Work& w, const Params& p, const Device& device) {
  const RadixSortShape radix = radix_sort_shape(p, device);
  w.launches += 1;  // the radix sort, which ends at once where it is not needed
  w.blocks = radix.blocks;
  w.scratch += double(sorted_index_words(p) * 4);
  if (bucket_sort_fits(p, device)) {
    const BucketSortShape s = bucket_sort_shape(p);
    w.launches += 2;
    w.blocks = s.buckets;
    w.sorted = 2.0 * double(p.n);
    w.scratch += double(s.bytes);
  } else {
    w.sorted = double(radix.passes) * double(p.n);
    w.syncs = 3.0 * radix.passes;
    w.scratch += double(radix.passes) * double(p.n) * 2 * sizeof(uint32_t);
  }
}

// Of v elements at once.
Work atomic_adds(const Params& p, int v, int launches) {
  Work w;
  w.launches = launches;
  w.vector = v * element_size(p.dtype);
  w.atomics = double(p.n) * double(p.columns() / v);
  w.queue = double(p.n) / double(p.rows);
  return w;
}

void describe_atomic_tiles(Work& w, const Params& p, int v, const Device& device) {
  describe_tiling(w, make_block_tiling(p, v, AtomicAddTiles::kTileEntries, AtomicAddTiles::kBlocksPerSm, device));
}

Work atomic_add(const Params& p, const Device& device) {
  const int v = atomic_add_width(p);
  Work w = atomic_adds(p, v, 1 + !p.in_place());
  if (wide_row_atomic_add_fits(p, v)) {
    const WideRowShape s = wide_row_shape(p, v, device);
    w.route = "wide";
    w.blocks = double(s.groups) * s.pieces;
    w.steps = s.several ? WideRowShape::kSeveral : 1;
  } else if (small_atomic_add_fits(p, v, device)) {
    w.route = "small";
    w.blocks = double(ceil_div(p.n * (p.columns() / v), kThreads));
    w.steps = 1;
  } else {
    w.route = "tiled";
    describe_atomic_tiles(w, p, v, device);
  }
  return w;
}

Work atomic_add_fp32(const Params& p, const Device& device) {
  const int v = vector_width(p, false);
  Work w = atomic_adds(p, v, 3);
  w.route = "fp32_copy";
  w.scratch = double(atomic_add_fp32_bytes(p));
  describe_atomic_tiles(w, p, v, device);
  return w;
}

Work few_entries(const Params& p, const Device& device) {
  Work w;
  const FewEntriesShape s = few_entries_shape(p, device);
  w.route = "few";
  w.launches = 1 + !p.in_place();
  w.vector = vector_width(p, true) * element_size(p.dtype);
  w.blocks = double(s.column_blocks * s.shares);
  const double run = std::max(double(s.share), double(p.n) / double(p.rows));  // entries of one row are not split
  w.steps = run * double(ceil_div(s.columns, s.column_blocks * kThreads));
  w.sorted = double(p.n);
  return w;
}

Work thread_tables(const Params& p, const Device& device) {
  Work w;
  const ThreadTablesShape s = thread_tables_shape(p, device);
  w.route = "thread_tables";
  w.launches = 2;
  w.vector = s.v * element_size(p.dtype);
  w.scratch = double(thread_tables_bytes(p, device));
  describe_tiling(w, thread_tables_tiling(p, s, device));
  return w;
}

Work block_tables(const Params& p, const Device& device) {
  Work w;
  const BlockTablesShape s = block_tables_shape(p, device);
  const bool partial = !block_tables_add_to_out(p), adds = !p.deterministic;
  const int64_t tiles_each = ceil_div(s.tiles, s.row_blocks);
  w.route = "block_tables";
  w.launches = 1 + partial + (partial && adds);
  w.vector = 16;
  w.blocks = double(s.row_blocks) * s.column_blocks;
  w.steps = double(ceil_div(s.tile_entries, s.groups) * tiles_each);
  if (adds) {  // in fp32
    w.atomics = double(s.row_blocks) * double(p.rows) * double(p.columns()) / 4;
    w.queue = double(s.row_blocks);
  }
  w.scratch = double(block_tables_bytes(p, device));
  w.sorted = double(p.n) * s.column_blocks;
  return w;
}

Work bucket_sum(const Params& p, const Device& device) {
  Work w;
  const BucketSumShape s = bucket_sum_shape(p, device);
  const double columns = double(p.columns()) * element_size(p.dtype) / 16, at_once = double(device.sm_count) * BucketSumShape::kBlocksPerSm;
  w.route = "buckets";
  w.launches = 3 + (s.bytes > s.fp32_out);
  w.vector = 16;
  w.blocks = s.buckets;
  w.steps = double(p.n) * columns / (std::min<double>(s.buckets, at_once) * kSortThreads);
  w.scratch = double(p.n) * 2 * sizeof(uint32_t);
  w.sorted = 2.0 * double(p.n);
  return w;
}

Work segmented_sum(const Params& p, const Device& device) {
  Work w;
  if (!p.sorted_index) describe_sort(w, p, device);
  const int v = vector_width(p, true);
  const SegmentedSumShape s = segmented_sum_shape(p, v, device);
  const double entries_of_row = double(p.n) / double(p.rows);
  const bool cut = entries_of_row > kChunkEntries;
  w.route = "segments";
  w.launches += 2;
  w.vector = v * element_size(p.dtype);
  w.blocks = double(s.blocks);
  w.steps = std::max(1.0, std::min<double>(entries_of_row * s.rows_each, kChunkEntries) * s.column_lanes / s.lanes);
  if (cut) w.scratch += double(cut_bytes(p));
  return w;
}

Work describe(const Params& p, const Device& device) {
  switch (make_plan(p, device).route) {
    case Route::kAtomicAdd: return atomic_add(p, device);
    case Route::kAtomicAddFp32: return atomic_add_fp32(p, device);
    case Route::kFewEntries: return few_entries(p, device);
    case Route::kThreadTables: return thread_tables(p, device);
    case Route::kBlockTables: return block_tables(p, device);
    case Route::kBucketSum: return bucket_sum(p, device);
    case Route::kSegmentedSum: return segmented_sum(p, device);
  }
  return {};
}

}  // namespace

std::string work_of(const Params& p, const Device& device) {
  if (p.n == 0 || p.rows == 0 || p.columns() == 0) return "";
  const Work w = describe(p, device);
  FactText facts;
  for (const char* route : {"tiled", "small", "wide", "fp32_copy", "few", "thread_tables", "block_tables", "buckets", "segments"})
    facts.add(route, std::string(route) == w.route);
  facts.add("launches", w.launches).add("vector", w.vector).add("blocks", w.blocks).add("steps", w.steps).add("atomics", w.atomics).add("queue", w.queue)
      .add("scratch", w.scratch).add("sorted", w.sorted).add("syncs", w.syncs);
  return facts.str();
}

std::string work_of_sort(const Params& p, const Device& device) {
  if (p.n == 0) return "";
  Work w;
  describe_sort(w, p, device);
  FactText facts;
  facts.add("launches", w.launches).add("blocks", w.blocks).add("scratch", w.scratch).add("sorted", w.sorted).add("syncs", w.syncs);
  return facts.str();
}

}  // namespace fusebackend::index_add
