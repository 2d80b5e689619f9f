// Tiles of 16-bit images in shared memory: planes of rows, each plane one channel of one image, whatever the memory order outside. What lies
// outside the image is zero.
#pragma once
#include "common/cuda_common.cuh"
#include "depthwise_conv/device_math.cuh"
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

// A tensor of images, and the part that a tile has of it.
struct Image {
  uint16_t* data;
  Strides stride;
  int batch, channels, height, width;
};

inline Image image_of(const void* data, const Strides& s, int64_t batch, int64_t channels, Pair sides) {
  return {static_cast<uint16_t*>(const_cast<void*>(data)), s, int(batch), int(channels), int(sides.h), int(sides.w)};
}

// Where a tile begins in its tensor; row and column may be outside.
struct Corner {
  int channel, row, column;
  int64_t image;
};

// 8x8 elements: pixel p's eight channels in `in[p]`, channel c's eight pixels in `out[c]`, or the other way.
__device__ __forceinline__ void transpose_8x8(const uint4 (&in)[8], uint4 (&out)[8]) {
  const auto word = [&](int p, int k) { return k == 0 ? in[p].x : k == 1 ? in[p].y : k == 2 ? in[p].z : in[p].w; };
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const uint32_t selector = c % 2 ? 0x7632 : 0x5410;
    out[c] = {__byte_perm(word(0, c / 2), word(1, c / 2), selector), __byte_perm(word(2, c / 2), word(3, c / 2), selector),
              __byte_perm(word(4, c / 2), word(5, c / 2), selector), __byte_perm(word(6, c / 2), word(7, c / 2), selector)};
  }
}

// An asynchronous copy of 4 bytes.
__device__ __forceinline__ void cp_async_4(void* shared, const void* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#else
  *static_cast<uint32_t*>(shared) = *static_cast<const uint32_t*>(global);
#endif
}

// Calls f(plane, row, chunk) for all of this thread's pieces of a tile, of `chunks` a row; neighbouring threads have neighbouring chunks.
template <typename F>
__device__ __forceinline__ void for_each_chunk(int planes, int rows, int chunks, F&& f) {
  // The position advances by blockDim.x at a time, without divisions.
  int chunk = int(threadIdx.x) % chunks, line = int(threadIdx.x) / chunks;
  const int chunk_step = int(blockDim.x) % chunks, line_step = int(blockDim.x) / chunks;
  int row = line % rows, plane = line / rows;
  const int row_step = line_step % rows, plane_step = line_step / rows;
  while (plane < planes) {
    f(plane, row, chunk);
    chunk += chunk_step;
    row += row_step;
    plane += plane_step;
    if (chunk >= chunks) chunk -= chunks, ++row;
    if (row >= rows) row -= rows, ++plane;
  }
}

// Calls f(plane, row, chunk) for this thread's pieces of a tile, of `chunks` a row. A thread keeps its chunk from row to row, so that what
// depends on that is computed once.
template <typename F>
__device__ __forceinline__ void for_each_row(int planes, int rows, int chunks, F&& f) {
  const int threads = int(blockDim.x), lines = max(threads / chunks, 1);
  int row = int(threadIdx.x) / chunks, plane = 0;
  int chunk = int(threadIdx.x) - row * chunks;
  if (row >= lines) return;  // left over
  const int chunk_step = chunks > threads ? threads : chunks;
  for (; chunk < chunks; chunk += chunk_step) {
    int r = row;
    for (plane = 0; r >= rows; r -= rows) ++plane;
    while (plane < planes) {
      f(plane, r, chunk);
      for (r += lines; r >= rows; r -= rows) ++plane;
    }
  }
}

// Where the planes of a tile begin in their tensor, at row 0 and column 0. A channel of the tensor is `channel / multiplier`, for x beside a
// result of several channels of each of x's.
struct Planes {
  const uint16_t* first;
  int64_t step, channel_step;
  int images, image_count, channel_count;  // of the tile, and how many the tensor has from the corner on

  __device__ __forceinline__ Planes(const Image& from, const TileShape& t, const Corner& at, int multiplier)
      : first(from.data + at.image * from.stride.n + (multiplier == 1 ? at.channel : at.channel / multiplier) * from.stride.c),
        step(t.images == 1 ? from.stride.c : from.stride.n), channel_step(from.stride.c), images(t.images),
        image_count(int(min(int64_t{1} << 30, from.batch - at.image))), channel_count(from.channels * multiplier - at.channel) {}

