// Tiles of rows in shared memory, in the type of sums, for any strides and alignment: shared_tile_forward.cuh, shared_tile_weight_grad.cuh.
#pragma once
#include "causal_conv1d/device_math.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kElems = 8;                // samples of a thread, and taps of a step
constexpr int kWindow = 2 * kElems + 4;  // samples that a step reads, from an aligned one on: kElems + 7, and up to 3 before these

// Where number i of a tile lies. Lanes read 8 neighbouring numbers each: 16 bytes of padding every 128 spread these reads over all banks.
template <typename S>
__host__ __device__ constexpr int padded(int i) {
  constexpr int kLine = 128 / sizeof(S);
  return i + i / kLine * (16 / static_cast<int>(sizeof(S)));
}

// N numbers from tile[i] on; i and N are multiples of 4.
template <int N, typename S>
__device__ __forceinline__ void read_tile(const S* tile, int i, S* out) {
  constexpr int kVec = 16 / sizeof(S);
#pragma unroll
  for (int j = 0; j < N; j += kVec)
    *reinterpret_cast<Vec<S, kVec>*>(out + j) = *reinterpret_cast<const Vec<S, kVec>*>(tile + padded<S>(i + j));
}

// How many samples before row[start] a 16-byte boundary lies; 0 where rows are read element by element anyway.
template <typename T>
__device__ __forceinline__ int misalignment(const T* row, int start, int64_t stride) {
  return stride == 1 ? static_cast<int>(reinterpret_cast<uintptr_t>(row + start) / sizeof(T) % (16 / sizeof(T))) : 0;
}

// tile[i] <- row[start + i] for i < count, zero outside [0, len). Rows of stride 1 must start at a 16-byte boundary.
template <typename T, typename S>
__device__ __forceinline__ void stage_tile(S* tile, const T* row, int start, int count, int len, int64_t stride) {
  if (stride == 1) {
    constexpr int V = 16 / sizeof(T);
#pragma unroll 2
    for (int i = threadIdx.x * V; i < count; i += blockDim.x * V) {
      const int t = start + i;
      alignas(16) S wide[V];
      if (t >= 0 && t + V <= len) {
        const auto raw = *reinterpret_cast<const Vec<T, V>*>(row + t);
        if constexpr (sizeof(T) == 8) {
#pragma unroll
          for (int j = 0; j < V; ++j) wide[j] = raw.v[j];
        } else {
          float v[V];
          unpack<T, V>(raw, v);
#pragma unroll
          for (int j = 0; j < V; ++j) wide[j] = v[j];
        }
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) wide[j] = t + j >= 0 && t + j < len ? S(to_float(row[t + j])) : S(0);
      }
      constexpr int kVec = 16 / sizeof(S);
#pragma unroll
      for (int j = 0; j < V; j += kVec) *reinterpret_cast<Vec<S, kVec>*>(tile + padded<S>(i + j)) = *reinterpret_cast<Vec<S, kVec>*>(wide + j);
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const int t = start + i;
      tile[padded<S>(i)] = t >= 0 && t < len ? S(to_float(row[t * stride])) : S(0);
    }
  }
}

// f(offset) with the offset, 0 to 3, as a constant: it selects registers of a window.
template <typename F>
__device__ __forceinline__ void with_offset(int offset, F&& f) {
  switch (offset) {
    case 0: return f(std::integral_constant<int, 0>{});
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    default: return f(std::integral_constant<int, 3>{});
  }
}

}  // namespace fusebackend::causal_conv1d
