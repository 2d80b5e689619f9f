// Operators without tensors, compiled into every library: what Python asks of the kernels, where there is no GPU as well.
//
//   attention_limits() -> (int biases, int head_dim, int head_dim_multiple): the most biases, and which sizes a head may have
#include <tuple>

#include "attention/attention.h"
#include "common/binding.h"

namespace fusebackend::attention {
namespace {

std::tuple<int64_t, int64_t, int64_t> attention_limits() { return {kMaxBiases, kMaxHeadDim, kHeadDimMultiple}; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) { m.impl("attention_limits", TORCH_BOX(&attention_limits)); }

}  // namespace fusebackend::attention
