// SiLU and its gradient for the CPU kernels, on vectors.
#pragma once
#include "common/cpu_vectors.h"

namespace fusebackend {
namespace {

// exp(x) = scale + scale * less_one() for |x| <= kExpRange, NaN for NaN: to 2^-26 with 5 terms of (exp(r) - 1 - r) / r^2, which are those of the
// least error for |r| <= ln2/2; to 2^-17 with 3, for results that are rounded to 16 bits. plus_one() is infinite from 88.38 (127.5 * ln2) to
// kInfiniteExp, where scale is 2^128.
constexpr float kExpRange = 88.25f, kInfiniteExp = 88.5f;
template <int TERMS>
struct Exp {
  V<float> scale, r, p;

  explicit Exp(V<float> x) {
    static_assert(TERMS == 3 || TERMS == 5);
    constexpr float kFiveTerms[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f4p-5f, 0x1.123a22p-7f, 0x1.6a23cap-10f};
    constexpr float kThreeTerms[] = {0x1.0006b8p-1f, 0x1.571d22p-3f, 0x1.5224e2p-5f};
    // Adding 1.5 * 2^23 rounds to an integer n; with 127 on top, its low bits are the exponent field of 2^n.
    constexpr float kShift = 12582912.f + 127.f;
    const V<float> shifted = x * 1.44269504f + kShift, n = shifted - kShift;
    // x - n * ln2, with ln2 in two parts for TERMS == 5: the first has so few bits that its product is exact.
    r = TERMS == 5 ? (x - n * 0.693145752f) - n * 1.42860677e-6f : x - n * 0.693147181f;
    p = in_all(TERMS == 5 ? kFiveTerms[4] : kThreeTerms[2]);
#pragma GCC unroll 8
    for (int i = TERMS - 2; i >= 0; --i) p = p * r + (TERMS == 5 ? kFiveTerms[i] : kThreeTerms[i]);
    scale = bit_cast<float>(bit_cast<int32_t>(shifted) << 23);
  }
  // exp(r) - 1, to more digits than 1 + that has.
  V<float> less_one() const { return p * r * r + r; }
  V<float> plus_one() const { return scale * ((p * r + 1.f) * r + 1.f) + 1.f; }
};

// exp by range reduction and Taylor terms, to 1e-16.
inline V<double> vexp(V<double> x) {
  const V<double> lo = V<double>{} - 708., hi = V<double>{} + 709.;
  const V<double> clamped = x < lo ? lo : (x > hi ? hi : x);
  const V<double> magic = V<double>{} + 6755399441055744.;  // 1.5 * 2^52: adding it rounds to an integer
  const V<double> rounded = clamped * 1.4426950408889634 + magic, n = rounded - magic;
  const V<double> r = (clamped - n * 6.93147180369123816490e-1) - n * 1.90821492927058770002e-10;
  V<double> p = V<double>{} + 1. / 6227020800.;
  constexpr double kTerms[] = {1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720,
                               1. / 120,       1. / 24,       1. / 6,       .5,          1.,         1.};
  for (const double term : kTerms) p = p * r + term;
  const V<double> scale = bit_cast<double>((bit_cast<int64_t>(rounded) + 1023) << 52);  // the low bits of `rounded` are n
  return x > hi ? V<double>{} + HUGE_VAL : p * scale;
}

inline V<float> in_range(V<float> v) { return at_most(in_all(kExpRange), at_least(in_all(-kExpRange), v)); }
// 1 + exp(-v), infinite for v below -88.38: v over it is -0 there, and NaN at -inf, as in eager mode.
template <int TERMS>
inline V<float> silu_divisor(V<float> v) { return Exp<TERMS>(-at_most(in_all(kExpRange), at_least(in_all(-kInfiniteExp), v))).plus_one(); }
// `gradient`, or NaN where v is infinite, as in eager mode.
inline V<float> nan_at_infinity(V<float> gradient, V<float> v) { return gradient + v * 0.f; }

// In double.
inline V<double> double_silu(V<double> v) { return v / (1 + vexp(-v)); }
inline V<double> double_silu_backward(V<double> dy, V<double> v) {
  const V<double> s = 1 / (1 + vexp(-v));
  return dy * s * (1 + v * (1 - s));
}

// To 2^-14, for results that are rounded to 16 bits.
inline V<float> rough_silu(V<float> v) { return v * reciprocal(silu_divisor<3>(v)); }
inline V<float> rough_silu_backward(V<float> dy, V<float> v) {
  const V<float> c = in_range(v);
  const Exp<3> e(-c);
  const V<float> s = 1 / e.plus_one();
  return nan_at_infinity(dy * s * (1 + c * (1 - s)), v);
}

// fp32 with errors no larger than those of PyTorch's kernels. The gradient carries the roundings of each step (`*_tail`) along.
inline V<float> exact_silu(V<float> v) { return v / silu_divisor<5>(v); }
inline V<float> exact_silu_backward(V<float> dy, V<float> value) {
  const V<float> v = in_range(value), one = in_all(1.f);
  const Exp<5> e(-v);
  const V<float> q = e.less_one();
  // The sigmoid s.
  const V<float> power = e.scale + one, other = power - one, lost = (one - (power - other)) + (e.scale - other);
  const V<float> s = one / (e.scale * q + power), s_tail = -(fused_difference(s, power, one) + s * (e.scale * q + lost)) * s;
  // The slope s + s * v * (1 - s).
  const V<float> c = one - s, c_tail = (one - c) - s - s_tail;
  const V<float> vs = v * s, vs_tail = fused_difference(v, s, vs) + v * s_tail;
  const V<float> product = vs * c, product_tail = fused_difference(vs, c, product) + (vs * c_tail + vs_tail * c);
  const V<float> slope = s + product, added = slope - s;
  const V<float> slope_tail = (s - (slope - added)) + (product - added) + (s_tail + product_tail);
  const V<float> g = dy * slope, tail = fused_difference(dy, slope, g) + dy * slope_tail;
  return nan_at_infinity(g - g == 0.f ? g + tail : g, value);  // an infinite g has no rounding error: the tail is NaN
}

// In A, for results that are stored as T.
template <typename T, typename A>
inline V<A> silu_of(V<A> v) {
  if constexpr (std::is_same_v<A, double>) return double_silu(v);
  else if constexpr (std::is_same_v<T, float>) return exact_silu(v);
  else return rough_silu(v);
}
template <typename T, typename A>
inline V<A> silu_backward_of(V<A> dy, V<A> v) {
  if constexpr (std::is_same_v<A, double>) return double_silu_backward(dy, v);
  else if constexpr (std::is_same_v<T, float>) return exact_silu_backward(dy, v);
  else return rough_silu_backward(dy, v);
}

// y <- silu(y), n rounded up to whole vectors.
template <typename T, typename A>
void apply_silu(A* y, int64_t n) {
  constexpr int W = VecOf<A>::kSize, kTogether = 4;  // vectors at a time, which hide one another's latencies
  int64_t t = 0;
  for (; n - t >= kTogether * W; t += kTogether * W) {
    V<A> v[kTogether];
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) v[i] = silu_of<T, A>(vload(y + t + i * W));
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) vstore(y + t + i * W, v[i]);
  }
  for (; t < n; t += W) vstore(y + t, silu_of<T, A>(vload(y + t)));
}
// dy <- dy * silu'(pre), n rounded up to whole vectors.
template <typename T, typename A>
void apply_silu_backward(A* dy, const A* pre, int64_t n) {
  for (int64_t t = 0; t < n; t += VecOf<A>::kSize) vstore(dy + t, silu_backward_of<T, A>(vload(dy + t), vload(pre + t)));
}

}  // namespace
}  // namespace fusebackend
