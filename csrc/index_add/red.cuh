// The PTX instruction `red`, an atomic addition in global memory without a result: adds V values to V neighbouring elements in as few
// instructions as the architecture has.
#pragma once

#include "index_add/element_types.cuh"

namespace fusebackend::index_add {

__device__ __forceinline__ void red(float* p, float a) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(a) : "memory"); }
__device__ __forceinline__ void red(double* p, double a) { asm volatile("red.global.add.f64 [%0], %1;" ::"l"(p), "d"(a) : "memory"); }
__device__ __forceinline__ void red(int32_t* p, int32_t a) { asm volatile("red.global.add.s32 [%0], %1;" ::"l"(p), "r"(a) : "memory"); }
__device__ __forceinline__ void red(int64_t* p, int64_t a) { asm volatile("red.global.add.u64 [%0], %1;" ::"l"(p), "l"(a) : "memory"); }

// 8- and 16-bit integers have no such instruction: compare and swap the aligned word around them.
template <typename T>
__device__ __forceinline__ void red_by_cas(T* p, T a) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  unsigned* word = reinterpret_cast<unsigned*>(address & ~uintptr_t(3));
  const unsigned shift = unsigned(address & 3) * 8, mask = ((1u << (8 * sizeof(T))) - 1) << shift;
  unsigned seen = *word, expected;
  do {
    expected = seen;
    const T sum = T(T(expected >> shift) + a);
    seen = atomicCAS(word, expected, (expected & ~mask) | ((unsigned(sum) << shift) & mask));
  } while (seen != expected);
}
__device__ __forceinline__ void red(int16_t* p, int32_t a) { red_by_cas(p, int16_t(a)); }
__device__ __forceinline__ void red(uint8_t* p, int32_t a) { red_by_cas(p, uint8_t(a)); }

__device__ __forceinline__ unsigned pack(__half*, float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return reinterpret_cast<const unsigned&>(h);
}
__device__ __forceinline__ unsigned pack(__nv_bfloat16*, float a, float b) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const unsigned&>(h);
}

__device__ __forceinline__ void red_pair(__half* p, unsigned pair) {
  asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(p), "r"(pair) : "memory");
}
__device__ __forceinline__ void red_pair(__nv_bfloat16* p, unsigned pair) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(p), "r"(pair) : "memory");
#else
  atomicAdd(reinterpret_cast<__nv_bfloat162*>(p), reinterpret_cast<const __nv_bfloat162&>(pair));
#endif
}

// One 16-bit addition compiles to a compare-and-swap loop, a pair to one instruction: add to the aligned pair around the element, and to
// its neighbour -0, which changes no value.
template <typename T>
__device__ __forceinline__ void red_one_half(T* p, float a) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const bool high = address & 2;
  red_pair(reinterpret_cast<T*>(address & ~uintptr_t(3)), high ? pack(p, -0.0f, a) : pack(p, a, -0.0f));
}
__device__ __forceinline__ void red(__half* p, float a) { red_one_half(p, a); }
__device__ __forceinline__ void red(__nv_bfloat16* p, float a) { red_one_half(p, a); }

template <typename Out, typename Acc, int V>
__device__ __forceinline__ void red_vector(Out* p, const Acc (&a)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) red(p + i, a[i]);
}

#if __CUDA_ARCH__ >= 900
template <int V>
__device__ __forceinline__ void red_vector(float* p, const float (&a)[V]) {
  if constexpr (V % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 4)
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p + i), "f"(a[i]), "f"(a[i + 1]), "f"(a[i + 2]), "f"(a[i + 3])
                   : "memory");
  } else if constexpr (V == 2) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(a[0]), "f"(a[1]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) red(p + i, a[i]);
  }
}
__device__ __forceinline__ void red_pairs(__nv_bfloat16* p, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void red_pairs(__half* p, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
template <typename T, int V>
__device__ __forceinline__ void red_halves(T* p, const float (&a)[V]) {
  if constexpr (V == 8) {
    red_pairs(p, pack(p, a[0], a[1]), pack(p, a[2], a[3]), pack(p, a[4], a[5]), pack(p, a[6], a[7]));
  } else if constexpr (V == 2) {
    red_pair(p, pack(p, a[0], a[1]));
  } else {
    static_assert(V == 1);
    red(p, a[0]);
  }
}
#else
template <typename T, int V>
__device__ __forceinline__ void red_halves(T* p, const float (&a)[V]) {
  if constexpr (V % 2 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 2) red_pair(p + i, pack(p, a[i], a[i + 1]));
  } else {
    red(p, a[0]);
  }
}
#endif
template <int V>
__device__ __forceinline__ void red_vector(__half* p, const float (&a)[V]) { red_halves(p, a); }
template <int V>
__device__ __forceinline__ void red_vector(__nv_bfloat16* p, const float (&a)[V]) { red_halves(p, a); }

}  // namespace fusebackend::index_add
