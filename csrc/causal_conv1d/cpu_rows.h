// Rows on the CPU: into scratch with zeros around them, convolved and correlated there, and back.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu_vectors.h"

namespace fusebackend::conv1d {

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

// Eight rows of eight, in place.
inline void transpose(V<float> (&v)[8]) {
  typedef int32_t M __attribute__((vector_size(32)));
  V<float> a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], M{0, 8, 1, 9, 4, 12, 5, 13});
    a[2 * i + 1] = __builtin_shuffle(v[2 * i], v[2 * i + 1], M{2, 10, 3, 11, 6, 14, 7, 15});
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = __builtin_shuffle(a[i], a[i + 2], M{0, 1, 8, 9, 4, 5, 12, 13});
    b[i + 1] = __builtin_shuffle(a[i], a[i + 2], M{2, 3, 10, 11, 6, 7, 14, 15});
    b[i + 2] = __builtin_shuffle(a[i + 1], a[i + 3], M{0, 1, 8, 9, 4, 5, 12, 13});
    b[i + 3] = __builtin_shuffle(a[i + 1], a[i + 3], M{2, 3, 10, 11, 6, 7, 14, 15});
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = __builtin_shuffle(b[i], b[i + 4], M{0, 1, 2, 3, 8, 9, 10, 11});
    v[i + 4] = __builtin_shuffle(b[i], b[i + 4], M{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

constexpr int64_t kRows = 8;  // of neighbouring channels, brought in together where these are contiguous

// Element (channel, time) of a tensor for one batch entry.
template <typename T>
struct Plane {
  T* data;
  int64_t c, t;

  T* row(int64_t channel) const { return data + channel * c; }
  bool across() const { return c == 1 && t != 1; }
};

// Scratch of the calling thread.
template <typename A>
A* row_scratch(int64_t n) {
  thread_local std::vector<A> memory;
  if (static_cast<int64_t>(memory.size()) < n) memory.resize(n);
  return memory.data();
}

// Rows channel to channel + rows (at most kRows), each as load_row does, `pitch` apart.
template <typename T, typename A>
void load_rows(A* dst, int64_t pitch, const Plane<const T>& src, int64_t channel, int64_t rows, int64_t first, int64_t last, int64_t len) {
  if constexpr (std::is_same_v<A, float>) {
    if (src.across() && rows == kRows) {
      const int64_t begin = std::clamp<int64_t>(0, first, last), end = std::clamp<int64_t>(len, begin, last);
      const T* from = src.row(channel);
      int64_t i = begin;
      for (; i + 8 <= end; i += 8) {
        V<float> v[8];
        for (int j = 0; j < 8; ++j) v[j] = vload_as(from + (i + j) * src.t);
        transpose(v);
        for (int r = 0; r < 8; ++r) vstore(dst + r * pitch + (i - first), v[r]);
      }
      for (int64_t r = 0; r < rows; ++r) {
        A* to = dst + r * pitch;
        std::fill(to, to + (begin - first), A(0));
        for (int64_t j = i; j < end; ++j) to[j - first] = load(from[j * src.t + r]);
        std::fill(to + (end - first), to + (last - first), A(0));
      }
      return;
    }
  } else if constexpr (std::is_same_v<T, float>) {
    if (src.across() && rows == kRows) {  // in double: by way of fp32
      float* narrow = row_scratch<float>(rows * pitch);
      load_rows<T, float>(narrow, pitch, src, channel, rows, first, last, len);
      std::copy(narrow, narrow + rows * pitch, dst);
      return;
    }
  }
  for (int64_t r = 0; r < rows; ++r) load_row<T, A>(dst + r * pitch, src.row(channel + r), src.t, first, last, len);
}

template <typename T, typename A>
void store_rows(const Plane<T>& dst, const A* src, int64_t pitch, int64_t channel, int64_t rows, int64_t n) {
  if constexpr (std::is_same_v<A, float>) {
    if (dst.across() && rows == kRows) {
      T* to = dst.row(channel);
      int64_t i = 0;
      for (; i + 8 <= n; i += 8) {
        V<float> v[8];
        for (int r = 0; r < 8; ++r) v[r] = vload(src + r * pitch + i);
        transpose(v);
        for (int j = 0; j < 8; ++j) vstore_as(to + (i + j) * dst.t, v[j]);
      }
      for (; i < n; ++i) {
        for (int64_t r = 0; r < rows; ++r) to[i * dst.t + r] = to_storage<T>(src[r * pitch + i]);
      }
      return;
    }
  } else if constexpr (std::is_same_v<T, float>) {
    if (dst.across() && rows == kRows) {
      float* narrow = row_scratch<float>(rows * pitch);
      std::copy(src, src + rows * pitch, narrow);
      store_rows<T, float>(dst, narrow, pitch, channel, rows, n);
      return;
    }
  }
  for (int64_t r = 0; r < rows; ++r) store_row<T, A>(dst.row(channel + r), src + r * pitch, dst.t, n);
}

constexpr int kRegs = 8;  // vectors of outputs, or taps, held at a time: the latency of FMA times its rate
template <typename A>
constexpr int64_t kPad = kRegs * VecOf<A>::kSize;  // rows are padded by this, so that blocks may overhang
template <typename A>
int64_t round_up(int64_t n) { return (n + kPad<A> - 1) / kPad<A> * kPad<A>; }

// acc += taps m + W*j for m in [first, last), j in [0, J). Taps a vector apart see the same samples from neighbouring outputs: they
// share loads.
template <int J, typename A>
inline void add_taps(V<A> (&acc)[kRegs], const A* x, const A* w, int first = 0, int last = VecOf<A>::kSize) {
  constexpr int W = VecOf<A>::kSize;
#pragma GCC unroll 1
  for (int m = first; m < last; ++m) {
    V<A> wk[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) wk[j] = V<A>{} + w[m + W * j];
#pragma GCC unroll 16
    for (int i = 0; i < kRegs + J - 1; ++i) {
      V<A> samples = vload(x + m + W * i);
      asm("" : "+x"(samples));  // else each use would load it again
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) {
        if (i - j >= 0 && i - j < kRegs) acc[i - j] += wk[j] * samples;
      }
    }
  }
}

// y[t] = start + sum_k w[k] * x[t + k] for t in [0, n rounded up to kPad). In fp32 no chain of additions is longer than 32: what
// chains add up to rounds less than one long chain, which is what eager mode's kernels are. Taps that meet only zeros are skipped:
// x is zero before `zeros` and from `end` on.
template <typename A>
void convolve(A* y, const A* x, const A* w, int64_t n, int64_t taps, A start, int64_t zeros, int64_t end) {
  constexpr int W = VecOf<A>::kSize;
  for (int64_t t = 0; t < n; t += kPad<A>) {
    V<A> acc[kRegs];
    for (int r = 0; r < kRegs; ++r) acc[r] = V<A>{} + start;
    int64_t k = std::max<int64_t>(0, zeros - (t + kPad<A> - 1));
    const int64_t k1 = std::min(taps, end - t);
    bool begun = false;  // y holds the sum of earlier chains
    auto end_of_chain = [&] {
      for (int r = 0; r < kRegs; ++r) {
        vstore(y + t + r * W, begun ? acc[r] + vload(y + t + r * W) : acc[r]);
        acc[r] = V<A>{};
      }
      begun = true;
    };
    for (; k1 - k >= 8 * W; k += 4 * W) {
      add_taps<4, A>(acc, x + t + k, w + k);
      end_of_chain();
    }
    for (; k1 - k >= 2 * W; k += 2 * W) {
      add_taps<2, A>(acc, x + t + k, w + k);
      end_of_chain();
    }
    const int rest = static_cast<int>(std::max<int64_t>(0, k1 - k)), paired = std::max(0, rest - W);
    add_taps<2, A>(acc, x + t + k, w + k, 0, paired);
    add_taps<1, A>(acc, x + t + k, w + k, paired, std::min(rest, W));
    end_of_chain();
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

}  // namespace fusebackend::conv1d
