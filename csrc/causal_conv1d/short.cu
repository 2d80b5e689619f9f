#include <algorithm>

#include "channel_major_plan.cuh"
#include "conv1d_cuda.h"
#include "short_channel_major.cuh"
#include "short_turned.cuh"
#include "time_major_plan.cuh"

namespace fusebackend::conv1d {
namespace {

template <int V>
Strips plan_strips(int64_t batch, int64_t len, int64_t channels, int samples, int64_t max_blocks) {
  Strips s;
  s.len = samples;
  s.per_row = FastDiv(static_cast<uint32_t>(ceil_div(len, samples)));
  s.count = batch * s.per_row.d;
  s.channel_blocks = FastDiv(static_cast<uint32_t>(ceil_div(channels, 32 * V)));
  s.blocks = static_cast<int>(std::min(ceil_div(s.count, kStripThreads / 32), max_blocks));
  return s;
}

template <typename F>
cudaError_t dispatch_taps(int64_t taps, F&& f) {
  switch (taps) {
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    default: return cudaErrorInvalidValue;
  }
}

// Samples a strip (measured on an H200). A strip reads K-1 samples that its neighbours read as well, backward twice that.
constexpr int kStripLen = 32, kBackwardStripLen = 256;
constexpr int64_t kMaxStripBlocks = 4096;

template <typename T, int K, int V>
cudaError_t channel_major_forward(const ConvParams& p, cudaStream_t stream) {
  const Strips s = plan_strips<V>(p.batch, p.in_len, p.channels, kStripLen, kMaxStripBlocks);
  return dispatch_silu<(V > 1)>(p.epilogue == Epilogue::kSilu, [&](auto silu) {
    short_channel_major_forward<T, K, V, 8, decltype(silu)::value><<<s.channel_blocks.d * s.blocks, dim3(32, kStripThreads / 32), 0, stream>>>(p, s);
    return cudaGetLastError();
  });
}

// Strips of the turning kernels: shorter than those measured best where blocks would be too few to fill the device.
constexpr int kTurnStrip = 256, kTurnBackwardStrip = 1024;
TurnStrips turn_strips(int64_t batch, int64_t channels, int64_t len, int strip) {
  while (strip > 64 && batch * ceil_div(len, strip) * ceil_div(channels, kTurnBlock) < int64_t{sm_count()} * 6) strip /= 2;
  return {strip, static_cast<int>(ceil_div(len, strip))};
}

using Rows = std::initializer_list<std::pair<const void*, Strides>>;

// What the turning kernels are for: 16-bit x in rows of channels, the others in rows of samples.
bool turns(Dtype dtype, int64_t batch, int64_t channels, int64_t len, const Strides& xs, Rows rows) {
  if (dtype == Dtype::kFloat || !channel_major(xs, channels) || batch > 65535 || len > (1 << 20)) return false;
  return std::all_of(rows.begin(), rows.end(), [](const auto& row) { return !row.first || row.second.t == 1; });
}

// Whether 16 bytes of x's channels may be accessed at once.
bool whole_channels(int64_t channels, const void* x, const Strides& xs) {
  return channels % kTurnVec == 0 && xs.b % kTurnVec == 0 && xs.t % kTurnVec == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
}
// Whether `unit` elements of rows of 16-bit samples may.
bool whole_samples(int unit, int64_t len, Rows rows) {
  return len % unit == 0 && std::all_of(rows.begin(), rows.end(), [&](const auto& row) {
           const auto& [data, s] = row;
           return !data || (s.b % unit == 0 && s.c % unit == 0 && reinterpret_cast<uintptr_t>(data) % (2 * unit) == 0);
         });
}

template <typename T, int K>
cudaError_t turning_forward(const ConvParams& p, cudaStream_t stream) {
  const TurnStrips s = turn_strips(p.batch, p.channels, p.in_len, kTurnStrip);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.channels, kTurnBlock)), s.per_row, static_cast<unsigned>(p.batch));
  short_turning_forward<T, K, 6><<<grid, kTurnThreads, 0, stream>>>(p, s);
  return cudaGetLastError();
}

