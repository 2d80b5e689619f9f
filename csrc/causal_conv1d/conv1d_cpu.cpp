// Rows are brought into scratch in the accumulation type with zeros around them, so that one inner loop serves every
// layout, type and padding: a block of outputs stays in vector registers while the taps go by.
//
// Channel-contiguous tensors with few taps skip the scratch: there the vectors run along the channels.
#include "conv1d_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace fusebackend::conv1d {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float load(float v) { return v; }
inline double load(double v) { return v; }
inline float load(BFloat16 v) { return bits_to_float(uint32_t{v.bits} << 16); }
inline float load(Half v) {
  const uint32_t sign = (v.bits & 0x8000u) << 16, rest = (v.bits & 0x7fffu) << 13;
  // Moving the exponent by a multiplication also makes subnormals right; inf and NaN need theirs restored.
  const float f = bits_to_float(rest) * bits_to_float(0x77800000u);
  return bits_to_float(float_to_bits(f) | sign | (rest >= 0x0f800000u ? 0x7f800000u : 0u));
}

template <typename T>
inline T store(float v);
template <>
inline float store<float>(float v) { return v; }
template <>
inline BFloat16 store<BFloat16>(float v) {
  const uint32_t u = float_to_bits(v);
  const uint16_t rounded = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  return {v != v ? static_cast<uint16_t>(0x7fc0) : rounded};
}
template <>
inline Half store<Half>(float v) {
  const uint32_t u = float_to_bits(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  uint32_t h;
  if (a > 0x7f800000u) h = 0x7e00u;
  else if (a >= 0x477ff000u) h = 0x7c00u;  // rounds to inf
  else if (a < 0x38800000u) h = float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000u;  // subnormal: the addition rounds
  else h = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13;
  return {static_cast<uint16_t>(h | sign)};
}

template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <typename T, typename A>
inline T to_storage(A v) {
  if constexpr (std::is_same_v<T, double>) return v;
  else return store<T>(v);
}

// 32-byte vectors, loaded from any address.
template <typename A>
struct VecOf {
  static constexpr int kSize = 32 / sizeof(A);
  typedef A type __attribute__((vector_size(32)));
  typedef A unaligned __attribute__((vector_size(32), aligned(sizeof(A)), may_alias));
};
template <typename A>
using V = typename VecOf<A>::type;
template <typename A>
inline V<A> vload(const A* p) { return *reinterpret_cast<const typename VecOf<A>::unaligned*>(p); }
template <typename A>
inline void vstore(A* p, V<A> v) { *reinterpret_cast<typename VecOf<A>::unaligned*>(p) = v; }

// exp by range reduction to |r| <= ln2/2 and Taylor terms; 2 ulp. double goes through libm: it is for gradcheck.
inline V<float> vexp(V<float> x) {
  typedef int32_t VI __attribute__((vector_size(32)));
  const V<float> lo = V<float>{} - 87.f, hi = V<float>{} + 88.7f;
  const V<float> clamped = x < lo ? lo : (x > hi ? hi : x);
  const V<float> magic = V<float>{} + 12582912.f;  // adding it rounds to an integer
  const V<float> n = (clamped * 1.44269504f + magic) - magic;
  const V<float> r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
  V<float> p = r * (1.f / 5040) + (1.f / 720);
  p = p * r + (1.f / 120);
  p = p * r + (1.f / 24);
  p = p * r + (1.f / 6);
  p = p * r + .5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const VI e = (__builtin_convertvector(n, VI) + 127) << 23;
  V<float> scale;
  std::memcpy(&scale, &e, sizeof e);
  return x == x ? (x > hi ? V<float>{} + HUGE_VALF : p * scale) : x;
}
// The same to 1e-16; double itself is for gradcheck, and for fp32 results that are to be rounded once.
inline V<double> vexp(V<double> x) {
  typedef int64_t VI __attribute__((vector_size(32)));
  const V<double> lo = V<double>{} - 708., hi = V<double>{} + 709.;
  const V<double> clamped = x < lo ? lo : (x > hi ? hi : x);
  const V<double> magic = V<double>{} + 6755399441055744.;
  const V<double> rounded = clamped * 1.4426950408889634 + magic, n = rounded - magic;
  const V<double> r = (clamped - n * 6.93147180369123816490e-1) - n * 1.90821492927058770002e-10;
  V<double> p = V<double>{} + 1. / 6227020800.;
  constexpr double kTerms[] = {1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120, 1. / 24, 1. / 6, .5, 1., 1.};
  for (const double term : kTerms) p = p * r + term;
  VI e;
  std::memcpy(&e, &rounded, sizeof e);
  e = (e + 1023) << 52;  // the low bits of `rounded` are n
  V<double> scale;
  std::memcpy(&scale, &e, sizeof e);
  return x == x ? (x > hi ? V<double>{} + HUGE_VAL : p * scale) : x;
}

template <typename A>
inline V<A> silu(V<A> v) { return v / (1 + vexp(-v)); }
template <typename A>
inline V<A> silu_backward(V<A> dy, V<A> v) {
  const V<A> s = 1 / (1 + vexp(-v));
  return dy * s * (1 + v * (1 - s));
}

// fp32 vectors as two of double and back. SiLU of fp32 is computed in double, so that it adds one rounding to a gradient.
typedef float Half32 __attribute__((vector_size(16)));
inline V<double> wide(V<float> v, int half) {
  Half32 h;
  std::memcpy(&h, reinterpret_cast<const char*>(&v) + 16 * half, sizeof h);
  return __builtin_convertvector(h, V<double>);
}
inline V<float> narrow(V<double> a, V<double> b) {
  const Half32 h[2] = {__builtin_convertvector(a, Half32), __builtin_convertvector(b, Half32)};
  V<float> v;
  std::memcpy(&v, h, sizeof v);
  return v;
}
template <typename T, typename A>
inline V<A> silu_of(V<A> v) {
  if constexpr (std::is_same_v<T, float>) return narrow(silu<double>(wide(v, 0)), silu<double>(wide(v, 1)));
  else return silu<A>(v);
}
template <typename T, typename A>
inline V<A> silu_backward_of(V<A> dy, V<A> v) {
  if constexpr (std::is_same_v<T, float>)
    return narrow(silu_backward<double>(wide(dy, 0), wide(v, 0)), silu_backward<double>(wide(dy, 1), wide(v, 1)));
  else return silu_backward<A>(dy, v);
}

template <typename T>
inline V<Acc<T>> vload_as(const T* p) {
  using A = Acc<T>;
  if constexpr (std::is_same_v<T, A>) {
    return vload(p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    typedef uint16_t V16 __attribute__((vector_size(16)));
    typedef uint32_t V32 __attribute__((vector_size(32)));
    V16 raw;
    std::memcpy(&raw, p, sizeof raw);
    const V32 wide = __builtin_convertvector(raw, V32) << 16;
    V<float> out;
    std::memcpy(&out, &wide, sizeof out);
    return out;
  } else {
#ifdef __F16C__
    return (V<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    V<A> out;
    for (int i = 0; i < VecOf<A>::kSize; ++i) out[i] = load(p[i]);
    return out;
#endif
  }
}

template <typename T>
inline void vstore_as(T* p, V<Acc<T>> v) {
  using A = Acc<T>;
  if constexpr (std::is_same_v<T, A>) {
    vstore(p, v);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    typedef uint16_t V16 __attribute__((vector_size(16)));
    typedef uint32_t V32 __attribute__((vector_size(32)));
    V32 u;
    std::memcpy(&u, &v, sizeof u);
    V32 rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    const V32 nan = (V32)(v != v);
    rounded = (nan & 0x7fc0u) | (~nan & rounded);
    const V16 narrow = __builtin_convertvector(rounded, V16);
    std::memcpy(p, &narrow, sizeof narrow);
  } else {
#ifdef __F16C__
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < VecOf<A>::kSize; ++i) p[i] = to_storage<T>(v[i]);
#endif
  }
}

// dst[i] <- src[i * stride] for i in [begin, end) of the row, zeros elsewhere in [first, last).
template <typename T>
void load_row(Acc<T>* dst, const T* src, int64_t stride, int64_t first, int64_t last, int64_t len) {
  const int64_t begin = std::clamp<int64_t>(0, first, last), end = std::clamp<int64_t>(len, begin, last);
  std::fill(dst, dst + (begin - first), Acc<T>(0));
  int64_t i = begin;
  if (stride == 1) {
    for (; i + VecOf<Acc<T>>::kSize <= end; i += VecOf<Acc<T>>::kSize) vstore(dst + (i - first), vload_as(src + i));
  }
  for (; i < end; ++i) dst[i - first] = load(src[i * stride]);
  std::fill(dst + (end - first), dst + (last - first), Acc<T>(0));
}

template <typename T>
void store_row(T* dst, const Acc<T>* src, int64_t stride, int64_t n) {
  int64_t i = 0;
  if (stride == 1) {
    for (; i + VecOf<Acc<T>>::kSize <= n; i += VecOf<Acc<T>>::kSize) vstore_as(dst + i, vload(src + i));
  }
  for (; i < n; ++i) dst[i * stride] = to_storage<T>(src[i]);
}

constexpr int kRegs = 8;  // vectors of outputs, or taps, held at a time: the latency of FMA times its rate
template <typename A>
constexpr int64_t kPad = kRegs * VecOf<A>::kSize;  // rows are padded by this, so that blocks may overhang

constexpr int64_t kShortChain = 16;

// y[t] = start + sum_k w[k] * x[t + k] for t in [0, n rounded up to kPad), up the taps or DOWN, in chains of so many fused
// multiply-adds. One chain is what eager mode's kernels do, and gives the same bits in fp32; shorter ones round less. Taps
// that meet only zeros are skipped: x is zero before `zeros` and from `end` on.
template <bool DOWN, typename A>
void convolve(A* y, const A* x, const A* w, int64_t n, int64_t taps, A start, int64_t zeros, int64_t end, int64_t chain) {
  constexpr int W = VecOf<A>::kSize;
  for (int64_t t = 0; t < n; t += kPad<A>) {
    V<A> acc[kRegs];
    for (int r = 0; r < kRegs; ++r) acc[r] = V<A>{} + start;
    const int64_t k0 = std::max<int64_t>(0, zeros - (t + kPad<A> - 1)), k1 = std::min(taps, end - t);
    for (int64_t first = k0; first < k1; first += chain) {
      V<A> total[kRegs];
      if (first > k0) {
        for (int r = 0; r < kRegs; ++r) total[r] = acc[r], acc[r] = V<A>{};
      }
      const int64_t last = std::min(k1, first + chain);
      for (int64_t i = first; i < last; ++i) {
        const int64_t k = DOWN ? k0 + k1 - 1 - i : i;
        const V<A> wk = V<A>{} + w[k];
        const A* p = x + t + k;
#pragma GCC unroll 8
        for (int r = 0; r < kRegs; ++r) acc[r] += wk * vload(p + r * W);
      }
      if (first > k0) {
        for (int r = 0; r < kRegs; ++r) acc[r] += total[r];
      }
    }
    for (int r = 0; r < kRegs; ++r) vstore(y + t + r * W, acc[r]);
  }
}

// dw[k] += sum_t g[t] * x[t + k] for t in [0, n), R taps at a time.
template <int R, typename A>
void correlate(double* dw, const A* g, const A* x, int64_t n, int64_t taps, int64_t zeros, int64_t end) {
  constexpr int W = VecOf<A>::kSize, kSteps = kRegs / R;  // vectors of samples, so that kRegs sums are under way
  for (int64_t k = 0; k < taps; k += R) {
    V<A> acc[kSteps][R] = {};
    const int64_t t0 = std::max<int64_t>(0, zeros - k - R + 1) / W * W, t1 = std::min(n, end - k);
    int64_t t = t0;
    for (; t + W * kSteps <= t1; t += W * kSteps) {
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) {
        const V<A> gt = vload(g + t + s * W);
        const A* p = x + t + s * W + k;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[s][r] += gt * vload(p + r);
      }
    }
    for (int64_t r = 0; r < std::min<int64_t>(R, taps - k); ++r) {
      for (int s = 0; s < kSteps; ++s) {
        for (int i = 0; i < W; ++i) dw[k + r] += acc[s][r][i];
      }
      for (int64_t i = t; i < t1; ++i) dw[k + r] += static_cast<double>(g[i]) * static_cast<double>(x[i + k + r]);
    }
  }
}

template <typename A, typename F>
void map_vectors(A* y, int64_t n, F&& f) {
  for (int64_t t = 0; t < n; t += VecOf<A>::kSize) vstore(y + t, f(vload(y + t), t));
}

template <typename T, typename P>
Acc<T> channel_bias(const P& p, int64_t c) {
  return static_cast<Acc<T>>(p.shift) + (p.bias ? load(static_cast<const T*>(p.bias)[c * p.bias_c]) : Acc<T>(0));
}

template <typename T>
void load_taps(Acc<T>* dst, const void* w, int64_t offset, int64_t stride, int64_t taps) {
  const T* src = static_cast<const T*>(w) + offset;
  for (int64_t k = 0; k < taps; ++k) dst[k] = load(src[k * stride]);
}

// Sums that end up in a gradient of many samples: in fp32, products are exact in double, and gradients come out correctly
// rounded.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, float>, double, Acc<T>>;

// The same row as Sum<T>.
template <typename T>
const Sum<T>* as_sums(const Acc<T>* row, int64_t n, std::vector<Sum<T>>& copy) {
  if constexpr (std::is_same_v<Sum<T>, Acc<T>>) {
    return row;
  } else {
    copy.assign(row, row + n);
    return copy.data();
  }
}

template <typename A>
int64_t round_up(int64_t n) { return (n + kPad<A> - 1) / kPad<A> * kPad<A>; }

// ---- rows ----

template <typename T>
void forward_rows(const ConvParams& p, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const int64_t n = round_up<A>(p.out_len);
  std::vector<A> x(n + p.taps), y(n), w(p.taps), dy(p.epilogue == Epilogue::kSiluGrad ? n : 0);
  for (int64_t u = begin; u < end; ++u) {
    const int64_t c = u / p.batch, b = u - c * p.batch;  // a channel's taps are loaded once
    if (u == begin || b == 0) load_taps<T>(w.data(), p.w, c * p.w_c, p.w_k, p.taps);
    load_row<T>(x.data(), static_cast<const T*>(p.x) + b * p.xs.b + c * p.xs.c, p.xs.t, -p.left, n + p.taps - p.left, p.in_len);
    convolve<false, A>(y.data(), x.data(), w.data(), n, p.taps, channel_bias<T>(p, c), p.left, p.left + p.in_len, p.taps);
    if (p.epilogue == Epilogue::kSilu) map_vectors(y.data(), n, [](V<A> v, int64_t) { return silu_of<T, A>(v); });
    if (p.epilogue == Epilogue::kSiluGrad) {
      load_row<T>(dy.data(), static_cast<const T*>(p.dy) + b * p.dys.b + c * p.dys.c, p.dys.t, 0, n, p.out_len);
      map_vectors(y.data(), n, [&](V<A> v, int64_t t) { return silu_backward_of<T, A>(vload(&dy[t]), v); });
    }
    store_row<T>(static_cast<T*>(p.out) + b * p.outs.b + c * p.outs.c, y.data(), p.outs.t, p.out_len);
  }
}

template <typename T>
void backward_rows(const BackwardParams& p, int64_t begin, int64_t end) {
  using A = Acc<T>;
  // g is stored with room for the zeros that dx reads before and after it: dx[s] = sum_j w[taps-1-j] * g[s - back + j].
  const int64_t n = round_up<A>(p.out_len), m = round_up<A>(p.in_len), back = p.taps - 1 - p.left;
  const int64_t before = std::max<int64_t>(0, back), after = std::max<int64_t>(0, m + p.left - n) + kPad<A>;
  std::vector<A> x(n + p.taps + kRegs), g(before + n + after), dx(m), pre(n), w(p.taps), flipped(p.taps);
  std::vector<double> dw(p.taps);
  std::vector<Sum<T>> x_sums, g_sums;
  for (int64_t c = begin; c < end; ++c) {
    load_taps<T>(w.data(), p.w, c * p.w_c, p.w_k, p.taps);
    std::reverse_copy(w.begin(), w.end(), flipped.begin());
    std::fill(dw.begin(), dw.end(), 0.);
    double db = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      A* g0 = g.data() + before;
      load_row<T>(g.data(), static_cast<const T*>(p.dy) + b * p.dys.b + c * p.dys.c, p.dys.t, -before, n + after, p.out_len);
      if (p.silu || p.dw)
        load_row<T>(x.data(), static_cast<const T*>(p.x) + b * p.xs.b + c * p.xs.c, p.xs.t, -p.left,
                    n + p.taps + kRegs - p.left, p.in_len);
      if (p.silu) {
        convolve<false, A>(pre.data(), x.data(), w.data(), n, p.taps, channel_bias<T>(p, c), p.left, p.left + p.in_len, p.taps);
        map_vectors(g0, n, [&](V<A> v, int64_t t) { return silu_backward_of<T, A>(v, vload(&pre[t])); });
        std::fill(g0 + p.out_len, g0 + n, A(0));  // 0 * NaN past the end
      }
      if (p.dx) {
        const int64_t chain = p.silu ? kShortChain : p.taps;  // with SiLU the bits differ anyway: its slope is more exact here
        convolve<true, A>(dx.data(), g0 - back, flipped.data(), m, p.taps, A(0), back, back + p.out_len, chain);
        store_row<T>(static_cast<T*>(p.dx) + b * p.dxs.b + c * p.dxs.c, dx.data(), p.dxs.t, p.in_len);
      }
      const Sum<T>* gs = p.dw || p.db ? as_sums<T>(g0, n, g_sums) : nullptr;
      if (p.dw) {
        const Sum<T>* xs = as_sums<T>(x.data(), static_cast<int64_t>(x.size()), x_sums);
        auto* sum = p.taps <= 4 ? correlate<4, Sum<T>> : correlate<kRegs, Sum<T>>;
        sum(dw.data(), gs, xs, p.out_len, p.taps, p.left, p.left + p.in_len);
      }
      if (p.db) {
        V<Sum<T>> sum[4] = {};
        constexpr int W = VecOf<Sum<T>>::kSize;
        for (int64_t t = 0; t < n; t += 4 * W) {
          for (int i = 0; i < 4; ++i) sum[i] += vload(gs + t + i * W);
        }
        for (int i = 0; i < W; ++i) db += static_cast<double>((sum[0] + sum[1] + (sum[2] + sum[3]))[i]);
      }
    }
    for (int64_t k = 0; k < p.taps && p.dw; ++k) static_cast<T*>(p.dw)[c * p.taps + k] = to_storage<T>(static_cast<A>(dw[k]));
    if (p.db) static_cast<T*>(p.db)[c] = to_storage<T>(static_cast<A>(db));
  }
}

