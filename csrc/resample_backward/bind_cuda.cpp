#include "common/device_properties.h"
#include "common/direct_call.h"
#include "common/workspace.h"
#include "resample_backward/binding.h"

namespace fusebackend::resample_backward {
namespace {

Tensor resample_backward(const Tensor& grad, int64_t dim, const std::vector<Tensor>& indices, const std::vector<Tensor>& weights, const Sizes& terms,
                         const Sizes& axis_sizes, const Sizes& order, ScalarType dtype) {
  Sizes sizes;
  Problem p = describe(to_vector(grad.sizes()), to_vector(grad.strides()), dim, terms, axis_sizes, order, grad.scalar_type(), dtype, sizes);
  int64_t count = 0;
  for (const int64_t n : terms) count += n;
  STD_TORCH_CHECK(static_cast<int64_t>(indices.size()) == count, "resample_backward: ", indices.size(), " indices for ", count, " terms");
  STD_TORCH_CHECK(weights.empty() || weights.size() == indices.size(), "resample_backward: ", weights.size(), " weights for ", count, " terms");
  const ScalarType index_dtype = indices[0].scalar_type(), weight_dtype = p.dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(index_dtype == ScalarType::Long || index_dtype == ScalarType::Int, "resample_backward: the indices must be int32 or int64");
  p.index_is_64 = index_dtype == ScalarType::Long;
  std::vector<Tensor> held;  // contiguous ones
  held.reserve(2 * indices.size());
  const auto vector_of = [&](const Tensor& t, int64_t length, ScalarType wanted, const char* what) {
    STD_TORCH_CHECK(t.scalar_type() == wanted, "resample_backward: ", what, " of another dtype");
    STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == length, "resample_backward: ", what, " that is no vector of the gradient's elements along its axis, ", length);
    STD_TORCH_CHECK(on_same_device(t, grad), "resample_backward: tensors on several devices");
    return held.emplace_back(torch::stable::contiguous(t)).data_ptr();
  };
  Tensor out = empty_strided_like(grad, sizes, dense_strides(sizes, order), dtype);
  const CudaScope scope(grad);
  for (size_t k = 0, at = 0; k < terms.size(); ++k) {
    Axis& axis = p.axis[kMostAxes - terms.size() + k];
    for (int64_t t = 0; t < terms[k]; ++t, ++at) {
      axis.term[t].index = vector_of(indices[at], axis.length, index_dtype, "an index");
      axis.term[t].weight = weights.empty() ? nullptr : vector_of(weights[at], axis.length, weight_dtype, "a weight");
    }
  }
  if (out.numel() == 0) {
    STD_TORCH_CHECK(grad.numel() == 0, "resample_backward: every index is out of range of a dimension of size 0");
    return out;
  }
  p.grad = grad.data_ptr(), p.out = out.data_ptr();
  const Plan plan = make_plan(p, sm_count());
  const Workspace tables(plan.table_bytes);
  check_cuda(launch(p, plan, tables.data(), scope.stream()), "resample_backward");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { direct::implement<&resample_backward>(m, "CUDA", "resample_backward"); }

}  // namespace fusebackend::resample_backward
