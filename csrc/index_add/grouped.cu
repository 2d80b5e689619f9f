// kTable's work where a slice is 8 vectors or wider: a block sorts its entries by row, so that sums stay in registers while the row is the
// same; only where the row changes are they added to a table in shared memory. A row that goes on from one group of threads to the next is
// added by one thread a column afterwards, so nothing is atomic in a block and its order is always the same.
#include "finish.cuh"
#include "overlap.cuh"
#include "rank.cuh"

namespace fusebackend::accumulate {
namespace {

constexpr int kTileEntries = 1024, kGroupedBlocksPerSm = 2;  // the first: that a block sorts at once
constexpr uint32_t kNoRow = ~0u;

// The grid covers entries and columns: a block has `groups` groups of block_columns threads, and takes every row_blocks-th tile.
template <typename T>
struct GroupedArgs {
  Params p;
  float* sums;  // nullptr: sums are reduced straight into out
  bool apart;   // sums[row_block][row][columns * V], written; else sums[row][columns * V], zeros that are reduced into
  int64_t columns, tiles, row_blocks;
  int block_columns, groups, column_blocks, row_bits, tile_entries;
  int prefetch_rows;  // of the source, that are fetched into the L2 cache during the first sort
};

template <typename T, int V>
__global__ void __launch_bounds__(kSortThreads, kGroupedBlocksPerSm) grouped_kernel(const __grid_constant__ GroupedArgs<T> a) {
  constexpr int U = kBatch;
  constexpr int kEach = kTileEntries / kSortThreads;
  __shared__ alignas(16) uint32_t from_of[kTileEntries];
  __shared__ alignas(16) uint16_t row_of[kTileEntries];
  __shared__ alignas(16) float scales[kTileEntries];
  __shared__ uint32_t warp_sums[kWarps], head_row[kSortThreads / 8], kept;
  extern __shared__ uint4 shared[];
  const Params& p = a.p;
  const uint32_t rows = uint32_t(p.rows), width = a.block_columns * V;
  float* const table = reinterpret_cast<float*>(shared);  // [row][width]
  float* const heads = table + rows * width;               // [group][width]: of rows that go on from the group before
  uint16_t* const seen = reinterpret_cast<uint16_t*>(heads + a.groups * width);  // [warp][rows]

  const unsigned row_block = blockIdx.x / unsigned(a.column_blocks), column_block = blockIdx.x % unsigned(a.column_blocks);
  const uint32_t group = threadIdx.x / unsigned(a.block_columns), lane_column = threadIdx.x % unsigned(a.block_columns);
  const int64_t column = int64_t(column_block) * a.block_columns + lane_column;
  const bool active = group < unsigned(a.groups) && column < a.columns, scaled = p.weight.data || p.alpha != 1.0;
  for (uint32_t i = threadIdx.x; i < rows * width; i += kSortThreads) table[i] = 0.f;
  let_next_kernel_set_up();  // the finishing kernel, which waits for this one's end
  int64_t out_offset = 0, source_offset = 0;
  if (active) column_offsets<V>(p, column, out_offset, source_offset);
  const T* const source = static_cast<const T*>(p.source) + source_offset;

  for (int64_t t = row_block; t < a.tiles; t += a.row_blocks) {
    const int64_t first = t * a.tile_entries;
    const int count = int(min(int64_t(a.tile_entries), p.n - first));
    for (uint32_t i = threadIdx.x; i < rows * kWarps; i += kSortThreads) seen[i] = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) from_of[threadIdx.x + e * kSortThreads] = 0;  // past the last entry a row is read that there is
    __syncthreads();
    const int base = int(threadIdx.x / 32) * (32 * kEach) + int(threadIdx.x % 32);
    uint16_t* const mine = seen + threadIdx.x / 32 * rows;
    int64_t row[kEach];
    uint32_t rank[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) row[e] = load_index(p.index, first + min(base + e * 32, count - 1));  // all loads before the first check
    if (t == row_block && a.prefetch_rows) {  // memory need not wait for the sort; but the index goes first
      const uint32_t row_lines = (a.block_columns * 16 + 127) / 128, lines = min(a.prefetch_rows, count) * row_lines;
      const T* const at = static_cast<const T*>(p.source) + first * p.source_row_stride + int64_t(column_block) * width;
      for (uint32_t i = threadIdx.x; i < lines; i += kSortThreads)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at + int64_t(i / row_lines) * p.source_row_stride + i % row_lines * (128 / sizeof(T))));
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) row[e] = base + e * 32 < count ? target_row(p, row[e]) : -1;
#pragma unroll
    for (int e = 0; e < kEach; ++e) rank[e] = rank_in_warp(mine, row[e] < 0 ? 0 : uint32_t(row[e]), a.row_bits, row[e] >= 0);
    const uint32_t left_out = __popc(__ballot_sync(~0u, row[0] < 0)) + __popc(__ballot_sync(~0u, row[1] < 0));
    static_assert(kEach == 2);
    if (threadIdx.x == 0) kept = kTileEntries;
    counts_to_places(seen, rows, warp_sums, [](uint32_t, uint32_t) {});
    if (threadIdx.x % 32 == 0 && left_out) atomicSub(&kept, left_out);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (row[e] < 0) continue;
      const int64_t n = first + base + e * 32;
      const uint32_t at = mine[row[e]] + rank[e];
      row_of[at] = uint16_t(row[e]);
      from_of[at] = uint32_t(p.source_index.data ? checked_row(load_index(p.source_index, n), p.source_rows, p.source_wraps) : n);
      if (scaled) scales[at] = float(p.alpha) * (p.weight.data ? widen<float>(static_cast<const T*>(p.weight.data)[n * p.weight.stride]) : 1.f);
    }
    __syncthreads();

    const int sorted = int(kept), per_group = ((sorted + a.groups - 1) / a.groups + U - 1) / U * U;
    const int begin = int(group) * per_group, end = min(sorted, begin + per_group);
    if (active && lane_column == 0) head_row[group] = kNoRow;
    if (active && begin < end) {
      uint4 v[U];  // as they come: taken apart, 16-bit elements would hold a register each
      float sum[V] = {};
      uint32_t current = row_of[begin];
      bool head = begin > 0 && row_of[begin - 1] == current;
      auto flush = [&] {
        auto* const to = reinterpret_cast<Vec<float, V>*>((head ? heads + group * width : table + current * width) + lane_column * V);
        if (head && lane_column == 0) head_row[group] = current;
        Vec<float, V> held{};
        if (!head) held = *to;
#pragma unroll
        for (int i = 0; i < V; ++i) held.v[i] += sum[i];
        *to = held;
      };
      for (int k0 = begin; k0 < end; k0 += U) {
        uint32_t from[U];
        load_batch(from, from_of + k0);
#pragma unroll
        for (int u = 0; u < U; ++u) v[u] = __ldcs(reinterpret_cast<const uint4*>(source + int64_t(from[u]) * p.source_row_stride));
        const bool one_row = row_of[min(k0 + U, end) - 1] == current;  // as most often: they are sorted
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (k0 + u >= end) break;
          if (!one_row)
            if (const uint32_t row = row_of[k0 + u]; row != current) {
              flush();
              current = row, head = false;
#pragma unroll
              for (int i = 0; i < V; ++i) sum[i] = 0.f;
            }
          const float scale = scaled ? scales[k0 + u] : 1.f;
          const Vec<T, V> values = reinterpret_cast<const Vec<T, V>&>(v[u]);
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i] = fmaf(widen<float>(values.v[i]), scale, sum[i]);
        }
      }
      flush();
    }
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < width; c += kSortThreads)
      for (int g = 1; g < a.groups; ++g)
        if (const uint32_t row = head_row[g]; row != kNoRow) table[row * width + c] += heads[g * width + c];
    __syncthreads();
  }

  if constexpr (std::is_same_v<T, float>) {
    if (!a.sums) {
      for (uint32_t row = group; active && row < rows; row += a.groups)
        red_vector(static_cast<float*>(p.out) + row * p.out_row_stride + out_offset,
                   reinterpret_cast<const Vec<float, V>*>(table)[row * a.block_columns + lane_column].v);
      return;
    }
  }
  if (!a.apart) wait_for_previous_kernel();  // which cleared them
  // Neighbouring threads take neighbouring quads, which make whole sectors.
  const uint32_t quads = width / 4;
  for (uint32_t i = threadIdx.x; i < rows * quads; i += kSortThreads) {
    const uint32_t row = i / quads;
    const int64_t at = int64_t(column_block) * width + i % quads * 4;
    if (at >= a.columns * V) continue;
    const Vec<float, 4> sum = reinterpret_cast<const Vec<float, 4>*>(table)[i];
    if (a.apart)
      *reinterpret_cast<Vec<float, 4>*>(a.sums + (row_block * rows + row) * a.columns * V + at) = sum;
    else
      red_vector(a.sums + row * a.columns * V + at, sum.v);
  }
}