// ---- channel-contiguous, few taps ----

constexpr int64_t kStrip = 32;  // samples marched through at a time, with the last K-1 in registers
constexpr int64_t kMaxMarchTaps = 4;

bool channel_contiguous(const Strides& s) { return s.c == 1 && s.t != 1; }

template <typename T>
bool can_march(int64_t channels, int64_t taps, std::initializer_list<Strides> tensors) {
  for (const Strides& s : tensors) {
    if (!channel_contiguous(s)) return false;
  }
  return taps <= kMaxMarchTaps && channels % VecOf<Acc<T>>::kSize == 0;
}

// The taps as [tap][channel], so that a vector of channels is a load.
template <typename T, typename P>
void load_taps_by_channel(const P& p, std::vector<Acc<T>>& w, std::vector<Acc<T>>& bias) {
  w.resize(p.taps * p.channels), bias.resize(p.channels);
  for (int64_t c = 0; c < p.channels; ++c) {
    for (int64_t k = 0; k < p.taps; ++k) w[k * p.channels + c] = load(static_cast<const T*>(p.w)[c * p.w_c + k * p.w_k]);
    bias[c] = channel_bias<T>(p, c);
  }
}

template <typename T>
inline V<Acc<T>> sample(const T* row, int64_t t, int64_t stride, int64_t len) {
  return t >= 0 && t < len ? vload_as(row + t * stride) : V<Acc<T>>{};
}

