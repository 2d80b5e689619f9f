// Cuts the CPU kernels' work into units, and chooses between what this file is compiled for and AVX-512.
#include "causal_conv1d/cpu_launch.h"

#include <algorithm>

#include "causal_conv1d/cpu_kernels.h"
#include "common/cpu_features.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

constexpr int64_t kMaxLanes = 16;   // of a vector of any width
constexpr int64_t kManyTaps = 256;  // from here on it pays to transpose samples, so that channels are the lanes

}  // namespace

ForwardUnits forward_units(const ConvParams& p) {
  const bool x_btc = is_btc(p.x_stride, p.channels), out_btc = is_btc(p.out_stride, p.channels), any_btc = x_btc || out_btc;
  ForwardUnits units;
  // With fewer channels than a vector may have lanes, most lanes would be idle.
  units.channels_in_lanes = p.channels >= kMaxLanes && (any_btc || std::min(p.taps, p.in_len) >= kManyTaps);
  if (units.channels_in_lanes) {
    // Equal parts whose taps, and the samples that these meet, stay in the second-level cache. Transposed samples are scattered over as many
    // pages as channels.
    const bool transposes = !x_btc || !out_btc;
    const int64_t most = std::clamp<int64_t>((1 << 16) / p.taps, 32, transposes ? 64 : 512), parts = ceil_div(p.channels, most);
    units.channels = ceil_div(p.channels, parts * kMaxLanes) * kMaxLanes;
    units.samples = std::max<int64_t>(transposes ? 256 : 64, 2 * p.taps / 16 * 16);
  } else {
    // Two cache lines of channels where these are contiguous. Scratch stays in the first-level cache, and is more than the taps by which units
    // overlap.
    units.channels = any_btc ? 128 / element_size(p.dtype) : 1;
    units.samples = std::max<int64_t>(units.channels == 1 ? 2048 : 256, 4 * p.taps / 256 * 256);
  }
  units.groups = ceil_div(p.channels, units.channels);
  units.tiles = ceil_div(p.out_len, units.samples);
  return units;
}

int64_t backward_unit_channels(const BackwardParams& p) {
  const bool any_btc = is_btc(p.x_stride, p.channels) || is_btc(p.dy_stride, p.channels) || (p.dx && is_btc(p.dx_stride, p.channels));
  return any_btc ? 64 / element_size(p.dtype) : 1;  // a cache line
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels kernels = may_use_avx512() ? avx512_kernels() : CpuKernels{forward_range, backward_range};
  return kernels;
}

}  // namespace fusebackend::causal_conv1d
