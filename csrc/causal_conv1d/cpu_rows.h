// Rows on the CPU: samples from a tensor into scratch, in the type of sums and with zeros around them, and back; a channel's taps and bias.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "causal_conv1d/params.h"
#include "common/cpu_vectors.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

// dst[i] <- src[i * stride] for i in [0, len), zeros elsewhere in [first, last); dst begins with i = first.
template <typename T, typename A>
void load_row(A* dst, const T* src, int64_t stride, int64_t first, int64_t last, int64_t len) {
  const int64_t begin = std::clamp<int64_t>(0, first, last), end = std::clamp<int64_t>(len, begin, last);
  std::fill(dst, dst + (begin - first), A(0));
  int64_t i = begin;
  if constexpr (std::is_same_v<A, Acc<T>>) {
    if (stride == 1) {
      for (; i + VecOf<A>::kSize <= end; i += VecOf<A>::kSize) vstore(dst + (i - first), vload_as<A>(src + i));
    }
  }
  for (; i < end; ++i) dst[i - first] = widen(src[i * stride]);
  std::fill(dst + (end - first), dst + (last - first), A(0));
}

template <typename T, typename A>
void store_row(T* dst, const A* src, int64_t stride, int64_t n) {
  int64_t i = 0;
  if constexpr (std::is_same_v<A, Acc<T>>) {
    if (stride == 1) {
      for (; i + VecOf<A>::kSize <= n; i += VecOf<A>::kSize) vstore_as<A>(dst + i, vload(src + i));
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
// Transposes as many rows as a vector has lanes, in place.
template <int D = 1>
inline void transpose(V<float> (&v)[VecOf<float>::kSize]) {
  exchange_blocks<D>(v, std::make_index_sequence<VecOf<float>::kSize>());
  if constexpr (2 * D < VecOf<float>::kSize) transpose<2 * D>(v);
}

// The elements (channel, time) of one batch entry.
template <typename T>
struct View {
  T* data;
  int64_t c, t;  // strides

  T* row(int64_t channel) const { return data + channel * c; }
  bool channels_contiguous() const { return c == 1 && t != 1; }
};

template <typename T>
View<T> view(void* data, const Strides& s, int64_t b) { return {static_cast<T*>(data) + b * s.b, s.c, s.t}; }
template <typename T>
View<const T> view(const void* data, const Strides& s, int64_t b) { return {static_cast<const T*>(data) + b * s.b, s.c, s.t}; }

// Scratch of the calling thread for conversions between float and double, for which there are no transposes of vectors.
inline float* float_scratch(int64_t n) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < n) memory.resize(n);
  return memory.data();
}

// Rows channel to channel + rows, each as by load_row, `pitch` apart. Where channels are contiguous, all rows of a sample are read at once,
// and as many as fill vectors are transposed.
template <typename T, typename A>
void load_rows(A* dst, int64_t pitch, const View<const T>& src, int64_t channel, int64_t rows, int64_t first, int64_t last, int64_t len) {
  const T* from = src.row(channel);
  if (!src.channels_contiguous() || rows == 1) {
    for (int64_t r = 0; r < rows; ++r) load_row<T, A>(dst + r * pitch, from + r * src.c, src.t, first, last, len);
  } else if constexpr (std::is_same_v<A, double> && std::is_same_v<T, float>) {
    float* narrow = float_scratch(rows * pitch);
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
          for (int j = 0; j < W; ++j) v[j] = vload_as<A>(from + (i + j) * src.t + r);
          transpose(v);
#pragma GCC unroll 16
          for (int j = 0; j < W; ++j) vstore(dst + (r + j) * pitch + (i - first), v[j]);
        }
      }
    }
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t r = t < i ? whole : 0; r < rows; ++r) dst[r * pitch + (t - first)] = widen(from[t * src.t + r]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      A* to = dst + r * pitch;
      std::fill(to, to + (begin - first), A(0));
      std::fill(to + (end - first), to + (last - first), A(0));
    }
  }
}

template <typename T, typename A>
void store_rows(const View<T>& dst, const A* src, int64_t pitch, int64_t channel, int64_t rows, int64_t n) {
  T* to = dst.row(channel);
  if (!dst.channels_contiguous() || rows == 1) {
    for (int64_t r = 0; r < rows; ++r) store_row<T, A>(to + r * dst.c, src + r * pitch, dst.t, n);
  } else if constexpr (std::is_same_v<A, double> && std::is_same_v<T, float>) {
    float* narrow = float_scratch(rows * pitch);
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
          for (int j = 0; j < W; ++j) vstore_as<A>(to + (i + j) * dst.t + r, v[j]);
        }
      }
    }
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t r = t < i ? whole : 0; r < rows; ++r) to[t * dst.t + r] = to_storage<T>(src[r * pitch + t]);
    }
  }
}

template <typename T, typename A, typename Params>
A channel_bias(const Params& p, int64_t c) {
  return static_cast<A>(p.shift) + (p.bias ? widen(static_cast<const T*>(p.bias)[c * p.bias_stride]) : A(0));
}
template <typename T, typename A, typename Params>
void load_taps(A* dst, const Params& p, int64_t c) {
  load_row<T, A>(dst, static_cast<const T*>(p.w) + c * p.w_stride.c, p.w_stride.k, 0, p.taps, p.taps);
}

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

// Elements from row to row in scratch: no power of two, with which rows would compete for the same sets of the cache.
inline int64_t row_pitch(int64_t n) { return round_up(n, 16) + 16; }

template <typename A>
int64_t whole_vectors(int64_t n) { return round_up(n, VecOf<A>::kSize); }

}  // namespace
}  // namespace fusebackend::causal_conv1d
