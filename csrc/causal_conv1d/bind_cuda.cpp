#include <algorithm>

#include "bind.h"
#include "conv1d_cuda.h"

namespace fusebackend::conv1d {
namespace {

enum class Layout { kTime, kChannel, kOther };

Layout layout(const Strides& s, int64_t channels) {
  if (s.c == 1 && s.t != 1 && channels > 1) return Layout::kChannel;
  return s.t == 1 ? Layout::kTime : Layout::kOther;
}

// The one-pass kernels: causal, few taps, every tensor in the same memory order.
bool short_enough(int64_t batch, int64_t channels, int64_t in_len, int64_t out_len, int64_t taps, int64_t left,
                  std::initializer_list<Strides> tensors) {
  if (taps < kMinShortTaps || taps > kMaxShortTaps || left != taps - 1 || in_len != out_len || batch * (in_len + 8) >= (int64_t{1} << 31)) return false;
  const Layout first = layout(*tensors.begin(), channels);
  for (const Strides& s : tensors) {
    if (layout(s, channels) != first) return false;
  }
  return first != Layout::kOther;
}

// Scratch of `count` numbers of 8 bytes.
Tensor scratch(const Tensor& like, int64_t count) { return empty_like_sized(like, {count * 8 / static_cast<int64_t>(like.element_size())}); }
template <typename N>
N* numbers(const Tensor& scratch) { return static_cast<N*>(scratch.data_ptr()); }

// From here on tensor cores beat FFMA (measured on an H200); with one batch entry most of their rows are empty. In fp32 a
// sum must be long enough for its rounding errors, in eager mode, to hide those of the tensor core's truncation: by taps forwards,
// by the samples that eager mode adds up for the weight gradient.
constexpr int64_t kToeplitzTaps = 10, kToeplitzTapsFp32 = 128, kToeplitzBatch = 2, kToeplitzChainFp32 = 640;
constexpr int64_t kTapsSamplesFp32 = 2048;  // the same for weight gradients in registers

// Eager mode's rounding errors are not larger than ours in each of few numbers, but for the same bits, or correct rounding. Rows
// of results begin to be many here, and the gradients of channels. SiLU's gradient is not a sum, and its errors go into all others:
// for few channels, and for few of it, it is kept in more digits, in double for fp32, and in fp32 for 16-bit types.
constexpr int64_t kMany = 64, kMany16 = 256, kFewGradients = 1 << 16;
bool keep_digits(Dtype dtype, int64_t batch, int64_t channels, int64_t out_len, bool silu) {
  return silu && (channels < (dtype == Dtype::kFloat ? kMany : kMany16) || batch * channels * out_len <= kFewGradients);
}
bool keeps_digits(const ConvParams& p) { return p.x_dtype != p.dtype || p.out_dtype != p.dtype; }

// One channel is no depthwise convolution to PyTorch: cuDNN has it, which adds up in other orders.
bool sums_exactly(const ConvParams& p) { return p.dtype == Dtype::kFloat && p.channels == 1; }
bool sums_like_eager(const ConvParams& p) { return p.dtype == Dtype::kFloat && p.out_len < kMany; }

// Picoseconds a channel, measured on an H200: an FFT of a pair of rows by points, tensor cores by products with whole groups of
// eight rows, FFMA by products.
constexpr double kFftPicoseconds = 17, kToeplitzPicosecondsFp32 = 0.019, kToeplitzPicoseconds = 0.0072, kWindowPicoseconds = 0.1;
constexpr int64_t kFftTaps = 256, kFftTapsFp32 = 2048;  // the longer: where its error is below that of a chain of sums

bool tensor_cores_pay(const ConvParams& p) {
  return std::min(p.taps, p.in_len) >= (p.dtype == Dtype::kFloat ? kToeplitzTapsFp32 : kToeplitzTaps) && p.batch >= kToeplitzBatch &&
         toeplitz_supported(p);
}

bool tensor_cores_pay(const WeightGradParams& p) {
  const bool accurate = p.dtype != Dtype::kFloat || eager_chain(p) >= kToeplitzChainFp32;
  return p.batch > 0 && p.taps >= (p.dtype == Dtype::kFloat ? kToeplitzTapsFp32 : kToeplitzTaps) && accurate && p.channels > 1 &&
         toeplitz_weight_grad_supported(p);
}

bool fft_is_faster(const ConvParams& p) {
  if (std::min(p.taps, p.in_len) < (p.dtype == Dtype::kFloat ? kFftTapsFp32 : kFftTaps)) return false;
  int64_t points = 8192;
  while (points < p.in_len + p.taps - 1) points *= 2;
  const double fft = (static_cast<double>((p.batch + 1) / 2) + 0.5) * static_cast<double>(points) * kFftPicoseconds;
  const double products = static_cast<double>(std::min(p.in_len, p.taps)) * static_cast<double>(p.out_len) * (p.taps >= p.in_len ? 0.5 : 1.0);
  if (!tensor_cores_pay(p)) return fft < products * static_cast<double>(p.batch) * kWindowPicoseconds;
  const double toeplitz = p.dtype == Dtype::kFloat ? kToeplitzPicosecondsFp32 : kToeplitzPicoseconds;
  return fft < products * static_cast<double>((p.batch + 7) / 8 * 8) * toeplitz;
}

// The same for weight gradients: an FFT by its points, in double; tensor cores by products, and for the channel itself.
constexpr double kFftDoublePicoseconds = 12.5, kToeplitzGradPicosecondsFp32 = 0.029, kToeplitzGradPicoseconds = 0.0145, kToeplitzChannelPicoseconds = 75e3;

bool fft_is_faster(const WeightGradParams& p) {
  if (!tensor_cores_pay(p) || !fft_weight_grad_supported(p)) return false;
  const double shorter = static_cast<double>(std::min(p.in_len, p.taps)), rest = static_cast<double>(p.out_len) - shorter / 2;
  const double products = shorter * std::max(rest, shorter / 2) * static_cast<double>(p.batch);
  const double toeplitz = products * (p.dtype == Dtype::kFloat ? kToeplitzGradPicosecondsFp32 : kToeplitzGradPicoseconds) + kToeplitzChannelPicoseconds;
  return static_cast<double>(fft_weight_grad_points(p)) * kFftDoublePicoseconds < toeplitz;
}

// Registers: in time-contiguous tensors for so many taps, from where tensor cores, or windows in shared memory, cost less.
// (batch, time, channel) is for them alone.
constexpr int64_t kTaps = 16, kTapsFp32 = 24;
bool taps_pay(const ConvParams& p) {
  if (!taps_supported(p)) return false;
  if (layout(p.xs, p.channels) == Layout::kChannel) return true;
  return taps_with_lead(p) <= (p.dtype == Dtype::kFloat ? kTapsFp32 : kTaps) || (p.dtype != Dtype::kFloat && !tensor_cores_pay(p));
}
bool taps_pay(const WeightGradParams& p) {
  if (p.batch * p.out_len == 0 || p.in_len == 0 || !taps_weight_grad_supported(p)) return false;
  if (p.dtype == Dtype::kFloat && (p.channels < kMany || p.batch * p.out_len < kTapsSamplesFp32)) return false;
  return layout(p.xs, p.channels) == Layout::kChannel || p.taps <= kTaps || !tensor_cores_pay(p);
}

cudaError_t convolve(ConvParams& p, const Tensor& like, cudaStream_t stream) {
  p.exact = sums_exactly(p);
  if (p.batch * p.channels * p.out_len == 0) return cudaSuccess;
  if (keeps_digits(p) || sums_exactly(p)) return launch_window_forward(p, stream);
  const Strides outs = short_turns(p) ? p.xs : p.outs;
  if (p.epilogue != Epilogue::kSiluGrad && p.w_k >= 0 && short_enough(p.batch, p.channels, p.in_len, p.out_len, p.taps, p.left, {p.xs, outs}))
    return launch_short_forward(p, stream);
  if (taps_pay(p)) return launch_taps_forward(p, stream);
  if (sums_like_eager(p)) return launch_window_forward(p, stream);
  if (fft_is_faster(p)) {
    if (const int64_t count = fft_forward_scratch(p)) {
      Tensor spectrum = scratch(like, (count + 1) / 2);
      return launch_fft_forward(p, numbers<float>(spectrum), stream);
    }
  }
  if (tensor_cores_pay(p)) return launch_toeplitz_forward(p, stream);
  return launch_window_forward(p, stream);
}

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t left, int64_t right, double shift,
                     bool silu, bool channels_last) {
  const int64_t length = check_forward(x, weight, bias, left, right);
  const CudaScope scope(x);
  Tensor out = empty_rows(x, x.size(0), x.size(1), length, channels_last);
  ConvParams p = forward_params(x, weight, bias, left, out, shift, silu);
  check_cuda(convolve(p, x, scope.stream()), "causal_conv1d");
  return out;
}

// The gradient of pre.
struct Gradient {
  Tensor memory;
  Strides strides;
  Dtype dtype;
};

void weight_gradient(const BackwardParams& b, const Gradient& g, const Tensor& like, cudaStream_t stream) {
  WeightGradParams p = {};
  p.x = b.x, p.g = g.memory.data_ptr(), p.dw = b.dw, p.db = b.db;
  p.batch = b.batch, p.channels = b.channels, p.in_len = b.in_len, p.out_len = b.out_len, p.taps = b.taps, p.left = b.left;
  p.xs = b.xs, p.gs = g.strides;
  p.dtype = b.dtype, p.g_dtype = g.dtype;
  const bool taps = taps_pay(p), fft = !taps && fft_is_faster(p);
  const bool toeplitz = !taps && !fft && p.g_dtype == p.dtype && tensor_cores_pay(p);
  p.splits = taps ? taps_weight_grad_splits(p) : fft ? fft_weight_grad_splits(p) : toeplitz ? toeplitz_weight_grad_splits(p) : window_weight_grad_splits(p);
  Tensor partial = scratch(like, p.splits * p.channels * (p.taps + 1));
  p.partial = numbers<double>(partial);
  if (fft) {
    Tensor spectra = scratch(like, fft_weight_grad_scratch(p));
    check_cuda(launch_fft_weight_grad(p, numbers<double>(spectra), stream), "causal_conv1d_backward");
    return;
  }
  auto* launch = taps ? launch_taps_weight_grad : toeplitz ? launch_toeplitz_weight_grad : launch_window_weight_grad;
  check_cuda(launch(p, stream), "causal_conv1d_backward");
}

std::tuple<Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                          const std::optional<Tensor>& bias, int64_t left, double shift, bool silu,
                                                          bool channels_last, bool need_x, bool need_weight, bool need_bias) {
  check_backward(grad, x, weight, bias, left);
  const CudaScope scope(x);
  Backward b(grad, x, weight, bias, left, shift, silu, channels_last, need_x, need_weight, need_bias);
  BackwardParams& p = b.params;
  if (p.channels == 0) return {b.dx, b.dw, b.db};

  // Of no samples at all the window kernels make zero gradients.
  const bool empty = p.batch == 0 || p.in_len == 0 || p.out_len == 0, digits = keep_digits(p.dtype, p.batch, p.channels, p.out_len, silu);
  const bool one_pass = p.dtype != Dtype::kFloat || !(digits || p.channels == 1);  // 16-bit types keep their digits there
  const bool turns = short_backward_turns(p);
  if (!empty && one_pass &&
      short_enough(p.batch, p.channels, p.in_len, p.out_len, p.taps, p.left, {p.xs, turns ? p.xs : p.dys, need_x && !turns ? p.dxs : p.xs})) {
    p.splits = short_backward_splits(p);
    Tensor partial = scratch(x, p.splits * p.channels * (p.taps + 1));
    p.partial = numbers<double>(partial);
    check_cuda(launch_short_backward(p, scope.stream()), "causal_conv1d_backward");
    return {b.dx, b.dw, b.db};
  }

  Gradient g = {grad, p.dys, p.dtype};
  if (silu) {
    if (digits) {
      g = {scratch(x, grad.numel()), {p.channels * p.out_len, p.out_len, 1}, p.dtype == Dtype::kFloat ? Dtype::kDouble : Dtype::kFloat};
    } else {
      g.memory = empty_rows(x, p.batch, p.channels, p.out_len, layout(p.dys, p.channels) == Layout::kChannel);
      g.strides = strides_of(g.memory);
    }
    ConvParams pre = forward_params(x, weight, bias, left, g.memory, shift, false);
    pre.out_len = p.out_len, pre.outs = g.strides, pre.out_dtype = g.dtype;
    pre.dy = p.dy, pre.dys = p.dys, pre.epilogue = Epilogue::kSiluGrad;
    check_cuda(convolve(pre, x, scope.stream()), "causal_conv1d_backward");
  }
  if (need_x) {
    ConvParams d = forward_params(grad, weight, std::nullopt, p.taps - 1 - left, b.dx, 0, false);
    d.x = g.memory.data_ptr(), d.xs = g.strides, d.x_dtype = g.dtype;
    d.w = static_cast<const char*>(p.w) + (p.taps - 1) * p.w_k * static_cast<int64_t>(weight.element_size());
    d.w_k = -p.w_k;
    check_cuda(convolve(d, x, scope.stream()), "causal_conv1d_backward");
  }
  if (need_weight || need_bias) weight_gradient(p, g, x, scope.stream());
  return {b.dx, b.dw, b.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d));
  m.impl("causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward));
}

}  // namespace fusebackend::conv1d
