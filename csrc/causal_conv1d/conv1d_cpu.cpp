// Rows are brought into scratch in the accumulation type with zeros around them, so that one inner loop serves every
// layout, type and padding: a block of outputs stays in vector registers while the taps go by.
//
// Channel-contiguous tensors with few taps skip the scratch: there the vectors run along the channels.
#include "conv1d_cpu.h"

#include <algorithm>
#include <vector>

#include "cpu_vectors.h"

namespace fusebackend::conv1d {
namespace {

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
