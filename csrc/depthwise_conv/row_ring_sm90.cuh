// Depthwise convolution of channels-last images by rows that wait in shared memory: 3x3 taps, stride 1, padded to the same size. The rows of all images are
// one sequence, of which a block walks down a part. One warp copies rows, ahead of those that compute, into a ring of slots; for the forward another copies
// results from shared memory. Bulk copies need no registers for what is on its way, so that memory is kept busy by few threads, and write whole lines.
// The other threads have a few columns of two channels each. Zeros beside the images lie in the slots, where no copy writes.
#pragma once
#include "common/bulk_copy_sm90.cuh"
#include "common/cuda_common.cuh"
#include "common/mbarrier_sm90.cuh"
#include "depthwise_conv/device_math.cuh"
#include "depthwise_conv/row_ring_plan.h"

namespace fusebackend::depthwise_conv {

// Where a block is. Rows are counted over all images.
struct RingPlace {
  int first_channel, first_column, columns;  // of the image: the last segment may have less than others
  int first, last;                           // rows of its results
  int first_row, last_row;                   // rows that these need, within their images
  int first_of_image;                        // the first row in its image
};

struct RowRingShape {
  int height, width, channels;
  int rows;  // of all images
  RowRingPlan plan;
  int pixel_bytes, pixel_step;    // of a block's channels; from pixel to pixel in memory
  int pixel_offset[kRingWindow];  // of neighbouring pixels in a slot

  __device__ __forceinline__ RingPlace find(uint32_t block) const {
    RingPlace at;
    const uint32_t rest = block / plan.segments, part = rest / plan.channel_tiles;
    at.first_column = int(block - rest * plan.segments) * plan.columns();
    at.columns = min(plan.columns(), width - at.first_column);
    at.first_channel = int(rest - part * plan.channel_tiles) * plan.channels;
    at.first = int(int64_t{rows} * part / plan.parts), at.last = int(int64_t{rows} * (part + 1) / plan.parts);
    at.first_of_image = at.first % height;
    at.first_row = at.first - min(kRingBeside, at.first_of_image);
    at.last_row = at.last + min(kRingBeside, height - 1 - (at.last - 1) % height);
    return at;
  }
  // The offset in memory of a column of a row, in a block's first channel.
  template <typename T>
  __device__ __forceinline__ int64_t offset(const RingPlace& at, int row, int column) const {
    return (int64_t{row} * width + column) * pixel_step + at.first_channel * int(sizeof(T));
  }
};

// What a block has in shared memory: a ring of slots for rows, places for results, barriers, and what kernels put behind them. A slot is full when its
// copies have arrived, and empty when every warp has read it; a place is full when every warp has written its results, and empty when these were copied.
template <int kPlaces>
struct RingMemory {
  uint32_t slots, places, full, empty, place_full, place_empty;
  char* rest;

  __device__ __forceinline__ RingMemory(const RowRingPlan& plan, char* shared)
      : slots(shared_address(shared)),
        places(slots + plan.slots * plan.slot_bytes),
        full(places + kPlaces * plan.place_bytes),
        empty(full + 8 * plan.slots),
        place_full(empty + 8 * plan.slots),
        place_empty(place_full + 8 * kPlaces),
        rest(shared + (place_empty + 8 * kPlaces - slots)) {}

  // All threads of the block call it.
  __device__ __forceinline__ void init(const RowRingPlan& plan) const {
    const int i = threadIdx.x, warps = plan.threads / 32;
    if (i < plan.slots) mbarrier::init(full + 8 * i, 1), mbarrier::init(empty + 8 * i, 32 * warps);
    if (i < kPlaces) mbarrier::init(place_full + 8 * i, warps), mbarrier::init(place_empty + 8 * i, 1);
    mbarrier::init_fence();
    __syncthreads();
  }
};

// Which slot comes next, or which place for results.
struct RingPosition {
  int slot = 0, round = 0;  // how often all were used before

  __device__ __forceinline__ void wait(uint32_t barriers) const { mbarrier::wait(barriers + 8 * slot, round & 1); }
  // For what was released: nothing has to be the first time.
  __device__ __forceinline__ void wait_for_release(uint32_t barriers) const {
    if (round > 0) mbarrier::wait(barriers + 8 * slot, (round - 1) & 1);
  }
  __device__ __forceinline__ void step(int slots) {
    if (++slot == slots) slot = 0, ++round;
  }
  // The slot of an earlier row.
  __device__ __forceinline__ int before(int rows, int slots) const { return slot >= rows ? slot - rows : slot - rows + slots; }
};

// Waits for all threads that compute, and tells whether `mine` is true of each.
__device__ __forceinline__ bool wait_for_computing(int threads, bool mine = true) {
  int all;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.s32 mine, %1, 0;\n"
      "barrier.cta.red.and.pred all, 1, %2, mine;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(all)
      : "r"(int(mine)), "r"(threads)
      : "memory");
  return all;
}

