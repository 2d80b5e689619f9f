// Rows are brought into scratch in the type that sums are made in, with zeros around them, so that one inner loop serves every
// layout, type and padding: a block of outputs stays in vector registers while the taps go by. Channel-contiguous tensors are
// transposed on the way.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "conv1d_cpu.h"
#include "cpu_lanes.h"
#include "cpu_rows.h"

namespace fusebackend::conv1d {
namespace {

// Whether fp32 is summed in double. Eager mode's rounding errors are not larger than ours in each of few numbers, but for correct
// rounding: so small problems are, and one channel, which is no depthwise convolution to PyTorch and has kernels that add up in other
// orders, and the gradients of few channels under SiLU, whose own errors go into all of them. Gradients of few taps are because
// two fp32 sums of few terms in different orders err alike: neither is the smaller in all of many.
constexpr int64_t kSmallProducts = int64_t{1} << 21, kFewChannels = 64, kFewTaps = 32;
bool in_double(Dtype dtype, int64_t batch, int64_t channels, int64_t length, int64_t taps) {
  return dtype == Dtype::kFloat && (channels == 1 || batch * channels * length * taps <= kSmallProducts);
}
bool in_double(const ConvParams& p) { return in_double(p.dtype, p.batch, p.channels, p.out_len, std::min(p.taps, p.in_len)); }
bool in_double(const BackwardParams& p) {
  return in_double(p.dtype, p.batch, p.channels, std::min(p.in_len, p.out_len), p.taps) ||
         (p.dtype == Dtype::kFloat && ((p.silu && p.channels < kFewChannels) || p.taps <= kFewTaps));
}

template <typename T, typename A, typename P>
A channel_bias(const P& p, int64_t c) {
  return static_cast<A>(p.shift) + (p.bias ? load(static_cast<const T*>(p.bias)[c * p.bias_c]) : A(0));
}

template <typename T, typename A>
void load_taps(A* dst, const void* w, int64_t offset, int64_t stride, int64_t taps) {
  load_row<T, A>(dst, static_cast<const T*>(w) + offset, stride, 0, taps, taps);
}

// The same row as sums of type S.
template <typename S, typename A>
const S* as_sums(const A* row, int64_t n, std::vector<S>& copy) {
  if constexpr (std::is_same_v<S, A>) {
    return row;
  } else {
    copy.assign(row, row + n);
    return copy.data();
  }
}

template <typename T>
Plane<T> plane(void* data, const Strides& s, int64_t b) { return {static_cast<T*>(data) + b * s.b, s.c, s.t}; }
template <typename T>
Plane<const T> plane(const void* data, const Strides& s, int64_t b) { return {static_cast<const T*>(data) + b * s.b, s.c, s.t}; }

// Memory whose element `first` begins a cache line.
template <typename A>
class Scratch {
 public:
  explicit Scratch(int64_t n, int64_t first = 0) : memory_(n + 2 * kLine) {
    const int64_t offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory_.data()) / sizeof(A)) + first;
    data_ = memory_.data() + (kLine - offset % kLine) % kLine;
  }
  A* data() { return data_; }

 private:
  static constexpr int64_t kLine = 64 / sizeof(A);
  std::vector<A> memory_;
  A* data_;
};

// Between rows in scratch: not a power of two, or they would compete for the same places in the cache.
int64_t pitch_of(int64_t n) { return (n + 15) / 16 * 16 + 16; }

template <typename T, typename A>
void forward_rows(const ConvParams& p, int64_t begin, int64_t end) {
  const int64_t together = rows_together(p), groups = row_groups(p), tile = tile_of(p), tiles = tiles_of(p);
  const int64_t most = round_up<A>(std::min(p.out_len, tile)), x_pitch = pitch_of(most + p.taps), y_pitch = pitch_of(most);
  Scratch<A> x(together * x_pitch, std::max<int64_t>(0, p.left)), y(together * y_pitch);
  std::vector<A> w(together * p.taps);
  for (int64_t u = begin; u < end; ++u) {
    const int64_t b = u / tiles / groups, first = u / tiles % groups * together, rows = std::min(together, p.channels - first);
    if (u == begin || u % tiles == 0) {
      for (int64_t r = 0; r < rows; ++r) load_taps<T, A>(w.data() + r * p.taps, p.w, (first + r) * p.w_c, p.w_k, p.taps);
    }
    const Plane<const T> from = plane<T>(p.x, p.xs, b);
    const Plane<T> to = plane<T>(p.out, p.outs, b);
    auto by_scratch = [&](int64_t t, int64_t len) {
      const int64_t n = round_up<A>(len), left = p.left - t;
      load_rows<T, A>(x.data(), x_pitch, from, first, rows, -left, n + p.taps - left, p.in_len);
      for (int64_t r = 0; r < rows; ++r) {
        A* out = y.data() + r * y_pitch;
        convolve<A, kLaneRegs>(out, x.data() + r * x_pitch, w.data() + r * p.taps, n, p.taps, channel_bias<T, A>(p, first + r), left, left + p.in_len);
        if (p.epilogue == Epilogue::kSilu) apply_silu<T>(out, n);
      }
      store_rows<T, A>({to.data + t * to.t, to.c, to.t}, y.data(), y_pitch, first, rows, len);
    };
    int64_t t = u % tiles * tile;
    const int64_t stop = std::min(p.out_len, t + tile);
    if constexpr (std::is_same_v<T, A>) {
      // Whole vectors, of contiguous samples that padding doesn't meet, need no scratch.
      constexpr int64_t W = VecOf<A>::kSize, kBlock = kLaneRegs * W;
      const int64_t begin = t + std::max<int64_t>(0, (p.left - t + kBlock - 1) / kBlock * kBlock);
      const int64_t n = std::max<int64_t>(0, std::min(stop, p.in_len + p.left - p.taps + 1) - begin) / W * W;
      if (n > 0 && together == 1 && from.t == 1 && to.t == 1) {
        if (begin > t) by_scratch(t, begin - t);
        for (int64_t i = begin; i < begin + n; i += kBlock) {  // so that SiLU finds sums in the fastest cache
          const int64_t len = std::min(kBlock, begin + n - i);
          A* out = to.row(first) + i;
          convolve<A, kLaneRegs>(out, from.row(first) + i - p.left, w.data(), len, p.taps, channel_bias<T, A>(p, first), 0, p.in_len + p.left - i);
          if (p.epilogue == Epilogue::kSilu) apply_silu<T>(out, len);
        }
        t = begin + n;
      }
    }
    if (t < stop) by_scratch(t, stop - t);
  }
}

