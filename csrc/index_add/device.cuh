// What the CUDA kernels share: accumulation types, indices that are checked, loads, offsets of columns.
#pragma once

#include <cassert>

#include "../common/cuda_common.cuh"
#include "accumulate.h"
#include "reduction.cuh"

namespace fusebackend::accumulate {

constexpr int kThreads = 256;
constexpr int kBatch = 8;  // loads in flight of a thread that sums sorted entries

template <typename T> struct AccOf { using type = int32_t; };
template <> struct AccOf<double> { using type = double; };
template <> struct AccOf<float> { using type = float; };
template <> struct AccOf<__half> { using type = float; };
template <> struct AccOf<__nv_bfloat16> { using type = float; };
template <> struct AccOf<int64_t> { using type = int64_t; };
template <typename T> using Acc = typename AccOf<T>::type;

template <typename A, typename T> __device__ __forceinline__ A widen(T x) { return A(x); }
template <> __device__ __forceinline__ float widen<float, __half>(__half x) { return __half2float(x); }
template <> __device__ __forceinline__ float widen<float, __nv_bfloat16>(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T, typename A> __device__ __forceinline__ T narrow(A x) { return T(x); }
template <> __device__ __forceinline__ __half narrow<__half, float>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, float>(float x) { return __float2bfloat16_rn(x); }

__device__ __forceinline__ int64_t load_index(const RowVector& v, int64_t i) {
  return v.is64 ? __ldg(static_cast<const long long*>(v.data) + i * v.stride) : __ldg(static_cast<const int*>(v.data) + i * v.stride);
}

// Out of range stops the kernel as PyTorch's own assertion does, before anything is read or written there.
__device__ __forceinline__ int64_t checked_row(int64_t row, int64_t rows, bool wrap_negative) {
  if (wrap_negative && row < 0) row += rows;
  assert(row >= 0 && row < rows && "index out of bounds");
  return row;
}

// The row of out that an index means, or -1 for none.
template <typename P>  // Params, or a smaller struct with the same members
__device__ __forceinline__ int64_t target_row(const P& p, int64_t index) {
  if (p.has_ignore && index == p.ignore) return -1;
  if (p.bounds == Bounds::kDrop) return index >= 0 && index < p.rows ? index : -1;
  return checked_row(index, p.rows, p.bounds == Bounds::kWrap);
}

// Source rows are read once, so they should leave the caches first; gathered rows are read again.
template <int kBytes> struct Word;
template <> struct Word<16> { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<1> { using type = unsigned char; };

template <typename T, int V>
__device__ __forceinline__ Vec<T, V> load_once(const T* p) {
  using W = typename Word<sizeof(T) * V>::type;
  const W w = __ldcs(reinterpret_cast<const W*>(p));
  return reinterpret_cast<const Vec<T, V>&>(w);
}
template <typename T, int V>
__device__ __forceinline__ Vec<T, V> load_again(const T* p) {
  using W = typename Word<sizeof(T) * V>::type;
  const W w = __ldg(reinterpret_cast<const W*>(p));
  return reinterpret_cast<const Vec<T, V>&>(w);
}

// Neighbours in shared memory, as few loads as will do: `at` is on a boundary of 16 bytes.
template <typename W, int N>
__device__ __forceinline__ void load_batch(W (&to)[N], const W* at) {
  constexpr int kWords = N * sizeof(W) / 16;
  static_assert(N * sizeof(W) % 16 == 0);
  uint4 words[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = reinterpret_cast<const uint4*>(at)[w];
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = reinterpret_cast<const W*>(words)[i];
}

// In 32 bits where that will do, which takes a third of the instructions.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) { return (a | b) >> 32 ? a / b : int64_t(uint32_t(a) / uint32_t(b)); }

// Offsets of column c (in units of V elements along the last dimension) in out and source.
template <int V>
__device__ __forceinline__ void column_offsets(const Params& p, int64_t c, int64_t& out, int64_t& source) {
  out = source = 0;
#pragma unroll 1  // else divisions of each dimension are most of a kernel's code
  for (int d = p.n_dims - 1; d >= 0; --d) {
    const int64_t size = d == p.n_dims - 1 ? p.dims[d].size / V : p.dims[d].size, step = d == p.n_dims - 1 ? V : 1;
    int64_t i = c;
    if (d > 0) {
      const int64_t q = quotient(c, size);
      i = c - q * size;
      c = q;
    }
    out += i * step * p.dims[d].out_stride;
    source += i * step * p.dims[d].source_stride;
  }
}

}  // namespace fusebackend::accumulate
