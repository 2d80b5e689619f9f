// Rows of thousands of samples with about as many taps: convolution by FFT, in fp32, inside one block's shared memory.
//
// Two batch entries are the real and the imaginary part of one complex signal; taps are real, so convolving it convolves both. Rows are scaled
// to a norm of about 1, since the rounding errors of the larger row of a pair would swamp the smaller.
#include <algorithm>

#include "causal_conv1d/direct_sums.cuh"
#include "causal_conv1d/fft.cuh"
#include "causal_conv1d/launchers.h"
#include "common/device_properties.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

struct RowScale {
  int exponent;  // 2^exponent makes the row's norm about 1
  double sum;    // of squares
  bool finite;
};

// Of the second row of a pair: the power of two that brings its norm nearest to that of the first, scaled by its own. By itself either could
// be twice as large as the other.
__device__ __forceinline__ int matching_exponent(const RowScale& first, const RowScale& second) {
  if (!(first.sum > 0 && second.sum > 0)) return second.exponent;
  return max(-126, min(126, first.exponent + (ilogb(2 * (first.sum / second.sum)) >> 1)));
}

// All threads get the same answer.
template <typename T>
__device__ RowScale row_scale(const T* row, int len, int64_t stride) {
  double sum = 0;
#pragma unroll 16
  for (int t = threadIdx.x; t < len; t += blockDim.x) {
    const double v = to_float(row[t * stride]);
    sum += v * v;
  }
  sum = block_sum(sum);
  const bool finite = sum <= 1e300;  // false for inf and for NaN
  return {finite && sum > 0 ? max(-126, min(126, -ilogb(sum) / 2)) : 0, sum, finite};
}

// 2^e for |e| <= 126.
__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }

// Not inlined: its registers would come on top of the butterflies'.
template <typename T>
__device__ __noinline__ float apply_silu(Epilogue epilogue, float dy, float y) {
  return epilogue == Epilogue::kSilu ? silu<T>(y) : silu_backward<T>(dy, y);
}

// Stores the outputs of one row.
template <typename T>
struct RowOut {
  T* out;
  const T* dy;
  int64_t out_t, dy_t;
  Epilogue epilogue;
  float bias;

  __device__ __forceinline__ RowOut(const ConvParams& p, int64_t b, int64_t c, float bias_)
      : out(row_of<T>(p.out, p.out_stride, b, c)), dy(row_of<T>(p.dy, p.dy_stride, b, c)),
        out_t(p.out_stride.t), dy_t(p.dy_stride.t), epilogue(p.epilogue), bias(bias_) {}
  __device__ __forceinline__ void operator()(int t, float y) const {
    y += bias;
    if (epilogue != Epilogue::kNone) y = apply_silu<T>(epilogue, epilogue == Epilogue::kSiluGrad ? to_float(dy[t * dy_t]) : 0.f, y);
    out[t * out_t] = from_float<T>(y);
  }
};

