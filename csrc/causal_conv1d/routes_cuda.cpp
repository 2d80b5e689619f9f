// Decides which CUDA kernel runs: see routes.h.
#include "causal_conv1d/routes.h"

#include <algorithm>

#include "causal_conv1d/launchers.h"
#include "causal_conv1d/route_limits.h"

namespace fusebackend::causal_conv1d {
namespace {

bool toeplitz_pays(const ConvParams& p) { return has_toeplitz_size(p) && toeplitz_supported(p); }
bool register_toeplitz_pays(const ConvParams& p) { return has_toeplitz_size(p) && p.batch >= kRegisterToeplitzBatch && register_toeplitz_supported(p); }
bool toeplitz_pays(const WeightGradParams& p) {
  const int64_t least = is_fp32(p.dtype) ? kToeplitzTapsFp32 : kToeplitzTaps;
  const bool accurate = !is_fp32(p.dtype) || eager_chain(p) >= kToeplitzChainFp32;
  return p.batch > 0 && p.taps >= least && accurate && p.channels > 1 && toeplitz_weight_grad_supported(p);
}

bool fft_pays(const ConvParams& p) {
  return p.epilogue != Epilogue::kChannel && has_fft_size(p) && fft_picoseconds(p) < products_picoseconds(p, toeplitz_pays(p)) && fft_forward_scratch(p) > 0;
}
bool fft_pays(const WeightGradParams& p) {
  if (!toeplitz_pays(p) || !fft_weight_grad_supported(p)) return false;
  const double shorter = static_cast<double>(std::min(p.in_len, p.taps)), rest = static_cast<double>(p.out_len) - shorter / 2;
  const double products = shorter * std::max(rest, shorter / 2) * static_cast<double>(p.batch);
  const double toeplitz = products * (is_fp32(p.dtype) ? kToeplitzGradPicosecondsFp32 : kToeplitzGradPicoseconds) + kToeplitzChannelPicoseconds;
  return static_cast<double>(fft_weight_grad_points(p)) * kFftGradPicoseconds < toeplitz;
}

// No other fast kernel takes (batch, time, channel).
bool registers_pay(const ConvParams& p) {
  if (!register_window_supported(p)) return false;
  if (is_btc(p.x_stride, p.channels)) return true;
  if (register_window_taps(p) <= (is_fp32(p.dtype) ? kRegisterTapsFp32 : kRegisterTaps)) return true;
  return !is_fp32(p.dtype) && !register_toeplitz_pays(p) && !toeplitz_pays(p);
}
bool registers_pay(const WeightGradParams& p) {
  if (p.batch * p.out_len == 0 || p.in_len == 0 || !register_window_weight_grad_supported(p)) return false;
  if (is_fp32(p.dtype) && (p.channels < kManyResults || p.batch * p.out_len < kRegisterGradSamplesFp32)) return false;
  return is_btc(p.x_stride, p.channels) || p.taps <= kRegisterTaps || !toeplitz_pays(p);
}

}  // namespace

ForwardRoute forward_route(const ConvParams& p) {
  const bool widened = p.x_dtype != p.dtype || p.out_dtype != p.dtype;
  if (widened || sums_exactly(p)) return ForwardRoute::kSharedTile;
  if (short_forward_supported(p)) return ForwardRoute::kShort;
  if (registers_pay(p)) return ForwardRoute::kRegisterWindow;
  if (register_toeplitz_pays(p)) return ForwardRoute::kRegisterToeplitz;
  if (is_fp32(p.dtype) && p.out_len < kManyResults) return ForwardRoute::kSharedTile;
  if (fft_pays(p)) return ForwardRoute::kFft;
  return toeplitz_pays(p) ? ForwardRoute::kToeplitz : ForwardRoute::kSharedTile;
}

WeightGradRoute weight_grad_route(const WeightGradParams& p) {
  if (registers_pay(p)) return WeightGradRoute::kRegisterWindow;
  if (fft_pays(p)) return WeightGradRoute::kFft;
  return p.g_dtype == p.dtype && toeplitz_pays(p) ? WeightGradRoute::kToeplitz : WeightGradRoute::kSharedTile;
}

// SiLU's gradient is not a sum, and its errors go into all gradients: they would show where there are few of these.
bool widens_silu_grad(const BackwardParams& p) { return p.silu && has_few_results(p); }

bool one_pass_backward(const BackwardParams& p) {
  const bool empty = p.batch == 0 || p.in_len == 0 || p.out_len == 0;
  // In one pass SiLU's gradient is kept in fp32, which is wider than 16-bit types only.
  return !empty && !(is_fp32(p.dtype) && (widens_silu_grad(p) || p.channels == 1)) && short_backward_supported(p);
}

}  // namespace fusebackend::causal_conv1d
