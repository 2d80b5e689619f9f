// Operators without tensors: what Python asks about the CUDA kernels, where there is no GPU as well.
//
//   causal_conv1d_prefers_btc(int element_size, int taps) -> bool
//   causal_conv1d_transposes_btc(int element_size, int channels, int length, int taps, bool backward) -> bool
#include "causal_conv1d/memory_order.h"
#include "common/binding.h"

namespace fusebackend::causal_conv1d {

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("causal_conv1d_prefers_btc", TORCH_BOX(&prefers_btc));
  m.impl("causal_conv1d_transposes_btc", TORCH_BOX(&transposes_btc));
}

}  // namespace fusebackend::causal_conv1d
