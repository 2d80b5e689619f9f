// Operators without tensors: what Python asks about the kernels, where there is no GPU as well.
//
//   depthwise_conv_limits() -> (int taps, int step, int side, int planes)
#include <tuple>

#include "common/binding.h"
#include "depthwise_conv/limits.h"

namespace fusebackend::depthwise_conv {
namespace {

std::tuple<int64_t, int64_t, int64_t, int64_t> limits() { return {kMaxTaps, kMaxStep, kMaxSide, kMaxPlanes}; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) { m.impl("depthwise_conv_limits", TORCH_BOX(&limits)); }

}  // namespace fusebackend::depthwise_conv
