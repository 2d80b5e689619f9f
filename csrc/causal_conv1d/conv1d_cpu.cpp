// Rows are brought into scratch in the type that sums are made in, with zeros around them, so that one inner loop serves every
// layout, type and padding: a block of outputs stays in vector registers while the taps go by. Channel-contiguous tensors are
// transposed on the way.
#include "conv1d_cpu.h"

#include <algorithm>
#include <vector>

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
  const T* src = static_cast<const T*>(w) + offset;
  for (int64_t k = 0; k < taps; ++k) dst[k] = load(src[k * stride]);
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

// Channels whose rows are brought in together.
bool across(const Strides& s) { return s.c == 1 && s.t != 1; }
int64_t rows_together(const ConvParams& p) { return across(p.xs) || across(p.outs) ? kRows : 1; }
int64_t rows_together(const BackwardParams& p) { return across(p.xs) || across(p.dys) || (p.dx && across(p.dxs)) ? kRows : 1; }

// Between rows in scratch: not a power of two, or they would compete for the same places in the cache.
int64_t pitch_of(int64_t n) { return (n + 15) / 16 * 16 + 16; }

template <typename T, typename A>
void forward_rows(const ConvParams& p, int64_t begin, int64_t end) {
  const int64_t n = round_up<A>(p.out_len), together = rows_together(p), x_pitch = pitch_of(n + p.taps), y_pitch = pitch_of(n);
  std::vector<A> x(together * x_pitch), y(together * y_pitch), w(p.taps);
  for (int64_t u = begin; u < end; ++u) {
    const int64_t first = u / p.batch * together, b = u % p.batch, rows = std::min(together, p.channels - first);
    load_rows<T, A>(x.data(), x_pitch, plane<T>(p.x, p.xs, b), first, rows, -p.left, n + p.taps - p.left, p.in_len);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t c = first + r;
      A* out = y.data() + r * y_pitch;
      load_taps<T, A>(w.data(), p.w, c * p.w_c, p.w_k, p.taps);
      convolve<A>(out, x.data() + r * x_pitch, w.data(), n, p.taps, channel_bias<T, A>(p, c), p.left, p.left + p.in_len);
      if (p.epilogue == Epilogue::kSilu) map_vectors(out, n, [](V<A> v, int64_t) { return silu_of<T, A>(v); });
    }
    store_rows<T, A>(plane<T>(p.out, p.outs, b), y.data(), y_pitch, first, rows, p.out_len);
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
  // g has n samples, zeros past the last; x those from the first tap of the first on, x_len in all.
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
      for (int64_t t = 0; t < n; t += 4 * W) {
        for (int i = 0; i < 4; ++i) sum[i] += vload(gs + t + i * W);
      }
      for (int i = 0; i < W; ++i) db_ += static_cast<double>((sum[0] + sum[1] + (sum[2] + sum[3]))[i]);
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
  const int64_t before = std::max<int64_t>(0, back), after = std::max<int64_t>(0, m + p.left - n) + kPad<A>;
  const int64_t together = rows_together(p), x_len = n + p.taps + kRegs;
  const int64_t x_pitch = pitch_of(x_len), g_pitch = pitch_of(before + n + after), dx_pitch = pitch_of(m);
  std::vector<A> x(together * x_pitch), g(together * g_pitch), dx(together * dx_pitch), pre(n), w(p.taps), flipped(p.taps);
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
          convolve<A>(pre.data(), x0, w.data(), n, p.taps, channel_bias<T, A>(p, c), p.left, p.left + p.in_len);
          map_vectors(g0, n, [&](V<A> v, int64_t t) { return silu_backward_of<T, A>(v, vload(&pre[t])); });
          std::fill(g0 + p.out_len, g0 + n, A(0));  // 0 * NaN past the end
        }
        if (p.dx) {
          std::reverse_copy(w.begin(), w.end(), flipped.begin());
          convolve<A>(dx.data() + r * dx_pitch, g0 - back, flipped.data(), m, p.taps, A(0), back, back + p.out_len);
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

template <typename P>
int64_t row_groups(const P& p) { return (p.channels + rows_together(p) - 1) / rows_together(p); }

}  // namespace

int64_t forward_units(const ConvParams& p) { return p.batch * row_groups(p); }
void forward_cpu(const ConvParams& p, int64_t begin, int64_t end) {
  if (in_double(p)) return forward_rows<float, double>(p, begin, end);
  dispatch(p.dtype, [&](auto type) { forward_rows<decltype(type), Acc<decltype(type)>>(p, begin, end); });
}

int64_t backward_units(const BackwardParams& p) { return row_groups(p); }
void backward_cpu(const BackwardParams& p, int64_t begin, int64_t end) {
  if (in_double(p)) return backward_rows<float, double>(p, begin, end);
  dispatch(p.dtype, [&](auto type) { backward_rows<decltype(type), Acc<decltype(type)>>(p, begin, end); });
}

}  // namespace fusebackend::conv1d
