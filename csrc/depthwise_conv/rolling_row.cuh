// Where a thread of the kernels that roll down columns is, its taps, and the row of columns that it holds.
#pragma once
#include <type_traits>

#include "common/cuda_common.cuh"
#include "depthwise_conv/device_math.cuh"
#include "depthwise_conv/rolling_window_plan.h"

namespace fusebackend::depthwise_conv {

// What the kernels read of Geometry, in 32 bits.
struct RollingSides {
  int in_h, in_w, out_h, out_w, pad_h, pad_w;
};

// Where a thread is.
struct RollingPlace {
  int image, channel, column, first_row, rows;
};

struct RollingIndex {
  FastDiv groups, channel_tiles, column_strips, row_tiles;

  __device__ __forceinline__ RollingPlace find(uint32_t strip, const RollingWindowPlan& plan, int columns) const {
    RollingPlace at;
    uint32_t rest, column, row, image;
    column_strips.divmod(strip, rest, column);
    row_tiles.divmod(rest, image, row);
    at.image = int(image), at.column = int(column) * columns, at.first_row = int(row) * plan.rows;
    at.rows = min(plan.rows, plan.all_rows - at.first_row);
    return at;
  }
};

__device__ __forceinline__ void ask_for(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Some columns of a row of kChannels channels, as they lie in memory. In planes rows begin at multiples of four columns, and are loaded so.
template <typename T, int kChannels, int kCount, bool kPlanes>
struct RollingRow {
  static constexpr int kBytes = int(sizeof(T)) * kChannels;
  using Word = std::conditional_t<kBytes == 2, unsigned short, std::conditional_t<kBytes == 4, unsigned int, uint2>>;
  static_assert(sizeof(Word) == kBytes);
  Word v[kCount];

  // `mask` tells which columns (in planes, which four) are inside; a step is in bytes.
  __device__ __forceinline__ void load(const T* at, int64_t column_step, uint32_t mask) {
    if constexpr (kPlanes) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        uint4 four = {0, 0, 0, 0};
        if (mask >> (i / 4) & 1) four = __ldg(reinterpret_cast<const uint4*>(at + i));
        v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
      }
    } else {
      const char* from = settled(reinterpret_cast<const char*>(at));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        v[i] = Word{};
        if (mask & 1u << i) v[i] = __ldg(reinterpret_cast<const Word*>(from));
        from = settled(from + column_step);
      }
    }
  }
  __device__ __forceinline__ float get(int i, int c) const {
    if constexpr (sizeof(T) == 4 && kChannels == 1) return __uint_as_float(v[i]);
    else if constexpr (sizeof(T) == 4) return __uint_as_float(c ? v[i].y : v[i].x);
    else if constexpr (kChannels == 2) return c ? high_half<T>(v[i]) : low_half<T>(v[i]);
    else return low_half<T>(v[i]);
  }
};

// Copies the taps of a block's channels to shared memory, and waits for them.
template <typename T, int kTaps>
__device__ __forceinline__ void stage_taps(float* shared, const void* w, const Strides& stride, int first_channel, int channels) {
  for (int i = threadIdx.x; i < channels * kTaps * kTaps; i += kRollingThreads) {
    const int c = i / (kTaps * kTaps), tap = i % (kTaps * kTaps);
    shared[i] = to_float(static_cast<const T*>(w)[(first_channel + c) * stride.n + tap / kTaps * stride.h + tap % kTaps * stride.w]);
  }
  __syncthreads();
}

// Reads the taps of a thread's channels, and tells whether all are finite.
template <int kTaps, int kChannels>
__device__ __forceinline__ bool read_taps(float (&w)[kTaps][kTaps][kChannels], const float* shared) {
  float finite = 0;
#pragma unroll
  for (int i = 0; i < kTaps * kTaps; ++i)
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      w[i / kTaps][i % kTaps][c] = shared[c * kTaps * kTaps + i];
      finite = fmaf(w[i / kTaps][i % kTaps][c], 0.f, finite);
    }
  return finite == 0.f;
}

// Which of `count` columns from `first` on are inside, by steps of `each`.
__device__ __forceinline__ uint32_t columns_inside(int first, int count, int each, int width) {
  uint32_t mask = 0;
  for (int i = 0; i < count; i += each)
    if (unsigned(first + i) < unsigned(width)) mask |= 1u << (i / each);
  return mask;
}

}  // namespace fusebackend::depthwise_conv