template <typename T, int K, int UNIT>
cudaError_t turning_backward(const BackwardParams& p, cudaStream_t stream) {
  const TurnStrips s = turn_strips(p.batch, p.channels, p.in_len, kTurnBackwardStrip);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.channels, kTurnBlock)), s.per_row, static_cast<unsigned>(p.batch));
  short_turning_backward<T, K, 4, UNIT><<<grid, kTurnThreads, 0, stream>>>(p, s, whole_channels(p.channels, p.x, p.xs));
  const cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess || (!p.dw && !p.db)) return e;
  return launch_reduce_partials(p.partial, p.splits, p.channels, K, p.dw, p.db, p.dtype, stream);
}

template <typename T, int K>
cudaError_t turned_forward(const ConvParams& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (turns(p.dtype, p.batch, p.channels, p.in_len, p.xs, {{p.out, p.outs}}) && whole_channels(p.channels, p.x, p.xs) &&
        whole_samples(kTurnVec, p.in_len, {{p.out, p.outs}}))
      return turning_forward<T, K>(p, stream);
  }
  const Strips s = plan_strips<kTurnChannels>(p.batch, p.in_len, p.channels, kTurnLen<T>, kMaxStripBlocks);
  return dispatch_silu<sizeof(T) == 4>(p.epilogue == Epilogue::kSilu, [&](auto silu) {
    short_turned_forward<T, K, decltype(silu)::value><<<s.channel_blocks.d * s.blocks, dim3(32, kStripThreads / 32), 0, stream>>>(p, s);
    return cudaGetLastError();
  });
}

// Long strips where they are many enough to fill the device.
int backward_strip_len(const BackwardParams& p) {
  int len = kBackwardStripLen;
  while (len > 32 && p.batch * ceil_div(p.in_len, len) * ceil_div(p.channels, p.dtype == Dtype::kFloat ? 2 : 4) < int64_t{sm_count()} * 512) len /= 2;
  return len;
}

template <typename T, int K, int V>
cudaError_t channel_major_backward(const BackwardParams& p, cudaStream_t stream) {
  const Strips s = plan_strips<V>(p.batch, p.in_len, p.channels, backward_strip_len(p), p.splits);
  const cudaError_t e = dispatch_silu<(V > 1)>(p.silu, [&](auto silu) {
    short_channel_major_backward<T, K, V, 4, decltype(silu)::value><<<s.channel_blocks.d * s.blocks, dim3(32, kStripThreads / 32), 0, stream>>>(p, s);
    return cudaGetLastError();
  });
  if (e != cudaSuccess || (!p.dw && !p.db)) return e;
  return launch_reduce_partials(p.partial, s.blocks, p.channels, K, p.dw, p.db, p.dtype, stream);
}

template <typename T, int K>
cudaError_t time_major_forward(const ConvParams& p, cudaStream_t stream) {
  const Access access = row_access<T>(p.in_len, {{p.x, p.xs}, {p.out, p.outs}});
  const ShortRows rows = plan_rows<T>(p.batch, p.in_len, access);
  const dim3 grid(static_cast<unsigned>(p.channels), time_major_splits(p.channels, rows.items));
  return dispatch_access(access, [&](auto how) {
    constexpr Access A = decltype(how)::value;
    return dispatch_silu<A == Access::kWhole>(p.epilogue == Epilogue::kSilu, [&](auto silu) {
      short_time_major_forward<T, K, 2, decltype(silu)::value, A><<<grid, kShortThreads, 0, stream>>>(p, rows);
      return cudaGetLastError();
    });
  });
}

