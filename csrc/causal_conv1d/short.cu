// Launches the kernels for short causal convolutions: short_bct.cuh, short_btc.cuh, short_btc_to_bct.cuh, short_btc_to_bct_ldmatrix.cuh.
#include <algorithm>

#include "causal_conv1d/alignment.h"
#include "causal_conv1d/launchers.h"
#include "causal_conv1d/short_bct.cuh"
#include "causal_conv1d/short_btc_to_bct.cuh"
#include "causal_conv1d/short_btc_to_bct_ldmatrix.cuh"

namespace fusebackend::causal_conv1d {
namespace {

static_assert(kTileVec == kTransposeVec);

// f(T{}, K) with the number of taps as a constant.
template <typename F>
cudaError_t dispatch(DType dtype, int64_t taps, F&& f) {
  return dispatch_dtype(dtype, [&](auto type) {
    switch (taps) {
      case 2: return f(type, std::integral_constant<int, 2>{});
      case 3: return f(type, std::integral_constant<int, 3>{});
      case 4: return f(type, std::integral_constant<int, 4>{});
      default: return cudaErrorInvalidValue;
    }
  });
}

// ---- (batch, channel, time) ----

template <typename F>
cudaError_t dispatch_access(RowAccess access, F&& f) {
  switch (access) {
    case RowAccess::kAligned: return f(std::integral_constant<RowAccess, RowAccess::kAligned>{});
    case RowAccess::kMaskedEnds: return f(std::integral_constant<RowAccess, RowAccess::kMaskedEnds>{});
    default: return f(std::integral_constant<RowAccess, RowAccess::kScalar>{});
  }
}

template <typename T, int K>
cudaError_t bct_forward(const ConvParams& p, cudaStream_t stream) {
  const RowAccess access = row_access(p.in_len, p.dtype, {{p.x, p.x_stride}, {p.out, p.out_stride}});
  const RowItems items = row_items(p.batch, p.in_len, p.dtype, access);
  const dim3 grid(static_cast<unsigned>(p.channels), blocks_per_channel(p.channels, items.count));
  return dispatch_access(access, [&](auto how) {
    constexpr RowAccess kAccess = decltype(how)::value;
    return dispatch_silu<kAccess == RowAccess::kAligned>(p.epilogue == Epilogue::kSilu, [&](auto silu) {
      short_bct_forward<T, K, 2, decltype(silu)::value, kAccess><<<grid, kRowThreads, 0, stream>>>(p, items);
      return cudaGetLastError();
    });
  });
}

template <typename T, int K>
cudaError_t bct_backward(const BackwardParams& p, cudaStream_t stream) {
  const RowAccess access = row_access(p.in_len, p.dtype, {{p.x, p.x_stride}, {p.dy, p.dy_stride}, {p.dx, p.dx_stride}});
  const RowItems items = row_items(p.batch, p.in_len, p.dtype, access);
  const dim3 grid(static_cast<unsigned>(p.channels), p.splits);
  return dispatch_access(access, [&](auto how) {
    constexpr RowAccess kAccess = decltype(how)::value;
    return dispatch_silu<kAccess == RowAccess::kAligned>(p.silu, [&](auto silu) {
      short_bct_backward<T, K, decltype(silu)::value, kAccess><<<grid, kRowThreads, 0, stream>>>(p, items);
      return cudaGetLastError();
    });
  });
}

// ---- (batch, time, channel) ----

// Samples of a strip. A strip reads K-1 samples that its neighbour reads as well; backward, twice that.
constexpr int kStripLen = 32, kBackwardStripLen = 256;
constexpr int64_t kMaxStripBlocks = 4096;

template <int V>
Strips make_strips(int64_t batch, int64_t len, int64_t channels, int strip_len, int64_t max_blocks) {
  Strips s;
  s.len = strip_len;
  s.per_row = FastDiv(static_cast<uint32_t>(ceil_div(len, strip_len)));
  s.count = batch * s.per_row.d;
  s.channel_blocks = FastDiv(static_cast<uint32_t>(ceil_div(channels, 32 * V)));
  s.blocks = static_cast<int>(std::min(ceil_div(s.count, kStripThreads / 32), max_blocks));
  return s;
}

// Shorter where strips would be too few to fill the device.
int backward_strip_len(const BackwardParams& p) {
  const int64_t threads = p.batch * ceil_div(p.channels, p.dtype == DType::kFloat32 ? 2 : 4), wanted = int64_t{sm_count()} * 512;
  int len = kBackwardStripLen;
  while (len > 32 && threads * ceil_div(p.in_len, len) < wanted) len /= 2;
  return len;
}

template <typename T, int K, int V>
cudaError_t btc_forward(const ConvParams& p, cudaStream_t stream) {
  const Strips s = make_strips<V>(p.batch, p.in_len, p.channels, kStripLen, kMaxStripBlocks);
  return dispatch_silu<(V > 1)>(p.epilogue == Epilogue::kSilu, [&](auto silu) {
    short_btc_forward<T, K, V, 8, decltype(silu)::value><<<s.channel_blocks.d * s.blocks, dim3(32, kStripThreads / 32), 0, stream>>>(p, s);
    return cudaGetLastError();
  });
}

template <typename T, int K, int V>
cudaError_t btc_backward(const BackwardParams& p, cudaStream_t stream) {
  const Strips s = make_strips<V>(p.batch, p.in_len, p.channels, backward_strip_len(p), p.splits);
  return dispatch_silu<(V > 1)>(p.silu, [&](auto silu) {
    short_btc_backward<T, K, V, 4, decltype(silu)::value><<<s.channel_blocks.d * s.blocks, dim3(32, kStripThreads / 32), 0, stream>>>(p, s);
    return cudaGetLastError();
  });
}

// ---- x (batch, time, channel), everything else (batch, channel, time) ----

constexpr int kTileStripLen = 256, kTileBackwardStripLen = 1024;

// Shorter where blocks would be too few to fill the device.
TileStrips tile_strips(int64_t batch, int64_t channels, int64_t len, int strip_len) {
  while (strip_len > 64 && batch * ceil_div(len, strip_len) * ceil_div(channels, kTileChannels) < int64_t{sm_count()} * 6) strip_len /= 2;
  return {strip_len, static_cast<int>(ceil_div(len, strip_len))};
}

template <typename Params>
dim3 tile_grid(const Params& p, const TileStrips& s) {
  return dim3(static_cast<unsigned>(ceil_div(p.channels, kTileChannels)), s.per_row, static_cast<unsigned>(p.batch));
}

// What the ldmatrix kernels need at least.
template <typename Params>
bool ldmatrix_supported(const Params& p, StridedTensors others) {
  return p.dtype != DType::kFloat32 && is_btc(p.x_stride, p.channels) && p.batch <= 65535 && p.in_len <= (1 << 20) &&
         all_present(others, [](const void*, const Strides& s) { return s.t == 1; });
}
bool backward_transposes(const BackwardParams& p) { return ldmatrix_supported(p, {{p.dy, p.dy_stride}, {p.dx, p.dx_stride}}); }
bool forward_transposes(const ConvParams& p) {
  return is_btc(p.x_stride, p.channels) && p.out_stride.t == 1 && channels_aligned(kTransposeChannels, p.channels, p.dtype, {{p.x, p.x_stride}});
}

template <typename T, int K>
cudaError_t btc_to_bct_forward(const ConvParams& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (ldmatrix_supported(p, {{p.out, p.out_stride}}) && channels_aligned(kTileVec, p.channels, p.dtype, {{p.x, p.x_stride}}) &&
        samples_aligned(kTileVec, p.in_len, p.dtype, {{p.out, p.out_stride}})) {
      const TileStrips s = tile_strips(p.batch, p.channels, p.in_len, kTileStripLen);
      short_btc_to_bct_ldmatrix_forward<T, K, 6><<<tile_grid(p, s), kTileThreads, 0, stream>>>(p, s);
      return cudaGetLastError();
    }
  }
  const Strips s = make_strips<kTransposeChannels>(p.batch, p.in_len, p.channels, kTransposeLen<T>, kMaxStripBlocks);
  return dispatch_silu<sizeof(T) == 4>(p.epilogue == Epilogue::kSilu, [&](auto silu) {
    short_btc_to_bct_forward<T, K, decltype(silu)::value><<<s.channel_blocks.d * s.blocks, dim3(32, kStripThreads / 32), 0, stream>>>(p, s);
    return cudaGetLastError();
  });
}

template <typename T, int K>
cudaError_t btc_to_bct_backward(const BackwardParams& p, cudaStream_t stream) {
  const TileStrips s = tile_strips(p.batch, p.channels, p.in_len, kTileBackwardStripLen);
  const bool whole_vectors = channels_aligned(kTileVec, p.channels, p.dtype, {{p.x, p.x_stride}});
  const auto samples = [&](int vec) { return samples_aligned(vec, p.in_len, p.dtype, {{p.dy, p.dy_stride}, {p.dx, p.dx_stride}}); };
  auto* kernel = samples(kTileVec) && whole_vectors ? short_btc_to_bct_ldmatrix_backward<T, K, 4, kTileVec>
                 : samples(4)                       ? short_btc_to_bct_ldmatrix_backward<T, K, 4, 4>
                 : samples(2)                       ? short_btc_to_bct_ldmatrix_backward<T, K, 4, 2>
                                                    : short_btc_to_bct_ldmatrix_backward<T, K, 4, 1>;
  kernel<<<tile_grid(p, s), kTileThreads, 0, stream>>>(p, s, whole_vectors);
  return cudaGetLastError();
}

template <typename Params>
bool short_and_causal(const Params& p) {
  return p.taps >= kMinShortTaps && p.taps <= kMaxShortTaps && p.left == p.taps - 1 && p.in_len == p.out_len &&
         p.batch * (p.in_len + 8) < (int64_t{1} << 31);
}

}  // namespace

