// How the kernels of each route divide their work, which sums they can take (`_fits`), and the size of their workspace (`_bytes`). Host code
// without CUDA; the launchers are in routes.h.
#pragma once

#include "common/integer_math.h"
#include "index_add/plan.h"

namespace fusebackend::index_add {

// ---- what host and kernels must agree on ----

constexpr int kThreads = 256;                                      // of a block, in kernels that do not sort in it
constexpr int kSortThreads = 512, kSortWarps = kSortThreads / 32;  // and in those that do
constexpr int kLoadsInFlight = 8;  // entries of a thread whose source rows are loaded at once, in kernels that sort entries in shared memory
constexpr int64_t kWorkspaceAlignment = 256;  // parts of a workspace begin on multiples of this many bytes

// How many bits it takes to write x.
constexpr int bit_width(uint64_t x) {
  int bits = 0;
  for (; x; x >>= 1) ++bits;
  return bits;
}

// ---- vectors ----

// The vector widths, in elements, for which kernels are compiled: 16 bytes (of 1-byte elements 4, which take 16 bytes once they are
// widened), a pair of 16-bit floats, one element.
constexpr int widest_vector(int element_bytes) { return element_bytes > 1 ? 16 / element_bytes : 4; }

// Whether 16-byte vectors of the type can be added atomically (`red`). Other types are added one by one, best by neighbouring threads.
constexpr bool has_vector_red(DType t) { return t == DType::kFloat32 || is_half(t); }

// The widest vectors along the last slice dimension that alignment allows in source, and in out and initial if they are accessed directly.
int vector_width(const Params& p, bool out_too);

// ---- kAtomicAdd and kAtomicAddFp32 ----

// How the blocks of the atomic_add and thread_tables kernels share entries and columns. The grid is row_blocks x column_blocks. A block has
// `groups` groups of block_columns threads, each with a column of V elements, and takes every row_blocks-th tile of groups * per_group
// entries. A group takes per_group neighbouring entries of the tile; or, if rows are shorter than 128 bytes (`interleave`), every groups-th
// entry, so that a warp reads whole cache lines.
struct BlockTiling {
  int64_t columns, tiles, row_blocks;
  int block_columns, groups, column_blocks, per_group;
  bool interleave;
};
BlockTiling make_block_tiling(const Params& p, int vector_width, int max_entries, int blocks_per_sm, const Device& device);

struct AtomicAddTiles {
  static constexpr int kTileEntries = 512;  // that a block stages at once
  static constexpr int kBlocksPerSm = 4;
};
int atomic_add_width(const Params& p);  // of vectors that are added straight into out
bool small_atomic_add_fits(const Params& p, int vector_width, const Device& device);  // few entries: a thread a vector of an entry
bool wide_row_atomic_add_fits(const Params& p, int vector_width);                     // wide rows that are added as they are
struct WideRowShape {
  static constexpr int kPieceThreads = 64;               // small blocks make room for the next ones soonest
  static constexpr int kSeveralEntriesBlocksPerSm = 20;  // that run at once, of those that take several entries
  static constexpr int kSeveral = 4;
  static constexpr int64_t kMaxGridY = 65535;
  uint32_t columns, pieces, groups;
  bool several;  // entries to a block
};
WideRowShape wide_row_shape(const Params& p, int vector_width, const Device& device);
size_t atomic_add_fp32_bytes(const Params& p);

// ---- kFewEntries ----

constexpr int kMaxFewEntries = 256;
inline bool few_entries_fits(const Params& p) { return p.n <= kMaxFewEntries; }
struct FewEntriesShape {
  static constexpr int kLoads = 4;  // in flight
  int64_t columns, column_blocks, share, shares;  // entries of a block, and blocks for all entries
};
FewEntriesShape few_entries_shape(const Params& p, const Device& device);

// ---- kThreadTables ----

// The widest vectors whose tables leave room for two blocks on a multiprocessor; if none do, the narrowest.
struct ThreadTablesShape {
  static constexpr int kTileEntries = 1024;  // that a block stages at once
  int v = 0, blocks_per_sm = 0, shared_bytes = 0, max_shared_bytes = 0;
};
ThreadTablesShape thread_tables_shape(const Params& p, const Device& device);
BlockTiling thread_tables_tiling(const Params& p, const ThreadTablesShape& s, const Device& device);
inline int thread_tables_blocks_per_sm(const Params& p, const Device& device) { return thread_tables_shape(p, device).blocks_per_sm; }
size_t thread_tables_bytes(const Params& p, const Device& device);

// ---- kBlockTables ----

// The grid covers entries and columns: a block has `groups` groups of block_columns threads, and takes every row_blocks-th tile.
struct BlockTablesShape {
  static constexpr int kTileEntries = 1024;  // that a block sorts at once
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kStaticSharedBytes = kTileEntries * 10 + 2048;
  int64_t columns, tiles, row_blocks;
  int block_columns, groups, column_blocks, row_bits, tile_entries;
  int prefetch_rows;  // of source, that are fetched into the L2 cache during the first sort
  int shared_bytes;
};
BlockTablesShape block_tables_shape(const Params& p, const Device& device);
bool block_tables_fit(const Params& p, const Device& device);
bool block_tables_add_to_out(const Params& p);  // without partial sums in the workspace
size_t block_tables_bytes(const Params& p, const Device& device);

// ---- kBucketSum ----

struct BucketSumShape {
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kFillEach = 8, kSumEach = 16;  // entries of a thread of the first kernel, and of the second
  static constexpr int kOverflowEach = 4;             // and of those of its blocks that come last
  static constexpr uint32_t kOverflowTile = kSortThreads * kOverflowEach;  // entries that such a block takes at once, at most
  static constexpr int kMaxDigitBits = 10;
  static constexpr uint32_t kMaxBuckets = 4096, kMaxRowsPerBucket = 4096;
  static constexpr uint32_t kMaxCapacity = kSortThreads * kSumEach;  // entries of a bucket
  static constexpr uint32_t kLowerCapacity = kMaxCapacity * 3 / 4;   // if it takes no more rounds of blocks: large buckets are waited for
  static constexpr int kMaxStaticSharedBytes = 24 * 1024;            // of the second kernel
  static constexpr int kCounters = 2;  // `overflows` and `initialised`, before bucket_sizes

