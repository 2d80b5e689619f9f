// Rows on the CPU: into scratch with zeros around them, convolved and correlated there, and back.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu_vectors.h"

namespace fusebackend::conv1d {
namespace {

// dst[i] <- src[i * stride] for i in [0, len), zeros elsewhere in [first, last); dst begins with i = first.
template <typename T, typename A>
void load_row(A* dst, const T* src, int64_t stride, int64_t first, int64_t last, int64_t len) {
  const int64_t begin = std::clamp<int64_t>(0, first, last), end = std::clamp<int64_t>(len, begin, last);
  std::fill(dst, dst + (begin - first), A(0));
  int64_t i = begin;
  if constexpr (std::is_same_v<A, Acc<T>>) {
    if (stride == 1) {
      for (; i + VecOf<A>::kSize <= end; i += VecOf<A>::kSize) vstore(dst + (i - first), vload_as(src + i));
    }
  }
  for (; i < end; ++i) dst[i - first] = load(src[i * stride]);
  std::fill(dst + (end - first), dst + (last - first), A(0));
}

template <typename T, typename A>
void store_row(T* dst, const A* src, int64_t stride, int64_t n) {
  int64_t i = 0;
  if constexpr (std::is_same_v<A, Acc<T>>) {
    if (stride == 1) {
      for (; i + VecOf<A>::kSize <= n; i += VecOf<A>::kSize) vstore_as(dst + i, vload(src + i));
    }
  }
  for (; i < n; ++i) dst[i * stride] = to_storage<T>(src[i]);
}

// Transposes each 2 x 2 blocks of D x D elements.
template <int D, size_t... I>
inline void exchange_blocks(V<float> (&v)[VecOf<float>::kSize], std::index_sequence<I...>) {
  constexpr int W = VecOf<float>::kSize;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (i & D) continue;
    const V<float> a = v[i], b = v[i + D];
    v[i] = __builtin_shuffle(a, b, V<int32_t>{static_cast<int32_t>(I & D ? W + I - D : I)...});
    v[i + D] = __builtin_shuffle(a, b, V<int32_t>{static_cast<int32_t>(I & D ? W + I : I + D)...});
  }
}
// As many rows as a vector has lanes, in place.
template <int D = 1>
inline void transpose(V<float> (&v)[VecOf<float>::kSize]) {
  exchange_blocks<D>(v, std::make_index_sequence<VecOf<float>::kSize>());
  if constexpr (2 * D < VecOf<float>::kSize) transpose<2 * D>(v);
}

// Element (channel, time) of a tensor for one batch entry.
template <typename T>
struct Plane {
  T* data;
  int64_t c, t;

  T* row(int64_t channel) const { return data + channel * c; }
  bool across() const { return c == 1 && t != 1; }
};

// Scratch of the calling thread, for the way between fp32 and double.
template <typename A>
A* row_scratch(int64_t n) {
  thread_local std::vector<A> memory;
  if (static_cast<int64_t>(memory.size()) < n) memory.resize(n);
  return memory.data();
}

// Rows channel to channel + rows, each as load_row does, `pitch` apart. Where channels are contiguous, as many as fill vectors are
// transposed, all of one sample at once.
template <typename T, typename A>
void load_rows(A* dst, int64_t pitch, const Plane<const T>& src, int64_t channel, int64_t rows, int64_t first, int64_t last, int64_t len) {
  const T* from = src.row(channel);
  if (!src.across() || rows == 1) {
    for (int64_t r = 0; r < rows; ++r) load_row<T, A>(dst + r * pitch, from + r * src.c, src.t, first, last, len);
  } else if constexpr (std::is_same_v<A, double> && std::is_same_v<T, float>) {  // by way of fp32
    float* narrow = row_scratch<float>(rows * pitch);
    load_rows<T, float>(narrow, pitch, src, channel, rows, first, last, len);
    std::copy(narrow, narrow + rows * pitch, dst);
  } else {
    const int64_t begin = std::clamp<int64_t>(0, first, last), end = std::clamp<int64_t>(len, begin, last);
    int64_t i = begin, whole = 0;
    if constexpr (std::is_same_v<A, float>) {
      constexpr int W = VecOf<A>::kSize;
      whole = rows / W * W;
      for (; i + W <= end; i += W) {
        for (int64_t r = 0; r < whole; r += W) {
          V<A> v[W];
#pragma GCC unroll 16
          for (int j = 0; j < W; ++j) v[j] = vload_as(from + (i + j) * src.t + r);
          transpose(v);
#pragma GCC unroll 16
          for (int j = 0; j < W; ++j) vstore(dst + (r + j) * pitch + (i - first), v[j]);
        }
      }
    }
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t r = t < i ? whole : 0; r < rows; ++r) dst[r * pitch + (t - first)] = load(from[t * src.t + r]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      A* to = dst + r * pitch;
      std::fill(to, to + (begin - first), A(0));
      std::fill(to + (end - first), to + (last - first), A(0));
    }
  }
}

