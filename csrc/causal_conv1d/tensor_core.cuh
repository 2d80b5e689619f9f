// Tensor cores: mma.m16n8k16, ldmatrix, fp32 operands as two scaled fp16 planes, and rows of such planes in shared memory.
#pragma once
#include "causal_conv1d/device_math.cuh"
#include "common/device_properties.h"

namespace fusebackend::causal_conv1d {

// Shared memory that a block may have on the current device; 0 where tensor cores lack bf16, or there is no asynchronous copy.
inline int tensor_core_shared_bytes() { return compute_capability_major() >= 8 ? max_shared_bytes() : 0; }

// round_up of common/integer_math.h in 32 bits: kernels need no more, and pay for it in registers.
__host__ __device__ inline int round_up_32(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// d = a * b (FIRST) or d += a * b, accumulated in fp32: a sum that starts with a product needs no zeroed registers.
// a: 16x16 row-major fragment, b: 16x8 column-major fragment.
template <typename T, bool FIRST>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  const float c[4] = {FIRST ? 0.f : d[0], FIRST ? 0.f : d[1], FIRST ? 0.f : d[2], FIRST ? 0.f : d[3]};
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
#endif
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// An fp32 operand v becomes two fp16 planes, v * 2^e = hi + lo, with e chosen so that the row's largest magnitude is in [2^14, 2^15). hi and lo
// carry at least 22 bits, which elements down to 2^-17 of the largest keep, and the three products hi*hi + hi*lo + lo*hi err by 2^-23 of a
// product, as much as fp32's own rounding. 16-bit operands are one plane.
template <typename T>
struct Planes {
  using Elem = T;
  static constexpr int kCount = 1;
};
template <>
struct Planes<float> {
  using Elem = __half;
  static constexpr int kCount = 2;
};

// Magnitudes are compared as bits; from kNotFinite on they are inf or NaN.
constexpr uint32_t kNotFinite = 0x7f800000u;

__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// The exponent e of a row with that largest magnitude, in [-113, 126].
__device__ __forceinline__ int normalizing_exponent(uint32_t largest) {
  return min(126, 14 - (static_cast<int>(max(largest, 1u << 23) >> 23) - 127));
}

// v * 2^e for |e| <= 252, in two factors, so that no intermediate result overflows or underflows.
struct Scale {
  float a, b;
  __device__ __forceinline__ explicit Scale(int e) : a(exp2_of(e / 2)), b(exp2_of(e - e / 2)) {}
  __device__ __forceinline__ float operator()(float v) const { return v * a * b; }
  static __device__ __forceinline__ float exp2_of(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }
};

constexpr int kChunk = 8;  // samples in 16 bytes of one plane; the planes of a chunk lie side by side in shared memory

// Bytes of a chunk, all planes.
template <typename T>
constexpr int kChunkBytes = 16 * Planes<T>::kCount;

// Bytes from a row's start to its 16-byte unit i. One unit is left free after every 2^skew, so that ldmatrix finds equal places of
// neighbouring blocks of samples in different banks.
constexpr int kNoSkew = 31;
__host__ __device__ constexpr int unit_offset(int i, int skew) { return (i + (i >> skew)) * 16; }

// Bytes from row to row: a multiple of 16 that is `residue` units modulo 8, so that rows fall in different banks.
template <typename T>
__host__ __device__ constexpr int row_pitch(int chunks, int residue, int skew) {
  const int units = unit_offset(chunks * kChunkBytes<T> / 16, skew) / 16;
  return (units + (residue - units % 8 + 8) % 8) * 16;
}

// By one warp: copies the samples of a row into its chunks, with zeros past `len`. Aligned rows are copied asynchronously, so that a warp has
// all of its rows under way at once; cp_async_wait and __syncwarp must follow.
template <typename T>
__device__ __forceinline__ void copy_row(char* out, const T* row, int len, int chunks, int64_t stride, int skew = kNoSkew) {
  constexpr int V = 16 / sizeof(T);
  const int lane = threadIdx.x & 31;
  int done = 0;
#if __CUDA_ARCH__ >= 800
  if (stride == 1 && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    done = len / V;
    for (int i = lane; i < done; i += 32) cp_async_16(out + unit_offset(i, skew), row + i * V);
  }
#endif
#pragma unroll 4
  for (int t = done * V + lane; t < chunks * kChunk; t += 32)
    reinterpret_cast<T*>(out + unit_offset(t / V, skew))[t % V] = t < len ? row[t * stride] : from_float<T>(0.f);
}

// By one warp: the largest magnitude of a copied row, as bits.
template <typename T>
__device__ __forceinline__ uint32_t largest_of_row(const char* row, int chunks, int skew = kNoSkew) {
  constexpr int V = 16 / sizeof(T);
  uint32_t largest = 0;
#pragma unroll 2
  for (int i = threadIdx.x & 31; i < chunks * kChunk / V; i += 32) {
    float v[V];
    unpack<T, V>(*reinterpret_cast<const Vec<T, V>*>(row + unit_offset(i, skew)), v);
#pragma unroll
    for (int j = 0; j < V; ++j) largest = max(largest, magnitude(v[j]));
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, o));
  return largest;
}

// By one warp: the sum of a copied row.
template <typename T>
__device__ __forceinline__ double sum_of_row(const char* row, int chunks, int skew = kNoSkew) {
  constexpr int V = 16 / sizeof(T);
  Sum<T> lane_sum = 0;
#pragma unroll 2
  for (int i = threadIdx.x & 31; i < chunks * kChunk / V; i += 32) {
    float v[V];
    unpack<T, V>(*reinterpret_cast<const Vec<T, V>*>(row + unit_offset(i, skew)), v);
#pragma unroll
    for (int j = 0; j < V; ++j) lane_sum += v[j];
  }
  double sum = lane_sum;
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  return sum;
}

__device__ __forceinline__ void split(float v, __half& hi, __half& lo) {
  hi = __float2half_rn(v);
  lo = __float2half_rn(v - __half2float(hi));
}

// By one warp: replaces the fp32 chunks of a copied row by their planes, scaled by 2^e. 16-bit types stay as they are.
template <typename T>
__device__ __forceinline__ void split_row(char* out, int chunks, int e, int skew = kNoSkew) {
  if constexpr (Planes<T>::kCount == 2) {
    const Scale scale(e);
#pragma unroll 2
    for (int i = threadIdx.x & 31; i < chunks; i += 32) {
      Vec<float, kChunk> raw;
      Vec<__half, kChunk> hi, lo;
      uint4* chunk = reinterpret_cast<uint4*>(out + unit_offset(2 * i, skew));
      reinterpret_cast<uint4*>(&raw)[0] = chunk[0];
      reinterpret_cast<uint4*>(&raw)[1] = chunk[1];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) split(scale(raw.v[j]), hi.v[j], lo.v[j]);
      chunk[0] = *reinterpret_cast<uint4*>(&hi);
      chunk[1] = *reinterpret_cast<uint4*>(&lo);
    }
  }
}

}  // namespace fusebackend::causal_conv1d
