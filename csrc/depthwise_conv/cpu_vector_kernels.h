// The vector kernels of one width of vectors.
#pragma once
#include "depthwise_conv/cpu_channels.h"
#include "depthwise_conv/cpu_launch.h"
#include "depthwise_conv/cpu_planes.h"

namespace fusebackend::depthwise_conv {
namespace {

template <typename F>
void dispatch(DType dtype, F&& f) {
  if (dtype == DType::kFloat16) f(Float16{});
  else if (dtype == DType::kBFloat16) f(BFloat16{});
  else f(float{});
}

CpuKernels vector_kernels() {
  CpuKernels k = {};
  k.lanes = kLanes;
  k.forward_channels = [](const ForwardParams& p, int64_t begin, int64_t end) { dispatch(p.dtype, [&](auto t) { forward_channels<decltype(t)>(p, begin, end); }); };
  k.forward_planes = [](const ForwardParams& p, int64_t begin, int64_t end) { dispatch(p.dtype, [&](auto t) { forward_planes<decltype(t)>(p, begin, end); }); };
  k.weight_grad_channels = [](const WeightGradParams& p, double* partial, int64_t parts, int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto t) { weight_grad_channels<decltype(t)>(p, partial, parts, begin, end); });
  };
  k.weight_grad_planes = [](const WeightGradParams& p, double* partial, int64_t parts, int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto t) { weight_grad_planes<decltype(t)>(p, partial, parts, begin, end); });
  };
  return k;
}

}  // namespace
}  // namespace fusebackend::depthwise_conv
