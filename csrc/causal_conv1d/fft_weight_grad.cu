// Weight gradients of rows of thousands of samples, for thousands of taps: correlation by FFT, in double inside one block's shared
// memory. In fp32 an FFT errs up to twice as much as eager mode's sums do; in double nothing but the result's rounding is left, and as
// right-angle transforms need half of the points, 8192 samples fit.
//
// dw[k] = sum_t g[t] x[t - left + k] is number k - left + out_len - 1 of the convolution of x with g reversed. Spectra of products are
// added up over the batch before the one inverse transform.
#include <algorithm>
#include <cstdlib>

#include "conv1d_cuda.h"
#include "device.cuh"
#include "device_limits.h"
#include "fft.cuh"
#include "weight_grad_one_by_one.cuh"

namespace fusebackend::conv1d {
namespace {

template <int LOG_N>
using WeightGradFft = Fft<double, LOG_N, true>;

// A block takes channels' groups of `rows` batch entries in turn. In scratch it has two spectra: of a row's gradient, and the sum.
template <typename T, int LOG_N>
__global__ void __launch_bounds__(WeightGradFft<LOG_N>::kThreads, WeightGradFft<LOG_N>::kBlocks)
    fft_weight_grad(const WeightGradParams p, const int groups, const int64_t rows, Complex<double>* scratch) {
  using F = WeightGradFft<LOG_N>;
  extern __shared__ __align__(16) Complex<double> shared[];
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len), taps = static_cast<int>(p.taps);
  const int numbers = in_len + out_len - 1, offset = static_cast<int>(p.left) - (out_len - 1);  // number n is of tap n + offset
  Complex<double>* gradient = scratch + static_cast<int64_t>(blockIdx.x) * 2 * F::N + threadIdx.x;
  Complex<double>* sum = gradient + F::N;
  for (int64_t unit = blockIdx.x; unit < p.channels * groups; unit += gridDim.x) {
    const int64_t c = unit / groups, group = unit - c * groups, first = group * rows, last = min(first + rows, p.batch);
    double* partial = p.partial + (group * p.channels + c) * (p.taps + 1);
    double g_sum = 0;
    for (int64_t b = first; b < last; ++b) {
      // Of the gradient, from its end, and of the samples: one loop, so that the transform's code is there once.
      for (int of_x = 0; of_x < 2; ++of_x) {
        const T* row = of_x ? static_cast<const T*>(p.x) + b * p.xs.b + c * p.xs.c
                            : static_cast<const T*>(p.g) + b * p.gs.b + c * p.gs.c + (out_len - 1) * p.gs.t;
        const int len = of_x ? in_len : out_len;
        const int64_t stride = of_x ? p.xs.t : -p.gs.t;
        __syncthreads();
        F::forward(
            shared,
            [&](int n) {
              const double v = n < len ? to_float(row[n * stride]) : 0.f;
              if (!of_x) g_sum += v;
              return v;
            },
            [&](int place, Complex<double> v) {
              if (!of_x) {
                gradient[place * F::kThreads] = v;
                return;
              }
              const Complex<double> product = v * gradient[place * F::kThreads];
              sum[place * F::kThreads] = b == first ? product : sum[place * F::kThreads] + product;
            });
      }
    }
    // An inf or a NaN has spread over all taps.
    bool finite = true;
    auto store = [&](int n, double v) {
      const int k = n + offset;
      if (k < 0 || k >= taps || n >= numbers) return;
      partial[k] = v;
      finite &= isfinite(v);
    };
    for (int k = threadIdx.x; k < taps; k += F::kThreads) {
      if (k < offset || k >= offset + numbers) partial[k] = 0;  // no sample reaches it
    }
    F::inverse(
        shared, [&](int place) { return (1. / F::N) * sum[place * F::kThreads]; },
        [&](int n, Complex<double> v) {
          store(n, v.x);
          store(n + F::N, v.y);
        });
    if (!__syncthreads_and(finite)) weight_grad_one_by_one<T>(p, c, first, static_cast<int>(last - first), partial);
    g_sum = sum_of_all(g_sum);
    if (threadIdx.x == 0) partial[taps] = g_sum;
  }
}

constexpr int kMinLog = 12, kMaxLog = 13;

// Elsewhere they run at 1/32 of the speed of floats, or less.
bool doubles_are_fast() { return device_attribute(cudaDevAttrSingleToDoublePrecisionPerfRatio) <= 2; }

// More than kMaxLog: too many samples.
int log_of(const WeightGradParams& p) {
  int log = kMinLog;
  while (log <= kMaxLog && (int64_t{1} << log) < std::max(p.in_len, p.out_len)) ++log;
  return log;
}

// What runs together should be about what there is room for: few channels are shared by groups of their batch entries.
int64_t blocks_at_once(int log_n) { return static_cast<int64_t>(sm_count()) * (log_n == kMaxLog ? 1 : 2); }
int64_t rows_of(const WeightGradParams& p) {
  const int64_t groups = std::clamp<int64_t>((blocks_at_once(log_of(p)) + p.channels - 1) / p.channels, 1, p.batch);
  return (p.batch + groups - 1) / groups;
}
int64_t blocks_of(const WeightGradParams& p) { return std::min(blocks_at_once(log_of(p)), p.channels * fft_weight_grad_splits(p)); }

template <int LOG_N>
cudaError_t launch(const WeightGradParams& p, double* scratch, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using F = WeightGradFft<LOG_N>;
    auto* kernel = fft_weight_grad<decltype(type), LOG_N>;
    static SharedMemoryOptIn opt_in;
    if (const cudaError_t e = opt_in.ensure(kernel, F::kSharedBytes); e != cudaSuccess) return e;
    kernel<<<static_cast<unsigned>(blocks_of(p)), F::kThreads, F::kSharedBytes, stream>>>(p, p.splits, rows_of(p),
                                                                                         reinterpret_cast<Complex<double>*>(scratch));
    return cudaGetLastError();
  });
}

}  // namespace

bool fft_weight_grad_supported(const WeightGradParams& p) {
  constexpr int kMaxTaps = 1 << 16;
  const int log_n = log_of(p);
  return p.g_dtype == p.dtype && p.batch * p.in_len * p.out_len > 0 && log_n <= kMaxLog && p.taps <= kMaxTaps && std::abs(p.left) <= kMaxTaps &&
         (1 << log_n) / 16 * 17 * static_cast<int>(sizeof(Complex<double>)) <= max_shared_bytes() && doubles_are_fast();
}

int64_t fft_weight_grad_points(const WeightGradParams& p) { return (2 * p.batch + 1) << log_of(p); }

int fft_weight_grad_splits(const WeightGradParams& p) { return static_cast<int>((p.batch + rows_of(p) - 1) / rows_of(p)); }

int64_t fft_weight_grad_scratch(const WeightGradParams& p) { return (blocks_of(p) << log_of(p)) * 4; }

cudaError_t launch_fft_weight_grad(const WeightGradParams& p, double* scratch, cudaStream_t stream) {
  const cudaError_t e = log_of(p) == kMinLog ? launch<kMinLog>(p, scratch, stream) : launch<kMaxLog>(p, scratch, stream);
  if (e != cudaSuccess) return e;
  return launch_reduce_partials(p.partial, p.splits, p.channels, p.taps, p.dw, p.db, p.dtype, stream);
}

}  // namespace fusebackend::conv1d