template <typename T, typename A>
void store_rows(const Plane<T>& dst, const A* src, int64_t pitch, int64_t channel, int64_t rows, int64_t n) {
  T* to = dst.row(channel);
  if (!dst.across() || rows == 1) {
    for (int64_t r = 0; r < rows; ++r) store_row<T, A>(to + r * dst.c, src + r * pitch, dst.t, n);
  } else if constexpr (std::is_same_v<A, double> && std::is_same_v<T, float>) {
    float* narrow = row_scratch<float>(rows * pitch);
    std::copy(src, src + rows * pitch, narrow);
    store_rows<T, float>(dst, narrow, pitch, channel, rows, n);
  } else {
    int64_t i = 0, whole = 0;
    if constexpr (std::is_same_v<A, float>) {
      constexpr int W = VecOf<A>::kSize;
      whole = rows / W * W;
      for (; i + W <= n; i += W) {
        for (int64_t r = 0; r < whole; r += W) {
          V<A> v[W];
#pragma GCC unroll 16
          for (int j = 0; j < W; ++j) v[j] = vload(src + (r + j) * pitch + i);
          transpose(v);
#pragma GCC unroll 16
          for (int j = 0; j < W; ++j) vstore_as(to + (i + j) * dst.t + r, v[j]);
        }
      }
    }
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t r = t < i ? whole : 0; r < rows; ++r) to[t * dst.t + r] = to_storage<T>(src[r * pitch + t]);
    }
  }
}

constexpr int kRegs = 8;  // vectors of outputs, or taps, held at a time: the latency of FMA times its rate
template <typename A>
int64_t round_up(int64_t n) { return (n + VecOf<A>::kSize - 1) / VecOf<A>::kSize * VecOf<A>::kSize; }

// acc += taps m + W*j for m in [first, last), j in [0, J). Taps a vector apart see the same samples from neighbouring outputs: they
// share loads.
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
      asm("" : "+v"(samples));  // else each use would load it again
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) {
        if (i - j >= 0 && i - j < R) acc[i - j] += wk[j] * samples;
      }
    }
  }
}

// y, or what it holds already, += acc, and acc begins anew.
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

// In fp32 no chain of additions is longer: what chains add up to rounds less than one long chain, which is what eager mode's kernels are.
constexpr int kChain = 32;

// R vectors of y[t] = start + sum_k w[k] * x[t + k] for k up to `end`.
template <int R, typename A>
inline void convolve_block(A* y, const A* x, const A* w, int64_t k, int64_t end, A start) {
  constexpr int W = VecOf<A>::kSize;
  V<A> acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = in_all(start);
  bool begun = false;
  if constexpr (R >= kRegs) {
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

// y[t] = start + sum_k w[k] * x[t + k] for t in [0, n), whole vectors, R of them at a time. Taps that meet only zeros are skipped: x is
// zero before `zeros` and from `end` on.
template <typename A, int R = kRegs>
void convolve(A* y, const A* x, const A* w, int64_t n, int64_t taps, A start, int64_t zeros, int64_t end) {
  constexpr int kBlock = R * VecOf<A>::kSize;
  int64_t t = 0;
  for (; n - t >= kBlock; t += kBlock) {
    convolve_block<R>(y + t, x + t, w, std::max<int64_t>(0, zeros - (t + kBlock - 1)), std::min(taps, end - t), start);
  }
  if constexpr (R > 1) convolve<A, R / 2>(y + t, x + t, w, n - t, taps, start, zeros - t, end - t);
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

// y <- silu(y), n rounded up to vectors.
template <typename T, typename A>
void apply_silu(A* y, int64_t n) {
  constexpr int W = VecOf<A>::kSize, kTogether = 4;  // so that they hide one another's latencies
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
// dy <- dy * silu'(pre)
template <typename T, typename A>
void apply_silu_backward(A* dy, const A* pre, int64_t n) {
  for (int64_t t = 0; t < n; t += VecOf<A>::kSize) vstore(dy + t, silu_backward_of<T, A>(vload(dy + t), vload(pre + t)));
}

}  // namespace
}  // namespace fusebackend::conv1d