template <typename T>
GroupedArgs<T> grouped_args(const Params& p, const Device& device) {
  GroupedArgs<T> a{p};
  a.columns = p.columns() * element_size(p.dtype) / 16;
  a.column_blocks = int(ceil_div(a.columns, kSortThreads));
  a.block_columns = int(ceil_div(a.columns, a.column_blocks));
  a.groups = kSortThreads / a.block_columns;
  while (p.rows > 1 << a.row_bits) ++a.row_bits;
  const int64_t blocks = std::max<int64_t>(int64_t(device.sm_count) * kGroupedBlocksPerSm / a.column_blocks, 1);
  const int64_t tiles_each = ceil_div(p.n, blocks * kTileEntries);
  // As many blocks as run at once, unless threads would have little to sum and blocks much to bring together.
  a.tile_entries = int(std::max(ceil_div(p.n, blocks * tiles_each), std::min<int64_t>(kBatch * a.groups, kTileEntries)));
  a.tiles = ceil_div(p.n, a.tile_entries);
  a.row_blocks = ceil_div(a.tiles, tiles_each);
  constexpr int kPrefetchBytes = 32 * 1024;  // a block: as much as memory gives while a tile is sorted
  if (!p.source_index.data && p.n_dims == 1 && a.columns % a.block_columns == 0) a.prefetch_rows = kPrefetchBytes / (a.block_columns * 16);
  return a;
}

