// Tensor cores: fragments of 16-bit elements, sums in fp32.
#pragma once
#include <type_traits>

#include "depthwise_conv/device_math.cuh"

namespace fusebackend::depthwise_conv {

// d += a * b; a: 16x16, row-major: its left half in a0, a1 (rows 0-7, 8-15), its right half in a2, a3; b: 16x8, column-major.
template <typename T>
__device__ __forceinline__ void mma_k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#endif
}

// The same of half the depth.
template <typename T>
__device__ __forceinline__ void mma_k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b0));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b0));
  }
#endif
}

// For each row of taps the fragment b of a matrix whose rows are a window's columns, and whose columns are results: a band of taps. `first`: the tap of
// this lane's first element; without `has_right` the lower half is zeros.
template <int kRows>
__device__ __forceinline__ void load_band(uint32_t (&band)[kRows][2], const uint16_t* w, int first, int taps, int tap_row, int tap_column, bool has_right = true) {
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
    uint32_t tap[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int b = first + i / 2 * 8 + i % 2;
      tap[i] = 0;
      if (unsigned(b) < unsigned(taps) && (i < 2 || has_right)) tap[i] = w[a * tap_row + b * tap_column];
    }
    band[a][0] = tap[0] | tap[1] << 16, band[a][1] = tap[2] | tap[3] << 16;
  }
}

// `sum` gets a NaN where one of two 16-bit numbers is not finite.
template <typename T>
__device__ __forceinline__ void add_zero_times(uint32_t& sum, uint32_t both) {
  using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const uint32_t zero = 0;
  const Two result = __hfma2(*reinterpret_cast<const Two*>(&both), *reinterpret_cast<const Two*>(&zero), *reinterpret_cast<const Two*>(&sum));
  sum = *reinterpret_cast<const uint32_t*>(&result);
}

// Four 8x8 matrices; lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrices(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(address));
}

// Two 8x8 matrices; lanes from 16 on give addresses that are not read.
__device__ __forceinline__ void load_two_matrices_transposed(uint32_t& r0, uint32_t& r1, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address));
}

}  // namespace fusebackend::depthwise_conv
