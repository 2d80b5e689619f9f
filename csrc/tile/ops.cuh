// What happens to an element on its way: nothing (CopyOp) or a + alpha * b (AddOp). Elements travel as raw bits, so copies keep
// NaN payloads; arithmetic interprets the bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tile.h"

namespace fusebackend::tile {

struct alignas(16) Bits128 {
  uint32_t word[4];
};
template <int kBytes>
struct BitsOf;
template <> struct BitsOf<1> { using type = uint8_t; };
template <> struct BitsOf<2> { using type = uint16_t; };
template <> struct BitsOf<4> { using type = uint32_t; };
template <> struct BitsOf<8> { using type = uint64_t; };
template <> struct BitsOf<16> { using type = Bits128; };
template <int kBytes>
using Bits = typename BitsOf<kBytes>::type;

template <int kBytes>
struct CopyOp {
  using Element = Bits<kBytes>;
  static constexpr bool kBinary = false;
  __device__ Element operator()(Element a, Element) const { return a; }
};

// Product and sum contract into one fma for floating types, as PyTorch's kernels do. Integers are unsigned here: they wrap.
template <typename T>
struct Arithmetic {
  static_assert(std::is_unsigned_v<T>);
  using Scalar = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  __device__ static T apply(T a, T b, Scalar alpha) { return T(a + alpha * b); }
};
template <>
struct Arithmetic<double> {
  using Scalar = double;
  __device__ static double apply(double a, double b, double alpha) { return fma(b, alpha, a); }
};
template <>
struct Arithmetic<float> {
  using Scalar = float;
  __device__ static float apply(float a, float b, float alpha) { return fmaf(b, alpha, a); }
};
template <>
struct Arithmetic<__half> {
  using Scalar = float;
  __device__ static __half apply(__half a, __half b, float alpha) { return __float2half_rn(fmaf(__half2float(b), alpha, __half2float(a))); }
};
template <>
struct Arithmetic<__nv_bfloat16> {
  using Scalar = float;
  __device__ static __nv_bfloat16 apply(__nv_bfloat16 a, __nv_bfloat16 b, float alpha) {
    return __float2bfloat16_rn(fmaf(__bfloat162float(b), alpha, __bfloat162float(a)));
  }
};

template <typename T>
struct AddOp {
  using Element = Bits<sizeof(T)>;
  using Scalar = typename Arithmetic<T>::Scalar;
  static constexpr bool kBinary = true;
  Scalar alpha;

  __device__ Element operator()(Element a, Element b) const {
    T x, y;
    memcpy(&x, &a, sizeof(T));
    memcpy(&y, &b, sizeof(T));
    const T sum = Arithmetic<T>::apply(x, y, alpha);
    Element bits;
    memcpy(&bits, &sum, sizeof(T));
    return bits;
  }
};

}  // namespace fusebackend::tile
