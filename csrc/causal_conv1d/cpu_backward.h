// The backward CPU kernel: the three gradients of whole rows, in scratch as in cpu_forward.h.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "causal_conv1d/cpu_inner_loops.h"
#include "causal_conv1d/cpu_launch.h"
#include "causal_conv1d/cpu_rows.h"
#include "common/cpu_silu.h"

namespace fusebackend::causal_conv1d {
namespace {

// dw and db of one channel, summed row after row. fp32 is summed in double, in which its products are exact, so gradients are correctly rounded.
template <typename T, typename A>
class WeightGradient {
 public:
  explicit WeightGradient(const BackwardParams& p) : p_(p), dw_(p.taps) {}

  void clear() {
    std::fill(dw_.begin(), dw_.end(), 0.);
    db_ = 0;
  }
  // g has n samples, whole vectors, with zeros past the last; x has x_len, from the one under the first tap of the first result on.
  void add(const A* g, int64_t n, const A* x, int64_t x_len) {
    if (!p_.dw && !p_.db) return;
    const S* wide_g = widened(g, n, wide_g_);
    if (p_.dw) {
      auto* sum = p_.taps <= 4 ? correlate<4, S> : correlate<kAccumulators, S>;
      const bool skips_zeros = all_finite(g, n);
      sum(dw_.data(), wide_g, widened(x, x_len, wide_x_), p_.out_len, p_.taps, skips_zeros ? p_.left : 0,
          skips_zeros ? p_.left + p_.in_len : n + p_.taps);
    }
    if (p_.db) {
      V<S> sum[4] = {};
      constexpr int W = VecOf<S>::kSize;
      int64_t t = 0;
      for (; t + 4 * W <= n; t += 4 * W) {
        for (int i = 0; i < 4; ++i) sum[i] += vload(wide_g + t + i * W);
      }
      for (; t < n; t += W) sum[0] += vload(wide_g + t);
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

  static const S* widened(const A* row, int64_t n, std::vector<S>& copy) {
    if constexpr (std::is_same_v<S, A>) {
      return row;
    } else {
      copy.assign(row, row + n);
      return copy.data();
    }
  }

  const BackwardParams& p_;
  std::vector<double> dw_;
  double db_ = 0;
  std::vector<S> wide_x_, wide_g_;
};

template <typename T, typename A>
void backward_rows(const BackwardParams& p, int64_t begin, int64_t end) {
  // g is stored with room for the zeros that dx reads before and after it: dx[s] = sum_j w[taps-1-j] * g[s - back + j].
  const int64_t n = whole_vectors<A>(p.out_len), m = whole_vectors<A>(p.in_len), back = p.taps - 1 - p.left;
  const int64_t before = std::max<int64_t>(0, back), after = std::max<int64_t>(0, m + p.left - n) + kAccumulators * VecOf<A>::kSize;
  const int64_t channels = backward_unit_channels(p), x_len = n + p.taps + kAccumulators;
  const int64_t x_pitch = row_pitch(x_len), g_pitch = row_pitch(before + n + after), dx_pitch = row_pitch(m);
  Scratch<A> x(channels * x_pitch, std::max<int64_t>(0, p.left)), g(channels * g_pitch, before), dx(channels * dx_pitch), pre(n);
  std::vector<A> w(p.taps), flipped(p.taps);
  std::vector<WeightGradient<T, A>> gradients(channels, WeightGradient<T, A>(p));
  for (int64_t u = begin; u < end; ++u) {
    const int64_t first = u * channels, rows = std::min(channels, p.channels - first);
    for (auto& gradient : gradients) gradient.clear();
    for (int64_t b = 0; b < p.batch; ++b) {
      load_rows<T, A>(g.data(), g_pitch, view<T>(p.dy, p.dy_stride, b), first, rows, -before, n + after, p.out_len);
      if (p.silu || p.dw) load_rows<T, A>(x.data(), x_pitch, view<T>(p.x, p.x_stride, b), first, rows, -p.left, x_len - p.left, p.in_len);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t c = first + r;
        A *g0 = g.data() + r * g_pitch + before, *x0 = x.data() + r * x_pitch;
        load_taps<T>(w.data(), p, c);
        const bool finite_taps = all_finite(w.data(), p.taps);
        if (p.silu) {
          convolve(pre.data(), x0, w.data(), n, p.taps, channel_bias<T, A>(p, c), finite_taps ? p.left : 0, finite_taps ? p.left + p.in_len : n + p.taps);
          apply_silu_backward<T>(g0, pre.data(), n);
          std::fill(g0 + p.out_len, g0 + n, A(0));  // past the end 0 * NaN may have made NaN
        }
        if (p.dx) {
          std::reverse_copy(w.begin(), w.end(), flipped.begin());
          A* dx0 = dx.data() + r * dx_pitch;
          if (finite_taps) {
            convolve(dx0, g0 - back, flipped.data(), m, p.taps, A(0), back, back + p.out_len);
          } else {  // no gradient meets a tap that it does not belong to
            convolve_within(dx0, g0 - back, flipped.data(), p.in_len, p.taps, back, back + p.out_len);
          }
        }
        gradients[r].add(g0, n, x0, x_len);
      }
      if (p.dx) store_rows<T, A>(view<T>(p.dx, p.dx_stride, b), dx.data(), dx_pitch, first, rows, p.in_len);
    }
    for (int64_t r = 0; r < rows; ++r) gradients[r].store(first + r);
  }
}

}  // namespace
}  // namespace fusebackend::causal_conv1d
