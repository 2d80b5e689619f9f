// kAtomicAdd of wide rows that are added as they are, few of them to one row: a block takes a piece of some entries, and vectors go from
// registers to atomic additions unconverted. No divisions and no staging: the kernel mostly waits for memory, and all threads should wait
// at once.
#include "index_add/dispatch.cuh"
#include "index_add/red.cuh"
#include "index_add/routes.h"

namespace fusebackend::index_add {
namespace {

constexpr int kPieceThreads = WideRowShape::kPieceThreads, kSeveralEntriesBlocksPerSm = WideRowShape::kSeveralEntriesBlocksPerSm;

struct WideRowArgs {
  uint4* out;
  const uint4* source;
  EntryVector index;
  int64_t rows, out_row_stride, source_row_stride;  // strides in vectors of 16 bytes
  uint32_t n, columns;
  Bounds bounds;
  bool pieces_in_x;  // of the grid's dimensions: there are too many pieces for y
};

__device__ __forceinline__ void red_16_bytes(float*, uint4* p, uint4 v) {
  const float a[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
  red_vector(reinterpret_cast<float*>(p), a);
}
template <typename T>
__device__ __forceinline__ void red_16_bytes(T*, uint4* p, uint4 v) {
  T* const to = reinterpret_cast<T*>(p);
#if __CUDA_ARCH__ >= 900
  red_pairs(to, v.x, v.y, v.z, v.w);
#else
  red_pair(to, v.x), red_pair(to + 2, v.y), red_pair(to + 4, v.z), red_pair(to + 6, v.w);
#endif
}

template <typename T, int kEntries>
__global__ void __launch_bounds__(kPieceThreads, kEntries == 1 ? 32 : kSeveralEntriesBlocksPerSm)
    atomic_add_wide_rows_kernel(const __grid_constant__ WideRowArgs a) {
  // Blocks of one piece of all entries are neighbours: a row that comes again is still in the L2 cache.
  const uint32_t piece = a.pieces_in_x ? blockIdx.x : blockIdx.y, group = a.pieces_in_x ? blockIdx.y : blockIdx.x;
  const uint32_t c = piece * kPieceThreads + threadIdx.x, first = group * kEntries;
  if (c >= a.columns) return;
  uint4 v[kEntries];
  uint4* to[kEntries];
#pragma unroll
  for (int u = 0; u < kEntries; ++u)
    if (first + u < a.n) v[u] = __ldcs(a.source + (first + u) * a.source_row_stride + c);
#pragma unroll
  for (int u = 0; u < kEntries; ++u)
    if (first + u < a.n) {
      to[u] = a.out + checked_row(load_index(a.index, first + u), a.rows, a.bounds == Bounds::kWrap) * a.out_row_stride + c;
      prefetch_l2(to[u]);  // atomic additions are slow on lines that the L2 cache does not hold
    }
#pragma unroll
  for (int u = 0; u < kEntries; ++u)
    if (first + u < a.n) red_16_bytes(static_cast<T*>(nullptr), to[u], v[u]);
}

}  // namespace

cudaError_t launch_wide_row_atomic_add(const Params& p, int v, const Device& device, cudaStream_t stream) {
  constexpr int kSeveral = WideRowShape::kSeveral;
  const WideRowShape s = wide_row_shape(p, v, device);
  const WideRowArgs a{static_cast<uint4*>(p.out), static_cast<const uint4*>(p.source), p.index, p.rows, p.out_row_stride / v,
                      p.source_row_stride / v, uint32_t(p.n), s.columns, p.bounds, s.pieces > WideRowShape::kMaxGridY};
  return dispatch_vector_red(p.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = s.several ? atomic_add_wide_rows_kernel<T, kSeveral> : atomic_add_wide_rows_kernel<T, 1>;
    kernel<<<a.pieces_in_x ? dim3(s.pieces, s.groups) : dim3(s.groups, s.pieces), kPieceThreads, 0, stream>>>(a);
    return cudaGetLastError();
  });
}

}  // namespace fusebackend::index_add
