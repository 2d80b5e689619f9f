// Launches the kernels of taps_time_major.cuh and taps_channel_major.cuh.
#include "channel_major_plan.cuh"
#include "conv1d_cuda.h"
#include "taps_channel_major.cuh"
#include "taps_time_major.cuh"
#include "time_major_plan.cuh"

namespace fusebackend::conv1d {
namespace {

constexpr int kMaxTaps = 40;       // zero taps in front included
constexpr int kMaxGradTaps = 160;  // of a weight gradient, some at a time

bool time_major(const Strides& s) { return s.t == 1; }

bool moderate(int64_t batch, int64_t in_len, int64_t out_len, int64_t left) {
  return batch * (std::max(in_len, out_len) + 16) < (int64_t{1} << 31) && left > -(1 << 20) && left < (1 << 20);
}
template <typename P>
bool moderate(const P& p) { return moderate(p.batch, p.in_len, p.out_len, p.left); }

bool channel_major(const ConvParams& p) {
  return p.taps <= kMaxTaps && channel_major(p.xs, p.channels) && channel_major(p.outs, p.channels) &&
         (p.epilogue != Epilogue::kSiluGrad || channel_major(p.dys, p.channels));
}
bool channel_major(const WeightGradParams& p) {
  return p.taps <= kMaxGradTaps && channel_major(p.xs, p.channels) && channel_major(p.gs, p.channels);
}

template <typename T>
Access access_of(const ConvParams& p) {
  const void* dy = p.epilogue == Epilogue::kSiluGrad ? p.dy : nullptr;
  const Access access = row_access<T>(p.out_len, {{p.x, p.xs}, {p.out, p.outs}, {dy, p.dys}});
  return access == Access::kWhole && p.in_len % kVecElems<T> ? Access::kVector : access;
}

template <typename T>
Access access_of(const WeightGradParams& p) {
  const Access access = row_access<T>(p.out_len, {{p.x, p.xs}, {p.g, p.gs}});
  return access == Access::kWhole && p.in_len % kVecElems<T> ? Access::kVector : access;
}

// f(taps, access) with both as constants.
template <typename F>
cudaError_t dispatch_taps(int64_t taps, Access access, F&& f) {
  auto with_taps = [&](auto n) {
    if (access == Access::kWhole) return f(n, std::integral_constant<Access, Access::kWhole>{});
    return f(n, std::integral_constant<Access, Access::kVector>{});
  };
  if (taps <= 8) return with_taps(std::integral_constant<int, 8>{});
  if (taps <= 12) return with_taps(std::integral_constant<int, 12>{});
  if (taps <= 16) return with_taps(std::integral_constant<int, 16>{});
  if (taps <= 24) return with_taps(std::integral_constant<int, 24>{});
  if (taps <= 36) return with_taps(std::integral_constant<int, 36>{});
  return with_taps(std::integral_constant<int, kMaxTaps>{});
}

template <typename T, bool DOWN>
cudaError_t forward(const ConvParams& p, cudaStream_t stream) {
  const Access access = access_of<T>(p);
  const ShortRows rows = plan_rows<T>(p.batch, p.out_len, access);
  const dim3 grid(static_cast<unsigned>(p.channels), time_major_splits(p.channels, rows.items));
  return dispatch_taps(p.taps + lead_of<T>(p.left), access, [&](auto taps, auto how) {
    taps_time_major_forward<T, decltype(taps)::value, DOWN, decltype(how)::value><<<grid, kShortThreads, 0, stream>>>(p, rows);
    return cudaGetLastError();
  });
}

template <int V>
Spans plan_spans(int64_t batch, int64_t out_len, int64_t channels, int len, int64_t blocks) {
  Spans s;
  s.len = len;
  s.per_row = FastDiv(static_cast<uint32_t>(ceil_div(out_len, len)));
  s.count = static_cast<uint32_t>(batch * s.per_row.d);
  s.channel_blocks = FastDiv(static_cast<uint32_t>(ceil_div(channels, 32 * V)));
  s.blocks = static_cast<int>(std::clamp<int64_t>(blocks, 1, s.count));
  return s;
}

// Blocks of spans that fill the device a few times over.
int64_t span_blocks(int64_t channels, int v, int64_t turns) { return ceil_div(int64_t{sm_count()} * turns, ceil_div(channels, 32 * v)); }

template <typename T, int V>
cudaError_t channel_major_forward(const ConvParams& p, cudaStream_t stream) {
  const int64_t spans = ceil_div(p.batch * ceil_div(p.out_len, kSpan), kSpanWarps);
  const Spans s = plan_spans<V>(p.batch, p.out_len, p.channels, kSpan, std::min(spans, span_blocks(p.channels, V, 32)));
  auto* kernel = sizeof(T) == 4 && p.w_k < 0 ? taps_channel_major_forward<T, V, true> : taps_channel_major_forward<T, V, false>;
  kernel<<<s.channel_blocks.d * s.blocks, dim3(32, kSpanWarps), p.taps * 32 * V * 4, stream>>>(p, s);
  return cudaGetLastError();
}

constexpr int kGradSpan = 128;

int64_t channel_major_splits(const WeightGradParams& p) {
  return std::min(span_blocks(p.channels, 2, 12), p.batch * ceil_div(p.out_len, kGradSpan));
}

template <typename T, int V>
cudaError_t channel_major_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  const Spans s = plan_spans<V>(p.batch, p.out_len, p.channels, kGradSpan, p.splits);
  const dim3 grid(s.channel_blocks.d * s.blocks, static_cast<unsigned>(ceil_div(p.taps, kTapStep * kSpanWarps)));
  taps_channel_major_weight_grad<T, V><<<grid, dim3(32, kSpanWarps), 0, stream>>>(p, s);
  return cudaGetLastError();
}

template <typename T>
int64_t gradient_items(const WeightGradParams& p) { return plan_rows<T>(p.batch, p.out_len, access_of<T>(p)).items; }

}  // namespace

