// A chunk is 16 bytes (rarely fewer) of neighbouring elements: the unit of all wide movement.
#pragma once

#include <cstdint>

namespace fusebackend::tile {

constexpr int kChunkBytes = 16;

template <typename E, int kBytes = kChunkBytes>
struct alignas(kBytes) Chunk {
  static constexpr int kCount = kBytes / sizeof(E);
  E v[kCount];
};

template <int kBytes>
struct RawOf;
template <> struct RawOf<4> { using type = uint32_t; };
template <> struct RawOf<8> { using type = uint2; };
template <> struct RawOf<16> { using type = uint4; };

template <int kBytes = kChunkBytes>
__device__ __forceinline__ uint32_t phase_bytes(const char* p) {
  return uint32_t(reinterpret_cast<uintptr_t>(p)) & (kBytes - 1);
}

template <typename E, int kBytes = kChunkBytes>
__device__ __forceinline__ Chunk<E, kBytes> load_aligned(const char* p) {
  using Raw = typename RawOf<kBytes>::type;
  const Raw raw = __ldg(reinterpret_cast<const Raw*>(p));
  return reinterpret_cast<const Chunk<E, kBytes>&>(raw);
}

// A chunk at any element alignment from the two aligned ones that hold it.
template <typename E>
__device__ __forceinline__ Chunk<E> load_shifted(const char* p) {
  const uint32_t shift = phase_bytes(p);
  const uint4* q = reinterpret_cast<const uint4*>(p - shift);
  const uint4 lo = __ldg(q), hi = __ldg(q + 1);
  uint32_t w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
  if (shift & 8)
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  if (shift & 4)
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  uint4 raw;
  const uint32_t bits = (shift & 3) * 8;
  raw.x = __funnelshift_r(w[0], w[1], bits);
  raw.y = __funnelshift_r(w[1], w[2], bits);
  raw.z = __funnelshift_r(w[2], w[3], bits);
  raw.w = __funnelshift_r(w[3], w[4], bits);
  return reinterpret_cast<const Chunk<E>&>(raw);
}

template <typename E, int kBytes>
__device__ __forceinline__ void store_aligned(char* p, const Chunk<E, kBytes>& chunk) {
  using Raw = typename RawOf<kBytes>::type;
  *reinterpret_cast<Raw*>(p) = reinterpret_cast<const Raw&>(chunk);
}

// The bytes of an operand. Chunks that reach outside are read by elements: never past the ends of a tensor.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
  __device__ bool holds(const char* p, int bytes) const { return p >= begin && p + bytes <= end; }
};

// Elements [first, last) of the chunk whose element 0 would lie at `p`, `stride` bytes apart (0: one value for all).
// Elements outside the range are unspecified.
template <typename E, int kBytes = kChunkBytes>
__device__ __forceinline__ Chunk<E, kBytes> load_chunk(const char* p, int64_t stride, int first, int last, const Extent& extent) {
  constexpr int kCount = Chunk<E, kBytes>::kCount;
  Chunk<E, kBytes> chunk;
  if (stride == int64_t(sizeof(E)) && first == 0 && last == kCount) {
    const uint32_t phase = phase_bytes(p);
    if (phase % kBytes == 0) return load_aligned<E, kBytes>(p);
    if constexpr (kBytes == kChunkBytes) {
      if (extent.holds(p - phase, 2 * kChunkBytes)) return load_shifted<E>(p);
    }
  }
  if (stride == 0) {
    const E value = *reinterpret_cast<const E*>(p);
#pragma unroll
    for (int i = 0; i < kCount; ++i) chunk.v[i] = value;
    return chunk;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i >= first && i < last) chunk.v[i] = *reinterpret_cast<const E*>(p + i * stride);
  return chunk;
}

// Elements [first, last) to `p`, `stride` bytes apart; a whole chunk goes out at once where `wide` (p aligned, stride one element).
template <typename E, int kBytes>
__device__ __forceinline__ void store_chunk(char* p, int64_t stride, int first, int last, bool wide, const Chunk<E, kBytes>& chunk) {
  constexpr int kCount = kBytes / sizeof(E);
  if (wide && first == 0 && last == kCount) return store_aligned(p, chunk);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i >= first && i < last) *reinterpret_cast<E*>(p + i * stride) = chunk.v[i];
}

}  // namespace fusebackend::tile
