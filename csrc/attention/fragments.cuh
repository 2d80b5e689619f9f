// Tensor-core fragments of 16-bit matrices (mma.sync m16n8k16), and swizzled tiles of them in shared memory.
//
// Of a 16x8 result a lane has the elements (g, 2c), (g, 2c+1), (g+8, 2c), (g+8, 2c+1), where g = lane / 4 and c = lane % 4. Two results side
// by side, rounded to 16 bits, are the left operand of the next product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/cuda_common.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define FUSE_SM80(...) __VA_ARGS__
#else
#define FUSE_SM80(...) __trap()  // bind_cuda.cpp refuses GPUs before compute capability 8.0
#endif

namespace fusebackend::attention {

template <typename T>
struct Half2;

template <>
struct Half2<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t out = 0;
    FUSE_SM80(asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low)));
    return out;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }
  static __device__ __forceinline__ float widen(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }
};

template <>
struct Half2<__half> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t out = 0;
    FUSE_SM80(asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low)));
    return out;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) { return __half22float2(*reinterpret_cast<const __half2*>(&x)); }
  static __device__ __forceinline__ float widen(uint16_t x) { return __half2float(__ushort_as_half(x)); }
};

// c += a @ b
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  FUSE_SM80(asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  FUSE_SM80(asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)));
}

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  FUSE_SM80(asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory"));
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  FUSE_SM80(asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory"));
}

// 16 bytes, or zeros in their place.
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t shared, const void* global, bool valid) {
  FUSE_SM80(asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory"));
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Which row of a matrix is at each place of a tile.
enum class Order {
  kPlain,
  // A lane's columns of four adjacent 16x8 results are eight adjacent rows, whose biases are one vector.
  kByVector,
};

template <Order kOrder>
__device__ __forceinline__ constexpr int row_at(int place) {
  if (kOrder == Order::kByVector) return place / 32 * 32 + place % 8 / 2 * 8 + place / 8 % 4 * 2 + place % 2;
  return place;
}

// A tile of rows of kD 16-bit elements. Vectors of 16 bytes are exchanged within a row so that ldmatrix has no bank conflicts, in the way
// that wgmma knows as a swizzle of 64 or 128 bytes.
template <int kD>
struct Tile {
  static constexpr int kVectors = kD / 8;
  static constexpr int kPitch = kD * 2;  // bytes
  static_assert(kVectors == 4 || kVectors % 8 == 0);

  static constexpr int bytes(int rows) { return rows * kPitch; }

  // What the place of a vector is XORed with, in bytes.
  static __device__ __forceinline__ int swizzle(int row) { return (kVectors == 4 ? row >> 1 & 3 : row & 7) << 4; }
  static __device__ __forceinline__ int offset(int row, int vector) { return row * kPitch + ((vector << 4) ^ swizzle(row)); }

  // Rows [first, first + kRows) of a matrix of `rows` rows and `columns` columns; zeros outside. `stride`: elements, below kMaxRowStride.
  // `thread`: of the kThreads that call this together.
  template <int kRows, int kThreads, Order kOrder = Order::kPlain, typename T>
  static __device__ __forceinline__ void load(uint32_t tile, const T* matrix, int stride, int first, int rows, int columns,
                                              int thread = threadIdx.x) {
    constexpr int kStep = kThreads / kVectors;  // rows
    static_assert(kThreads % kVectors == 0);
    const int vector = thread % kVectors, place = thread / kVectors;
    // row_at permutes bits: the row of place + i * kStep is the sum of the rows of both, where kStep is a power of two.
    constexpr bool kSplits = (kStep & (kStep - 1)) == 0;
    const int row = first + row_at<kOrder>(place);
    const T* const from = matrix + int64_t(row) * stride + vector * 8;
    const int last = vector * 8 < columns ? rows - row : 0;  // rows from `row` on that exist
    const uint32_t to = tile + offset(place, vector);
#pragma unroll
    for (int i = 0; i < (kRows + kStep - 1) / kStep; ++i) {
      if (kRows % kStep != 0 && place + i * kStep >= kRows) break;
      const int further = kSplits ? row_at<kOrder>(i * kStep) : row_at<kOrder>(place + i * kStep) - row_at<kOrder>(place);
      // The swizzle repeats every 8 rows.
      cp_async_16_or_zero(kStep % 8 == 0 ? to + i * kStep * kPitch : tile + offset(place + i * kStep, vector), from + int64_t(further) * stride,
                          further < last);
    }
  }

  // Left operand: 16 rows, of which `row` is that of number lane % 16; the 16 columns from 16 * k.
  static __device__ __forceinline__ void left(uint32_t (&a)[4], uint32_t tile, int row, int k) {
    ldmatrix(a, tile + offset(row, 2 * k + threadIdx.x % 32 / 16));
  }
  // Right operands of results j and j + 1, whose columns are rows of the tile; the sum runs over the 16 columns from 16 * k.
  static __device__ __forceinline__ void right(uint32_t (&b)[4], uint32_t tile, int j, int k) {
    const int lane = threadIdx.x % 32, n = lane % 8;
    const int r = 8 * (lane < 16 ? j : j + 1) + n;
    ldmatrix(b, tile + offset(r, 2 * k + lane / 8 % 2));
  }
  // Right operands of results j and j + 1, whose columns are columns of the tile; the sum runs over the 16 rows from
  // 16 * k.
  static __device__ __forceinline__ void right_transposed(uint32_t (&b)[4], uint32_t tile, int k, int j) {
    const int lane = threadIdx.x % 32, n = lane % 8;
    const int r = 16 * k + lane / 8 % 2 * 8 + n;
    ldmatrix_transposed(b, tile + offset(r, j + lane / 16));
  }
  // Left operand of the transposed tile: its rows are the 16 columns from 16 * m, the sum runs over the 16 rows from `row`.
  static __device__ __forceinline__ void left_transposed(uint32_t (&a)[4], uint32_t tile, int m, int row) {
    const int lane = threadIdx.x % 32;
    ldmatrix_transposed(a, tile + offset(row + lane % 8 + lane / 16 * 8, 2 * m + lane / 8 % 2));
  }

  // A pair of adjacent columns.
  static __device__ __forceinline__ void store_pair(char* tile, int row, int column, uint32_t pair) {
    *reinterpret_cast<uint32_t*>(tile + offset(row, column / 8) + column % 8 * 2) = pair;
  }
};

// Two adjacent results, rounded: the left operand of the product with rows 16k to 16k + 15.
template <typename T, int kResults>
__device__ __forceinline__ void pack_left(uint32_t (&packed)[4], const float (&results)[kResults][4], int k) {
#pragma unroll
  for (int x = 0; x < 4; ++x) packed[x] = Half2<T>::pack(results[2 * k + x / 2][x % 2 * 2], results[2 * k + x / 2][x % 2 * 2 + 1]);
}

// A warp's 16 rows of results, scaled and rounded, by way of 16 rows of shared memory that only this warp uses, from `row` on. They are rows
// of the matrix from `first` on in kOrder; those from `rows` on are left out.
template <int kD, Order kOrder = Order::kPlain, typename T>
__device__ __forceinline__ void store_rows(char* tile, int row, const float (&result)[kD / 8][4], float upper, float lower, T* matrix,
                                           int64_t stride, int first, int rows, int columns) {
  using Staged = Tile<kD>;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kD / 8; ++j) {
    Staged::store_pair(tile, row + g, 8 * j + 2 * c, Half2<T>::pack(result[j][0] * upper, result[j][1] * upper));
    Staged::store_pair(tile, row + g + 8, 8 * j + 2 * c, Half2<T>::pack(result[j][2] * lower, result[j][3] * lower));
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * Staged::kVectors; i += 32) {
    const int r = i / Staged::kVectors, vector = i % Staged::kVectors, to = first + row_at<kOrder>(r);
    if (to < rows && vector * 8 < columns)
      *reinterpret_cast<uint4*>(matrix + int64_t(to) * stride + vector * 8) =
          *reinterpret_cast<const uint4*>(tile + Staged::offset(row + r, vector));
  }
}

// From maxima of this magnitude on, as masks by large finite numbers have, log2(e) times the maximum, or the sum with the logarithm, would be
// rounded by more than exponents may be: there the maximum is subtracted first, which is exact.
constexpr float kLargeScore = 1024;

__device__ __forceinline__ bool is_large(float score) { return fabsf(score) > kLargeScore; }

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace fusebackend::attention

#undef FUSE_SM80
