// Rows on the CPU convolved with taps, and correlated with gradients: samples are the lanes of vectors.
#pragma once
#include <algorithm>

#include "common/cpu_vectors.h"

namespace fusebackend::causal_conv1d {
namespace {

// Vectors of sums that are under way at a time: the latency of a fused multiply-add times its rate, and more in convolutions where there are
// registers for it, since vectors of outputs share loads.
constexpr int kAccumulators = 8, kConvolveAccumulators = FUSE_VECTOR_BYTES == 64 ? 16 : 8;

// acc += taps m + W*j for m in [first, last), j in [0, J). Taps a vector apart see the same samples from neighbouring vectors of outputs, and
// share their loads.
template <int J, int R, typename A>
inline void add_taps(V<A> (&acc)[R], const A* x, const A* w, int first, int last) {
  constexpr int W = VecOf<A>::kSize;
#pragma GCC unroll 1
  for (int m = first; m < last; ++m) {
    V<A> wk[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) wk[j] = in_all(w[m + W * j]);
#pragma GCC unroll 32
    for (int i = 0; i < R + J - 1; ++i) {
      V<A> samples = vload(x + m + W * i);
      asm("" : FUSE_IN_REGISTER(samples));  // else the compiler would load it again at each use
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) {
        if (i - j >= 0 && i - j < R) acc[i - j] += wk[j] * samples;
      }
    }
  }
}

// Adds acc to y, or stores it there if none of y's sums has begun, and clears it.
template <int R, typename A>
inline void end_chain(V<A> (&acc)[R], A* y, bool& begun) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    A* to = y + r * VecOf<A>::kSize;
    vstore(to, begun ? acc[r] + vload(to) : acc[r]);
    acc[r] = V<A>{};
  }
  begun = true;
}

// Additions to an accumulator before it is added to the result. Sums of such chains round less than one long chain, which eager mode's
// kernels have.
constexpr int kChain = 32;

// R vectors of y[t] = start + sum w[j] * x[t + j] over j in [k, end).
template <int R, typename A>
inline void convolve_block(A* y, const A* x, const A* w, int64_t k, int64_t end, A start) {
  constexpr int W = VecOf<A>::kSize;
  V<A> acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = in_all(start);
  bool begun = false;
  if constexpr (R >= kAccumulators) {
    for (; end - k >= 4 * W; k += 4 * W) {
      for (int m = 0; m < W; m += kChain / 4) {
        add_taps<4>(acc, x + k, w + k, m, std::min(W, m + kChain / 4));
        end_chain(acc, y, begun);
      }
    }
  }
  for (; end - k >= 2 * W; k += 2 * W) {
    add_taps<2>(acc, x + k, w + k, 0, W);
    end_chain(acc, y, begun);
  }
  const int rest = static_cast<int>(std::max<int64_t>(0, end - k)), paired = std::max(0, rest - W);
  add_taps<2>(acc, x + k, w + k, 0, paired);
  add_taps<1>(acc, x + k, w + k, paired, std::min(rest, W));
  end_chain(acc, y, begun);
}

// y[t] = start + sum_k w[k] * x[t + k] for t in [0, n), n being whole vectors, R of them at a time. x is zero before `zeros` and from `end` on:
// taps that meet zeros alone are skipped.
template <typename A, int R = kConvolveAccumulators>
void convolve(A* y, const A* x, const A* w, int64_t n, int64_t taps, A start, int64_t zeros, int64_t end) {
  constexpr int kBlock = R * VecOf<A>::kSize;
  int64_t t = 0;
  for (; n - t >= kBlock; t += kBlock) {
    convolve_block<R>(y + t, x + t, w, std::max<int64_t>(0, zeros - (t + kBlock - 1)), std::min(taps, end - t), start);
  }
  if constexpr (R > 1) convolve<A, R / 2>(y + t, x + t, w, n - t, taps, start, zeros - t, end - t);
}

// Whether all of n numbers are finite. Where taps or gradients are not, products with the zeros around samples are NaN: they must be made where
// they are asked for, and nowhere else.
template <typename A>
bool all_finite(const A* numbers, int64_t n) {
  constexpr int W = VecOf<A>::kSize;
  V<A> zeros = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) zeros += vload(numbers + i) * A(0);
  A sum = 0;
  for (int j = 0; j < W; ++j) sum += zeros[j];
  for (; i < n; ++i) sum += numbers[i] * A(0);
  return sum == 0;
}

// y[t] = sum_k w[k] * x[t + k] for t in [0, n), over samples in [begin, end) alone.
template <typename A>
void convolve_within(A* y, const A* x, const A* w, int64_t n, int64_t taps, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < n; ++t) {
    y[t] = 0;
    for (int64_t k = std::max<int64_t>(0, begin - t); k < std::min(taps, end - t); ++k) y[t] += w[k] * x[t + k];
  }
}

// dw[k] += sum_t g[t] * x[t + k] for t in [0, n), R taps at a time. `zeros` and `end` as above.
template <int R, typename A>
void correlate(double* dw, const A* g, const A* x, int64_t n, int64_t taps, int64_t zeros, int64_t end) {
  constexpr int W = VecOf<A>::kSize, kSteps = kAccumulators / R;  // vectors of samples at a time
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

}  // namespace
}  // namespace fusebackend::causal_conv1d