// In lanes: nothing is transposed but the taps where channels are contiguous.
template <typename T, typename A>
void forward_lanes(const ConvParams& p, int64_t begin, int64_t end) {
  constexpr int W = VecOf<A>::kSize;
  const int64_t together = rows_together(p), tile = tile_of(p), tiles = tiles_of(p);
  // Samples that are used often are widened, or transposed, once; else, and where padding doesn't meet them, they are used where they lie.
  const bool in_place = plane<T>(p.x, p.xs, 0).across() && p.taps <= (std::is_same_v<T, A> ? 64 : 8);
  const int64_t step = in_place && plane<T>(p.out, p.outs, 0).across() ? kLaneRegs : std::min(tile, p.out_len), pitch = pitch_of(step + p.taps);
  Scratch<A> x((step + p.taps) * W), y(step * W), rows(W * pitch), w(together * p.taps), start(together);
  for (int64_t u = begin; u < end; ++u) {
    const int64_t b = u / tiles % p.batch, group = u / tiles / p.batch * together, channels = std::min(together, p.channels - group);
    if (u == begin || u % (tiles * p.batch) == 0) {
      for (int64_t c = 0; c < channels; c += W) {
        const int64_t lanes = std::min<int64_t>(W, channels - c);
        for (int64_t i = 0; i < lanes; ++i) {
          load_taps<T, A>(rows.data() + i * pitch, p.w, (group + c + i) * p.w_c, p.w_k, p.taps);
          start.data()[c + i] = channel_bias<T, A>(p, group + c + i);
        }
        rows_to_block(w.data() + c * p.taps, rows.data(), pitch, lanes, p.taps);
      }
    }
    const Plane<const T> from = plane<T>(p.x, p.xs, b);
    const int64_t stop = std::min(p.out_len, (u % tiles + 1) * tile);
    for (int64_t t = u % tiles * tile; t < stop; t += step) {
      const int64_t n = std::min(step, stop - t), first = t - p.left, last = first + n + p.taps - 1;
      Plane<T> to = plane<T>(p.out, p.outs, b);
      to.data += t * to.t;
      for (int64_t c = 0; c < channels; c += W) {
        const int64_t lanes = std::min<int64_t>(W, channels - c);
        const A* taps = w.data() + c * p.taps;
        const V<A> bias = vload(start.data() + c);
        if (in_place && lanes == W && first >= 0 && last <= p.in_len) {
          convolve_lanes<T, A>(y.data(), from.row(group + c) + first * from.t, from.t, taps, n, p.taps, bias, -first, p.in_len - first);
        } else {
          load_lanes<T, A>(x.data(), from, group + c, lanes, first, last, p.in_len, rows.data(), pitch);
          convolve_lanes<A, A>(y.data(), x.data(), W, taps, n, p.taps, bias, -first, p.in_len - first);
        }
        if (p.epilogue == Epilogue::kSilu) apply_silu<T>(y.data(), n * W);
        store_lanes<T, A>(to, group + c, y.data(), lanes, n, rows.data(), pitch);
      }
    }
  }
}

// dw and db of one channel, added to by row after row. In fp32, products are exact in double, and gradients come out correctly rounded.
template <typename T, typename A>
class WeightGradient {
 public:
  WeightGradient(const BackwardParams& p) : p_(p), dw_(p.taps) {}

