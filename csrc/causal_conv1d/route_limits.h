// From where on which kind of kernel is faster, or accurate enough: what routes_cuda.cpp decides by, and what work.cpp expects. Plain C++. Times
// and thresholds were measured on an H200.
#pragma once
#include <algorithm>

#include "causal_conv1d/params.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {

inline bool is_fp32(DType dtype) { return dtype == DType::kFloat32; }

// Tensor cores: taps from which they are faster than fused multiply-adds. With one batch entry most of their rows would be empty. fp32 sums
// must also be so long that eager mode's rounding errors exceed a tensor core's truncation: forwards those of so many taps, for weight
// gradients those of eager mode's chains (eager_chain).
constexpr int64_t kToeplitzTaps = 10, kToeplitzTapsFp32 = 128, kToeplitzBatch = 2, kToeplitzChainFp32 = 640;
constexpr int64_t kRegisterToeplitzBatch = 5;  // more than half of the rows of a warp

// Registers: taps up to which they are faster on (batch, channel, time) than tensor cores, or windows in shared memory; on (batch, time,
// channel) they are used for as many as the kernels take. fp32 weight gradients are sums of sums there, whose errors are below eager mode's
// from so many samples on.
constexpr int64_t kRegisterTaps = 16, kRegisterTapsFp32 = 24, kRegisterGradSamplesFp32 = 2048;
constexpr int64_t kMaxRegisterTaps = 40, kMaxRegisterGradTaps = 160;  // kMaxTaps and kMaxGradTaps of register_window.cu

// FFT: taps from which its fp32 errors are below those of a sum of products, and the most points (kMaxLog of fft_forward.cu).
constexpr int64_t kFftTaps = 256, kFftTapsFp32 = 2048, kMaxFftPoints = 1 << 14;

// Picoseconds a channel: of an FFT of a pair of rows, by points; of the other kernels by products, tensor cores with whole groups of eight
// batch entries.
constexpr double kFftPicoseconds = 17, kToeplitzPicosecondsFp32 = 0.019, kToeplitzPicoseconds = 0.0072, kSharedTilePicoseconds = 0.1;
// The same for weight gradients: an FFT in double, by points; tensor cores by products, and for the channel itself.
constexpr double kFftGradPicoseconds = 12.5, kToeplitzGradPicosecondsFp32 = 0.029, kToeplitzGradPicoseconds = 0.0145;
constexpr double kToeplitzChannelPicoseconds = 75e3;

// Below so many results of a kind, errors must match eager mode's one by one, which takes bit-identical or correctly rounded results.
constexpr int64_t kManyResults = 64, kManyResults16 = 256, kManyGradients = 1 << 16;

inline bool has_toeplitz_size(const ConvParams& p) {
  return std::min(p.taps, p.in_len) >= (is_fp32(p.dtype) ? kToeplitzTapsFp32 : kToeplitzTaps) && p.batch >= kToeplitzBatch;
}
// The farthest, in samples, that a tap may lie from its output for tensor cores that read samples into registers (register_toeplitz.cuh).
constexpr int64_t kToeplitzReach = 32;
inline bool is_within_reach(const ConvParams& p) { return p.left >= 0 && p.left <= kToeplitzReach && p.taps - 1 - p.left <= kToeplitzReach; }
inline bool has_fft_size(const ConvParams& p) { return std::min(p.taps, p.in_len) >= (is_fp32(p.dtype) ? kFftTapsFp32 : kFftTaps); }

inline double fft_picoseconds(const ConvParams& p) {
  int64_t points = 8192;
  while (points < p.in_len + p.taps - 1) points *= 2;
  return (static_cast<double>(ceil_div(p.batch, 2)) + 0.5) * static_cast<double>(points) * kFftPicoseconds;
}
// The same without an FFT.
inline double products_picoseconds(const ConvParams& p, bool on_tensor_cores) {
  const double products = static_cast<double>(std::min(p.in_len, p.taps)) * static_cast<double>(p.out_len) * (p.taps >= p.in_len ? 0.5 : 1.0);
  const double toeplitz = is_fp32(p.dtype) ? kToeplitzPicosecondsFp32 : kToeplitzPicoseconds;
  const double a_product = on_tensor_cores ? static_cast<double>(round_up(p.batch, 8)) * toeplitz : static_cast<double>(p.batch) * kSharedTilePicoseconds;
  return products * a_product;
}

// The number of results from which SiLU's gradient need not be wider than them: see widens_silu_grad in routes.h.
inline bool has_few_results(const BackwardParams& p) {
  return p.channels < (is_fp32(p.dtype) ? kManyResults : kManyResults16) || p.batch * p.channels * p.out_len <= kManyGradients;
}

}  // namespace fusebackend::causal_conv1d
