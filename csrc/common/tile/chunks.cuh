// A chunk is 16 bytes of neighbouring elements: the unit of all wide movement.
#pragma once

#include <cstdint>

#include "common/tile/memory_units.h"

namespace fusebackend::tile {

template <typename E>
struct alignas(kChunkBytes) Chunk {
  static constexpr int kCount = kChunkBytes / sizeof(E);
  E v[kCount];
};

// The distance of `p` from the aligned address at or before it.
template <int kBytes = kChunkBytes>
__device__ __forceinline__ uint32_t phase_bytes(const char* p) {
  return uint32_t(reinterpret_cast<uintptr_t>(p)) & (kBytes - 1);
}

// Volatile and not .nc: else the compiler moves the load to its first use, behind barriers that it should overlap with.
__device__ __forceinline__ uint4 load_raw(const void* p) {
  uint4 raw;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(p));
  return raw;
}

template <typename E>
__device__ __forceinline__ Chunk<E> load_aligned(const char* p) {
  const uint4 raw = load_raw(p);
  return reinterpret_cast<const Chunk<E>&>(raw);
}

// A chunk at any alignment, from the two aligned chunks that hold it.
template <typename E>
__device__ __forceinline__ Chunk<E> load_shifted(const char* p) {
  const uint32_t shift = phase_bytes(p);
  const uint4* q = reinterpret_cast<const uint4*>(p - shift);
  const uint4 lo = load_raw(q), hi = load_raw(q + 1);
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

template <typename E>
__device__ __forceinline__ void store_aligned(char* p, const Chunk<E>& chunk) {
  *reinterpret_cast<uint4*>(p) = reinterpret_cast<const uint4&>(chunk);
}

// The bytes of an operand. Chunks that reach outside are read element by element: never past the ends of a tensor.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
  __device__ bool holds(const char* p, int64_t bytes) const { return p >= begin && p + bytes <= end; }
};

// Loads elements [first, last) of the chunk whose element 0 would lie at `p`, `stride` bytes apart (0: one value for all). The others are
// unspecified.
template <typename E>
__device__ __forceinline__ Chunk<E> load_chunk(const char* p, int64_t stride, int first, int last, const Extent& extent) {
  constexpr int kCount = Chunk<E>::kCount;
  Chunk<E> chunk;
  if (stride == int64_t(sizeof(E)) && first == 0 && last == kCount) {
    const uint32_t phase = phase_bytes(p);
    if (phase == 0) return load_aligned<E>(p);
    if (extent.holds(p - phase, 2 * kChunkBytes)) return load_shifted<E>(p);
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

// The compiler cannot tell that a pointer that was loaded from shared memory points to global memory, and would emit a generic store.
__device__ __forceinline__ void store_global(char* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w));
}

// Stores bytes [first, last) of a chunk, in the widest pieces that lie within.
template <int kAt, int kWidth, int kSmallest>
__device__ __forceinline__ void store_part(char* to, const uint32_t (&words)[4], int first, int last) {
  if (first <= kAt && kAt + kWidth <= last) {
    if constexpr (kWidth == 16) store_global(to, words[0], words[1], words[2], words[3]);
    if constexpr (kWidth == 8) *reinterpret_cast<uint2*>(to + kAt) = make_uint2(words[kAt / 4], words[kAt / 4 + 1]);
    if constexpr (kWidth == 4) *reinterpret_cast<uint32_t*>(to + kAt) = words[kAt / 4];
    if constexpr (kWidth == 2) *reinterpret_cast<uint16_t*>(to + kAt) = uint16_t(words[kAt / 4] >> kAt % 4 * 8);
    if constexpr (kWidth == 1) *reinterpret_cast<uint8_t*>(to + kAt) = uint8_t(words[kAt / 4] >> kAt % 4 * 8);
  } else if constexpr (kWidth > kSmallest) {
    if (first < kAt + kWidth / 2 && kAt < last) store_part<kAt, kWidth / 2, kSmallest>(to, words, first, last);
    if (first < kAt + kWidth && kAt + kWidth / 2 < last) store_part<kAt + kWidth / 2, kWidth / 2, kSmallest>(to, words, first, last);
  }
}

// Stores elements [first, last) to `p`, `stride` bytes apart; a whole chunk at once where `wide` (p is aligned, the stride one element).
template <typename E>
__device__ __forceinline__ void store_chunk(char* p, int64_t stride, int first, int last, bool wide, const Chunk<E>& chunk) {
  constexpr int kCount = Chunk<E>::kCount;
  if (wide && first == 0 && last == kCount) return store_aligned(p, chunk);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i >= first && i < last) *reinterpret_cast<E*>(p + i * stride) = chunk.v[i];
}

}  // namespace fusebackend::tile
