// Weight gradients of rows of thousands of samples, for thousands of taps: correlation by FFT, in double inside one block's shared memory. In
// fp32 an FFT errs up to twice as much as eager mode's sums; in double only the rounding of the result is left. Right-angle transforms need
// half the points, so 8192 samples fit.
//
// dw[k] = sum_t g[t] x[t - left + k] is number k - left + out_len - 1 of the convolution of x with g reversed. Spectra are multiplied, and added
// up over the batch before the one inverse transform.
#include <algorithm>
#include <cstdlib>

#include "causal_conv1d/direct_sums.cuh"
#include "causal_conv1d/launchers.h"
#include "causal_conv1d/fft.cuh"
#include "common/device_properties.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

template <int LOG_N>
using WeightGradFft = Fft<double, LOG_N, true>;

// A block takes groups of `rows` batch entries of a channel in turn. In scratch it has two spectra: of a row of g, and the sum of products.
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
      // Of g, from its end, then of x: one loop, so that the transform's code is there once.
      for (int of_x = 0; of_x < 2; ++of_x) {
        const T* row = of_x ? row_of<T>(p.x, p.x_stride, b, c) : row_of<T>(p.g, p.g_stride, b, c) + (out_len - 1) * p.g_stride.t;
        const int len = of_x ? in_len : out_len;
        const int64_t stride = of_x ? p.x_stride.t : -p.g_stride.t;
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
    // An inf or a NaN in a row has spread over all taps.
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
    if (!__syncthreads_and(finite)) direct_weight_grad<T>(p, c, first, static_cast<int>(last - first), partial);
    g_sum = block_sum(g_sum);
    if (threadIdx.x == 0) partial[taps] = g_sum;
  }
}

constexpr int kMinLog = 12, kMaxLog = 13;

// On data-centre GPUs. On others they run at 1/32 of the speed of floats, or less.
bool doubles_are_fast() { return device_attribute(cudaDevAttrSingleToDoublePrecisionPerfRatio) <= 2; }

// log2 of the points of a transform; more than kMaxLog for too many samples.
int log_points(const WeightGradParams& p) {
  int log = kMinLog;
  while (log <= kMaxLog && (int64_t{1} << log) < std::max(p.in_len, p.out_len)) ++log;
  return log;
}

// Few channels are cut into groups of batch entries, so that there is a block for each that can run at the same time.
int64_t resident_blocks(int log_n) { return static_cast<int64_t>(sm_count()) * (log_n == kMaxLog ? 1 : 2); }
int64_t group_rows(const WeightGradParams& p) {
  return ceil_div(p.batch, std::clamp<int64_t>(ceil_div(resident_blocks(log_points(p)), p.channels), 1, p.batch));
}
int64_t blocks_of(const WeightGradParams& p) { return std::min(resident_blocks(log_points(p)), p.channels * fft_weight_grad_splits(p)); }

template <int LOG_N>
cudaError_t launch(const WeightGradParams& p, double* scratch, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using F = WeightGradFft<LOG_N>;
    auto* kernel = fft_weight_grad<decltype(type), LOG_N>;
    static SharedMemoryOptIn opt_in;
    if (const cudaError_t e = opt_in.ensure(kernel, F::kSharedBytes); e != cudaSuccess) return e;
    kernel<<<static_cast<unsigned>(blocks_of(p)), F::kThreads, F::kSharedBytes, stream>>>(p, p.splits, group_rows(p),
                                                                                         reinterpret_cast<Complex<double>*>(scratch));
    return cudaGetLastError();
  });
}

}  // namespace

bool fft_weight_grad_supported(const WeightGradParams& p) {
  constexpr int kMaxTaps = 1 << 16;
  const int log_n = log_points(p);
  return p.g_dtype == p.dtype && p.batch * p.in_len * p.out_len > 0 && log_n <= kMaxLog && p.taps <= kMaxTaps && std::abs(p.left) <= kMaxTaps &&
         (1 << log_n) / 16 * 17 * static_cast<int>(sizeof(Complex<double>)) <= max_shared_bytes() && doubles_are_fast();
}

int64_t fft_weight_grad_points(const WeightGradParams& p) { return (2 * p.batch + 1) << log_points(p); }

int fft_weight_grad_splits(const WeightGradParams& p) { return static_cast<int>(ceil_div(p.batch, group_rows(p))); }

int64_t fft_weight_grad_scratch(const WeightGradParams& p) { return (blocks_of(p) << log_points(p)) * 4; }

cudaError_t launch_fft_weight_grad(const WeightGradParams& p, double* scratch, cudaStream_t stream) {
  return log_points(p) == kMinLog ? launch<kMinLog>(p, scratch, stream) : launch<kMaxLog>(p, scratch, stream);
}

}  // namespace fusebackend::causal_conv1d
