// a + alpha * b of elements as raw bits (common/tile/elements.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/tile/elements.cuh"

namespace fusebackend::transpose_add {

// Floating types use one fma, as PyTorch's kernels do. Integers are unsigned: they wrap.
template <typename T>
struct Arithmetic {
  static_assert(std::is_unsigned_v<T>);
  using Scalar = uint32_t;
  __device__ static T add(T a, T b, Scalar alpha) { return T(a + alpha * b); }
};
template <>
struct Arithmetic<double> {
  using Scalar = double;
  __device__ static double add(double a, double b, double alpha) { return fma(b, alpha, a); }
};
template <>
struct Arithmetic<float> {
  using Scalar = float;
  __device__ static float add(float a, float b, float alpha) { return fmaf(b, alpha, a); }
};
// 16-bit floats are added in fp32 and rounded once. Where alpha is 1 they may as well be added in 16 bits, as pairs: fp32 has at least
// 2p + 2 bits for both formats' p (8 and 11), so that rounding to fp32 first never changes the rounded sum (Figueroa 1995).
template <>
struct Arithmetic<__half> {
  using Scalar = float;
  using Pair = __half2;
  __device__ static __half add(__half a, __half b, float alpha) { return __float2half_rn(fmaf(__half2float(b), alpha, __half2float(a))); }
};
template <>
struct Arithmetic<__nv_bfloat16> {
  using Scalar = float;
  using Pair = __nv_bfloat162;
  __device__ static __nv_bfloat16 add(__nv_bfloat16 a, __nv_bfloat16 b, float alpha) {
    return __float2bfloat16_rn(fmaf(__bfloat162float(b), alpha, __bfloat162float(a)));
  }
};
// Adds elements of type T; or, where elements have four and more bytes, integers of that size if `integers`: one kernel serves both.
template <typename T>
struct AddOp {
  using Element = tile::Bits<sizeof(T)>;
  using Scalar = typename Arithmetic<T>::Scalar;
  using Integer = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  static constexpr bool kIsSum = true;
  static constexpr bool kServesIntegers = sizeof(T) >= 4;
  static constexpr bool kPairs = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;
  Scalar alpha;
  Integer integer_alpha;
  bool integers;

  __device__ Element operator()(Element a, Element b) const {
    return by_type([=](auto sum) { return sum(a, b); });
  }

  template <int kCount>
  __device__ void apply(Element (&first)[kCount], const Element (&second)[kCount], bool swapped) const {
    if constexpr (kPairs && kCount % 2 == 0) {
      if (alpha == Scalar(1)) {
        using Pair = typename Arithmetic<T>::Pair;
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
          Pair& sum = reinterpret_cast<Pair&>(first[i]);
          sum = __hadd2_rn(sum, reinterpret_cast<const Pair&>(second[i]));
        }
        return;
      }
    }
    by_type([&](auto sum) { combine(first, second, swapped, sum); });
  }

 private:
  // use(sum), where sum(a, b) adds two elements: of integers or of T.
  template <typename Use>
  __device__ auto by_type(Use use) const {
    if (kServesIntegers && integers) return use([this](Element a, Element b) { return Element(a + integer_alpha * b); });
    return use([this](Element a, Element b) { return cast<Element>(Arithmetic<T>::add(cast<T>(a), cast<T>(b), alpha)); });
  }

  template <int kCount, typename Sum>
  __device__ static void combine(Element (&first)[kCount], const Element (&second)[kCount], bool swapped, Sum sum) {
    if (swapped) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) first[i] = sum(second[i], first[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) first[i] = sum(first[i], second[i]);
    }
  }

  template <typename To, typename From>
  __device__ static To cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
  }
};

}  // namespace fusebackend::transpose_add
