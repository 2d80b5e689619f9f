// kBlockTables: few rows of 8 vectors or more that take many entries. A block sorts a tile of entries by row, so that sums stay in
// registers while the row is the same; only where the row changes are they added to a table of all rows in shared memory. Sums of a row
// whose entries are split over several groups of threads are added afterwards, by one thread a column. So nothing is atomic within a
// block, and the order of its additions is always the same.
#include "common/programmatic_launch.cuh"
#include "index_add/block_sort.cuh"
#include "index_add/combine_partials.cuh"
#include "index_add/dispatch.cuh"
#include "index_add/red.cuh"
#include "index_add/routes.h"
#include "index_add/zero_fill.cuh"

namespace fusebackend::index_add {
namespace {

constexpr int kTileEntries = BlockTablesShape::kTileEntries, kBlocksPerSm = BlockTablesShape::kBlocksPerSm;
constexpr uint32_t kNoRow = ~0u;

// The grid covers entries and columns: a block has `groups` groups of block_columns threads, and takes every row_blocks-th tile.
template <typename T>
struct BlockTablesArgs {
  Params p;
  float* partial;  // nullptr: sums are added to out atomically
  bool per_block;  // partial is [row_block][row][columns * V] and written; else [row][columns * V], zeros that are added to atomically
  int64_t columns, tiles, row_blocks;
  int block_columns, groups, column_blocks, row_bits, tile_entries;
  int prefetch_rows;  // of source, that are fetched into the L2 cache during the first sort
};

template <typename T, int V>
__global__ void __launch_bounds__(kSortThreads, kBlocksPerSm) block_tables_kernel(const __grid_constant__ BlockTablesArgs<T> a) {
  constexpr int kEach = kTileEntries / kSortThreads;  // entries of a thread in the sort
  __shared__ alignas(16) uint32_t from_of[kTileEntries];
  __shared__ alignas(16) uint16_t row_of[kTileEntries];
  __shared__ alignas(16) float scales[kTileEntries];
  __shared__ uint32_t warp_sums[kSortWarps], split_row[kSortThreads / 8], kept;
  extern __shared__ uint4 shared[];
  const Params& p = a.p;
  const uint32_t rows = uint32_t(p.rows), width = a.block_columns * V;
  float* const table = reinterpret_cast<float*>(shared);   // [row][width]
  float* const split_sums = table + rows * width;          // [group][width]: the group's part of a row that began in an earlier group
  uint16_t* const digit_counts = reinterpret_cast<uint16_t*>(split_sums + a.groups * width);  // [warp][row]

  const unsigned row_block = blockIdx.x / unsigned(a.column_blocks), column_block = blockIdx.x % unsigned(a.column_blocks);
  const uint32_t group = threadIdx.x / unsigned(a.block_columns), lane_column = threadIdx.x % unsigned(a.block_columns);
  const int64_t column = int64_t(column_block) * a.block_columns + lane_column;
  const bool active = group < unsigned(a.groups) && column < a.columns, scaled = p.scales();
  for (uint32_t i = threadIdx.x; i < rows * width; i += kSortThreads) table[i] = 0.f;
  launch_dependents();  // the kernel that combines the partial sums
  int64_t out_offset = 0, source_offset = 0;
  if (active) column_offsets<V>(p, column, out_offset, source_offset);
  const T* const source = static_cast<const T*>(p.source) + source_offset;

  for (int64_t t = row_block; t < a.tiles; t += a.row_blocks) {
    const int64_t first = t * a.tile_entries;
    const int count = int(min(int64_t(a.tile_entries), p.n - first));
    for (uint32_t i = threadIdx.x; i < rows * kSortWarps; i += kSortThreads) digit_counts[i] = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) from_of[threadIdx.x + e * kSortThreads] = 0;  // past the last entry, row 0 is read
    __syncthreads();
    const int base = int(threadIdx.x / 32) * (32 * kEach) + int(threadIdx.x % 32);
    uint16_t* const my_counts = digit_counts + threadIdx.x / 32 * rows;
    int64_t row[kEach];
    uint32_t rank[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e)  // all loads before the first check
      row[e] = load_index(p.index, first + min(base + e * 32, count - 1));
    if (t == row_block && a.prefetch_rows) {  // the loads of source need not wait for the sort, only for those of the index
      const uint32_t row_lines = (a.block_columns * 16 + 127) / 128, lines = min(a.prefetch_rows, count) * row_lines;
      const T* const at = static_cast<const T*>(p.source) + first * p.source_row_stride + int64_t(column_block) * width;
      for (uint32_t i = threadIdx.x; i < lines; i += kSortThreads)
        prefetch_l2(at + int64_t(i / row_lines) * p.source_row_stride + i % row_lines * (128 / sizeof(T)));
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) row[e] = base + e * 32 < count ? target_row(p, row[e]) : -1;
#pragma unroll
    for (int e = 0; e < kEach; ++e) rank[e] = rank_in_warp(my_counts, row[e] < 0 ? 0 : uint32_t(row[e]), a.row_bits, row[e] >= 0);
    const uint32_t dropped = __popc(__ballot_sync(~0u, row[0] < 0)) + __popc(__ballot_sync(~0u, row[1] < 0));
    static_assert(kEach == 2);
    if (threadIdx.x == 0) kept = kTileEntries;
    digit_counts_to_places(digit_counts, rows, warp_sums, [](uint32_t, uint32_t) {});
    if (threadIdx.x % 32 == 0 && dropped) atomicSub(&kept, dropped);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (row[e] < 0) continue;
      const int64_t n = first + base + e * 32;
      const uint32_t at = my_counts[row[e]] + rank[e];
      row_of[at] = uint16_t(row[e]);
      from_of[at] = uint32_t(source_row(p, n));
      if (scaled) scales[at] = factor_of<T>(p, n);
    }
    __syncthreads();