// Adjacent pixels of which a block has all channels are one copy, others one each. The lanes of a warp call it.
template <typename Copy>
__device__ __forceinline__ void copy_pixels(const RowRingShape& s, int pixels, Copy&& copy) {
  const bool whole = s.pixel_bytes == s.pixel_step;
  for (int i = threadIdx.x % 32; i < (whole ? 1 : pixels); i += 32) copy(i, whole ? pixels * s.pixel_bytes : s.pixel_bytes);
}

// What the loading warp does. Rows of `own`, if it is not null, come behind those of `rows`, without the columns beside.
template <typename T, bool kOwn, int kPlaces>
__device__ __forceinline__ void load_rows(const RowRingShape& s, const RingPlace& at, const RingMemory<kPlaces>& ring, const void* rows, const void* own) {
  const int left = max(at.first_column - kRingBeside, 0), right = min(at.first_column + at.columns + kRingBeside, s.width);
  const int front = (left - at.first_column + kRingBeside) * s.pixel_bytes, behind = ring_pixels(s.plan.columns(), RowRingResult::kForward) * s.pixel_bytes;
  RingPosition position;
  for (int row = at.first_row; row < at.last_row; ++row) {
    const uint32_t full = ring.full + 8 * position.slot, slot = ring.slots + position.slot * s.plan.slot_bytes;
    const bool has_own = kOwn && row >= at.first && row < at.last;
    position.wait_for_release(ring.empty);
    if (threadIdx.x % 32 == 0) mbarrier::expect_bytes(full, (right - left + (has_own ? at.columns : 0)) * s.pixel_bytes);
    __syncwarp();
    const char* from = static_cast<const char*>(rows) + s.offset<T>(at, row, left);
    copy_pixels(s, right - left, [&](int i, int bytes) { copy_bytes(slot + front + i * s.pixel_bytes, from + i * s.pixel_step, bytes, full); });
    if (has_own) {
      const char* from_own = static_cast<const char*>(own) + s.offset<T>(at, row, at.first_column);
      copy_pixels(s, at.columns, [&](int i, int bytes) { copy_bytes(slot + behind + i * s.pixel_bytes, from_own + i * s.pixel_step, bytes, full); });
    }
    position.step(s.plan.slots);
  }
}

// What the storing warp does.
template <typename T>
__device__ __forceinline__ void store_rows(const RowRingShape& s, const RingPlace& at, const RingMemory<kRingPlaces>& ring, void* results) {
  RingPosition position, before;
  for (int row = at.first; row < at.last; ++row) {
    const uint32_t from = ring.places + position.slot * s.plan.place_bytes;
    char* const to = static_cast<char*>(results) + s.offset<T>(at, row, at.first_column);
    position.wait(ring.place_full);
    copy_pixels(s, at.columns, [&](int i, int bytes) { store_bytes(to + i * s.pixel_step, from + i * s.pixel_bytes, bytes); });
    commit_stores();
    wait_until_read<kRingPlaces - 1>();
    __syncwarp();
    if (row - at.first >= kRingPlaces - 1) {
      if (threadIdx.x % 32 == 0) mbarrier::arrive(ring.place_empty + 8 * before.slot);
      before.step(kRingPlaces);
    }
    position.step(kRingPlaces);
  }
  wait_until_stored();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier::arrive(ring.place_empty + 8 * before.slot);
}

// Writes the zeros beside the images.
template <bool kOwn>
__device__ __forceinline__ void write_zeros(const RowRingShape& s, const RingPlace& at, char* shared) {
  const RowRingPlan& plan = s.plan;
  const int words = s.pixel_bytes / 16;
  const auto clear = [&](int first, int last) {  // pixels of all slots
    const int words_of_slot = max(last - first, 0) * words;
    for (int slot = 0; slot < plan.slots; ++slot)
      for (int i = threadIdx.x; i < words_of_slot; i += plan.threads) *reinterpret_cast<uint4*>(shared + slot * plan.slot_bytes + first * s.pixel_bytes + i * 16) = uint4{0, 0, 0, 0};
  };
  const int pixels = ring_pixels(plan.columns(), RowRingResult::kForward);
  clear(0, kRingBeside - at.first_column);
  clear(s.width - at.first_column + kRingBeside, pixels);
  if (kOwn) clear(pixels + at.columns, pixels + plan.columns());
}

// Copies the taps of a block's channels to shared memory, by pairs of channels, and tells whether those that this thread saw are finite.
template <typename T, bool kReversed>
__device__ __forceinline__ bool stage_ring_taps(float* to, const void* w, const Strides& stride, const RingPlace& at, const RowRingPlan& plan) {
  constexpr int kAll = kRingTaps * kRingTaps;
  bool finite = true;
  for (int i = threadIdx.x; i < plan.channels * kAll; i += plan.threads) {
    const int c = i / kAll, place = i - c * kAll, tap = kReversed ? kAll - 1 - place : place;
    const float value = to_float(static_cast<const T*>(w)[(at.first_channel + c) * stride.n + tap / kRingTaps * stride.h + tap % kRingTaps * stride.w]);
    to[(c / kRingChannels * kAll + place) * kRingChannels + c % kRingChannels] = value;
    finite = finite && isfinite(value);
  }
  return finite;
}