template <typename T, int K>
cudaError_t time_major_backward(const BackwardParams& p, cudaStream_t stream) {
  const Access access = row_access<T>(p.in_len, {{p.x, p.xs}, {p.dy, p.dys}, {p.dx, p.dxs}});
  const ShortRows rows = plan_rows<T>(p.batch, p.in_len, access);
  const cudaError_t e = dispatch_access(access, [&](auto how) {
    constexpr Access A = decltype(how)::value;
    return dispatch_silu<A == Access::kWhole>(p.silu, [&](auto silu) {
      short_time_major_backward<T, K, decltype(silu)::value, A><<<dim3(static_cast<unsigned>(p.channels), p.splits), kShortThreads, 0, stream>>>(p, rows);
      return cudaGetLastError();
    });
  });
  if (e != cudaSuccess || p.splits == 1 || (!p.dw && !p.db)) return e;
  return launch_reduce_partials(p.partial, p.splits, p.channels, K, p.dw, p.db, p.dtype, stream);
}

}  // namespace

bool short_turns(const ConvParams& p) {
  return channel_major(p.xs, p.channels) && p.outs.t == 1 && p.channels % kTurnChannels == 0 && dispatch_dtype(p.dtype, [&](auto type) {
           return vector_aligned<decltype(type), kTurnChannels>({{p.x, p.xs}}) ? cudaSuccess : cudaErrorNotSupported;
         }) == cudaSuccess;
}

cudaError_t launch_short_forward(const ConvParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    return dispatch_taps(p.taps, [&](auto taps) {
      constexpr int K = decltype(taps)::value;
      if (channel_major(p.xs, p.channels)) {
        if (p.outs.t == 1) return turned_forward<T, K>(p, stream);
        if (p.channels % 4 == 0 && vector_aligned<T, 4>({{p.x, p.xs}, {p.out, p.outs}}))
          return channel_major_forward<T, K, 4>(p, stream);
        return channel_major_forward<T, K, 1>(p, stream);
      }
      return time_major_forward<T, K>(p, stream);
    });
  });
}

bool short_backward_turns(const BackwardParams& p) {
  return turns(p.dtype, p.batch, p.channels, p.in_len, p.xs, {{p.dy, p.dys}, {p.dx, p.dxs}});
}

int short_backward_splits(const BackwardParams& p) {
  if (short_backward_turns(p)) return static_cast<int>(p.batch) * turn_strips(p.batch, p.channels, p.in_len, kTurnBackwardStrip).per_row;
  if (channel_major(p.xs, p.channels)) {
    const int64_t strips = p.batch * ceil_div(p.in_len, backward_strip_len(p));
    return static_cast<int>(std::min<int64_t>(ceil_div(strips, kStripThreads / 32), kMaxStripBlocks));
  }
  return time_major_splits(p.channels, p.batch * ceil_div(p.in_len, p.dtype == Dtype::kFloat ? 4 : 8));
}

cudaError_t launch_short_backward(const BackwardParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    return dispatch_taps(p.taps, [&](auto taps) {
      constexpr int K = decltype(taps)::value;
      if constexpr (sizeof(T) == 2) {
        if (short_backward_turns(p)) {
          const auto whole = [&](int unit) { return whole_samples(unit, p.in_len, {{p.dy, p.dys}, {p.dx, p.dxs}}); };
          if (whole(kTurnVec) && whole_channels(p.channels, p.x, p.xs)) return turning_backward<T, K, kTurnVec>(p, stream);
          if (whole(4)) return turning_backward<T, K, 4>(p, stream);
          return whole(2) ? turning_backward<T, K, 2>(p, stream) : turning_backward<T, K, 1>(p, stream);
        }
      }
      if (!channel_major(p.xs, p.channels)) return time_major_backward<T, K>(p, stream);
      constexpr int V = sizeof(T) == 4 ? 2 : 4;  // more would cost occupancy: taps, sums and two windows are in registers
      if (p.channels % V == 0 && vector_aligned<T, V>({{p.x, p.xs}, {p.dy, p.dys}, {p.dx, p.dxs}}))
        return channel_major_backward<T, K, V>(p, stream);
      return channel_major_backward<T, K, 1>(p, stream);
    });
  });
}

}  // namespace fusebackend::conv1d
