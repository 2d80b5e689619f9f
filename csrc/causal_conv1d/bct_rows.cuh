// Rows of contiguous samples, (batch, channel, time) in memory: how a thread accesses 16 bytes of a row at a time, and how rows are shared
// among threads and blocks. For short_bct.cuh and register_window_bct.cuh.
//
// Rows may start anywhere: a thread's samples begin at a 16-byte boundary of memory, not at a multiple of 16 bytes in t, and the two ends
// of a row are masked. All tensors must be equally far from such a boundary at each t; if not, access is by element.
#pragma once
#include <algorithm>

#include "causal_conv1d/alignment.h"
#include "causal_conv1d/device_math.cuh"
#include "common/device_properties.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {

template <typename T>
constexpr int kVecSize = 16 / sizeof(T);  // elements of a 16-byte access
constexpr int kRowThreads = 256;          // of a block; blockIdx.x is the channel

// kAligned: every 16-byte access is aligned, and lies inside its row or outside, so it is predicated and needs no branches.
// kMaskedEnds: accesses at the ends of a row may lie half inside. kScalar: element by element.
enum class RowAccess : int { kAligned, kMaskedEnds, kScalar };

// One item is the 16 bytes of results of one thread.
struct RowItems {
  FastDiv per_row;
  int64_t count;  // batch * per_row
  // Whether access is kMaskedEnds. The short forward kernel of that access asks this at run time all the same: the compiler then needs a
  // quarter fewer registers.
  bool masked_ends;
};

template <typename T, int N, RowAccess ACCESS>
__device__ __forceinline__ void load_samples(const T* row, int t, int len, float* out, bool vectors = true) {
  if constexpr (ACCESS == RowAccess::kAligned) {
    Vec<T, N> raw = {};
    if (static_cast<unsigned>(t) < static_cast<unsigned>(len)) raw = *reinterpret_cast<const Vec<T, N>*>(row + t);
    unpack<T, N>(raw, out);
  } else if (ACCESS == RowAccess::kMaskedEnds && vectors && t >= 0 && t + N <= len) {
    unpack<T, N>(*reinterpret_cast<const Vec<T, N>*>(row + t), out);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = t + i >= 0 && t + i < len ? to_float(row[t + i]) : 0.f;
  }
}

template <typename T, int N, RowAccess ACCESS>
__device__ __forceinline__ void store_samples(T* row, int t, int len, const float* in, bool vectors = true) {
  if constexpr (ACCESS == RowAccess::kAligned) {
    if (static_cast<unsigned>(t) < static_cast<unsigned>(len)) *reinterpret_cast<Vec<T, N>*>(row + t) = pack<T, N>(in);
  } else if (ACCESS == RowAccess::kMaskedEnds && vectors && t >= 0 && t + N <= len) {
    *reinterpret_cast<Vec<T, N>*>(row + t) = pack<T, N>(in);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (t + i >= 0 && t + i < len) row[t + i] = from_float<T>(in[i]);
    }
  }
}

// Samples between the 16-byte boundary at or before row[0] and row[0]: by so many a row's items begin before it.
template <typename T, RowAccess ACCESS>
__device__ __forceinline__ int row_misalignment(const T* row) {
  return ACCESS == RowAccess::kMaskedEnds ? static_cast<int>((reinterpret_cast<uintptr_t>(row) / sizeof(T)) % kVecSize<T>) : 0;
}

// The sum over the block of each of N values, in a fixed order, in every thread.
template <int N, typename S>
__device__ __forceinline__ void block_sums(S (&v)[N]) {
  constexpr int kWarps = kRowThreads / 32;
  __shared__ S warp_sums[kWarps][N];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v[n] += __shfl_down_sync(0xffffffffu, v[n], o);
    if (lane == 0) warp_sums[warp][n] = v[n];
  }
  __syncthreads();
  if (threadIdx.x < N) {
    S s = 0;
    for (int i = 0; i < kWarps; ++i) s += warp_sums[i][threadIdx.x];
    warp_sums[0][threadIdx.x] = s;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) v[n] = warp_sums[0][n];
}

// The access that rows of `len` samples allow, the same for all tensors.
inline RowAccess row_access(int64_t len, DType dtype, StridedTensors tensors) {
  const int64_t bytes = element_size(dtype), vec = 16 / bytes;
  const auto& [first, first_stride] = *tensors.begin();
  bool aligned = len % vec == 0;
  for (const auto& [data, s] : tensors) {
    if (!data) continue;
    const uintptr_t base = reinterpret_cast<uintptr_t>(data);
    if (base % bytes || (base - reinterpret_cast<uintptr_t>(first)) % 16) return RowAccess::kScalar;
    if ((s.b - first_stride.b) % vec || (s.c - first_stride.c) % vec) return RowAccess::kScalar;
    aligned = aligned && base % 16 == 0 && s.b % vec == 0 && s.c % vec == 0;
  }
  return aligned ? RowAccess::kAligned : RowAccess::kMaskedEnds;
}

inline RowItems row_items(int64_t batch, int64_t len, DType dtype, RowAccess access) {
  const int64_t vec = 16 / element_size(dtype), per_row = ceil_div(len + (access == RowAccess::kMaskedEnds ? vec - 1 : 0), vec);
  return {FastDiv(static_cast<uint32_t>(per_row)), batch * per_row, access == RowAccess::kMaskedEnds};
}

// Blocks a channel: enough to fill the device several times over, none with fewer than two items a thread.
inline int blocks_per_channel(int64_t channels, int64_t items) {
  const int64_t wanted = ceil_div(int64_t{sm_count()} * 16, channels);
  return static_cast<int>(std::clamp<int64_t>(std::min(wanted, ceil_div(items, 2 * kRowThreads)), 1, 65535));
}

}  // namespace fusebackend::causal_conv1d