  void clear() {
    std::fill(dw_.begin(), dw_.end(), 0.);
    db_ = 0;
  }
  // g has n samples, whole vectors, zeros past the last; x those from the first tap of the first on, x_len in all.
  void add(const A* g, int64_t n, const A* x, int64_t x_len) {
    if (!p_.dw && !p_.db) return;
    const S* gs = as_sums<S>(g, n, g_sums_);
    if (p_.dw) {
      const S* xs = as_sums<S>(x, x_len, x_sums_);
      auto* sum = p_.taps <= 4 ? correlate<4, S> : correlate<kRegs, S>;
      sum(dw_.data(), gs, xs, p_.out_len, p_.taps, p_.left, p_.left + p_.in_len);
    }
    if (p_.db) {
      V<S> sum[4] = {};
      constexpr int W = VecOf<S>::kSize;
      int64_t t = 0;
      for (; t + 4 * W <= n; t += 4 * W) {
        for (int i = 0; i < 4; ++i) sum[i] += vload(gs + t + i * W);
      }
      for (; t < n; t += W) sum[0] += vload(gs + t);
      const V<S> all = sum[0] + sum[1] + (sum[2] + sum[3]);
      for (int i = 0; i < W; ++i) db_ += static_cast<double>(all[i]);
    }
  }
  void store(int64_t c) const {
    for (int64_t k = 0; k < p_.taps && p_.dw; ++k) static_cast<T*>(p_.dw)[c * p_.taps + k] = to_storage<T>(static_cast<Acc<T>>(dw_[k]));
    if (p_.db) static_cast<T*>(p_.db)[c] = to_storage<T>(static_cast<Acc<T>>(db_));
  }

 private:
  using S = std::conditional_t<std::is_same_v<T, float>, double, A>;
  const BackwardParams& p_;
  std::vector<double> dw_;
  double db_ = 0;
  std::vector<S> x_sums_, g_sums_;
};

template <typename T, typename A>
void backward_rows(const BackwardParams& p, int64_t begin, int64_t end) {
  // g is stored with room for the zeros that dx reads before and after it: dx[s] = sum_j w[taps-1-j] * g[s - back + j].
  const int64_t n = round_up<A>(p.out_len), m = round_up<A>(p.in_len), back = p.taps - 1 - p.left;
  const int64_t before = std::max<int64_t>(0, back), after = std::max<int64_t>(0, m + p.left - n) + kRegs * VecOf<A>::kSize;
  const int64_t together = rows_together(p), x_len = n + p.taps + kRegs;
  const int64_t x_pitch = pitch_of(x_len), g_pitch = pitch_of(before + n + after), dx_pitch = pitch_of(m);
  Scratch<A> x(together * x_pitch, std::max<int64_t>(0, p.left)), g(together * g_pitch, before), dx(together * dx_pitch), pre(n);
  std::vector<A> w(p.taps), flipped(p.taps);
  std::vector<WeightGradient<T, A>> gradients(together, p);
  for (int64_t u = begin; u < end; ++u) {
    const int64_t first = u * together, rows = std::min(together, p.channels - first);
    for (auto& gradient : gradients) gradient.clear();
    for (int64_t b = 0; b < p.batch; ++b) {
      load_rows<T, A>(g.data(), g_pitch, plane<T>(p.dy, p.dys, b), first, rows, -before, n + after, p.out_len);
      if (p.silu || p.dw) load_rows<T, A>(x.data(), x_pitch, plane<T>(p.x, p.xs, b), first, rows, -p.left, x_len - p.left, p.in_len);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t c = first + r;
        A *g0 = g.data() + r * g_pitch + before, *x0 = x.data() + r * x_pitch;
        load_taps<T, A>(w.data(), p.w, c * p.w_c, p.w_k, p.taps);
        if (p.silu) {
          convolve<A, kLaneRegs>(pre.data(), x0, w.data(), n, p.taps, channel_bias<T, A>(p, c), p.left, p.left + p.in_len);
          apply_silu_backward<T>(g0, pre.data(), n);
          std::fill(g0 + p.out_len, g0 + n, A(0));  // 0 * NaN past the end
        }
        if (p.dx) {
          std::reverse_copy(w.begin(), w.end(), flipped.begin());
          convolve<A, kLaneRegs>(dx.data() + r * dx_pitch, g0 - back, flipped.data(), m, p.taps, A(0), back, back + p.out_len);
        }
        gradients[r].add(g0, n, x0, x_len);
      }
      if (p.dx) store_rows<T, A>(plane<T>(p.dx, p.dxs, b), dx.data(), dx_pitch, first, rows, p.in_len);
    }
    for (int64_t r = 0; r < rows; ++r) gradients[r].store(first + r);
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

void forward_range(const ConvParams& p, int64_t begin, int64_t end) {
  const bool lanes = in_lanes(p);
  if (in_double(p)) return (lanes ? forward_lanes<float, double> : forward_rows<float, double>)(p, begin, end);
  dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    return (lanes ? forward_lanes<T, Acc<T>> : forward_rows<T, Acc<T>>)(p, begin, end);
  });
}
void backward_range(const BackwardParams& p, int64_t begin, int64_t end) {
  if (in_double(p)) return backward_rows<float, double>(p, begin, end);
  dispatch(p.dtype, [&](auto type) { backward_rows<decltype(type), Acc<decltype(type)>>(p, begin, end); });
}

}  // namespace
}  // namespace fusebackend::conv1d
