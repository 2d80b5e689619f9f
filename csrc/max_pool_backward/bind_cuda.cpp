#include "common/device_properties.h"
#include "common/direct_call.h"
#include "max_pool_backward/binding.h"

namespace fusebackend::max_pool_backward {
namespace {

Tensor max_pool_backward(const Tensor& grad, const Tensor& offsets, const Sizes& axis_sizes, const Sizes& kernel, const Sizes& stride, const Sizes& padding,
                         const Sizes& dilation, const Sizes& order) {
  const Sizes grad_sizes = to_vector(grad.sizes());
  STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Char, "max_pool_backward: the offsets must be int8");
  STD_TORCH_CHECK(to_vector(offsets.sizes()) == grad_sizes, "max_pool_backward: the offsets must have the gradient's sizes");
  STD_TORCH_CHECK(on_same_device(offsets, grad), "max_pool_backward: tensors on several devices");
  Sizes sizes;
  Problem p = describe(grad_sizes, to_vector(grad.strides()), to_vector(offsets.strides()), axis_sizes, kernel, stride, padding, dilation, order,
                       grad.scalar_type(), sizes);
  Tensor out = empty_strided_like(grad, sizes, dense_strides(sizes, order), grad.scalar_type());
  if (out.numel() == 0) return out;
  const CudaScope scope(grad);
  p.grad = grad.data_ptr(), p.offsets = static_cast<const int8_t*>(offsets.data_ptr()), p.out = out.data_ptr();
  check_cuda(launch(p, make_plan(p, sm_count()), scope.stream()), "max_pool_backward");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { direct::implement<&max_pool_backward>(m, "CUDA", "max_pool_backward"); }

}  // namespace fusebackend::max_pool_backward