// Units: strips of all batch entries, all channels.
template <typename T, int K>
void forward_march(const ConvParams& p, int64_t begin, int64_t end) {
  using A = Acc<T>;
  constexpr int W = VecOf<A>::kSize;
  const int64_t strips = (p.out_len + kStrip - 1) / kStrip;
  std::vector<A> taps, biases;
  load_taps_by_channel<T>(p, taps, biases);
  for (int64_t u = begin; u < end; ++u) {
    const int64_t b = u / strips, t0 = (u - b * strips) * kStrip, t1 = std::min(p.out_len, t0 + kStrip);
    for (int64_t c = 0; c < p.channels; c += W) {
      const T* x = static_cast<const T*>(p.x) + b * p.xs.b + c;
      T* out = static_cast<T*>(p.out) + b * p.outs.b + c;
      V<A> w[K], win[K];
      for (int k = 0; k < K; ++k) w[k] = vload(&taps[k * p.channels + c]);
      for (int k = 0; k < K - 1; ++k) win[k + 1] = sample(x, t0 - p.left + k, p.xs.t, p.in_len);
      const V<A> bias = vload(&biases[c]);
      for (int64_t t = t0; t < t1; ++t) {
        for (int k = 0; k < K - 1; ++k) win[k] = win[k + 1];
        win[K - 1] = sample(x, t - p.left + K - 1, p.xs.t, p.in_len);
        V<A> y = bias;
        for (int k = 0; k < K; ++k) y += w[k] * win[k];
        vstore_as(out + t * p.outs.t, p.epilogue == Epilogue::kSilu ? silu_of<T, A>(y) : y);
      }
    }
  }
}