  uint32_t rows_per_bucket, buckets, capacity;
  size_t bucket_entries, fp32_out, bytes;  // offsets in the workspace, and its size
  int digit_bits() const;
};
BucketSumShape bucket_sum_shape(const Params& p, const Device& device);
int bucket_sum_shared_bytes(const Params& p, const BucketSumShape& s);
bool bucket_sum_fits(const Params& p, const Device& device);
inline size_t bucket_sum_bytes(const Params& p, const Device& device) { return bucket_sum_shape(p, device).bytes; }

// ---- kSegmentedSum, and the sorts before it ----

struct SegmentedSumShape {
  static constexpr int64_t kEntriesPerTeam = 64;  // about, of the rows that a team takes
  static constexpr uint32_t kChunksEach = 1;      // that a team takes
  static constexpr uint32_t kChunksPerBlock = 64, kMaxJoinColumns = 32;  // of the second kernel
  int64_t columns, blocks;
  uint32_t column_lanes, lanes, chunks, chunk_blocks, row_blocks, rows_each;
  uint32_t join_width, join_column_blocks;
};
SegmentedSumShape segmented_sum_shape(const Params& p, int vector_width, const Device& device);
int64_t cut_bytes(const Params& p);           // of the workspace: the sums of rows that are cut, at first;
int64_t sorted_index_bytes(const Params& p);  // the sorted index, behind them
size_t segmented_sum_bytes(const Params& p, const Device& device);

// The sort by buckets, which is tried first: it reports where the index is too uneven for it.
struct BucketSortShape {
  static constexpr int kTileEach = 8, kBucketEach = 12;  // entries of a thread in the first and in the second kernel
  static constexpr uint32_t kTile = kSortThreads * kTileEach, kCapacity = kSortThreads * kBucketEach;  // entries of a tile; of a bucket
  static constexpr int64_t kAverage = kCapacity * 3 / 4;  // entries of a bucket on average, so that few overflow
  static constexpr int kMaxLocalBits = 12;                // of a row within its bucket
  static constexpr uint32_t kMaxBuckets = 4096;
  uint32_t tiles, buckets;
  int bucket_bits, row_bits;
  size_t sorted_from, starts, bytes;  // offsets in the workspace, behind `sorted`, and its size
  int tile_shared_bytes, bucket_shared_bytes;  // dynamic, of the two kernels
};
BucketSortShape bucket_sort_shape(const Params& p);
inline int max_sort_shared_bytes(const Device& device) { return device.shared_bytes_per_block - 8 * 1024; }  // beside the static part
bool bucket_sort_fits(const Params& p, const Device& device);

struct RadixSortShape {
  static constexpr int kEach = 4;  // entries of a thread at a time
  static constexpr uint32_t kTile = kSortThreads * kEach;
  static constexpr int kMaxDigitBits = 10, kMaxBins = 1 << kMaxDigitBits;
  static constexpr size_t kFlagBytes = kWorkspaceAlignment;  // at the front of the workspace: whether the bucket sort overflowed
  int passes, digit_bits;
  uint32_t blocks, per_block;
  size_t swap, counts, totals, bytes;  // offsets in the workspace, behind the pairs, and its size
};
RadixSortShape radix_sort_shape(const Params& p, const Device& device);

}  // namespace fusebackend::index_add