template <typename T, int LOG_N>
__global__ void __launch_bounds__(Fft<float, LOG_N>::kThreads, Fft<float, LOG_N>::kBlocks)
    fft_forward(const ConvParams p, const int groups, Complex<float>* scratch) {
  using F = Fft<float, LOG_N>;
  extern __shared__ __align__(16) Complex<float> shared[];
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len), taps = static_cast<int>(p.taps);
  const int offset = taps - 1 - static_cast<int>(p.left);  // output t is sample t + offset of the full convolution
  Complex<float>* spectrum = scratch + static_cast<int64_t>(blockIdx.x) * F::N + threadIdx.x;
  for (int64_t unit = blockIdx.x; unit < p.channels * groups; unit += gridDim.x) {
    const int64_t c = unit / groups, group = unit - c * groups;
    const T* w = static_cast<const T*>(p.w) + c * p.w_stride.c + (taps - 1) * p.w_stride.k;  // reversed: a convolution, not a correlation
    const float bias = static_cast<float>(p.shift) + load_bias<T>(p, c);
    const RowScale ws = row_scale(w, taps, -p.w_stride.k);
    const float w_scale = power_of_two(ws.exponent);
    __syncthreads();
    F::forward(
        shared, [&](int n) { return Complex<float>{n < taps ? w_scale * to_float(w[-n * p.w_stride.k]) : 0.f, 0.f}; },
        [&](int place, Complex<float> v) { spectrum[place * F::kThreads] = {v.x / F::N, v.y / F::N}; });
    for (int64_t b = 2 * group; b < p.batch; b += 2 * groups) {
      const bool two = b + 1 < p.batch;
      const T* x0 = row_of<T>(p.x, p.x_stride, b, c);
      const T* x1 = two ? x0 + p.x_stride.b : x0;
      const RowOut<T> out0(p, b, c, bias), out1(p, b + 1, c, bias);
      const RowScale s0 = row_scale(x0, in_len, p.x_stride.t), s1 = row_scale(x1, in_len, p.x_stride.t);
      if (!(ws.finite && s0.finite && s1.finite)) {
        // An inf or a NaN would spread over both rows.
        for (int64_t i = threadIdx.x; i < p.out_len * (two ? 2 : 1); i += F::kThreads) {
          const int64_t t = i % p.out_len;
          const float y = direct_sum(i < p.out_len ? x0 : x1, p.x_stride.t, in_len, w - (taps - 1) * p.w_stride.k, p.w_stride.k, taps,
                                     static_cast<int>(t - p.left), 0.f, p.skips_padding);
          RowOut<T>(p, b + (i >= p.out_len), c, bias)(static_cast<int>(t), y);
        }
        continue;
      }
      const int exponent1 = matching_exponent(s0, s1);
      const float scale0 = power_of_two(s0.exponent), scale1 = two ? power_of_two(exponent1) : 0.f;
      const float unscale0 = power_of_two(-s0.exponent), unscale1 = power_of_two(-exponent1), w_unscale = power_of_two(-ws.exponent);
      Complex<float> z[F::kPoints];
      __syncthreads();
      F::forward(
          shared,
          [&](int n) {
            if (n >= in_len) return Complex<float>{0.f, 0.f};
            return Complex<float>{scale0 * to_float(x0[n * p.x_stride.t]), scale1 * to_float(x1[n * p.x_stride.t])};
          },
          [&](int place, Complex<float> v) { z[place] = v * spectrum[place * F::kThreads]; });
      F::inverse(
          shared, [&](int place) { return z[place]; },
          [&](int n, Complex<float> v) {
            const int t = n - offset;
            if (t < 0 || t >= out_len) return;
            out0(t, v.x * unscale0 * w_unscale);
            if (two) out1(t, v.y * unscale1 * w_unscale);
          });
    }
  }
}

constexpr int kMinLog = 13, kMaxLog = 14;

int log2_ceil(int64_t n) {
  int log = kMinLog;
  while (log <= kMaxLog && (int64_t{1} << log) < n) ++log;
  return log;
}

// log2 of the points with which nothing wraps around into the outputs that are wanted; more than kMaxLog if that is not supported.
int log_points(const ConvParams& p) {
  const int64_t offset = p.taps - 1 - p.left;
  if (offset < 0) return kMaxLog + 1;
  return log2_ceil(std::max({p.in_len + p.taps - 1 - offset, p.out_len + offset, p.in_len, p.taps}));
}
// Blocks that run at the same time, see Fft::kBlocks.
int resident_blocks(int log_n) { return sm_count() * (log_n == kMaxLog ? 1 : 2); }

bool shared_memory_holds(int log_n) { return log_n <= kMaxLog && ((1 << log_n) + (1 << log_n) / 16) * 8 <= max_shared_bytes(); }

int forward_groups(const ConvParams& p, int log_n) {
  return static_cast<int>(std::clamp<int64_t>(ceil_div(resident_blocks(log_n), p.channels), 1, ceil_div(p.batch, 2)));
}

int64_t forward_blocks(const ConvParams& p, int log_n) {
  return std::min<int64_t>(resident_blocks(log_n), p.channels * forward_groups(p, log_n));
}

template <typename F>
cudaError_t dispatch_log(int log_n, F&& f) {
  switch (log_n) {
    case 13: return f(std::integral_constant<int, 13>{});
    case 14: return f(std::integral_constant<int, 14>{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

int64_t fft_forward_scratch(const ConvParams& p) {
  const int log_n = log_points(p);
  return shared_memory_holds(log_n) ? (forward_blocks(p, log_n) << log_n) * 2 : 0;
}

cudaError_t launch_fft_forward(const ConvParams& p, float* scratch, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    return dispatch_log(log_points(p), [&](auto log) {
      constexpr int kLog = decltype(log)::value;
      auto* kernel = fft_forward<decltype(type), kLog>;
      static SharedMemoryOptIn opt_in;
      if (const cudaError_t e = opt_in.ensure(kernel, Fft<float, kLog>::kSharedBytes); e != cudaSuccess) return e;
      kernel<<<static_cast<unsigned>(forward_blocks(p, kLog)), Fft<float, kLog>::kThreads, Fft<float, kLog>::kSharedBytes, stream>>>(
          p, forward_groups(p, kLog), reinterpret_cast<Complex<float>*>(scratch));
      return cudaGetLastError();
    });
  });
}

}  // namespace fusebackend::causal_conv1d
