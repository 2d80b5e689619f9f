#include "common/direct_call.h"
#include "foreach_cast/foreach_cast.h"

namespace fusebackend::foreach_cast {
namespace {

std::vector<Tensor> foreach_cast(const std::vector<Tensor>& tensors, ScalarType dtype) {
  STD_TORCH_CHECK(!tensors.empty(), "foreach_cast: tensors is empty; at least one is needed");
  const Tensor& first = tensors[0];
  const auto from = to_dtype(first.scalar_type()), to = to_dtype(dtype);
  const bool supported = from && to && ((*from == DType::kFloat32 && is_half(*to)) || (is_half(*from) && *to == DType::kFloat32));
  STD_TORCH_CHECK(supported, "foreach_cast: these dtypes are not supported; float32 to 16-bit floats and back are");
  const CudaScope scope(first);
  std::vector<Tensor> results;
  results.reserve(tensors.size());
  Stretches stretches;
  const auto flush = [&] {
    if (stretches.count > 0) check_cuda(launch(stretches, *from, *to, scope.stream()), "foreach_cast");
    stretches.count = 0;
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    STD_TORCH_CHECK(t.scalar_type() == first.scalar_type(), "foreach_cast: tensors[", i, "] has another dtype; one dtype is needed");
    STD_TORCH_CHECK(on_same_device(t, first), "foreach_cast: tensors[", i, "] is on another device");
    STD_TORCH_CHECK(covers_memory(t), "foreach_cast: tensors[", i, "] has gaps, or elements that share memory");
    Tensor& result = results.emplace_back(empty_strided_like(t, to_vector(t.sizes()), to_vector(t.strides()), dtype));
    if (t.numel() == 0) continue;
    if (stretches.count == kMostTensors) flush();
    stretches.from[stretches.count] = t.data_ptr();
    stretches.to[stretches.count] = result.data_ptr();
    stretches.elements[stretches.count++] = t.numel();
  }
  flush();
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { direct::implement<&foreach_cast>(m, "CUDA", "foreach_cast"); }

}  // namespace fusebackend::foreach_cast
