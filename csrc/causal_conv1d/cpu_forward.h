// The forward CPU kernels. Samples come to scratch in the type that sums are made in, with zeros around them, so that one inner loop serves
// every layout, dtype and padding; a block of outputs stays in vector registers while the taps go by. Where nothing needs to be
// converted, transposed or padded, tensors are used as they lie.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "causal_conv1d/cpu_lanes.h"
#include "causal_conv1d/cpu_launch.h"
#include "common/cpu_channel_epilogue.h"
#include "common/cpu_silu.h"

namespace fusebackend::causal_conv1d {
namespace {

// What follows the sums, in the type of these, n of each channel rounded up to whole vectors.
template <typename T, typename A>
class Follow {
 public:
  explicit Follow(const ConvParams& p) : p_(p), maps_(AffineMaps<A>::of(p.after, p.channels, static_cast<const T*>(nullptr))) {}

  // Of one channel.
  void row(A* y, int64_t n, int64_t c) const {
    if (p_.epilogue == Epilogue::kSilu) apply_silu<T>(y, n);
    if (p_.epilogue != Epilogue::kChannel) return;
    if constexpr (std::is_same_v<A, float>) each(y, n, Finish::of_channel(p_.after, maps_, c));
    else for (int64_t t = 0; t < n; ++t) y[t] = number(y[t], c);
  }
  // Of as many channels, from c on, as a vector has lanes, `lanes` of which there are; all of these at each of n samples.
  void block(A* y, int64_t n, int64_t c, int64_t lanes) const {
    constexpr int64_t W = VecOf<A>::kSize;
    if (p_.epilogue == Epilogue::kSilu) apply_silu<T>(y, n * W);
    if (p_.epilogue != Epilogue::kChannel) return;
    if constexpr (std::is_same_v<A, float>) each(y, n * W, Finish::of_channels(p_.after, maps_, c));
    else
      for (int64_t t = 0; t < n; ++t)
        for (int64_t i = 0; i < lanes; ++i) y[t * W + i] = number(y[t * W + i], c + i);
  }

 private:
  static void each(float* y, int64_t n, const Finish& finish) {
    for (int64_t t = 0; t < n; t += VecOf<float>::kSize) vstore(y + t, finish(vload(y + t), static_cast<const T*>(nullptr)));
  }
  A number(A v, int64_t c) const { return activated_number(p_.after.is_affine ? maps_.map(v, c) : v, p_.after.activation); }