bool short_forward_supported(const ConvParams& p) {
  if (!short_and_causal(p) || p.epilogue == Epilogue::kSiluGrad || p.epilogue == Epilogue::kChannel || p.w_stride.k < 0) return false;
  const MemoryOrder x = memory_order(p.x_stride, p.channels);
  return x != MemoryOrder::kOther && (x == memory_order(p.out_stride, p.channels) || forward_transposes(p));
}

cudaError_t launch_short_forward(const ConvParams& p, cudaStream_t stream) {
  return dispatch(p.dtype, p.taps, [&](auto type, auto taps) {
    using T = decltype(type);
    constexpr int K = decltype(taps)::value;
    if (!is_btc(p.x_stride, p.channels)) return bct_forward<T, K>(p, stream);
    if (p.out_stride.t == 1) return btc_to_bct_forward<T, K>(p, stream);
    const bool aligned = channels_aligned(4, p.channels, p.dtype, {{p.x, p.x_stride}, {p.out, p.out_stride}});
    return aligned ? btc_forward<T, K, 4>(p, stream) : btc_forward<T, K, 1>(p, stream);
  });
}

bool short_backward_supported(const BackwardParams& p) {
  if (!short_and_causal(p)) return false;
  const MemoryOrder x = memory_order(p.x_stride, p.channels);
  const auto as_x = [&](const Strides& s) { return memory_order(s, p.channels) == x; };
  return x != MemoryOrder::kOther && (backward_transposes(p) || (as_x(p.dy_stride) && (!p.dx || as_x(p.dx_stride))));
}

