// Operators without tensors: what Python asks about the kernels, where there is no GPU as well.
//
//   causal_conv1d_limits() -> (int samples, int taps, int tiles, int tile_samples)
//   causal_conv1d_prefers_btc(int element_size, int taps) -> bool
//   causal_conv1d_transposes_btc(int element_size, int channels, int length, int taps, bool backward) -> bool
#include "causal_conv1d/bind.h"
#include "causal_conv1d/memory_order.h"
#include "common/binding.h"

namespace fusebackend::causal_conv1d {
namespace {

std::tuple<int64_t, int64_t, int64_t, int64_t> limits() { return {kMaxSamples, kMaxTaps, kMaxTiles, kTileSamples}; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("causal_conv1d_limits", TORCH_BOX(&limits));
  m.impl("causal_conv1d_prefers_btc", TORCH_BOX(&prefers_btc));
  m.impl("causal_conv1d_transposes_btc", TORCH_BOX(&transposes_btc));
}

}  // namespace fusebackend::causal_conv1d