// Sums of products, a channel a lane: in Sum<T>.
template <typename T>
struct Lanes {
  using A = Acc<T>;
  static constexpr int kParts = sizeof(Sum<T>) / sizeof(A);
  V<Sum<T>> part[kParts];

  void add(V<A> a, V<A> b) {
    if constexpr (kParts == 1) {
      part[0] += a * b;
    } else {
      for (int i = 0; i < kParts; ++i) part[i] += wide(a, i) * wide(b, i);
    }
  }
  void add(const Lanes& other) {
    for (int i = 0; i < kParts; ++i) part[i] += other.part[i];
  }
  Sum<T> lane(int i) const { return part[i / VecOf<Sum<T>>::kSize][i % VecOf<Sum<T>>::kSize]; }
};

// Units: groups of 64 channels, causal convolutions; a strip also computes the K-1 gradients after it.
constexpr int64_t kGroup = 64;

template <typename T, int K>
void backward_march(const BackwardParams& p, int64_t begin, int64_t end) {
  using A = Acc<T>;
  constexpr int W = VecOf<A>::kSize;
  std::vector<A> taps, biases;
  load_taps_by_channel<T>(p, taps, biases);
  for (int64_t u = begin; u < end; ++u) {
    Lanes<T> dw[kGroup / W][K + 1] = {};  // the last is db
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t t0 = 0; t0 < p.in_len; t0 += kStrip) {
        const int64_t t1 = std::min(p.in_len, t0 + kStrip);
        for (int64_t c = u * kGroup; c < std::min(p.channels, (u + 1) * kGroup); c += W) {
          const T* x = static_cast<const T*>(p.x) + b * p.xs.b + c;
          const T* dy = static_cast<const T*>(p.dy) + b * p.dys.b + c;
          T* dx = static_cast<T*>(p.dx) + b * p.dxs.b + c;
          Lanes<T> sums[K + 1] = {};
          V<A> w[K], win[K], g[K] = {};
          for (int k = 0; k < K; ++k) w[k] = vload(&taps[k * p.channels + c]);
          for (int k = 0; k < K - 1; ++k) win[k + 1] = sample(x, t0 - (K - 1) + k, p.xs.t, p.in_len);
          const V<A> bias = vload(&biases[c]);
          for (int64_t t = t0; t < t1 + K - 1; ++t) {
            for (int k = 0; k < K - 1; ++k) win[k] = win[k + 1], g[k] = g[k + 1];
            win[K - 1] = sample(x, t, p.xs.t, p.in_len);
            g[K - 1] = sample(dy, t, p.dys.t, p.in_len);
            if (p.silu && t < p.in_len) {
              V<A> pre = bias;
              for (int k = 0; k < K; ++k) pre += w[k] * win[k];
              g[K - 1] = silu_backward_of<T, A>(g[K - 1], pre);
            }
            if (t < t1) {
              for (int k = 0; k < K; ++k) sums[k].add(g[K - 1], win[k]);
              sums[K].add(g[K - 1], V<A>{} + A(1));
            }
            if (p.dx && t - (K - 1) >= t0) {
              V<A> d = {};
              for (int k = 0; k < K; ++k) d += w[k] * g[K - 1 - k];
              vstore_as(dx + (t - (K - 1)) * p.dxs.t, d);
            }
          }
          for (int k = 0; k <= K; ++k) dw[(c - u * kGroup) / W][k].add(sums[k]);
        }
      }
    }
    for (int64_t c = u * kGroup; c < std::min(p.channels, (u + 1) * kGroup); ++c) {
      const Lanes<T>(&sums)[K + 1] = dw[(c - u * kGroup) / W];
      const int lane = static_cast<int>((c - u * kGroup) % W);
      for (int k = 0; k < K && p.dw; ++k) static_cast<T*>(p.dw)[c * K + k] = to_storage<T>(static_cast<A>(sums[k].lane(lane)));
      if (p.db) static_cast<T*>(p.db)[c] = to_storage<T>(static_cast<A>(sums[K].lane(lane)));
    }
  }
}