  const ConvParams& p_;
  const AffineMaps<A> maps_;
};

// Samples are the lanes of vectors.
template <typename T, typename A>
void forward_rows(const ConvParams& p, const ForwardUnits& units, int64_t begin, int64_t end) {
  const int64_t most = whole_vectors<A>(std::min(p.out_len, units.samples)), x_pitch = row_pitch(most + p.taps), y_pitch = row_pitch(most);
  Scratch<A> x(units.channels * x_pitch, std::max<int64_t>(0, p.left)), y(units.channels * y_pitch);
  std::vector<A> w(units.channels * p.taps);
  const Follow<T, A> follow(p);
  for (int64_t u = begin; u < end; ++u) {
    const int64_t b = u / units.tiles / units.groups, first = u / units.tiles % units.groups * units.channels;
    const int64_t rows = std::min(units.channels, p.channels - first);
    if (u == begin || u % units.tiles == 0) {
      for (int64_t r = 0; r < rows; ++r) load_taps<T>(w.data() + r * p.taps, p, first + r);
    }
    const View<const T> from = view<T>(p.x, p.x_stride, b);
    const View<T> to = view<T>(p.out, p.out_stride, b);
    auto by_scratch = [&](int64_t t, int64_t len) {
      const int64_t n = whole_vectors<A>(len), left = p.left - t;
      load_rows<T, A>(x.data(), x_pitch, from, first, rows, -left, n + p.taps - left, p.in_len);
      for (int64_t r = 0; r < rows; ++r) {
        A* out = y.data() + r * y_pitch;
        const A* taps = w.data() + r * p.taps;
        const bool skips_zeros = all_finite(taps, p.taps);
        convolve(out, x.data() + r * x_pitch, taps, n, p.taps, channel_bias<T, A>(p, first + r), skips_zeros ? left : 0,
                 skips_zeros ? left + p.in_len : n + p.taps);
        follow.row(out, n, first + r);
      }
      store_rows<T, A>({to.data + t * to.t, to.c, to.t}, y.data(), y_pitch, first, rows, len);
    };
    int64_t t = u % units.tiles * units.samples;
    const int64_t stop = std::min(p.out_len, t + units.samples);
    if constexpr (std::is_same_v<T, A>) {
      // Without scratch: whole vectors of contiguous samples that meet no padding.
      constexpr int64_t W = VecOf<A>::kSize, kBlock = kConvolveAccumulators * W;
      const int64_t begin = t + std::max<int64_t>(0, round_up(p.left - t, kBlock));
      const int64_t n = std::max<int64_t>(0, std::min(stop, p.in_len + p.left - p.taps + 1) - begin) / W * W;
      if (n > 0 && units.channels == 1 && from.t == 1 && to.t == 1) {
        if (begin > t) by_scratch(t, begin - t);
        for (int64_t i = begin; i < begin + n; i += kBlock) {  // block by block, so that what follows finds sums in the first-level cache
          const int64_t len = std::min(kBlock, begin + n - i);
          A* out = to.row(first) + i;
          convolve(out, from.row(first) + i - p.left, w.data(), len, p.taps, channel_bias<T, A>(p, first), 0, p.in_len + p.left - i);
          follow.row(out, len, first);
        }
        t = begin + n;
      }
    }
    if (t < stop) by_scratch(t, stop - t);
  }
}

// Channels are the lanes of vectors.
template <typename T, typename A>
void forward_lanes(const ConvParams& p, const ForwardUnits& units, int64_t begin, int64_t end) {
  constexpr int W = VecOf<A>::kSize;
  const bool x_btc = is_btc(p.x_stride, p.channels), out_btc = is_btc(p.out_stride, p.channels);
  // Samples that many taps use are converted once; for few taps they are used as they lie, where they meet no padding.
  const bool in_place = x_btc && p.taps <= (std::is_same_v<T, A> ? 64 : 8);
  const int64_t step = in_place && out_btc ? kConvolveAccumulators : std::min(units.samples, p.out_len), pitch = row_pitch(step + p.taps);
  Scratch<A> x((step + p.taps) * W), y(step * W), rows(W * pitch), w(units.channels * p.taps), start(units.channels);
  const Follow<T, A> follow(p);
  bool skips_zeros = true;
  for (int64_t u = begin; u < end; ++u) {
    const int64_t b = u / units.tiles % p.batch, group = u / units.tiles / p.batch * units.channels;
    const int64_t channels = std::min(units.channels, p.channels - group);
    if (u == begin || u % (units.tiles * p.batch) == 0) {
      for (int64_t c = 0; c < channels; c += W) {
        const int64_t lanes = std::min<int64_t>(W, channels - c);
        for (int64_t i = 0; i < lanes; ++i) {
          load_taps<T>(rows.data() + i * pitch, p, group + c + i);
          start.data()[c + i] = channel_bias<T, A>(p, group + c + i);
        }
        rows_to_block(w.data() + c * p.taps, rows.data(), pitch, lanes, p.taps);
      }
      skips_zeros = all_finite(w.data(), channels * p.taps);
    }
    const View<const T> from = view<T>(p.x, p.x_stride, b);
    const int64_t stop = std::min(p.out_len, (u % units.tiles + 1) * units.samples);
    for (int64_t t = u % units.tiles * units.samples; t < stop; t += step) {
      const int64_t n = std::min(step, stop - t), first = t - p.left, last = first + n + p.taps - 1;
      View<T> to = view<T>(p.out, p.out_stride, b);
      to.data += t * to.t;
      for (int64_t c = 0; c < channels; c += W) {
        const int64_t lanes = std::min<int64_t>(W, channels - c);
        const A* taps = w.data() + c * p.taps;
        const V<A> bias = vload(start.data() + c);
        if (in_place && lanes == W && first >= 0 && last <= p.in_len) {
          convolve_lanes<T, A>(y.data(), from.row(group + c) + first * from.t, from.t, taps, n, p.taps, bias, -first, p.in_len - first);
        } else {
          load_lanes<T, A>(x.data(), from, group + c, lanes, first, last, p.in_len, rows.data(), pitch);
          convolve_lanes<A, A>(y.data(), x.data(), W, taps, n, p.taps, bias, skips_zeros ? -first : 0, skips_zeros ? p.in_len - first : n + p.taps);
        }
        follow.block(y.data(), n, group + c, lanes);
        store_lanes<T, A>(to, group + c, y.data(), lanes, n, rows.data(), pitch);
      }
    }
  }
}

}  // namespace
}  // namespace fusebackend::causal_conv1d
