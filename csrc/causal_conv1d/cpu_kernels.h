// The CPU kernels of one width of vectors: forward and backward over a range of units (cpu_launch.h), in the type that sums are made in.
#pragma once
#include <algorithm>

#include "causal_conv1d/cpu_backward.h"
#include "causal_conv1d/cpu_forward.h"

namespace fusebackend::causal_conv1d {
namespace {

// Whether fp32 is summed in double. With few outputs, matching eager's error elementwise needs correctly rounded results, so small problems are,
// and one channel, which is no depthwise convolution to PyTorch and has kernels that add up in other orders. So are gradients of few channels
// under SiLU, whose own errors go into all of them, and of few taps: two fp32 sums of few terms in different orders err alike, so neither's
// errors are the smaller everywhere.
constexpr int64_t kSmallProducts = int64_t{1} << 21, kFewChannels = 64, kFewTaps = 32;
bool sums_in_double(DType dtype, int64_t batch, int64_t channels, int64_t length, int64_t taps) {
  return dtype == DType::kFloat32 && (channels == 1 || batch * channels * length * taps <= kSmallProducts);
}
bool sums_in_double(const ConvParams& p) { return sums_in_double(p.dtype, p.batch, p.channels, p.out_len, std::min(p.taps, p.in_len)); }
bool sums_in_double(const BackwardParams& p) {
  return sums_in_double(p.dtype, p.batch, p.channels, std::min(p.in_len, p.out_len), p.taps) ||
         (p.dtype == DType::kFloat32 && ((p.silu && p.channels < kFewChannels) || p.taps <= kFewTaps));
}

template <typename F>
auto dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: return f(Float16{});
    case DType::kBFloat16: return f(BFloat16{});
    case DType::kFloat64: return f(double{});
    default: return f(float{});
  }
}

void forward_range(const ConvParams& p, int64_t begin, int64_t end) {
  const ForwardUnits units = forward_units(p);
  if (sums_in_double(p)) return (units.channels_in_lanes ? forward_lanes<float, double> : forward_rows<float, double>)(p, units, begin, end);
  dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    return (units.channels_in_lanes ? forward_lanes<T, Acc<T>> : forward_rows<T, Acc<T>>)(p, units, begin, end);
  });
}
void backward_range(const BackwardParams& p, int64_t begin, int64_t end) {
  if (sums_in_double(p)) return backward_rows<float, double>(p, begin, end);
  dispatch(p.dtype, [&](auto type) { backward_rows<decltype(type), Acc<decltype(type)>>(p, begin, end); });
}

}  // namespace
}  // namespace fusebackend::causal_conv1d
