// Decides which CUDA kernel runs: see routes.h. Times and thresholds were measured on an H200.
#include "causal_conv1d/routes.h"

#include <algorithm>

#include "causal_conv1d/launchers.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

bool is_fp32(DType dtype) { return dtype == DType::kFloat32; }

// Tensor cores: taps from which they are faster than fused multiply-adds. With one batch entry most of their rows would be empty. fp32 sums
// must also be so long that eager mode's rounding errors exceed a tensor core's truncation: forwards those of so many taps, for weight
// gradients those of eager mode's chains (eager_chain).
constexpr int64_t kToeplitzTaps = 10, kToeplitzTapsFp32 = 128, kToeplitzBatch = 2, kToeplitzChainFp32 = 640;

// Registers: taps up to which they are faster on (batch, channel, time) than tensor cores, or windows in shared memory. fp32 weight gradients
// are sums of sums there, whose errors are below eager mode's from so many samples on.
constexpr int64_t kRegisterTaps = 16, kRegisterTapsFp32 = 24, kRegisterGradSamplesFp32 = 2048;

// FFT: taps from which its fp32 errors are below those of a sum of products.
constexpr int64_t kFftTaps = 256, kFftTapsFp32 = 2048;

// Picoseconds a channel: of an FFT of a pair of rows, by points; of the other kernels by products, tensor cores with whole groups of eight
// batch entries.
constexpr double kFftPicoseconds = 17, kToeplitzPicosecondsFp32 = 0.019, kToeplitzPicoseconds = 0.0072, kSharedTilePicoseconds = 0.1;
// The same for weight gradients: an FFT in double, by points; tensor cores by products, and for the channel itself.
constexpr double kFftGradPicoseconds = 12.5, kToeplitzGradPicosecondsFp32 = 0.029, kToeplitzGradPicoseconds = 0.0145;
constexpr double kToeplitzChannelPicoseconds = 75e3;

// Below so many results of a kind, errors must match eager mode's one by one, which takes bit-identical or correctly rounded results.
constexpr int64_t kManyResults = 64, kManyResults16 = 256, kManyGradients = 1 << 16;

bool toeplitz_pays(const ConvParams& p) {
  const int64_t least = is_fp32(p.dtype) ? kToeplitzTapsFp32 : kToeplitzTaps;
  return std::min(p.taps, p.in_len) >= least && p.batch >= kToeplitzBatch && toeplitz_supported(p);
}
bool toeplitz_pays(const WeightGradParams& p) {
  const int64_t least = is_fp32(p.dtype) ? kToeplitzTapsFp32 : kToeplitzTaps;
  const bool accurate = !is_fp32(p.dtype) || eager_chain(p) >= kToeplitzChainFp32;
  return p.batch > 0 && p.taps >= least && accurate && p.channels > 1 && toeplitz_weight_grad_supported(p);
}

bool fft_pays(const ConvParams& p) {
  if (std::min(p.taps, p.in_len) < (is_fp32(p.dtype) ? kFftTapsFp32 : kFftTaps)) return false;
  int64_t points = 8192;
  while (points < p.in_len + p.taps - 1) points *= 2;
  const double fft = (static_cast<double>(ceil_div(p.batch, 2)) + 0.5) * static_cast<double>(points) * kFftPicoseconds;
  const double products = static_cast<double>(std::min(p.in_len, p.taps)) * static_cast<double>(p.out_len) * (p.taps >= p.in_len ? 0.5 : 1.0);
  const double toeplitz = is_fp32(p.dtype) ? kToeplitzPicosecondsFp32 : kToeplitzPicoseconds;
  const double other = toeplitz_pays(p) ? static_cast<double>(round_up(p.batch, 8)) * toeplitz : static_cast<double>(p.batch) * kSharedTilePicoseconds;
  return fft < products * other && fft_forward_scratch(p) > 0;
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
  return register_window_taps(p) <= (is_fp32(p.dtype) ? kRegisterTapsFp32 : kRegisterTaps) || (!is_fp32(p.dtype) && !toeplitz_pays(p));
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
bool widens_silu_grad(const BackwardParams& p) {
  return p.silu && (p.channels < (is_fp32(p.dtype) ? kManyResults : kManyResults16) || p.batch * p.channels * p.out_len <= kManyGradients);
}

bool one_pass_backward(const BackwardParams& p) {
  const bool empty = p.batch == 0 || p.in_len == 0 || p.out_len == 0;
  // In one pass SiLU's gradient is kept in fp32, which is wider than 16-bit types only.
  return !empty && !(is_fp32(p.dtype) && (widens_silu_grad(p) || p.channels == 1)) && short_backward_supported(p);
}

}  // namespace fusebackend::causal_conv1d
