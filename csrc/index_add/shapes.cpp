#include "index_add/shapes.h"

#include <algorithm>

namespace fusebackend::index_add {

int vector_width(const Params& p, bool out_too) {
  const int size = element_size(p.dtype);
  const SliceDim& last = p.dims[p.n_dims - 1];
  auto fits = [&](int v) {
    const int bytes = v * size;
    auto aligned = [&](const void* base, int64_t row_stride) {
      return reinterpret_cast<uintptr_t>(base) % bytes == 0 && row_stride * size % bytes == 0;
    };
    if (last.size % v || last.source_stride != 1 || !aligned(p.source, p.source_row_stride)) return false;
    if (out_too && (last.out_stride != 1 || !aligned(p.out, p.out_row_stride) || !aligned(p.initial, 0))) return false;
    for (int d = 0; d + 1 < p.n_dims; ++d)
      if (p.dims[d].source_stride * size % bytes || (out_too && p.dims[d].out_stride * size % bytes)) return false;
    return true;
  };
  if (fits(widest_vector(size))) return widest_vector(size);
  return is_half(p.dtype) && fits(2) ? 2 : 1;
}

// About as many blocks as run at once, which share the work evenly: as few tiles each as possible, of one size, at most max_entries.
BlockTiling make_block_tiling(const Params& p, int v, int max_entries, int blocks_per_sm, const Device& device) {
  BlockTiling t{};
  t.columns = p.columns() / v;
  t.column_blocks = int(ceil_div(t.columns, kThreads));
  t.block_columns = int(ceil_div(t.columns, t.column_blocks));
  t.groups = kThreads / t.block_columns;
  const int64_t blocks = std::max<int64_t>(int64_t(device.sm_count) * blocks_per_sm / t.column_blocks, 1);
  const int64_t tiles_per_block = ceil_div(p.n, blocks * t.groups * std::max(max_entries / t.groups, 1));
  t.per_group = int(ceil_div(p.n, blocks * t.groups * tiles_per_block));
  t.tiles = ceil_div(p.n, t.groups * t.per_group);
  t.row_blocks = ceil_div(t.tiles, tiles_per_block);
  t.interleave = p.dims[p.n_dims - 1].size * element_size(p.dtype) < 128;
  return t;
}

// ---- kAtomicAdd and kAtomicAddFp32 ----

int atomic_add_width(const Params& p) { return has_vector_red(p.dtype) ? vector_width(p, true) : 1; }

bool small_atomic_add_fits(const Params& p, int v, const Device& device) {
  // Entries of one row are not summed before they are added, so only few, which might all be of one row.
  constexpr int64_t kMaxEntries = 4096, kMaxVectorsPerSm = 4096, kMaxStride = 1 << 30, kExactInFloat = 1 << 24;
  return p.n_dims == 1 && p.n <= kMaxEntries && p.n * p.columns() / v <= device.sm_count * kMaxVectorsPerSm &&
         p.dims[0].out_stride < kMaxStride && p.dims[0].source_stride < kMaxStride && p.weight.stride == 1 &&
         double(float(p.alpha)) == p.alpha && (is_floating(p.dtype) || (p.alpha >= -kExactInFloat && p.alpha <= kExactInFloat));
}

bool wide_row_atomic_add_fits(const Params& p, int v) {
  constexpr int kPieceThreads = WideRowShape::kPieceThreads;
  return p.is_plain() && has_vector_red(p.dtype) && p.n_dims == 1 && v * element_size(p.dtype) == 16 && p.columns() / v >= kPieceThreads &&
         p.columns() / v <= INT32_MAX && p.n <= 2 * p.rows && p.n <= WideRowShape::kMaxGridY;
}

WideRowShape wide_row_shape(const Params& p, int v, const Device& device) {
  using S = WideRowShape;
  // Several entries to a block, if there are blocks enough all the same. Of few entries one to a block, unless these blocks would run in
  // more rounds.
  constexpr int kFewEntries = 64;
  WideRowShape s{};
  s.columns = uint32_t(p.columns() / v);
  s.pieces = uint32_t(ceil_div(s.columns, S::kPieceThreads));
  const int64_t blocks = s.columns * p.n / (S::kSeveral * S::kPieceThreads);
  s.several = blocks >= 4 * device.sm_count && (p.n >= kFewEntries || blocks <= S::kSeveralEntriesBlocksPerSm * device.sm_count);
  s.groups = uint32_t(ceil_div(p.n, s.several ? S::kSeveral : 1));
  return s;
}

size_t atomic_add_fp32_bytes(const Params& p) { return size_t(p.rows) * p.columns() * sizeof(float); }

// ---- kFewEntries ----

FewEntriesShape few_entries_shape(const Params& p, const Device& device) {
  constexpr int kBlocksPerSm = 4;
  FewEntriesShape s{};
  s.columns = p.columns() / vector_width(p, true);
  const int64_t running = int64_t(device.sm_count) * kBlocksPerSm;
  s.column_blocks = std::min(ceil_div(s.columns, kThreads), running);
  const int64_t shares = std::min(ceil_div(p.n, FewEntriesShape::kLoads), std::max<int64_t>(running / s.column_blocks, 1));
  s.share = ceil_div(p.n, shares);
  s.shares = ceil_div(p.n, s.share);
  return s;
}

// ---- kThreadTables ----

ThreadTablesShape thread_tables_shape(const Params& p, const Device& device) {
  constexpr int kTileEntries = ThreadTablesShape::kTileEntries;
  constexpr int kStaticBytes = kTileEntries * 8 + 1200;  // the staged tile, and what the system takes of each block's share
  const int acc_bytes = element_size(p.dtype) == 8 ? 8 : 4, widest = vector_width(p, false);
  ThreadTablesShape s;
  if (p.source_rows > UINT32_MAX) return s;
  for (int v : {8, 4, 2, 1}) {
    if (v > widest) continue;
    const size_t bytes = size_t(p.rows) * v * kThreads * acc_bytes + (p.scales() ? kTileEntries * acc_bytes : 0);
    const int blocks = int(size_t(device.shared_bytes_per_sm) / (bytes + kStaticBytes));
    const int most = device.shared_bytes_per_block - kStaticBytes;
    if (bytes <= size_t(most) && blocks > s.blocks_per_sm) s = {v, std::min(blocks, 4), int(bytes), most};
    if (s.blocks_per_sm >= 2) break;
  }
  return s;
}

BlockTiling thread_tables_tiling(const Params& p, const ThreadTablesShape& s, const Device& device) {
  return make_block_tiling(p, s.v, ThreadTablesShape::kTileEntries, s.blocks_per_sm, device);
}

size_t thread_tables_bytes(const Params& p, const Device& device) {
  const BlockTiling tiling = thread_tables_tiling(p, thread_tables_shape(p, device), device);
  return size_t(tiling.row_blocks) * p.rows * p.columns() * (element_size(p.dtype) == 8 ? 8 : 4);
}

// ---- kBlockTables ----

BlockTablesShape block_tables_shape(const Params& p, const Device& device) {
  using S = BlockTablesShape;
  BlockTablesShape s{};
  s.columns = p.columns() * element_size(p.dtype) / 16;
  s.column_blocks = int(ceil_div(s.columns, kSortThreads));
  s.block_columns = int(ceil_div(s.columns, s.column_blocks));
  s.groups = kSortThreads / s.block_columns;
  s.row_bits = bit_width(p.rows - 1);
  const int64_t blocks = std::max<int64_t>(int64_t(device.sm_count) * S::kBlocksPerSm / s.column_blocks, 1);
  const int64_t tiles_each = ceil_div(p.n, blocks * S::kTileEntries);
  // As many blocks as run at once, unless threads would have little to sum, and much to combine.
  s.tile_entries = int(std::max(ceil_div(p.n, blocks * tiles_each), std::min<int64_t>(kLoadsInFlight * s.groups, S::kTileEntries)));
  s.tiles = ceil_div(p.n, s.tile_entries);
  s.row_blocks = ceil_div(s.tiles, tiles_each);
  constexpr int kPrefetchBytes = 32 * 1024;  // of a block: what memory gives while a tile is sorted
  if (!p.source_index.data && p.n_dims == 1 && s.columns % s.block_columns == 0) s.prefetch_rows = kPrefetchBytes / (s.block_columns * 16);
  const int width = s.block_columns * (16 / element_size(p.dtype));
  s.shared_bytes = int(p.rows + s.groups) * width * 4 + int(p.rows) * kSortWarps * 2;
  return s;
}

bool block_tables_fit(const Params& p, const Device& device) {
  using S = BlockTablesShape;
  constexpr int64_t kMinColumns = 8, kMaxRows = 1024;
  if (!has_vector_red(p.dtype)) return false;
  const int v = vector_width(p, false);
  if (v * element_size(p.dtype) != 16 || p.columns() / v < kMinColumns || p.rows > kMaxRows || p.source_rows > UINT32_MAX) return false;
  const int most = std::min(device.shared_bytes_per_block, device.shared_bytes_per_sm / S::kBlocksPerSm) - S::kStaticSharedBytes;
  return block_tables_shape(p, device).shared_bytes <= most;
}

// With many entries a block there are few atomic additions, so that fp32 sums need no second kernel, if their order may vary.
bool block_tables_add_to_out(const Params& p) {
  constexpr int64_t kMinEntries = 1 << 17;
  return p.dtype == DType::kFloat32 && p.in_place() && !p.deterministic && p.n >= kMinEntries &&
         vector_width(p, true) == widest_vector(sizeof(float));
}

size_t block_tables_bytes(const Params& p, const Device& device) {
  if (block_tables_add_to_out(p)) return 0;
  return size_t(p.deterministic ? block_tables_shape(p, device).row_blocks : 1) * p.rows * p.columns() * sizeof(float);
}

// ---- kBucketSum ----

// Entries of a bucket on average, so that few overflow.
static constexpr int64_t average(int64_t capacity) { return capacity * 3 / 4; }

int BucketSumShape::digit_bits() const { return std::min(bit_width(buckets - 1), kMaxDigitBits); }

// So many rows to a bucket that blocks run in a whole number of rounds.
BucketSumShape bucket_sum_shape(const Params& p, const Device& device) {
  using S = BucketSumShape;
  const int64_t at_once = int64_t(device.sm_count) * S::kBlocksPerSm;
  auto rounds_of = [&](int64_t capacity) { return ceil_div(p.n, at_once * average(capacity)); };
  const int64_t rounds = rounds_of(S::kMaxCapacity);
  const bool rounded_once = is_half(p.dtype) && (p.precise || p.n >= 16 * p.rows);
  BucketSumShape s{};
  s.capacity = rounds_of(S::kLowerCapacity) == rounds ? S::kLowerCapacity : S::kMaxCapacity;
  s.rows_per_bucket = uint32_t(std::max<int64_t>(ceil_div(p.rows, at_once * rounds), 1));
  s.buckets = uint32_t(ceil_div(p.rows, int64_t(s.rows_per_bucket)));
  s.bucket_entries = round_up((s.buckets + S::kCounters) * sizeof(uint32_t), kWorkspaceAlignment);
  s.fp32_out = s.bucket_entries + round_up(int64_t(s.buckets) * s.capacity * 2 * sizeof(uint32_t), kWorkspaceAlignment);
  s.bytes = s.fp32_out + (rounded_once ? atomic_add_fp32_bytes(p) : 0);
  return s;
}

int bucket_sum_shared_bytes(const Params& p, const BucketSumShape& s) {
  const uint32_t bucket = s.capacity * (p.scales() ? 10 : 6) + s.rows_per_bucket * 4;
  const uint32_t overflow =
      BucketSumShape::kOverflowTile * (p.scales() ? 12 : 8) + std::max((1u << s.digit_bits()) * kSortWarps * 2, s.rows_per_bucket * 4);
  return int(std::max(bucket, overflow));
}

bool bucket_sum_fits(const Params& p, const Device& device) {
  using S = BucketSumShape;
  const int size = element_size(p.dtype);
  if (!has_vector_red(p.dtype) || p.n < 2 || p.n > INT32_MAX || p.rows == 0 || p.rows > INT32_MAX) return false;
  if (vector_width(p, true) * size != 16 || p.source_rows > UINT32_MAX || p.source_row_stride * size > int64_t(UINT32_MAX)) return false;
  const BucketSumShape s = bucket_sum_shape(p, device);
  const int most = std::min(device.shared_bytes_per_block, device.shared_bytes_per_sm / S::kBlocksPerSm) - S::kMaxStaticSharedBytes;
  return s.buckets <= S::kMaxBuckets && s.rows_per_bucket <= S::kMaxRowsPerBucket && p.n / s.buckets <= average(s.capacity) &&
         bucket_sum_shared_bytes(p, s) <= most;
}

// ---- kSegmentedSum, and the sorts before it ----

// How many lanes of a team take different columns: the number with which the fewest idle.
static uint32_t column_lanes_for(int64_t columns) {
  if (columns <= 8) return 1u << bit_width(columns - 1);
  uint32_t best = 32;
  for (uint32_t lanes : {16, 8})
    if (round_up(columns, lanes) < round_up(columns, best)) best = lanes;
  return best;
}

SegmentedSumShape segmented_sum_shape(const Params& p, int v, const Device& device) {
  using S = SegmentedSumShape;
  SegmentedSumShape s{};
  s.columns = p.columns() / v;
  s.column_lanes = column_lanes_for(s.columns);
  s.lanes = std::max(s.column_lanes, 8u);
  s.chunks = uint32_t(ceil_div(p.n, kChunkEntries));
  // So many rows that their entries are some batches of loads, if that leaves each multiprocessor blocks for several rounds.
  const int64_t teams = std::max<int64_t>(int64_t(device.sm_count) * kThreads * 12 / s.lanes / ceil_div(s.columns, s.column_lanes), 1);
  s.rows_each = uint32_t(std::clamp<int64_t>(std::min(S::kEntriesPerTeam * p.rows / p.n, p.rows / teams), 1, s.lanes - 1));
  s.chunk_blocks = uint32_t(ceil_div(ceil_div(s.chunks, S::kChunksEach) * s.lanes, kThreads));
  s.row_blocks = uint32_t(ceil_div(ceil_div(p.rows, s.rows_each) * s.lanes, kThreads));
  s.blocks = (int64_t(s.chunk_blocks) + s.row_blocks) * ceil_div(s.columns, s.column_lanes);
  const uint32_t elements = uint32_t(p.columns());
  s.join_width = std::min(elements, S::kMaxJoinColumns);
  s.join_column_blocks = uint32_t(ceil_div(elements, s.join_width));
  return s;
}

int64_t cut_bytes(const Params& p) {
  const int64_t per_sum = p.dtype == DType::kFloat64 ? 16 : 8;  // a compensated sum; those of other types are no larger
  return round_up(ceil_div(p.n, kChunkEntries) * 2 * p.columns() * per_sum, kWorkspaceAlignment);
}
int64_t sorted_index_bytes(const Params& p) { return round_up(sorted_index_words(p) * 4, kWorkspaceAlignment); }

size_t segmented_sum_bytes(const Params& p, const Device& device) {
  return cut_bytes(p) + (p.sorted_index ? 0 : sorted_index_bytes(p) + sort_bytes(p, device));
}

BucketSortShape bucket_sort_shape(const Params& p) {
  using S = BucketSortShape;
  BucketSortShape s{};
  while (s.row_bits < S::kMaxLocalBits && p.rows >> s.row_bits > 1 && p.n / ceil_div(p.rows, int64_t(2) << s.row_bits) <= S::kAverage)
    ++s.row_bits;
  s.tiles = uint32_t(ceil_div(p.n, S::kTile));
  s.buckets = uint32_t(ceil_div(p.rows, int64_t(1) << s.row_bits)) + p.leaves_out();
  s.bucket_bits = bit_width(s.buckets - 1);
  s.sorted_from = size_t(s.tiles) * S::kTile * 4;
  s.starts = s.sorted_from * (p.source_index.data ? 2 : 1);
  s.bytes = s.starts + size_t(s.tiles) * (s.buckets + 1) * 2;
  s.tile_shared_bytes = int(S::kTile * (p.source_index.data ? 8 : 4) + s.buckets * kSortWarps * 2);
  s.bucket_shared_bytes = int(S::kCapacity * (p.source_index.data ? 10 : 6) + (kSortWarps * 2 << s.row_bits));
  return s;
}

bool bucket_sort_fits(const Params& p, const Device& device) {
  using S = BucketSortShape;
  if (p.n == 0 || p.rows == 0 || p.rows > int64_t(S::kMaxBuckets - 1) << S::kMaxLocalBits) return false;
  const BucketSortShape s = bucket_sort_shape(p);
  return s.buckets <= S::kMaxBuckets && p.n / s.buckets <= S::kAverage &&
         std::max(s.tile_shared_bytes, s.bucket_shared_bytes) <= max_sort_shared_bytes(device);
}

RadixSortShape radix_sort_shape(const Params& p, const Device& device) {
  using S = RadixSortShape;
  constexpr int kBlocksPerSm = 2;  // that run at once on every architecture but sm_75
  RadixSortShape s{};
  const int bits = std::clamp(bit_width(p.leaves_out() ? p.rows : p.rows - 1), 1, 32);
  s.passes = int(ceil_div(bits, S::kMaxDigitBits));
  s.digit_bits = int(ceil_div(bits, s.passes));
  const int64_t most = int64_t(device.sm_count) * (device.shared_bytes_per_sm >= 96 * 1024 ? kBlocksPerSm : 1);
  const int64_t tiles_each = std::max<int64_t>(ceil_div(p.n, most * S::kTile), 1);
  s.per_block = uint32_t(tiles_each * S::kTile);
  s.blocks = uint32_t(std::max<int64_t>(ceil_div(p.n, s.per_block), 1));
  s.swap = size_t(p.n) * 2 * sizeof(uint32_t);
  s.counts = s.swap + (s.passes > 1 ? s.swap : 0);
  s.totals = s.counts + (size_t(s.blocks) << s.digit_bits) * 4;
  s.bytes = s.totals + S::kMaxBins * 4;
  return s;
}

size_t sort_bytes(const Params& p, const Device& device) {
  const size_t bucket_sort = bucket_sort_fits(p, device) ? bucket_sort_shape(p).bytes : 0;
  return RadixSortShape::kFlagBytes + std::max(radix_sort_shape(p, device).bytes, bucket_sort);
}

}  // namespace fusebackend::index_add
