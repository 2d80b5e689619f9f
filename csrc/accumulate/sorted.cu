// The deterministic route: a stable sort of (row, entry) pairs, then one walk over the sorted entries that sums each row's run in order.
// Which partial sums meet in which order depends on the shape and the device alone, so a repetition is bit-identical.
#include <cub/device/device_radix_sort.cuh>

#include "dispatch.cuh"
#include "launch.h"

namespace fusebackend::accumulate {
namespace {

constexpr int kBlocksPerSm = 4, kGroupsPerBlock = 8, kJoinColumns = 64;

__global__ void prepare_kernel(const __grid_constant__ Params p, uint32_t* keys, uint32_t* positions) {
  for (int64_t n = int64_t(blockIdx.x) * kThreads + threadIdx.x; n < p.n; n += int64_t(gridDim.x) * kThreads) {
    const int64_t row = target_row(p, load_index(p.index, n));
    keys[n] = row < 0 ? uint32_t(p.rows) : uint32_t(row);
    positions[n] = uint32_t(n);
  }
}

// Runs that groups of the walk cut: the group whose tail starts one adds up its tail and the heads of the groups that the run goes on in.
template <typename T>
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ Args<T> a, int64_t total_groups) {
  using A = Acc<T>;
  __shared__ int64_t last_of[kGroupsPerBlock];
  __shared__ A sums[kThreads];
  const Params& p = a.p;
  const uint32_t* keys = a.sorted.keys;
  const int64_t per = a.walk.per_group;
  const int64_t cut_columns = p.columns();
  const int width = int(cut_columns < kJoinColumns ? cut_columns : kJoinColumns);
  const unsigned column_blocks = unsigned((cut_columns + width - 1) / width), group_block = blockIdx.x / column_blocks;
  if (threadIdx.x < kGroupsPerBlock) {
    const int64_t g = int64_t(group_block) * kGroupsPerBlock + threadIdx.x, begin = g * per, end = begin + per;
    int64_t last = -1;
    if (g < total_groups && end < p.n) {
      const uint32_t key = keys[end];
      const bool starts_here = keys[end - 1] == key && (keys[begin] != key || begin == 0 || keys[begin - 1] != key);
      if (starts_here && key < p.rows) {
        int64_t low = g + 1, high = total_groups;  // the last group that begins with this key
        if (low + 1 >= total_groups || keys[(low + 1) * per] != key) high = low + 1;
        while (high - low > 1) {
          const int64_t middle = (low + high) / 2;
          (keys[middle * per] == key ? low : high) = middle;
        }
        last = low;
      }
    }
    last_of[threadIdx.x] = last;
  }
  __syncthreads();
  // Columns across threads; long runs are shared out between the threads of a column.
  const int split = threadIdx.x / width;
  const int64_t c = int64_t(blockIdx.x % column_blocks) * width + threadIdx.x % width;
  for (int i = 0; i < kGroupsPerBlock; ++i) {
    const int64_t last = last_of[i];
    if (last < 0) continue;
    const int64_t g = int64_t(group_block) * kGroupsPerBlock + i;
    const int splits = last - g < 8 ? 1 : kThreads / width;
    A sum = A(0);
    if (split < splits && c < cut_columns) {
      if (split == 0) sum = a.sorted.cut[(g * 2 + 1) * cut_columns + c];
      const A* head = a.sorted.cut + c;
#pragma unroll 8
      for (int64_t k = g + 1 + split; k <= last; k += splits) sum += head[k * 2 * cut_columns];
    }
    if (splits > 1) {
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (split == 0)
        for (int s = 1; s < splits; ++s) sum += sums[s * width + threadIdx.x];
      __syncthreads();
    }
    if (split == 0 && c < cut_columns) {
      int64_t out, source;
      column_offsets<1>(p, c, out, source);
      T* target = a.out + int64_t(keys[(g + 1) * per]) * p.out_row_stride + out;
      *target = narrow<T>(widen<A>(*target) + sum);
    }
  }
}

struct Layout {
  size_t keys, positions, sorted_keys, sorted_positions, cut, sort, sort_bytes, total;
};

int key_bits(const Params& p) {
  int bits = 1;
  while (bits < 32 && (uint64_t(1) << bits) <= uint64_t(p.rows)) ++bits;  // p.rows itself stands for "ignored"
  return bits;
}

Layout layout(const Params& p, const Device& device) {
  Layout l{};
  auto take = [&](size_t bytes) {
    const size_t at = l.total;
    l.total += (bytes + 255) / 256 * 256;
    return at;
  };
  l.keys = take(p.n * 4);
  l.positions = take(p.n * 4);
  l.sorted_keys = take(p.n * 4);
  l.sorted_positions = take(p.n * 4);
  const Walk w = plan_walk(p, vector_width(p, true), device.sm_count * kBlocksPerSm, kTile<Flush::kSegment>, false);
  const int acc = element_size(p.dtype) == 8 ? 8 : 4;
  l.cut = take(size_t(w.tiles) * w.groups * 2 * p.columns() * acc);
  cub::DeviceRadixSort::SortPairs(nullptr, l.sort_bytes, static_cast<uint32_t*>(nullptr), static_cast<uint32_t*>(nullptr),
                                  static_cast<uint32_t*>(nullptr), static_cast<uint32_t*>(nullptr), p.n, 0, key_bits(p));
  l.sort = take(l.sort_bytes);
  return l;
}

}  // namespace

size_t sorted_bytes(const Params& p, const Device& device) { return layout(p, device).total; }

cudaError_t launch_sorted(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  const Layout l = layout(p, device);
  char* base = static_cast<char*>(workspace);
  auto at = [&](size_t offset) { return reinterpret_cast<uint32_t*>(base + offset); };
  const int64_t prepare_blocks = ceil_div(p.n, kThreads), most = int64_t(device.sm_count) * 8;
  prepare_kernel<<<unsigned(std::min(prepare_blocks, most)), kThreads, 0, stream>>>(p, at(l.keys), at(l.positions));
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  size_t sort_bytes = l.sort_bytes;
  error = cub::DeviceRadixSort::SortPairs(base + l.sort, sort_bytes, at(l.keys), at(l.sorted_keys), at(l.positions), at(l.sorted_positions),
                                          p.n, 0, key_bits(p), stream);
  if (error != cudaSuccess) return error;
  const int v = vector_width(p, true);
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    Args<T> a{p, plan_walk(p, v, device.sm_count * kBlocksPerSm, kTile<Flush::kSegment>, false), static_cast<T*>(p.out),
              {at(l.sorted_keys), at(l.sorted_positions), reinterpret_cast<Acc<T>*>(base + l.cut)}};
    cudaError_t walked = launch_walk<T, T, Flush::kSegment>(a, v, stream);
    if (walked != cudaSuccess) return walked;
    const int64_t groups = ceil_div(p.n, a.walk.per_group);
    const int64_t blocks = ceil_div(groups, kGroupsPerBlock) * ceil_div(p.columns(), kJoinColumns);
    join_kernel<T><<<unsigned(blocks), kThreads, 0, stream>>>(a, groups);
    return cudaGetLastError();
  });
}

}  // namespace fusebackend::accumulate