    const int sorted = int(kept), per_group = ((sorted + a.groups - 1) / a.groups + kLoadsInFlight - 1) / kLoadsInFlight * kLoadsInFlight;
    const int begin = int(group) * per_group, end = min(sorted, begin + per_group);
    if (active && lane_column == 0) split_row[group] = kNoRow;
    if (active && begin < end) {
      uint4 v[kLoadsInFlight];  // not unpacked: 16-bit elements would take a register each
      float sum[V] = {};
      uint32_t current = row_of[begin];
      bool split = begin > 0 && row_of[begin - 1] == current;  // the row began in an earlier group
      auto flush = [&] {
        auto* const to = reinterpret_cast<Vec<float, V>*>((split ? split_sums + group * width : table + current * width) + lane_column * V);
        if (split && lane_column == 0) split_row[group] = current;
        Vec<float, V> held{};
        if (!split) held = *to;
#pragma unroll
        for (int i = 0; i < V; ++i) held.v[i] += sum[i];
        *to = held;
      };
      for (int k0 = begin; k0 < end; k0 += kLoadsInFlight) {
        uint32_t from[kLoadsInFlight];
        load_shared_vector(from, from_of + k0);
#pragma unroll
        for (int u = 0; u < kLoadsInFlight; ++u)
          v[u] = __ldcs(reinterpret_cast<const uint4*>(source + int64_t(from[u]) * p.source_row_stride));
        const bool one_row = row_of[min(k0 + kLoadsInFlight, end) - 1] == current;  // the usual case, since they are sorted
#pragma unroll
        for (int u = 0; u < kLoadsInFlight; ++u) {
          if (k0 + u >= end) break;
          if (!one_row)
            if (const uint32_t row = row_of[k0 + u]; row != current) {
              flush();
              current = row, split = false;
#pragma unroll
              for (int i = 0; i < V; ++i) sum[i] = 0.f;
            }
          const float scale = scaled ? scales[k0 + u] : 1.f;
          const Vec<T, V> values = reinterpret_cast<const Vec<T, V>&>(v[u]);
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i] += product(widen<float>(values.v[i]), scale);
        }
      }
      flush();
    }
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < width; c += kSortThreads)
      for (int g = 1; g < a.groups; ++g)
        if (const uint32_t row = split_row[g]; row != kNoRow) table[row * width + c] += split_sums[g * width + c];
    __syncthreads();
  }

  if constexpr (std::is_same_v<T, float>) {
    if (!a.partial) {
      for (uint32_t row = group; active && row < rows; row += a.groups)
        red_vector(static_cast<float*>(p.out) + row * p.out_row_stride + out_offset,
                   reinterpret_cast<const Vec<float, V>*>(table)[row * a.block_columns + lane_column].v);
      return;
    }
  }
  if (!a.per_block) wait_for_previous_kernel();  // which wrote the zeros
  // Neighbouring threads take neighbouring quads, which make whole sectors.
  const uint32_t quads = width / 4;
  for (uint32_t i = threadIdx.x; i < rows * quads; i += kSortThreads) {
    const uint32_t row = i / quads;
    const int64_t at = int64_t(column_block) * width + i % quads * 4;
    if (at >= a.columns * V) continue;
    const Vec<float, 4> sum = reinterpret_cast<const Vec<float, 4>*>(table)[i];
    if (a.per_block)
      *reinterpret_cast<Vec<float, 4>*>(a.partial + (row_block * rows + row) * a.columns * V + at) = sum;
    else
      red_vector(a.partial + row * a.columns * V + at, sum.v);
  }
}

}  // namespace

cudaError_t launch_block_tables(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  const BlockTablesShape s = block_tables_shape(p, device);
  return dispatch_vector_red(p.dtype, [&](auto type) {
    using T = decltype(type);
    BlockTablesArgs<T> a{p, block_tables_add_to_out(p) ? nullptr : static_cast<float*>(workspace), p.deterministic};
    a.columns = s.columns, a.tiles = s.tiles, a.row_blocks = s.row_blocks;
    a.block_columns = s.block_columns, a.groups = s.groups, a.column_blocks = s.column_blocks;
    a.row_bits = s.row_bits, a.tile_entries = s.tile_entries, a.prefetch_rows = s.prefetch_rows;
    const bool needs_zeros = a.partial && !a.per_block;
    const auto kernel = block_tables_kernel<T, kWidest<T>>;
    static SharedMemoryOptIn opt_in;
    constexpr int kWithoutOptIn = 32 * 1024;  // beside the static part
    if (s.shared_bytes > kWithoutOptIn)
      if (cudaError_t error = opt_in.ensure(kernel, device.shared_bytes_per_block - BlockTablesShape::kStaticSharedBytes); error != cudaSuccess) return error;
    if (needs_zeros)
      if (cudaError_t error = zero_fill(a.partial, p.rows * p.columns(), device.sm_count, stream); error != cudaSuccess) return error;
    const unsigned blocks = unsigned(a.row_blocks * a.column_blocks);
    const cudaError_t error =
        launch_dependent(kernel, blocks, kSortThreads, s.shared_bytes, needs_zeros && device.has_dependent_launch(), stream, a);
    if (error != cudaSuccess || !a.partial) return error;
    return combine_partials(p, a.partial, a.per_block ? a.row_blocks : 1, device, stream);
  });
}

}  // namespace fusebackend::index_add