  // Whether the tensor has this plane.
  __device__ __forceinline__ bool find(const TileShape& t, int plane, const uint16_t*& at) const {
    if (t.images == 1) {
      at = first + plane * step;
      return plane < channel_count;
    }
    if (t.channels == 1) {
      at = first + plane * step;
      return plane < image_count;
    }
    const int channel = plane / images, image = plane - channel * images;
    at = first + channel * channel_step + image * step;
    return channel < channel_count && image < image_count;
  }
};

// Fills the tile. The copies may be asynchronous: cp_async_commit, cp_async_wait and a barrier must follow.
template <int kColumns>
__device__ __forceinline__ void fill_columns(const Image& from, const TileShape& t, const Corner& at, int multiplier, uint16_t* tile) {
  const Planes planes(from, t, at, multiplier);
  for_each_row(t.planes(), t.rows, (t.columns + kColumns - 1) / kColumns, [&](int plane, int row, int chunk) {
    const int i = at.row + row, j = at.column + chunk * kColumns;
    uint16_t* const to = tile + plane * t.plane_pitch + row * t.pitch + chunk * kColumns;
    const uint16_t* source;
    const bool inside = planes.find(t, plane, source) && unsigned(i) < unsigned(from.height) && unsigned(j) < unsigned(from.width);
    source += i * from.stride.h;
    if constexpr (kColumns == 1) {
      *to = inside ? source[j * from.stride.w] : uint16_t{0};
    } else if (!inside) {
      if constexpr (kColumns == 2) *reinterpret_cast<uint32_t*>(to) = 0;
      if constexpr (kColumns == 4) *reinterpret_cast<uint2*>(to) = {0, 0};
    } else if constexpr (kColumns == 2) {
      cp_async_4(to, source + j);
    } else {
      cp_async_8(to, source + j);
    }
  });
}

__device__ __forceinline__ void fill_transposed(const Image& from, const TileShape& t, const Corner& at, uint16_t* tile) {
  const int groups = t.channels / 8, chunks = t.columns / 8;
  // Groups of channels are innermost: neighbouring threads read neighbouring channels.
  for_each_chunk(t.images * t.rows, chunks, groups, [&](int line, int chunk, int group) {
    const int image = t.images == 1 ? 0 : line / t.rows, row = line - image * t.rows;
    const int i = at.row + row, channel = at.channel + group * 8;
    const bool inside = i >= 0 && i < from.height && at.image + image < from.batch && channel < from.channels;
    const uint16_t* source = from.data + (at.image + image) * from.stride.n + channel + int64_t{i} * from.stride.h;
    uint4 pixels[8], rows[8];
#pragma unroll
    for (int p = 0; p < 8; ++p) {
      const int j = at.column + chunk * 8 + p;
      pixels[p] = {0, 0, 0, 0};
      if (inside && j >= 0 && j < from.width) pixels[p] = __ldg(reinterpret_cast<const uint4*>(source + int64_t{j} * from.stride.w));
    }
    transpose_8x8(pixels, rows);
    uint16_t* to = tile + (group * 8 * t.images + image) * t.plane_pitch + row * t.pitch + chunk * 8;
#pragma unroll
    for (int c = 0; c < 8; ++c) *reinterpret_cast<uint4*>(to + c * t.images * t.plane_pitch) = rows[c];
  });
}

__device__ __forceinline__ void fill_sparse(const Image& from, const TileShape& t, const Corner& at, int multiplier, uint16_t* tile) {
  for_each_chunk(t.images * t.rows, t.columns, t.channels, [&](int line, int column, int channel) {
    const int image = line / t.rows, row = line - image * t.rows, i = at.row + row, j = at.column + column, c = at.channel + channel;
    const bool inside = i >= 0 && i < from.height && j >= 0 && j < from.width && at.image + image < from.batch && c < from.channels * multiplier;
    tile[(channel * t.images + image) * t.plane_pitch + row * t.pitch + column] =
        inside ? from.data[(at.image + image) * from.stride.n + c / multiplier * from.stride.c + int64_t{i} * from.stride.h + int64_t{j} * from.stride.w] : uint16_t{0};
  });
}

