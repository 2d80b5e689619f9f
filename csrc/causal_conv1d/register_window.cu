// Launches the kernels of register_window_bct.cuh and register_window_btc.cuh.
#include <algorithm>

#include "causal_conv1d/alignment.h"
#include "causal_conv1d/launchers.h"
#include "causal_conv1d/register_window_bct.cuh"
#include "causal_conv1d/register_window_btc.cuh"

namespace fusebackend::causal_conv1d {
namespace {

constexpr int kMaxTaps = 40;       // of the forward kernels; of (batch, channel, time) with the zero taps in front
constexpr int kMaxGradTaps = 160;  // of the weight-gradient kernels, which take some at a time

// Within the 32-bit indices of the kernels.
template <typename Params>
bool small_enough(const Params& p) {
  return p.batch * (std::max(p.in_len, p.out_len) + 16) < (int64_t{1} << 31) && p.left > -(1 << 20) && p.left < (1 << 20);
}

// f(the tensors that a launch accesses, x first).
template <typename F>
auto with_tensors(const ConvParams& p, F&& f) {
  return f(StridedTensors{{p.x, p.x_stride}, {p.out, p.out_stride}, {p.epilogue == Epilogue::kSiluGrad ? p.dy : nullptr, p.dy_stride}});
}
template <typename F>
auto with_tensors(const WeightGradParams& p, F&& f) {
  return f(StridedTensors{{p.x, p.x_stride}, {p.g, p.g_stride}});
}

template <typename Params>
bool all_btc(const Params& p) {
  const auto btc = [&](const void*, const Strides& s) { return is_btc(s, p.channels); };
  return with_tensors(p, [&](StridedTensors all) { return all_present(all, btc); });
}
template <typename Params>
bool pairs_aligned(const Params& p) {
  return with_tensors(p, [&](StridedTensors all) { return channels_aligned(2, p.channels, p.dtype, all); });
}

template <typename Params>
RowAccess bct_access(const Params& p) {
  const RowAccess access = with_tensors(p, [&](StridedTensors all) { return row_access(p.out_len, p.dtype, all); });
  return access == RowAccess::kAligned && p.in_len % (16 / element_size(p.dtype)) ? RowAccess::kMaskedEnds : access;
}
template <typename Params>
bool bct_supported(const Params& p) {
  const auto bct = [](const void*, const Strides& s) { return s.t == 1; };
  return with_tensors(p, [&](StridedTensors all) { return all_present(all, bct); }) && bct_access(p) != RowAccess::kScalar;
}

// f(taps, access) with both as constants.
template <typename F>
cudaError_t dispatch_taps(int64_t taps, RowAccess access, F&& f) {
  auto with_taps = [&](auto n) {
    if (access == RowAccess::kAligned) return f(n, std::integral_constant<RowAccess, RowAccess::kAligned>{});
    return f(n, std::integral_constant<RowAccess, RowAccess::kMaskedEnds>{});
  };
  if (taps <= 8) return with_taps(std::integral_constant<int, 8>{});
  if (taps <= 12) return with_taps(std::integral_constant<int, 12>{});
  if (taps <= 16) return with_taps(std::integral_constant<int, 16>{});
  if (taps <= 24) return with_taps(std::integral_constant<int, 24>{});
  if (taps <= 36) return with_taps(std::integral_constant<int, 36>{});
  return with_taps(std::integral_constant<int, kMaxTaps>{});
}

template <typename Params>
int64_t padded_taps(const Params& p) { return p.taps + front_zeros(p.left, 16 / element_size(p.dtype)); }

template <typename T, bool LAST_TAP_FIRST>
cudaError_t bct_forward(const ConvParams& p, cudaStream_t stream) {
  const RowAccess access = bct_access(p);
  const RowItems items = row_items(p.batch, p.out_len, p.dtype, access);
  const dim3 grid(static_cast<unsigned>(p.channels), blocks_per_channel(p.channels, items.count));
  return dispatch_taps(padded_taps(p), access, [&](auto taps, auto how) {
    register_window_bct_forward<T, decltype(taps)::value, LAST_TAP_FIRST, decltype(how)::value><<<grid, kRowThreads, 0, stream>>>(p, items);
    return cudaGetLastError();
  });
}

template <typename T>
cudaError_t bct_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  const RowAccess access = bct_access(p);
  const RowItems items = row_items(p.batch, p.out_len, p.dtype, access);
  return dispatch_taps(std::min<int64_t>(padded_taps(p), kMaxTaps), access, [&](auto n, auto how) {
    constexpr int kTaps = decltype(n)::value;
    const dim3 grid(static_cast<unsigned>(p.channels), p.splits, static_cast<unsigned>(ceil_div(padded_taps(p), kTaps)));
    register_window_bct_weight_grad<T, kTaps, decltype(how)::value><<<grid, kRowThreads, 0, stream>>>(p, items);
    return cudaGetLastError();
  });
}

template <int V>
Spans make_spans(int64_t batch, int64_t out_len, int64_t channels, int len, int64_t blocks) {
  Spans s;
  s.len = len;
  s.per_row = FastDiv(static_cast<uint32_t>(ceil_div(out_len, len)));
  s.count = static_cast<uint32_t>(batch * s.per_row.d);
  s.channel_blocks = FastDiv(static_cast<uint32_t>(ceil_div(channels, 32 * V)));
  s.blocks = static_cast<int>(std::clamp<int64_t>(blocks, 1, s.count));
  return s;
}

// Span blocks that give each SM `per_sm` blocks.
int64_t span_blocks(int64_t channels, int v, int64_t per_sm) { return ceil_div(int64_t{sm_count()} * per_sm, ceil_div(channels, 32 * v)); }

template <typename T, bool LAST_TAP_FIRST, int V>
cudaError_t btc_forward(const ConvParams& p, cudaStream_t stream) {
  const int64_t most = ceil_div(p.batch * ceil_div(p.out_len, kSpan), kSpanWarps);
  const Spans s = make_spans<V>(p.batch, p.out_len, p.channels, kSpan, std::min(most, span_blocks(p.channels, V, 32)));
  register_window_btc_forward<T, V, LAST_TAP_FIRST><<<s.channel_blocks.d * s.blocks, dim3(32, kSpanWarps), p.taps * 32 * V * 4, stream>>>(p, s);
  return cudaGetLastError();
}

constexpr int kGradSpan = 128;

template <typename T, int V>
cudaError_t btc_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  const Spans s = make_spans<V>(p.batch, p.out_len, p.channels, kGradSpan, p.splits);
  const dim3 grid(s.channel_blocks.d * s.blocks, static_cast<unsigned>(ceil_div(p.taps, kTapStep * kSpanWarps)));
  register_window_btc_weight_grad<T, V><<<grid, dim3(32, kSpanWarps), 0, stream>>>(p, s);
  return cudaGetLastError();
}

}  // namespace