// Where a thread that computes is: its pair of the block's channels, and its columns of the block's segment.
struct RingThread {
  int channel;  // the first of the pair, among all
  int pair, group, column, columns;  // columns of the image; of these so many are results
  bool works;
  uint32_t offset;  // of its first pixel in a slot

  template <typename T>
  __device__ __forceinline__ static RingThread find(const RowRingShape& s, const RingPlace& at) {
    RingThread t;
    const int pairs = s.plan.channels / kRingChannels, group = int(threadIdx.x) / pairs;
    t.pair = int(threadIdx.x) - group * pairs;
    t.works = group < s.plan.groups;
    t.group = t.works ? group : 0;
    t.channel = at.first_channel + kRingChannels * t.pair, t.column = at.first_column + t.group * kRingColumns;
    t.columns = t.works ? min(s.width - t.column, kRingColumns) : 0;
    t.offset = uint32_t(t.group * kRingColumns * s.pixel_bytes + kRingChannels * t.pair * int(sizeof(T)));
    return t;
  }
};

// Two neighbouring channels of some pixels, as they lie in memory.
template <typename T, int kPixels>
struct RingPixels {
  using Word = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;
  Word v[kPixels] = {};

  // From an address in the shared window.
  __device__ __forceinline__ void read(uint32_t at, const RowRingShape& s) {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      if constexpr (sizeof(T) == 4) asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[i].x), "=f"(v[i].y) : "r"(at + s.pixel_offset[i]));
      else asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[i]) : "r"(at + s.pixel_offset[i]));
    }
  }
  __device__ __forceinline__ void get(float (&to)[kPixels][kRingChannels]) const {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      if constexpr (sizeof(T) == 4) to[i][0] = v[i].x, to[i][1] = v[i].y;
      else to[i][0] = low_half<T>(v[i]), to[i][1] = high_half<T>(v[i]);
    }
  }
};

// Gives a thread's results of a row to the storing warp.
template <typename T>
__device__ __forceinline__ void write_results(const RowRingShape& s, const RingMemory<kRingPlaces>& ring, const RingThread& t, RingPosition& position, const float (&v)[kRingColumns][kRingChannels]) {
  position.wait_for_release(ring.place_empty);
  if (t.works) {
    const uint32_t at = ring.places + position.slot * s.plan.place_bytes + t.offset;
#pragma unroll
    for (int j = 0; j < kRingColumns; ++j) {
      if constexpr (sizeof(T) == 4) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + s.pixel_offset[j]), "f"(v[j][0]), "f"(v[j][1]) : "memory");
      else asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + s.pixel_offset[j]), "r"(pack<T>(v[j][0], v[j][1])) : "memory");
    }
  }
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier::arrive(ring.place_full + 8 * position.slot);
  position.step(kRingPlaces);
}

// Writes a thread's results of a row itself.
template <typename T>
__device__ __forceinline__ void write_results(const RowRingShape& s, const RingThread& t, char* to, const float (&v)[kRingColumns][kRingChannels]) {
#pragma unroll
  for (int j = 0; j < kRingColumns; ++j, to += s.pixel_step) {
    Vec<T, kRingChannels> value;
#pragma unroll
    for (int c = 0; c < kRingChannels; ++c) value.v[c] = from_float<T>(v[j][c]);
    if (j < t.columns) *reinterpret_cast<Vec<T, kRingChannels>*>(to) = value;
  }
}

// Waits until the storing warp has stored all that was given to it.
__device__ __forceinline__ void wait_for_stores(const RingMemory<kRingPlaces>& ring, RingPosition position) {
  for (int i = 1; i < kRingPlaces; ++i) position.step(kRingPlaces);
  position.wait_for_release(ring.place_empty);
}

// All results of a block once more, one by one: result(image, channel, row, column). For taps that are not finite: padding is not multiplied by these.
template <typename T, typename F>
__device__ __forceinline__ void rewrite_results(const RowRingShape& s, const RingPlace& at, void* results, F&& result) {
  for (int row = at.first; row < at.last; ++row) {
    for (int i = threadIdx.x; i < at.columns * s.plan.channels; i += s.plan.threads) {
      const int column = at.first_column + i / s.plan.channels, channel = at.first_channel + i % s.plan.channels;
      static_cast<T*>(results)[(int64_t{row} * s.width + column) * s.channels + channel] = from_float<T>(result(row / s.height, channel, row % s.height, column));
    }
  }
}

}  // namespace fusebackend::depthwise_conv