int short_backward_splits(const BackwardParams& p) {
  if (backward_transposes(p)) return static_cast<int>(p.batch) * tile_strips(p.batch, p.channels, p.in_len, kTileBackwardStripLen).per_row;
  if (is_btc(p.x_stride, p.channels)) {
    const int64_t strips = p.batch * ceil_div(p.in_len, backward_strip_len(p));
    return static_cast<int>(std::min<int64_t>(ceil_div(strips, kStripThreads / 32), kMaxStripBlocks));
  }
  return blocks_per_channel(p.channels, p.batch * ceil_div(p.in_len, 16 / element_size(p.dtype)));
}

cudaError_t launch_short_backward(const BackwardParams& p, cudaStream_t stream) {
  const bool in_btc = is_btc(p.x_stride, p.channels);
  const cudaError_t e = dispatch(p.dtype, p.taps, [&](auto type, auto taps) {
    using T = decltype(type);
    constexpr int K = decltype(taps)::value;
    if (!in_btc) return bct_backward<T, K>(p, stream);
    if constexpr (sizeof(T) == 2) {
      if (backward_transposes(p)) return btc_to_bct_backward<T, K>(p, stream);
    }
    constexpr int V = sizeof(T) == 4 ? 2 : 4;  // more would cost occupancy: taps, sums and two windows are in registers
    const bool aligned = channels_aligned(V, p.channels, p.dtype, {{p.x, p.x_stride}, {p.dy, p.dy_stride}, {p.dx, p.dx_stride}});
    return aligned ? btc_backward<T, K, V>(p, stream) : btc_backward<T, K, 1>(p, stream);
  });
  if (e != cudaSuccess || (!in_btc && p.splits == 1)) return e;  // one block a channel writes dw and db itself
  return launch_reduce_partials(p, stream);
}

}  // namespace fusebackend::causal_conv1d