int64_t taps_with_lead(const ConvParams& p) { return p.taps + (p.dtype == Dtype::kFloat ? lead_of<float>(p.left) : lead_of<__half>(p.left)); }

bool taps_supported(const ConvParams& p) {
  if (p.x_dtype != p.dtype || p.out_dtype != p.dtype || !moderate(p)) return false;
  if (channel_major(p)) return true;
  if (!time_major(p.xs) || !time_major(p.outs) || (p.epilogue == Epilogue::kSiluGrad && !time_major(p.dys))) return false;
  return dispatch_dtype(p.dtype, [&](auto type) {
           using T = decltype(type);
           return p.taps + lead_of<T>(p.left) <= kMaxTaps && access_of<T>(p) != Access::kElement ? cudaSuccess : cudaErrorNotSupported;
         }) == cudaSuccess;
}

// The order of a sum is that of eager mode, bit for bit, in fp32 only: see window.cu.
cudaError_t launch_taps_forward(const ConvParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (channel_major(p)) {
      const void* dy = p.epilogue == Epilogue::kSiluGrad ? p.dy : nullptr;
      if (p.channels % 2 == 0 && vector_aligned<T, 2>({{p.x, p.xs}, {p.out, p.outs}, {dy, p.dys}})) return channel_major_forward<T, 2>(p, stream);
      return channel_major_forward<T, 1>(p, stream);
    }
    if constexpr (sizeof(T) == 4) {
      if (p.w_k < 0) return forward<T, true>(p, stream);
    }
    return forward<T, false>(p, stream);
  });
}

bool taps_weight_grad_supported(const WeightGradParams& p) {
  if (p.g_dtype != p.dtype || !moderate(p)) return false;
  if (channel_major(p)) return true;
  if (p.taps + 8 > kMaxGradTaps || !time_major(p.xs) || !time_major(p.gs)) return false;
  return (p.dtype == Dtype::kFloat ? access_of<float>(p) : access_of<__half>(p)) != Access::kElement;
}

int taps_weight_grad_splits(const WeightGradParams& p) {
  if (channel_major(p)) return static_cast<int>(channel_major_splits(p));
  return time_major_splits(p.channels, p.dtype == Dtype::kFloat ? gradient_items<float>(p) : gradient_items<__half>(p));
}

cudaError_t launch_taps_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  const cudaError_t e = dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (channel_major(p)) {
      if (p.channels % 2 == 0 && vector_aligned<T, 2>({{p.x, p.xs}, {p.g, p.gs}})) return channel_major_weight_grad<T, 2>(p, stream);
      return channel_major_weight_grad<T, 1>(p, stream);
    }
    const Access access = access_of<T>(p);
    const ShortRows rows = plan_rows<T>(p.batch, p.out_len, access);
    const int64_t taps = p.taps + lead_of<T>(p.left);
    return dispatch_taps(std::min<int64_t>(taps, kMaxTaps), access, [&](auto n, auto how) {
      constexpr int kTaps = decltype(n)::value;
      const dim3 grid(static_cast<unsigned>(p.channels), p.splits, static_cast<unsigned>(ceil_div(taps, kTaps)));
      taps_time_major_weight_grad<T, kTaps, decltype(how)::value><<<grid, kShortThreads, 0, stream>>>(p, rows);
      return cudaGetLastError();
    });
  });
  return e != cudaSuccess ? e : launch_reduce_partials(p.partial, p.splits, p.channels, p.taps, p.dw, p.db, p.dtype, stream);
}

}  // namespace fusebackend::conv1d
