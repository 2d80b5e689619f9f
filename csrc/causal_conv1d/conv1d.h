// Depthwise 1-D convolution along time: what every kernel of this folder computes.
//
//   pre[b,c,t] = shift + bias[c] + sum_k w[c,k] * x[b,c,t-left+k]      0 <= t < out_len, 0 <= k < taps
//   out        = pre, silu(pre), or dy * silu'(pre)                     (Epilogue)
//
// x is zero outside [0, in_len). Causal convolution is left = taps-1, out_len = in_len. The gradient for x is the same
// operation on the gradient of pre, with the taps reversed and left' = taps-1-left; reversing is a negative stride.
#pragma once
#include <cstdint>

namespace fusebackend::conv1d {

enum class Dtype : int { kFloat = 0, kHalf = 1, kBFloat16 = 2, kDouble = 3 };
enum class Epilogue : int { kNone = 0, kSilu = 1, kSiluGrad = 2 };

// Element strides of a (batch, channel, time) tensor.
struct Strides {
  int64_t b, c, t;
};

struct ConvParams {
  const void* x;
  const void* w;     // (channels, taps)
  const void* bias;  // (channels,) or null
  const void* dy;    // read by Epilogue::kSiluGrad only
  void* out;
  int64_t batch, channels, in_len, out_len, taps, left;
  Strides xs, dys, outs;
  int64_t w_c, w_k, bias_c;
  double shift;
  Epilogue epilogue;
  Dtype dtype;  // of w, bias and dy
  // CUDA only. Another type than dtype: a gradient of pre, kept in more digits between two kernels.
  Dtype x_dtype, out_dtype;
  bool exact;  // CUDA only, fp32: sums and SiLU are in double, so that results are correctly rounded
};

// dw[c,k] = sum_{b,t} g[b,c,t] * x[b,c,t-left+k]  and  db[c] = sum_{b,t} g[b,c,t].
// `partial` is scratch for `splits` partial sums of (channels, taps+1) numbers, added in a fixed order.
struct WeightGradParams {
  const void* x;
  const void* g;
  void* dw;  // (channels, taps) contiguous, or null
  void* db;  // (channels,) or null
  double* partial;
  int64_t batch, channels, in_len, out_len, taps, left;
  Strides xs, gs;
  int splits;
  Dtype dtype;
  Dtype g_dtype;  // see ConvParams::x_dtype
};

// g = dy, or dy * silu'(pre) with pre recomputed; dx, dw, db from g. Any of the three may be null.
struct BackwardParams {
  const void* x;
  const void* w;
  const void* bias;
  const void* dy;
  void* dx;
  void* dw;        // (channels, taps) contiguous
  void* db;        // (channels,)
  double* partial;  // CUDA only: splits * channels * (taps+1)
  int64_t batch, channels, in_len, out_len, taps, left;
  Strides xs, dys, dxs;
  int64_t w_c, w_k, bias_c;
  double shift;
  bool silu;
  int splits;
  Dtype dtype;
};

}  // namespace fusebackend::conv1d
