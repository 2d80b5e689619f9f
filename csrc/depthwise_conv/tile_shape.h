// Tiles of images, as plans and kernels see them.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "common/integer_math.h"
#include "depthwise_conv/params.h"

namespace fusebackend::depthwise_conv {

// How a tile of 16-bit elements is moved.
enum class Move : int {
  kElements,  // one element at a time
  kPairs,     // two columns at a time
  kQuads,     // four columns
  kOctets,    // eight columns
  kChannels,  // eight channels by eight columns, which are transposed in registers
  kSparse,    // one element at a time, channels innermost
};

constexpr int columns_of(Move m) { return m == Move::kPairs ? 2 : m == Move::kQuads ? 4 : m == Move::kOctets ? 8 : 1; }

// The shape of a tile: `channels` x `images` planes of `rows` x `columns`, rows `pitch` and planes `plane_pitch`
// elements apart.
struct TileShape {
  int channels, images, rows, columns, pitch, plane_pitch;

  FUSE_HOST_DEVICE constexpr int planes() const { return channels * images; }
  FUSE_HOST_DEVICE constexpr int elements() const { return planes() * plane_pitch; }
};

// What is known of a tensor's place in memory. Estimates know strides only, and take pointers for aligned.
struct Placement {
  Strides stride;
  int64_t channels, width;
  uint64_t address;
};

inline Placement placement_of(const void* data, const Strides& stride, int64_t channels, int64_t width) {
  return {stride, channels, width, reinterpret_cast<uint64_t>(data)};
}

// Whether an offset of a few rows and columns fits 32 bits.
constexpr bool has_small_steps(const Strides& s) {
  constexpr int64_t kMost = 1 << 20;
  return s.h > -kMost && s.h < kMost && s.w > -kMost && s.w < kMost;
}

inline bool multiples(const Placement& t, int64_t of) {
  return t.stride.n % of == 0 && t.stride.c % of == 0 && t.stride.h % of == 0 && t.width % of == 0 && t.address % (2 * of) == 0;
}

// The widest move of at most `most` columns.
inline Move move_of(const Placement& t, int most) {
  if (t.stride.w == 1) {
    for (Move m : {Move::kOctets, Move::kQuads, Move::kPairs})
      if (columns_of(m) <= most && multiples(t, columns_of(m))) return m;
    if (t.width > 1 || t.stride.c != 1) return Move::kElements;
  }
  if (t.stride.c != 1 || t.channels == 1) return Move::kElements;
  const bool aligned = t.channels % 8 == 0 && t.stride.n % 8 == 0 && t.stride.h % 8 == 0 && t.stride.w % 8 == 0 && t.address % 16 == 0;
  return aligned ? Move::kChannels : Move::kSparse;
}

inline bool along_channels(Move m) { return m == Move::kChannels || m == Move::kSparse; }

// Rows of a tile that are read as matrices of 8x8 are an odd number of 16 bytes apart: then eight neighbouring ones are in different banks.
constexpr int odd_pitch(int columns) { return int(round_up(columns, 8)) / 8 % 2 ? int(round_up(columns, 8)) : int(round_up(columns, 8)) + 8; }

}  // namespace fusebackend::depthwise_conv