template <typename F>
auto dispatch(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kHalf: return f(Half{});
    case Dtype::kBFloat16: return f(BFloat16{});
    case Dtype::kDouble: return f(double{});
    default: return f(float{});
  }
}

template <typename F>
void dispatch_taps(int64_t taps, F&& f) {
  switch (taps) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    default: return f(std::integral_constant<int, 4>{});
  }
}

bool marches(const ConvParams& p) {
  return p.epilogue != Epilogue::kSiluGrad && dispatch(p.dtype, [&](auto type) {
    return can_march<decltype(type)>(p.channels, p.taps, {p.xs, p.outs});
  });
}
bool marches(const BackwardParams& p) {
  return p.left == p.taps - 1 && p.in_len == p.out_len && dispatch(p.dtype, [&](auto type) {
    return can_march<decltype(type)>(p.channels, p.taps, {p.xs, p.dys, p.dx ? p.dxs : p.xs});
  });
}

}  // namespace

int64_t forward_units(const ConvParams& p) { return p.batch * (marches(p) ? (p.out_len + kStrip - 1) / kStrip : p.channels); }
void forward_cpu(const ConvParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (!marches(p)) return forward_rows<T>(p, begin, end);
    dispatch_taps(p.taps, [&](auto taps) { forward_march<T, decltype(taps)::value>(p, begin, end); });
  });
}

int64_t backward_units(const BackwardParams& p) { return marches(p) ? (p.channels + kGroup - 1) / kGroup : p.channels; }
void backward_cpu(const BackwardParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (!marches(p)) return backward_rows<T>(p, begin, end);
    dispatch_taps(p.taps, [&](auto taps) { backward_march<T, decltype(taps)::value>(p, begin, end); });
  });
}

}  // namespace fusebackend::conv1d
