#include "causal_conv1d/work.h"

#include <algorithm>

#include "causal_conv1d/route_limits.h"
#include "common/facts.h"

namespace fusebackend::causal_conv1d {
namespace {

enum class Kind { kTile, kShort, kWindow, kTensorCores, kFft };

template <typename Params>
bool short_and_causal(const Params& p) {
  return p.taps >= kMinShortTaps && p.taps <= kMaxShortTaps && p.left == p.taps - 1 && p.in_len == p.out_len;
}

Kind kind_of(const ConvParams& p) {
  if ((is_fp32(p.dtype) && p.channels == 1) || p.x_dtype != p.dtype || p.out_dtype != p.dtype) return Kind::kTile;
  const bool in_btc = is_btc(p.x_stride, p.channels), out_btc = is_btc(p.out_stride, p.channels);
  if (short_and_causal(p) && p.epilogue != Epilogue::kSiluGrad && p.epilogue != Epilogue::kChannel && p.w_stride.k >= 0 && (in_btc || !out_btc)) return Kind::kShort;
  const int64_t most = in_btc ? kMaxRegisterTaps : is_fp32(p.dtype) ? kRegisterTapsFp32 : has_toeplitz_size(p) ? kRegisterTaps : kMaxRegisterTaps;
  if (in_btc == out_btc && p.taps <= most) return Kind::kWindow;
  if (p.epilogue == Epilogue::kChannel) {
    const bool in_registers = !is_fp32(p.dtype) && p.batch >= kRegisterToeplitzBatch && is_within_reach(p);
    if (!in_btc && !out_btc && has_toeplitz_size(p) && in_registers) return Kind::kTensorCores;
    return !is_fp32(p.dtype) && in_btc == out_btc && p.taps <= kMaxRegisterTaps ? Kind::kWindow : Kind::kTile;
  }
  if (is_fp32(p.dtype) && p.out_len < kManyResults) return Kind::kTile;
  const bool on_tensor_cores = has_toeplitz_size(p);
  const bool fits = p.in_len + p.taps - 1 <= kMaxFftPoints;
  if (has_fft_size(p) && fits && fft_picoseconds(p) < products_picoseconds(p, on_tensor_cores)) return Kind::kFft;
  return on_tensor_cores ? Kind::kTensorCores : Kind::kTile;
}

constexpr int64_t kWarp = 32;

// Channels of a thread in (batch, time, channel).
int64_t vector_of(int64_t channels) { return channels % 4 == 0 ? 4 : 1; }

// What a kernel of tensor cores has in shared memory: as many groups of eight rows as fit, up to four.
int64_t tensor_core_rows(int64_t batch, int64_t len) {
  constexpr int64_t kSharedBytes = 112 * 1024, kSampleBytes = 2;
  int64_t rows = 8;
  while (rows < std::min<int64_t>(batch, 32) && 2 * rows * len * kSampleBytes <= kSharedBytes) rows *= 2;
  return rows;
}

int64_t blocks(int64_t batch, int64_t channels, int64_t len, DType dtype, bool in_btc, Kind kind, int sm_count) {
  constexpr int64_t kThreads = 256, kStrip = 32, kStripsPerBlock = 8, kBlocksPerSm = 16;
  if (kind == Kind::kTensorCores) return channels * ceil_div(batch, tensor_core_rows(batch, len));
  if (kind == Kind::kFft) return std::min<int64_t>(sm_count, channels * ceil_div(batch, 2));
  if (kind == Kind::kTile) return batch * channels * ceil_div(len, 8 * kThreads);
  if (in_btc) return ceil_div(channels, kWarp * vector_of(channels)) * ceil_div(batch * ceil_div(len, kStrip), kStripsPerBlock);
  const int64_t vectors = batch * ceil_div(len * int64_t(element_size(dtype)), 16);
  return channels * std::clamp<int64_t>(std::min(ceil_div(sm_count * kBlocksPerSm, channels), ceil_div(vectors, 2 * kThreads)), 1, 65535);
}

// Of the smallest block of toeplitz_forward.cu, rounded up: eight rows of x, two copies of the taps between zeros, and the rest.
int64_t tensor_core_shared_bytes(const ConvParams& p) {
  constexpr int64_t kRest = 24 * 1024, kRowEnd = 256, kZeroTaps = 512;
  const int64_t item = int64_t(element_size(p.dtype));
  return std::min<int64_t>(p.batch, 8) * (p.in_len * item + kRowEnd) + 2 * (p.taps + kZeroTaps) * item + (is_fp32(p.dtype) ? kRest / 8 : kRest);
}

void write(FactText& facts, Kind kind, bool doubles, bool in_btc, int64_t channels) {
  const bool strips = in_btc && (kind == Kind::kShort || kind == Kind::kWindow);
  const int64_t per_warp = kWarp * vector_of(channels);
  facts.add("short", kind == Kind::kShort).add("window", kind == Kind::kWindow).add("tensor_cores", kind == Kind::kTensorCores)
      .add("fft", kind == Kind::kFft).add("doubles", doubles)
      .add("lanes", strips ? double(ceil_div(channels, per_warp) * per_warp) / double(channels) : 1.0);
}

}  // namespace

std::string work_of(const ConvParams& p, int sm_count) {
  const bool in_btc = is_btc(p.x_stride, p.channels);
  const Kind kind = kind_of(p);
  FactText facts;
  facts.add("blocks", blocks(p.batch, p.channels, p.out_len, p.dtype, in_btc, kind, sm_count));
  write(facts, kind, is_fp32(p.dtype) && p.channels == 1, in_btc, p.channels);
  facts.add("shared", kind == Kind::kTensorCores ? tensor_core_shared_bytes(p) : 0);
  return facts.str();
}

std::string work_of(const BackwardParams& p, int sm_count) {
  const bool fp32 = is_fp32(p.dtype), widens = p.silu && has_few_results(p), in_btc = is_btc(p.x_stride, p.channels);
  const bool same_order = is_btc(p.dy_stride, p.channels) == in_btc && is_btc(p.dx_stride, p.channels) == in_btc;
  const bool transposes = in_btc && !fp32 && !is_btc(p.dy_stride, p.channels) && !is_btc(p.dx_stride, p.channels);
  const bool one_pass = short_and_causal(p) && (same_order || transposes) && !(fp32 && (widens || p.channels == 1));
  ConvParams conv = {};
  conv.batch = p.batch, conv.channels = p.channels, conv.in_len = p.out_len, conv.out_len = p.in_len, conv.taps = p.taps;
  conv.left = p.taps - 1 - p.left;
  conv.x_stride = p.dy_stride, conv.out_stride = p.dx_stride, conv.w_stride = {p.taps, -1};
  conv.dtype = conv.x_dtype = conv.out_dtype = p.dtype;
  if (widens) conv.x_dtype = fp32 ? DType::kFloat64 : DType::kFloat32;
  const bool weight_grad = p.dw || p.db;
  const int convolutions = one_pass ? 0 : int(p.silu) + (p.dx ? 1 : 0);
  const bool grad_tensor_cores = p.taps >= (fp32 ? kToeplitzTapsFp32 : kToeplitzTaps) && p.channels > 1 && !widens;
  const bool few = fp32 && (p.channels < kManyResults || p.batch * p.out_len < kRegisterGradSamplesFp32);
  const bool grad_window = !widens && !few && p.taps <= kMaxRegisterGradTaps && (in_btc || p.taps <= kRegisterTaps || !grad_tensor_cores);
  const int64_t width = !p.silu || one_pass ? 0 : int64_t(element_size(p.dtype)) * (widens ? 2 : 1);
  const Kind kind = one_pass ? Kind::kShort : kind_of(conv);
  FactText facts;
  facts.add("blocks", blocks(p.batch, p.channels, p.in_len, p.dtype, in_btc, kind, sm_count)).add("one_pass", one_pass).add("convolutions", convolutions)
      .add("launches", one_pass ? 2 : convolutions + (weight_grad ? 2 : 0)).add("grad_window", !one_pass && grad_window)
      .add("grad_tensor_cores", !one_pass && !grad_window && grad_tensor_cores).add("wide_bytes", width * p.batch * p.channels * p.out_len);
  write(facts, kind, fp32 && (p.channels == 1 || widens), in_btc, p.channels);
  return facts.str();
}

}  // namespace fusebackend::causal_conv1d
