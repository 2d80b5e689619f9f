// Depthwise 1-D convolution along time, forward and backward: what every kernel of this folder computes, and from which parameters.
//
//   pre[b,c,t] = shift + bias[c] + sum_k w[c,k] * x[b,c,t-left+k]      0 <= t < out_len, 0 <= k < taps
//   out        = pre, silu(pre), dy * silu'(pre), or what common/channel_epilogue.h describes     (Epilogue)
//
// x is zero outside [0, in_len). A causal convolution has left = taps-1 and out_len = in_len. The gradient for x is the same operation on
// the gradient of pre, with the taps reversed (a negative stride) and left' = taps-1-left.
#pragma once
#include <cstdint>

#include "causal_conv1d/memory_order.h"
#include "common/channel_epilogue.h"
#include "common/dtype.h"

namespace fusebackend::causal_conv1d {

enum class Epilogue : int { kNone = 0, kSilu = 1, kSiluGrad = 2, kChannel = 3 };

// Element strides of the weight, (channel, tap).
struct WeightStrides {
  int64_t c, k;
};

struct ConvParams {
  const void* x;
  const void* w;     // (channels, taps)
  const void* bias;  // (channels,) or null
  const void* dy;    // read by Epilogue::kSiluGrad only
  void* out;
  int64_t batch, channels, in_len, out_len, taps, left;
  Strides x_stride, dy_stride, out_stride;
  WeightStrides w_stride;
  int64_t bias_stride;
  double shift;
  Epilogue epilogue;
  ChannelEpilogue after;  // applied by Epilogue::kChannel only
  DType dtype;            // of w, bias and dy
  // CUDA only. Differ from dtype where a gradient of pre passes from one kernel to the next in a wider type.
  DType x_dtype, out_dtype;
  bool exact;  // CUDA, fp32 only: sums and SiLU are in double, so that results are correctly rounded
  // CUDA only: x is a gradient, and products with the zeros around it are left out. That changes a result only where a tap is inf or NaN, since
  // its product with zero is NaN.
  bool skips_padding;
};

// dw[c,k] = sum_{b,t} g[b,c,t] * x[b,c,t-left+k]  and  db[c] = sum_{b,t} g[b,c,t].
struct WeightGradParams {
  const void* x;
  const void* g;
  void* dw;         // (channels, taps) contiguous, or null
  void* db;         // (channels,) or null
  double* partial;  // scratch: `splits` partial sums of (channels, taps+1) numbers, db last, added up in a fixed order
  int64_t batch, channels, in_len, out_len, taps, left;
  Strides x_stride, g_stride;
  int splits;
  DType dtype;
  DType g_dtype;  // see ConvParams::x_dtype
  // CUDA only: partial sums lack products with the zeros around x. They are NaN where the gradient is inf or NaN, and zero otherwise.
  bool skips_padding;
};

// g = dy, or dy * silu'(pre) with pre recomputed; dx, dw, db from g. Any of the three may be null.
struct BackwardParams {
  const void* x;
  const void* w;
  const void* bias;
  const void* dy;
  void* dx;
  void* dw;         // (channels, taps) contiguous
  void* db;         // (channels,)
  double* partial;  // CUDA only: see WeightGradParams
  int64_t batch, channels, in_len, out_len, taps, left;
  Strides x_stride, dy_stride, dx_stride;
  WeightStrides w_stride;
  int64_t bias_stride;
  double shift;
  bool silu;
  int splits;
  DType dtype;
};

}  // namespace fusebackend::causal_conv1d
