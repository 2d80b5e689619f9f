// Channels as the lanes of vectors: a block is as many channels as a vector has lanes. Where channels are contiguous, only the taps are
// transposed. Where time is, samples are too, which pays for many taps, since no load of theirs crosses a cache line.
#pragma once
#include <algorithm>
#include <type_traits>

#include "causal_conv1d/cpu_inner_loops.h"
#include "causal_conv1d/cpu_rows.h"

namespace fusebackend::causal_conv1d {
namespace {

// Transposes `lanes` rows, `pitch` apart, of n numbers into a block, and back.
template <typename A>
void rows_to_block(A* block, const A* rows, int64_t pitch, int64_t lanes, int64_t n) {
  store_rows<A, A>(View<A>{block, 1, VecOf<A>::kSize}, rows, pitch, 0, lanes, n);
}
template <typename A>
void block_to_rows(A* rows, int64_t pitch, const A* block, int64_t lanes, int64_t n) {
  load_rows<A, A>(rows, pitch, View<const A>{block, 1, VecOf<A>::kSize}, 0, lanes, 0, n, n);
}

// Samples [first, last) of a block that begins with `channel`, zeros outside [0, len). `rows` is scratch.
template <typename T, typename A>
void load_lanes(A* block, const View<const T>& src, int64_t channel, int64_t lanes, int64_t first, int64_t last, int64_t len, A* rows,
                int64_t pitch) {
  constexpr int W = VecOf<A>::kSize;
  const int64_t begin = std::clamp<int64_t>(0, first, last), end = std::clamp<int64_t>(len, begin, last);
  std::fill(block, block + (begin - first) * W, A(0));
  std::fill(block + (end - first) * W, block + (last - first) * W, A(0));
  block += (begin - first) * W;
  if (!src.channels_contiguous()) {
    if constexpr (std::is_same_v<T, A>) {
      if (src.t == 1) return rows_to_block(block, src.row(channel) + begin, src.c, lanes, end - begin);
    }
    load_rows<T, A>(rows, pitch, src, channel, lanes, begin, end, len);
    return rows_to_block(block, rows, pitch, lanes, end - begin);
  }
  const T* from = src.row(channel) + begin * src.t;
  for (int64_t t = begin; t < end; ++t, block += W, from += src.t) {
    if (lanes == W) {
      vstore(block, vload_as<A>(from));
    } else {
      T some[W] = {};
      std::copy(from, from + lanes, some);
      vstore(block, vload_as<A>(some));
    }
  }
}

template <typename T, typename A>
void store_lanes(const View<T>& dst, int64_t channel, const A* block, int64_t lanes, int64_t n, A* rows, int64_t pitch) {
  constexpr int W = VecOf<A>::kSize;
  if (!dst.channels_contiguous()) {
    if constexpr (std::is_same_v<T, A>) {
      if (dst.t == 1) return block_to_rows(dst.row(channel), dst.c, block, lanes, n);
    }
    block_to_rows(rows, pitch, block, lanes, n);
    return store_rows<T, A>(dst, rows, pitch, channel, lanes, n);
  }
  T* to = dst.row(channel);
  for (int64_t t = 0; t < n; ++t, block += W, to += dst.t) {
    if (lanes == W) {
      vstore_as<A>(to, vload(block));
    } else {
      for (int64_t i = 0; i < lanes; ++i) to[i] = to_storage<T>(block[i]);
    }
  }
}

// acc[r] += sum_j w[j] * x[r + j], samples being `stride` numbers apart.
template <int J, int R, typename T, typename A>
inline void add_lane_taps(V<A> (&acc)[R], const T* x, int64_t stride, const A* w) {
  asm("" : "+r"(x));  // else the compiler would keep samples from call to call, for which there are too few registers
  V<A> wj[J];
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) wj[j] = vload(w + VecOf<A>::kSize * j);
#pragma GCC unroll 32
  for (int i = 0; i < R + J - 1; ++i, x += stride) {
    V<A> samples = vload_as<A>(x);
    asm("" : FUSE_IN_REGISTER(samples));  // else the compiler would load it again at each use
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) {
      if (i - j >= 0 && i - j < R) acc[i - j] += wj[j] * samples;
    }
  }
}

// As convolve_block, for R samples of a block.
template <int R, typename T, typename A>
inline void convolve_lane_block(A* y, const T* x, int64_t stride, const A* w, int64_t k, int64_t end, V<A> start) {
  constexpr int W = VecOf<A>::kSize;
  V<A> acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = start;
  bool begun = false;
  do {
    const int64_t stop = std::min(end, k + kChain);
#pragma GCC unroll 1
    for (; stop - k >= 4; k += 4) add_lane_taps<4>(acc, x + k * stride, stride, w + k * W);
#pragma GCC unroll 1
    for (; k < stop; ++k) add_lane_taps<1>(acc, x + k * stride, stride, w + k * W);
    end_chain(acc, y, begun);
  } while (k < end);
}

// As convolve, for n samples of a block, those of x being `stride` apart.
template <typename T, typename A, int R = kConvolveAccumulators>
void convolve_lanes(A* y, const T* x, int64_t stride, const A* w, int64_t n, int64_t taps, V<A> start, int64_t zeros, int64_t end) {
  int64_t t = 0;
  for (; n - t >= R; t += R) {
    const int64_t first = std::max<int64_t>(0, zeros - (t + R - 1)), last = std::min(taps, end - t);
    convolve_lane_block<R>(y + t * VecOf<A>::kSize, x + t * stride, stride, w, first, last, start);
  }
  if constexpr (R > 1) {
    if (t < n) convolve_lanes<T, A, R / 2>(y + t * VecOf<A>::kSize, x + t * stride, stride, w, n - t, taps, start, zeros - t, end - t);
  }
}

}  // namespace
}  // namespace fusebackend::causal_conv1d