template <typename T>
int shared_bytes(const GroupedArgs<T>& a) {
  const int width = a.block_columns * int(16 / sizeof(T));
  return int(a.p.rows + a.groups) * width * 4 + int(a.p.rows) * kWarps * 2;
}

}  // namespace

bool grouped_fits(const Params& p, const Device& device) {
  if (p.dtype != DType::kFloat32 && !is_half(p.dtype)) return false;
  const int v = vector_width(p, false);
  if (v * element_size(p.dtype) != 16 || p.columns() / v < 8 || p.rows > 1024 || p.source_rows > UINT32_MAX) return false;
  constexpr int kStaticBytes = kTileEntries * 10 + 2048;
  const int most = std::min(device.shared_bytes_per_block, device.shared_bytes / kGroupedBlocksPerSm) - kStaticBytes;
  return is_half(p.dtype) ? shared_bytes(grouped_args<__half>(p, device)) <= most : shared_bytes(grouped_args<float>(p, device)) <= most;
}

// With many entries a block there are few additions left, so fp32 sums need no second kernel, if their order may vary.
static bool reduces_directly(const Params& p) {
  return p.dtype == DType::kFloat32 && p.in_place() && !p.deterministic && p.n >= 1 << 17 && vector_width(p, true) == kWide<float>;
}

size_t grouped_bytes(const Params& p, const Device& device) {
  if (reduces_directly(p)) return 0;
  return size_t(p.deterministic ? grouped_args<float>(p, device).row_blocks : 1) * p.rows * p.columns() * sizeof(float);
}

cudaError_t launch_grouped(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  auto run = [&](auto type) {
    using T = decltype(type);
    GroupedArgs<T> a = grouped_args<T>(p, device);
    a.sums = reduces_directly(p) ? nullptr : static_cast<float*>(workspace);
    a.apart = p.deterministic;
    const bool cleared = a.sums && !a.apart;
    const auto kernel = grouped_kernel<T, kWide<T>>;
    static SharedMemoryOptIn opt_in;
    const int bytes = shared_bytes(a);
    if (bytes > 32 * 1024)  // beside the static part
      if (cudaError_t error = opt_in.ensure(kernel, device.shared_bytes_per_block - kTileEntries * 10 - 2048); error != cudaSuccess) return error;
    if (cleared)
      if (cudaError_t error = clear(a.sums, p.rows * p.columns(), stream); error != cudaSuccess) return error;
    const unsigned blocks = unsigned(a.row_blocks * a.column_blocks);
    const cudaError_t error = launch_overlapped(kernel, blocks, kSortThreads, bytes, cleared ? device.major : 0, stream, a);
    if (error != cudaSuccess || !a.sums) return error;
    return finish(p, a.sums, a.apart ? a.row_blocks : 1, device, stream);
  };
  if (p.dtype == DType::kFloat32) return run(float());
  return p.dtype == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace fusebackend::accumulate