// The moves of kPairs and kQuads alone: what a kernel for these needs no registers for the others for.
__device__ __forceinline__ void fill_vectors(Move move, const Image& from, const TileShape& t, const Corner& at, int multiplier, uint16_t* tile) {
  move == Move::kPairs ? fill_columns<2>(from, t, at, multiplier, tile) : fill_columns<4>(from, t, at, multiplier, tile);
}
__device__ __forceinline__ void fill(Move move, const Image& from, const TileShape& t, const Corner& at, int multiplier, uint16_t* tile) {
  switch (move) {
    case Move::kPairs: return fill_columns<2>(from, t, at, multiplier, tile);
    case Move::kQuads: return fill_columns<4>(from, t, at, multiplier, tile);
    case Move::kChannels: return fill_transposed(from, t, at, tile);
    case Move::kSparse: return fill_sparse(from, t, at, multiplier, tile);
    default: return fill_columns<1>(from, t, at, multiplier, tile);
  }
}

// Writes the part of a tile that is inside the tensor. The corner is inside.
template <typename Word>
__device__ __forceinline__ void store_columns(const uint16_t* tile, const TileShape& t, const Image& to, const Corner& at) {
  constexpr int kColumns = sizeof(Word) / 2;
  const Planes planes(to, t, at, 1);
  const int columns = min(t.columns, to.width - at.column), rows = min(t.rows, to.height - at.row);
  for_each_row(t.planes(), rows, (columns + kColumns - 1) / kColumns, [&](int plane, int row, int chunk) {
    const uint16_t* target;
    if (!planes.find(t, plane, target)) return;
    target += (at.row + row) * to.stride.h + (at.column + chunk * kColumns) * to.stride.w;
    *reinterpret_cast<Word*>(const_cast<uint16_t*>(target)) = *reinterpret_cast<const Word*>(tile + plane * t.plane_pitch + row * t.pitch + chunk * kColumns);
  });
}

__device__ __forceinline__ void store_transposed(const uint16_t* tile, const TileShape& t, const Image& to, const Corner& at) {
  const int groups = t.channels / 8, chunks = (min(t.columns, to.width - at.column) + 7) / 8;
  for_each_chunk(t.images * t.rows, chunks, groups, [&](int line, int chunk, int group) {
    const int image = t.images == 1 ? 0 : line / t.rows, row = line - image * t.rows;
    const int i = at.row + row, channel = at.channel + group * 8;
    if (i >= to.height || at.image + image >= to.batch || channel >= to.channels) return;
    const uint16_t* source = tile + (group * 8 * t.images + image) * t.plane_pitch + row * t.pitch + chunk * 8;
    uint4 rows[8], pixels[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) rows[c] = *reinterpret_cast<const uint4*>(source + c * t.images * t.plane_pitch);
    transpose_8x8(rows, pixels);
    uint16_t* target = to.data + (at.image + image) * to.stride.n + channel + int64_t{i} * to.stride.h;
#pragma unroll
    for (int p = 0; p < 8; ++p) {
      const int j = at.column + chunk * 8 + p;
      if (j < to.width) *reinterpret_cast<uint4*>(target + int64_t{j} * to.stride.w) = pixels[p];
    }
  });
}

__device__ __forceinline__ void store_sparse(const uint16_t* tile, const TileShape& t, const Image& to, const Corner& at) {
  const int columns = min(t.columns, to.width - at.column);
  for_each_chunk(t.images * t.rows, columns, t.channels, [&](int line, int column, int channel) {
    const int image = line / t.rows, row = line - image * t.rows, i = at.row + row;
    if (i >= to.height || at.image + image >= to.batch || at.channel + channel >= to.channels) return;
    to.data[(at.image + image) * to.stride.n + (at.channel + channel) * to.stride.c + int64_t{i} * to.stride.h + int64_t{at.column + column} * to.stride.w] =
        tile[(channel * t.images + image) * t.plane_pitch + row * t.pitch + column];
  });
}

__device__ __forceinline__ void store(Move move, const uint16_t* tile, const TileShape& t, const Image& to, const Corner& at) {
  switch (move) {
    case Move::kPairs: return store_columns<uint32_t>(tile, t, to, at);
    case Move::kQuads: return store_columns<uint2>(tile, t, to, at);
    case Move::kOctets: return store_columns<uint4>(tile, t, to, at);
    case Move::kChannels: return store_transposed(tile, t, to, at);
    case Move::kSparse: return store_sparse(tile, t, to, at);
    default: return store_columns<uint16_t>(tile, t, to, at);
  }
}

}  // namespace fusebackend::depthwise_conv