int64_t register_window_taps(const ConvParams& p) { return padded_taps(p); }

bool register_window_supported(const ConvParams& p) {
  if (p.x_dtype != p.dtype || p.out_dtype != p.dtype || !small_enough(p)) return false;
  return (p.taps <= kMaxTaps && all_btc(p)) || (padded_taps(p) <= kMaxTaps && bct_supported(p));
}

cudaError_t launch_register_window_forward(const ConvParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto last_tap_first) {
      constexpr bool kLastTapFirst = decltype(last_tap_first)::value;
      if (!all_btc(p)) return bct_forward<T, kLastTapFirst>(p, stream);
      return pairs_aligned(p) ? btc_forward<T, kLastTapFirst, 2>(p, stream) : btc_forward<T, kLastTapFirst, 1>(p, stream);
    };
    if constexpr (sizeof(T) == 4) {  // the order of eager mode's sums matters in fp32 only
      if (p.w_stride.k < 0) return launch(std::true_type{});
    }
    return launch(std::false_type{});
  });
}

bool register_window_weight_grad_supported(const WeightGradParams& p) {
  if (p.g_dtype != p.dtype || !small_enough(p)) return false;
  return (p.taps <= kMaxGradTaps && all_btc(p)) || (p.taps + 8 <= kMaxGradTaps && bct_supported(p));
}

int register_window_weight_grad_splits(const WeightGradParams& p) {
  if (all_btc(p)) return static_cast<int>(std::min(span_blocks(p.channels, 2, 12), p.batch * ceil_div(p.out_len, kGradSpan)));
  return blocks_per_channel(p.channels, row_items(p.batch, p.out_len, p.dtype, bct_access(p)).count);
}

cudaError_t launch_register_window_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (all_btc(p)) return pairs_aligned(p) ? btc_weight_grad<T, 2>(p, stream) : btc_weight_grad<T, 1>(p, stream);
    return bct_weight_grad<T>(p, stream);
  });
}

}  // namespace fusebackend::causal_conv1d
