// kReduce for wide rows that are added as they are, few of them to one row: a block takes a piece of some entries, and the vectors go from
// registers to reductions bit by bit. No divisions, no staging: half of the threads' time goes into waiting for memory, and all of them
// should wait at once.
#include "dispatch.cuh"
#include "launch.h"

namespace fusebackend::accumulate {
namespace {

constexpr int kRowThreads = 64;  // small blocks leave soonest room for the next
constexpr int kManyBlocksPerSm = 20;  // of those that take several entries
constexpr int64_t kMaxSecond = 65535;  // of blocks in the grid's second dimension

struct RowsArgs {
  uint4* out;
  const uint4* source;
  RowVector index;
  int64_t rows, out_row_stride, source_row_stride;  // strides in vectors of 16 bytes
  uint32_t n, columns;
  Bounds bounds;
  bool pieces_first;  // of the grid's dimensions: there are too many for the second one
};

__device__ __forceinline__ void red_raw(float*, uint4* p, uint4 v) {
  const float a[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
  red_vector(reinterpret_cast<float*>(p), a);
}
template <typename T>
__device__ __forceinline__ void red_raw(T*, uint4* p, uint4 v) {
  T* const to = reinterpret_cast<T*>(p);
#if __CUDA_ARCH__ >= 900
  red_pairs(to, v.x, v.y, v.z, v.w);
#else
  red_pair(to, v.x), red_pair(to + 2, v.y), red_pair(to + 4, v.z), red_pair(to + 6, v.w);
#endif
}

template <typename T, int U>
__global__ void __launch_bounds__(kRowThreads, U == 1 ? 32 : kManyBlocksPerSm) rows_kernel(const __grid_constant__ RowsArgs a) {
  // Blocks of one piece of all entries are neighbours: a row that comes again is in the L2 cache still.
  const uint32_t piece = a.pieces_first ? blockIdx.x : blockIdx.y, group = a.pieces_first ? blockIdx.y : blockIdx.x;
  const uint32_t c = piece * kRowThreads + threadIdx.x, first = group * U;
  if (c >= a.columns) return;
  uint4 v[U];
  uint4* to[U];
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (first + u < a.n) v[u] = __ldcs(a.source + (first + u) * a.source_row_stride + c);
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (first + u < a.n) {
      to[u] = a.out + checked_row(load_index(a.index, first + u), a.rows, a.bounds == Bounds::kWrap) * a.out_row_stride + c;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(to[u]));  // reductions are slow on lines that the cache does not hold
    }
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (first + u < a.n) red_raw(static_cast<T*>(nullptr), to[u], v[u]);
}

}  // namespace

bool rows_fit(const Params& p, int v) {
  const bool plain = !p.weight.data && p.alpha == 1.0 && !p.source_index.data && !p.has_ignore && p.bounds != Bounds::kDrop;
  const bool type = p.dtype == DType::kFloat32 || is_half(p.dtype);
  return plain && type && p.n_dims == 1 && v * element_size(p.dtype) == 16 && p.columns() / v >= kRowThreads && p.columns() / v <= INT32_MAX &&
         p.n <= 2 * p.rows && p.n <= kMaxSecond;
}

cudaError_t launch_rows(const Params& p, int v, const Device& device, cudaStream_t stream) {
  const uint32_t columns = uint32_t(p.columns() / v), pieces = uint32_t(ceil_div(columns, kRowThreads));
  const RowsArgs a{static_cast<uint4*>(p.out), static_cast<const uint4*>(p.source), p.index, p.rows, p.out_row_stride / v,
                   p.source_row_stride / v, uint32_t(p.n), columns, p.bounds, pieces > kMaxSecond};
  auto run = [&](auto kernel, int entries) {
    const uint32_t groups = uint32_t(ceil_div(p.n, entries));
    kernel<<<a.pieces_first ? dim3(pieces, groups) : dim3(groups, pieces), kRowThreads, 0, stream>>>(a);
    return cudaGetLastError();
  };
  auto go = [&](auto type) {
    using T = decltype(type);
    // Several entries to a block, if there are blocks enough all the same. Of few entries, one to a block, unless these would run in more rounds:
    // 15 are three times 4 and 3.
    constexpr int kMany = 4, kFewEntries = 64;
    const int64_t blocks = columns * p.n / (kMany * kRowThreads);
    const bool many = blocks >= 4 * device.sm_count && (p.n >= kFewEntries || blocks <= kManyBlocksPerSm * device.sm_count);
    return many ? run(rows_kernel<T, kMany>, kMany) : run(rows_kernel<T, 1>, 1);
  };
  if (p.dtype == DType::kFloat32) return go(float());
  return p.dtype == DType::kFloat16 ? go(__half()) : go(__nv_bfloat16());
}

}  // namespace fusebackend::accumulate
