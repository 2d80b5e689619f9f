// Tiles of 16-bit (batch, time, channel) samples in shared memory that ldmatrix reads transposed. For short_btc_to_bct_ldmatrix.cuh.
//
// A block goes along a strip of time with 64 channels, 32 samples a step. Rows of 64 channels are copied to shared memory a few steps ahead;
// one ldmatrix then gives a lane 8 neighbouring samples of one channel. Four lanes share a channel. The samples before a lane's own are in
// the lane before it or, for the first of the four, in the last lane of the step before.
#pragma once
#include "causal_conv1d/tensor_core.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kTileThreads = 256, kTileChannels = 64, kTileLen = 32, kTileVec = 8;
constexpr int kTileBytes = kTileLen * kTileChannels * 2;

struct TileStrips {
  int len;      // samples of a strip, a multiple of kTileLen
  int per_row;  // strips of one batch entry
};

// The first `count` of 8 elements into shared memory and zeros after them, UNIT elements at a time: so many are aligned, and lie inside
// their row or outside.
template <typename T, int UNIT>
__device__ __forceinline__ void copy_vector(uint32_t to, const T* from, int count) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (UNIT == kTileVec) {
    const bool valid = count > 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(valid ? from : nullptr), "r"(valid ? 16 : 0) : "memory");
    return;
  }
#endif
  Vec<T, kTileVec> raw = {};
#pragma unroll
  for (int i = 0; i < kTileVec; i += UNIT) {
    if (i < count) *reinterpret_cast<Vec<T, UNIT>*>(raw.v + i) = *reinterpret_cast<const Vec<T, UNIT>*>(from + i);
  }
  const uint4 v = *reinterpret_cast<const uint4*>(&raw);
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// What a thread copies of each tile, and what it reads.
template <typename T>
struct TileReader {
  const T* row;  // the next sample to copy, at this thread's 8 channels
  int64_t stride;
  int t, end;    // that sample's time; samples from `end` on are zeros
  int channels;  // of the 8, those that exist
  uint32_t to, from;

  __device__ __forceinline__ TileReader(const T* x, int64_t stride_, int t0, int end_, int64_t c0, int64_t all_channels, uint32_t base)
      : stride(stride_), t(t0 + threadIdx.x / 8), end(end_) {
    const int64_t c = c0 + threadIdx.x % 8 * kTileVec;
    channels = static_cast<int>(min(all_channels - c, int64_t{kTileVec}));
    row = x + c + t * stride;
    to = base + offset(threadIdx.x / 8, threadIdx.x % 8);
    // Row k of ldmatrix's matrix m is sample 8 * (k / 2) + 2 * m + k % 2, so that a lane gets 8 neighbouring samples.
    const int k = threadIdx.x % 8, m = threadIdx.x / 8 % 4;
    from = base + offset(k / 2 * 8 + 2 * m + k % 2, threadIdx.x / 32);
  }

  // Bytes to sample t (of 32) and chunk (of 8) of 16 bytes: swizzled, so that what one ldmatrix reads falls in different banks.
  static __device__ __forceinline__ int offset(int t, int chunk) { return t * 128 + (chunk ^ (2 * (t / 8) + t % 2)) * 16; }

  // channels_aligned: 16 bytes of channels may be copied at once.
  __device__ __forceinline__ void copy_next(int stage_offset, bool channels_aligned) {
    const int count = t < end ? channels : 0;
    if (channels_aligned) copy_vector<T, kTileVec>(to + stage_offset, row, count);
    else copy_vector<T, 1>(to + stage_offset, row, count);
    t += kTileLen, row += kTileLen * stride;
  }

  // 8 samples of channel threadIdx.x / 4, from sample threadIdx.x % 4 * 8 of the tile on.
  __device__ __forceinline__ void read(int stage_offset, uint32_t (&words)[4]) const { ldmatrix_x4_trans(words, from + stage_offset); }
};

// From the lane before, of the four of a channel; for the first of them `last_step`, of the last.
__device__ __forceinline__ uint32_t from_lane_before(uint32_t this_step, uint32_t last_step) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(0xffffffffu, lane % 4 == 3 ? last_step : this_step, (lane & ~3) | ((lane + 3) & 3));
}
// `last_step` from the lane after; for the last of the four `this_step`, of the first.
__device__ __forceinline__ float from_lane_after(float this_step, float last_step) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(0xffffffffu, lane % 4 == 0 ? this_step : last_step, (lane & ~3) | ((lane + 1) & 3));
}

// The 4 samples before a strip, as a step before it would have left them; only the last of the four lanes' are used.
template <typename T>
__device__ __forceinline__ void load_samples_before(const T* x, int64_t stride, int t0, uint32_t (&last_step)[2]) {
  Vec<T, 4> v = {};
  if (threadIdx.x % 4 == 3 && t0 > 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v.v[i] = x[(t0 - 4 + i) * stride];
  }
  last_step[0] = reinterpret_cast<uint32_t*>(&v)[0], last_step[1] = reinterpret_cast<uint32_t*>(&v)[1];
}

// x[t-4 .. t+7] in fp32 from the words of a step; last_step becomes what the next step needs.
template <typename T>
__device__ __forceinline__ void unpack_window(const uint32_t (&words)[4], uint32_t (&last_step)[2], float (&x)[12]) {
  const uint32_t before[2] = {from_lane_before(words[2], last_step[0]), from_lane_before(words[3], last_step[1])};
  last_step[0] = words[2], last_step[1] = words[3];
  unpack<T, 4>(*reinterpret_cast<const Vec<T, 4>*>(before), x);
  unpack<T, 8>(*reinterpret_cast<const Vec<T, 8>*>(words), x + 4);
}

}  // namespace fusebackend::causal_conv1d
