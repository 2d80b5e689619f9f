// The epilogue (channel_epilogue.h) of the CPU kernels: on vectors of floats, and on single numbers.
#pragma once
#include <vector>

#include "common/channel_epilogue.h"
#include "common/cpu_silu.h"

namespace fusebackend {
namespace {

// erf to an ulp: a polynomial near zero, else 1 - exp of one.
inline V<float> verf(V<float> v) {
  const V<float> a = bit_cast<float>(bit_cast<uint32_t>(v) & 0x7fffffffu), s = v * v;
  V<float> small = in_all(-5.96761703e-4f);
  for (const float term : {4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f}) small = small * s + term;
  small = small * v + v;
  V<float> power = (in_all(-1.72853470e-5f) * a + 3.83197126e-4f) * s + (in_all(-3.88396438e-3f) * a + 2.42546219e-2f);
  for (const float term : {-1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f}) power = power * a + term;
  power = power * a - a;
  const Exp<5> e(at_least(in_all(-kExpRange), power));
  const V<float> large = 1.f - (e.scale + e.scale * e.less_one());
  const V<float> signed_large = bit_cast<float>(bit_cast<uint32_t>(large) | (bit_cast<uint32_t>(v) & 0x80000000u));
  return a > 0.927734375f ? signed_large : small;  // a NaN is not larger
}

inline V<float> clamp_from_zero(V<float> v, float high) { return at_most(in_all(high), at_least(V<float>{}, v)); }

// The activation of results that are stored as T.
template <typename T>
inline V<float> activated(V<float> v, Activation a) {
  switch (a) {
    case Activation::kRelu: return at_least(V<float>{}, v);
    case Activation::kRelu6: return clamp_from_zero(v, 6.f);
    case Activation::kHardswish: return v * clamp_from_zero(v + 3.f, 6.f) / 6.f;
    case Activation::kSilu: return silu_of<T, float>(v);
    case Activation::kGeluTanh: {
      // Beyond 100 the square does not matter, but may overflow.
      const V<float> u = v * (at_most(in_all(100.f), v * v) * float(kGeluGate * kGeluCubic) + float(kGeluGate));
      if constexpr (std::is_same_v<T, float>) return v / silu_divisor<5>(u);
      else return v * reciprocal(silu_divisor<3>(u));
    }
    case Activation::kGelu: return v * .5f * (verf(v * 0.70710678118654752f) + 1.f);
    default: return v;
  }
}

// The same of one number, in S: float or double.
template <typename S>
inline S activated_number(S v, Activation a) {
  const auto clamp = [](S n, S high) { return n < 0 ? S(0) : n > high ? high : n; };
  switch (a) {
    case Activation::kRelu: return v < 0 ? S(0) : v;
    case Activation::kRelu6: return clamp(v, 6);
    case Activation::kHardswish: return v * clamp(v + 3, 6) / 6;
    case Activation::kSilu: return v / (1 + std::exp(-v));
    case Activation::kGeluTanh: return v * S(.5) * (1 + std::tanh(S(kGeluGate / 2) * (v + S(kGeluCubic) * v * v * v)));
    case Activation::kGelu: return v * S(.5) * (1 + std::erf(v * S(0.70710678118654752)));
    default: return v;
  }
}

// The affine maps of all channels, in S, which is as wide as the sums of T or wider.
template <typename S>
struct AffineMaps {
  std::vector<S> mean, scale, shift;  // empty if there is none

  template <typename T>
  static AffineMaps of(const ChannelEpilogue& e, int64_t channels, const T*) {
    AffineMaps m;
    if (!e.is_affine) return m;
    const auto number = [](const ChannelVector& v, int64_t c) {
      return v.wide ? S(static_cast<const Acc<T>*>(v.data)[c * v.stride]) : S(widen(static_cast<const T*>(v.data)[c * v.stride]));
    };
    const int64_t padded = channels + VecOf<S>::kSize - 1;  // a vector may begin with the last
    m.mean.assign(padded, S(0)), m.scale.assign(padded, S(1)), m.shift.assign(padded, S(0));
    for (int64_t c = 0; c < channels; ++c) {
      if (e.mean.data) m.mean[c] = number(e.mean, c);
      if (e.variance.data) m.scale[c] = 1 / std::sqrt(number(e.variance, c) + S(e.eps));
      if (e.scale.data) m.scale[c] *= number(e.scale, c);
      if (e.shift.data) m.shift[c] = number(e.shift, c);
    }
    return m;
  }
  S map(S v, int64_t c) const { return (v - mean[c]) * scale[c] + shift[c]; }
};

// What becomes of a vector of results, whose channels are known.
struct Finish {
  V<float> mean = {}, scale = {}, shift = {};
  bool is_affine = false;
  Activation activation = Activation::kNone;

  // Of one channel, the same in all lanes, and of as many as there are lanes.
  static Finish of_channel(const ChannelEpilogue& e, const AffineMaps<float>& maps, int64_t c) {
    Finish f = of(e);
    if (e.is_affine) f.mean = in_all(maps.mean[c]), f.scale = in_all(maps.scale[c]), f.shift = in_all(maps.shift[c]);
    return f;
  }
  static Finish of_channels(const ChannelEpilogue& e, const AffineMaps<float>& maps, int64_t first) {
    Finish f = of(e);
    if (e.is_affine) f.mean = vload(&maps.mean[first]), f.scale = vload(&maps.scale[first]), f.shift = vload(&maps.shift[first]);
    return f;
  }
  template <typename T>
  V<float> operator()(V<float> v, const T*) const {
    if (is_affine) v = (v - mean) * scale + shift;
    return activated<T>(v, activation);
  }

 private:
  static Finish of(const ChannelEpilogue& e) {
    Finish f;
    f.is_affine = e.is_affine, f.activation = e.activation;
    return f;
  }
};

}  // namespace
}  // namespace fusebackend
