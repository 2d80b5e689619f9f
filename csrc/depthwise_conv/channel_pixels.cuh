// Where the kernels for 16-bit channels-last tensors have their tiles, and how pixels come to them and from them: in shared memory there is a plane
// a channel, with two pixels in a word, which are transposed in registers on the way.
#pragma once
#include "common/cuda_common.cuh"
#include "depthwise_conv/channel_tile_plan.h"

namespace fusebackend::depthwise_conv {

struct ChannelTileIndex {
  FastDiv channel_tiles, column_tiles, row_tiles, words;
};

// What the kernels read of Geometry, in 32 bits.
struct ChannelTileSides {
  int batch, channels, in_h, in_w, out_h, out_w, pad_h, pad_w;
};

// A segment's image and rows; no rows if there is no such segment.
struct Segment {
  int image, first_row, rows;
};

__device__ __forceinline__ Segment segment_at(uint32_t index, const ChannelTilePlan& plan, const ChannelTileIndex& by, const ChannelTileSides& sides) {
  uint32_t image, row_tile;
  by.row_tiles.divmod(index, image, row_tile);
  Segment at = {int(image), int(row_tile) * plan.rows, 0};
  if (index < plan.all_segments) at.rows = min(plan.rows, sides.out_h - at.first_row);
  return at;
}

// Where the strip of a place of a product begins in a row of shared memory, in words. A place without a strip has another's, whose products are
// not used: behind the last strip there may be words that are just being filled.
__device__ __forceinline__ int strip_of_place(int place, const ChannelTilePlan& plan, int segment_pitch, int strip_words) {
  const int segment = min(place >> plan.slot_bits, plan.segments - 1), strip = min(place & ((1 << plan.slot_bits) - 1), plan.strips - 1);
  return segment * segment_pitch + strip * strip_words;
}

// Eight channels of two pixels.
struct PixelPair {
  uint4 first, second;

  // To eight planes, `pitch` words apart.
  __device__ __forceinline__ void put(uint32_t* to, int pitch) const {
    const uint32_t a[4] = {first.x, first.y, first.z, first.w}, b[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i * pitch] = __byte_perm(a[i], b[i], 0x5410);
      to[(2 * i + 1) * pitch] = __byte_perm(a[i], b[i], 0x7632);
    }
  }
  __device__ __forceinline__ void get(const uint32_t* from, int pitch) {
    uint32_t a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = from[2 * i * pitch], high = from[(2 * i + 1) * pitch];
      a[i] = __byte_perm(low, high, 0x5410), b[i] = __byte_perm(low, high, 0x7632);
    }
    first = {a[0], a[1], a[2], a[3]}, second = {b[0], b[1], b[2], b[3]};
  }
};

// A thread's pixels on their way from global memory: its own places in shared memory, which no other thread has to wait for.
struct PixelsAhead {
  static constexpr int kPlaces = 2 * kChannelTileThreads;  // of a row
  uint4* const places;
  int next = 0;

  __device__ __forceinline__ explicit PixelsAhead(uint32_t* shared) : places(reinterpret_cast<uint4*>(shared) + threadIdx.x) {}

  // The pixels of the row that was loaded kChannelTileAhead rows ago; the next row takes their place.
  __device__ __forceinline__ PixelPair get() const {
    cp_async_wait<kChannelTileAhead - 1>();
    return {places[next], places[next + kChannelTileThreads]};
  }
  __device__ __forceinline__ void load(const uint16_t* at, const uint16_t* other, bool inside, bool other_inside) {
    uint4* const to = places + next;
    if (inside) cp_async_16(to, at);
    else *to = {0, 0, 0, 0};
    if (other_inside) cp_async_16(to + kChannelTileThreads, other);
    else to[kChannelTileThreads] = {0, 0, 0, 0};
    cp_async_commit();
    next = next == (kChannelTileAhead - 1) * kPlaces ? 0 : next + kPlaces;
  }
  // Whatever is on its way is of no use.
  __device__ __forceinline__ void forget() { cp_async_wait<0>(); }
};

}  // namespace fusebackend::depthwise_conv
