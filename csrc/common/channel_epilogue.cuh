// The epilogue (channel_epilogue.h) on sums in registers. Its kind is a number that all threads share, known when the kernel runs: an instantiation for each would
// multiply compile time and library size.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/channel_epilogue.h"

namespace fusebackend {

// The affine map of a channel.
struct ChannelAffine {
  float mean = 0, scale = 1, shift = 0;
};

template <typename T>
__device__ __forceinline__ float number_of(const ChannelVector& v, int64_t channel) {
  return v.wide ? static_cast<const float*>(v.data)[channel * v.stride] : static_cast<float>(static_cast<const T*>(v.data)[channel * v.stride]);
}

template <typename T>
__device__ __forceinline__ ChannelAffine affine_of(const ChannelEpilogue& e, int64_t channel) {
  ChannelAffine a;
  if (!e.is_affine) return a;
  if (e.mean.data) a.mean = number_of<T>(e.mean, channel);
  if (e.variance.data) a.scale = rsqrtf(number_of<T>(e.variance, channel) + float(e.eps));
  if (e.scale.data) a.scale *= number_of<T>(e.scale, channel);
  if (e.shift.data) a.shift = number_of<T>(e.shift, channel);
  return a;
}

// In shared memory, for kernels that have no registers for it. It is read anew wherever it is used.
struct StagedAffine {
  ChannelAffine numbers;

  __device__ __forceinline__ ChannelAffine get() const {
    const volatile ChannelAffine& v = numbers;
    ChannelAffine a;
    a.mean = v.mean, a.scale = v.scale, a.shift = v.shift;
    return a;
  }
};

__device__ __forceinline__ float map(float v, const ChannelAffine& a) { return fmaf(v - a.mean, a.scale, a.shift); }

// Comparisons are such that a NaN stays one.
__device__ __forceinline__ float clamp_from_zero(float v, float high) {
  v = v < 0.f ? 0.f : v;
  return v > high ? high : v;
}

// v * sigmoid(u); NaN for v = -inf, as in PyTorch. The reciprocal in fp32 is Newton's: a division has cases for which the kernels' loops would spill
// registers. For 16-bit results an exponential below 2^-126 need not be exact either: it is lost beside 1.
template <typename T>
__device__ __forceinline__ float sigmoid_gated(float v, float u) {
  float power, sigmoid;
  if constexpr (sizeof(T) == 4) power = expf(-u);
  else asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(u * -1.4426950408889634f));
  const float divisor = 1.f + power;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(divisor));
  if (sizeof(T) == 4 && divisor < 1e38f) sigmoid = fmaf(fmaf(-divisor, sigmoid, 1.f), sigmoid, sigmoid);
  return v * sigmoid;
}

__device__ __forceinline__ float hardswish(float v) { return v * clamp_from_zero(v + 3.f, 6.f) * (1.f / 6.f); }

// Calls use(f), f being the activation of one number. Where many numbers are to be mapped, `use` has the loop: the choice is made once.
template <typename T, typename F>
__device__ __forceinline__ void with_activation(Activation a, F&& use) {
  switch (a) {
    case Activation::kRelu:
    case Activation::kRelu6: return use([high = a == Activation::kRelu6 ? 6.f : INFINITY](float v) { return clamp_from_zero(v, high); });
    case Activation::kHardswish: return use([](float v) { return hardswish(v); });
    case Activation::kSilu:
    case Activation::kGeluTanh: {
      const float gate = a == Activation::kGeluTanh ? float(kGeluGate) : 1.f, cubic = a == Activation::kGeluTanh ? float(kGeluGate * kGeluCubic) : 0.f;
      // Above 100 the square does not matter, but may overflow, and no cubic term times infinity would be NaN.
      return use([=](float v) { return sigmoid_gated<T>(v, v * fmaf(cubic, fminf(v * v, 100.f), gate)); });
    }
    case Activation::kGelu: return use([](float v) { return .5f * v * (1.f + erff(v * 0.70710678118654752f)); });
    default: return;
  }
}

// Maps the numbers of some channels, side by side in the last dim; `affine` has as many.
template <typename T, int kNumbers, int kChannels>
__device__ __forceinline__ void finish(float (&v)[kNumbers][kChannels], const ChannelEpilogue& e, const ChannelAffine (&affine)[kChannels]) {
  if (!e.any) return;
  if (e.is_affine) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
#pragma unroll
      for (int c = 0; c < kChannels; ++c) v[i][c] = map(v[i][c], affine[c]);
  }
  with_activation<T>(e.activation, [&](auto f) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
#pragma unroll
      for (int c = 0; c < kChannels; ++c) v[i][c] = f(v[i][c]);
  });
}

// The same of one channel.
template <typename T, int kRows, int kNumbers>
__device__ __forceinline__ void finish(float (&v)[kRows][kNumbers], const ChannelEpilogue& e, const ChannelAffine& affine) {
  if (!e.any) return;
  const auto for_each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) v[i][j] = f(v[i][j]);
  };
  if (e.is_affine) for_each([&](float v) { return map(v, affine); });
  with_activation<T>(e.activation, for_each);
}
template <typename T, int kNumbers>
__device__ __forceinline__ void finish(float (&v)[kNumbers], const ChannelEpilogue& e, const ChannelAffine& affine) {
  finish<T>(reinterpret_cast<float(&)[1][kNumbers]>(v), e, affine);
}

// One number, where time does not matter.
template <typename T>
__device__ __forceinline__ float finished(float v, const ChannelEpilogue& e, int64_t channel) {
  float numbers[1] = {v};
  finish<T>(numbers, e, affine_of<T>(e, channel));
  return numbers[0];
}

}  // namespace fusebackend
