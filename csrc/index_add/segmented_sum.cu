// kSegmentedSum: by a sorted index, some lanes of a warp sum the entries of each row and write it once, rounded once, with what out started
// from. Rows with more than kChunkEntries entries are cut into chunks of the sorted entries, whose sums a second kernel adds up. Which
// partial sums meet in which order depends on shapes and indices alone, so a repetition is bit-identical.
#include "index_add/segmented_sum.cuh"

#include "common/programmatic_launch.cuh"
#include "index_add/routes.h"

namespace fusebackend::index_add {
namespace {

constexpr uint32_t kChunksEach = SegmentedSumShape::kChunksEach, kChunksPerBlock = SegmentedSumShape::kChunksPerBlock;

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 4) segmented_sum_kernel(const __grid_constant__ SegmentedSumArgs<T> a) {
  constexpr bool kRings = sizeof(Vec<T, V>) >= 4;
  __shared__ Vec<T, V> rings[kRings ? kRing * kThreads : 1];
  const Params& p = a.p;
  const Team team(a);
  const uint32_t blocks = a.chunk_blocks + a.row_blocks, block = blockIdx.x % blocks;
  const uint32_t column = blockIdx.x / blocks * a.column_lanes + team.column();
  const bool writes = column < a.columns && team.split == 0;
  int64_t out_offset, source_offset;
  column_offsets<V>(p, min(column, a.columns - 1), out_offset, source_offset);  // lanes beyond the columns read the last one again
  const T* const source = static_cast<const T*>(p.source) + source_offset;
  wait_for_previous_kernel();
  launch_dependents();

  if (block >= a.chunk_blocks) {
    const uint32_t team_row = ((block - a.chunk_blocks) * kThreads + threadIdx.x) / team.lanes * a.rows_each;
    const uint32_t row_begin = min(team_row, uint32_t(p.rows)), row_end = min(row_begin + a.rows_each, uint32_t(p.rows));
    const uint32_t begins = a.index.row_begins[min(row_begin + team.lane, row_end)];  // each lane stands for a row
    const uint32_t lane_end = __shfl_down_sync(~0u, begins, 1, team.lanes);
    const bool cut = team.lane < a.rows_each && lane_end - begins > kChunkEntries;
    if constexpr (kRings)
      if (team.splits == 1 && a.source_row_bytes && !__any_sync(~0u, cut))
        return sum_rows<T, V>(a, team, row_begin, row_end, writes, source, out_offset, rings + threadIdx.x);
    if (row_begin == row_end) return;
    if (!kRings && team.splits == 1 && !__any_sync(team.mask, cut))
      return sum_rows_of_narrow_vectors<T, V>(a, team, row_begin, row_end, begins, writes, source, out_offset);
    for (uint32_t row = row_begin; row < row_end; ++row) {
      const uint32_t begin = __shfl_sync(team.mask, begins, row - row_begin, team.lanes);
      const uint32_t end = __shfl_sync(team.mask, begins, row + 1 - row_begin, team.lanes);
      if (end - begin > kChunkEntries || (begin == end && p.in_place())) continue;
      Sum<T> sum[V]{};
      add_entries<T, V>(sum, a, team, begin, end, source);
      if (writes) store_row<T, V>(p, row * p.out_row_stride + out_offset, sum);
    }
    return;
  }

  // Few chunks are parts of cut rows: each lane looks one of the team's chunks up.
  const uint32_t team_chunk = (block * kThreads + threadIdx.x) / team.lanes * kChunksEach, chunk_begin = min(team_chunk, a.chunks);
  const uint32_t kept = a.index.row_begins[p.rows], mine = min(chunk_begin + min(team.lane, kChunksEach - 1), a.chunks - 1);
  uint32_t end_of_first = 0, begin_of_next = 0;  // of a cut row that began before the chunk; of one that begins in it; 0: none
  {
    const uint32_t first = mine * kChunkEntries, last = min(first + kChunkEntries, kept), row = a.index.chunk_rows[mine];
    if (first < last && chunk_begin < a.chunks) {
      const uint32_t row_end = a.index.row_begins[row + 1];
      const uint32_t next_row = mine + 1 < a.chunks ? a.index.chunk_rows[mine + 1] : uint32_t(p.rows);
      if (row_end - a.index.row_begins[row] > kChunkEntries) end_of_first = min(row_end, last);
      if (row_end < last && next_row < p.rows)
        if (const uint32_t begin = a.index.row_begins[next_row];
            begin > first && begin < last && a.index.row_begins[next_row + 1] - begin > kChunkEntries)
          begin_of_next = begin;
    }
  }
  for (uint32_t i = 0; i < kChunksEach; ++i) {
    const uint32_t chunk = chunk_begin + i, first = chunk * kChunkEntries;
    const bool there = chunk < a.chunks;
    const uint32_t end = __shfl_sync(~0u, end_of_first, i, team.lanes), begin = __shfl_sync(~0u, begin_of_next, i, team.lanes);
#pragma unroll 1
    for (int slot = 0; slot < 2; ++slot) {
      uint32_t from = 0, to = 0;
      if (there && slot == 0 && end > 0) from = first, to = end;
      if (there && slot == 1 && begin > 0) from = begin, to = min(first + kChunkEntries, kept);
      if (!__any_sync(~0u, from < to)) continue;
      Sum<T> sum[V]{};
      bool streamed = false;
      if constexpr (kRings)
        if (team.splits == 1 && a.source_row_bytes) {
          stream_entries<T, V>(sum, a, team, from, to, source, rings + threadIdx.x, [](uint32_t) {});
          streamed = true;
        }
      if (!streamed && from < to) add_entries<T, V>(sum, a, team, from, to, source);
      Sum<T>* const cut = a.cut + ((int64_t(chunk) * 2 + slot) * a.columns + column) * V;
      if (writes && from < to)
#pragma unroll
        for (int i = 0; i < V; ++i) cut[i] = sum[i];
    }
  }
}

// Rows that were cut: the chunk in which a row begins adds up its part and those of the chunks in which the row goes on.
template <typename T>
__global__ void __launch_bounds__(kThreads) join_cut_rows_kernel(const __grid_constant__ SegmentedSumArgs<T> a, uint32_t columns,
                                                                 uint32_t width, uint32_t column_blocks) {
  __shared__ uint32_t last_of[kChunksPerBlock], row_of[kChunksPerBlock], slot_of[kChunksPerBlock];
  __shared__ Sum<T> sums[kThreads];
  const Params& p = a.p;
  const uint32_t first_chunk = blockIdx.x / column_blocks * kChunksPerBlock;
  // The sorted index may be read before the wait: the kernel before let this one start only when it had the index itself.
  if (threadIdx.x < kChunksPerBlock) {
    const uint32_t chunk = first_chunk + threadIdx.x;
    const uint32_t row = chunk + 1 < a.chunks ? a.index.chunk_rows[chunk + 1] : p.rows;  // which may begin in this chunk
    last_of[threadIdx.x] = 0;
    if (row < p.rows) {
      const uint32_t from = a.index.row_begins[row], to = a.index.row_begins[row + 1];
      if (to - from > kChunkEntries && from / kChunkEntries == chunk) {
        last_of[threadIdx.x] = (to - 1) / kChunkEntries;
        row_of[threadIdx.x] = row;
        slot_of[threadIdx.x] = from % kChunkEntries != 0;
      }
    }
  }
  const bool any = __syncthreads_or(threadIdx.x < kChunksPerBlock && last_of[threadIdx.x] > 0);
  wait_for_previous_kernel();  // in every block: what follows this kernel relies on the sums too
  launch_dependents();
  if (!any) return;
  // Columns across threads. Each group of threads takes some of the short rows; all groups share a long one.
  const uint32_t group = threadIdx.x / width, groups = kThreads / width, c = blockIdx.x % column_blocks * width + threadIdx.x % width;
  const bool busy = group < groups && c < columns;
  constexpr uint32_t kShort = 8;  // chunks
  auto parts = [&](uint32_t i, uint32_t from, uint32_t step) {
    Sum<T> sum{};
    if (from == 0) sum.add(a.cut[(int64_t(first_chunk + i) * 2 + slot_of[i]) * columns + c]);
#pragma unroll 8
    for (uint32_t k = first_chunk + i + 1 + from; k <= last_of[i]; k += step) sum.add(a.cut[int64_t(k) * 2 * columns + c]);
    return sum;
  };
  auto store = [&](uint32_t i, Sum<T> sum) {
    int64_t out, source;
    column_offsets<1>(p, c, out, source);
    Sum<T> one[1]{sum};
    store_row<T, 1>(p, row_of[i] * p.out_row_stride + out, one);
  };
  for (uint32_t i = group; i < kChunksPerBlock; i += groups)
    if (busy && last_of[i] > first_chunk + i && last_of[i] - (first_chunk + i) < kShort) store(i, parts(i, 0, 1));
  for (uint32_t i = 0; i < kChunksPerBlock; ++i) {
    if (last_of[i] < first_chunk + i + kShort) continue;
    Sum<T> sum{};
    if (busy) sum = parts(i, group, groups);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (busy && group == 0) {
      for (uint32_t other = 1; other < groups; ++other) sum.add(sums[other * width + threadIdx.x]);
      store(i, sum);
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_segmented_sum(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  auto* words = static_cast<const uint32_t*>(p.sorted_index);
  if (!words) {
    char* const own_index = static_cast<char*>(workspace) + cut_bytes(p);
    auto* const own_words = reinterpret_cast<uint32_t*>(own_index);
    if (cudaError_t error = launch_sort(p, own_words, own_index + sorted_index_bytes(p), device, stream); error != cudaSuccess) return error;
    words = own_words;
  }
  const int v = vector_width(p, true);
  const SegmentedSumShape s = segmented_sum_shape(p, v, device);
  const uint64_t row_bytes = uint64_t(p.source_row_stride) * element_size(p.dtype);  // a negative stride gives more than 32 bits
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    const SegmentedSumArgs<T> a{p, SortedIndex(p, words), static_cast<Sum<T>*>(workspace), uint32_t(s.columns), s.lanes, s.column_lanes,
                                s.lanes / s.column_lanes, s.chunks, s.chunk_blocks, s.row_blocks, s.rows_each,
                                row_bytes <= UINT32_MAX ? uint32_t(row_bytes) : 0};
    static_assert(sizeof(Sum<T>) <= (std::is_same_v<T, double> ? 16 : 8));  // as cut_bytes() has it
    const bool overlap = device.has_dependent_launch();
    const cudaError_t error = dispatch_width<T>(v, [&](auto width) {
      return launch_dependent(segmented_sum_kernel<T, width>, unsigned(s.blocks), kThreads, 0, overlap, stream, a);
    });
    if (error != cudaSuccess) return error;
    return launch_dependent(join_cut_rows_kernel<T>, unsigned(ceil_div(s.chunks, kChunksPerBlock) * s.join_column_blocks), kThreads, 0, overlap,
                            stream, a, uint32_t(p.columns()), s.join_width, s.join_column_blocks);
  });
}

}  // namespace fusebackend::index_add
