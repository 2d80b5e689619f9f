// Depthwise 2-D convolution, forward and backward: what every kernel of this folder computes, and from which parameters.
//
//   y[n,o,i,j]   = bias[o] + sum_{a,b} w[o,a,b] * x[n, o / multiplier, i*stride.h - pad.h + a*dilation.h, j*stride.w - pad.w + b*dilation.w]
//   dx[n,c,...]  = the sum of w[o,a,b] * g[n,o,i,j] over the outputs that this element of x has a part in
//   dw[o,a,b]    = the sum of g[n,o,i,j] * x[...] over n, i, j;  db[o] = the sum of g[n,o,i,j]
//
// and y goes through an epilogue (common/channel_epilogue.h). Taps that fall outside x are left out, as PyTorch's kernels do: no padding is multiplied.
#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/channel_epilogue.h"

namespace fusebackend::depthwise_conv {

// Of (batch, channel, row, column), in elements.
struct Strides {
  int64_t n, c, h, w;
};

struct Pair {
  int64_t h, w;
};

struct Geometry {
  int64_t batch, channels, multiplier;  // channels of x; y has channels * multiplier
  Pair in, out, taps, stride, pad, dilation;

  constexpr int64_t outputs() const { return channels * multiplier; }
  constexpr int64_t tap_count() const { return taps.h * taps.w; }
};

struct ForwardParams {
  Geometry g;
  const void *x, *w, *bias;  // w: (outputs, taps.h, taps.w), w_stride apart; bias may be null
  void* y;
  Strides x_stride, y_stride;
  Strides w_stride;  // n: of the output; c is not read
  int64_t bias_stride;
  DType dtype;
  ChannelEpilogue epilogue;
};

// dx from g.
struct InputGradParams {
  Geometry g;
  const void *grad, *w;
  void* dx;
  Strides grad_stride, dx_stride, w_stride;
  DType dtype;
};

// x's gradient as the forward of the incoming gradient, with reversed taps: where the stride is 1, and there is one output a channel.
constexpr Geometry reversed(const Geometry& g) {
  Geometry r = g;
  r.in = g.out, r.out = g.in;
  r.pad = {(g.taps.h - 1) * g.dilation.h - g.pad.h, (g.taps.w - 1) * g.dilation.w - g.pad.w};
  return r;
}

inline ForwardParams reversed(const InputGradParams& p) {
  ForwardParams f = {};
  f.g = reversed(p.g);
  f.x = p.grad, f.y = p.dx;
  f.x_stride = p.grad_stride, f.y_stride = p.dx_stride, f.w_stride = p.w_stride;
  f.dtype = p.dtype;
  f.w = static_cast<const char*>(p.w) + ((p.g.taps.h - 1) * p.w_stride.h + (p.g.taps.w - 1) * p.w_stride.w) * element_size(p.dtype);
  f.w_stride.h = -p.w_stride.h, f.w_stride.w = -p.w_stride.w;
  return f;
}

// dw (contiguous; null if only db is wanted) and db (or null).
struct WeightGradParams {
  Geometry g;
  const void *grad, *x;
  void *dw, *db;
  float* partial;  // CUDA only: `splits` partial sums of (outputs, taps + 1) numbers, db last
  int splits;
  Strides grad_stride, x_stride;
  DType dtype;
};

}  // namespace fusebackend::depthwise_conv
