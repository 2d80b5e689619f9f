//   fusebackend::strided_bmm(Tensor x, Tensor y, int[] order) -> Tensor
//
// patterns/strided_bmm/ops.py says what it computes.
#include "common/device_properties.h"
#include "common/direct_call.h"
#include "strided_bmm/binding.h"

namespace fusebackend::strided_bmm {
namespace {

bool is_aligned(const Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0; }

Tensor strided_bmm(const Tensor& x, const Tensor& y, const std::vector<int64_t>& order) {
  STD_TORCH_CHECK(x.dim() == 4 && y.dim() == 4 && x.size(0) == y.size(0) && x.size(1) == y.size(1) && x.size(3) == y.size(3),
                  "strided_bmm: x and y, (outer, batch, rows, terms), do not fit to one another");
  const std::optional<DType> dtype = to_dtype(x.scalar_type());
  STD_TORCH_CHECK(dtype && x.scalar_type() == y.scalar_type(), "strided_bmm: x and y must have one dtype, float16, bfloat16 or float32");
  STD_TORCH_CHECK(on_same_device(x, y), "strided_bmm: x and y must be on one device");
  const Order memory = to_array<Order>(order, "order");
  STD_TORCH_CHECK(is_permutation(memory), "strided_bmm: order is no permutation of the result's four dims");
  const Sizes sizes{x.size(0), x.size(1), x.size(2), y.size(2), x.size(3)};
  const Strides steps = result_strides(sizes, memory);
  Tensor out = empty_strided_like(x, {sizes[0], sizes[1], sizes[2], sizes[3]}, {steps[0], steps[1], steps[2], steps[3]});
  Problem p{};
  const char* refusal = describe(sizes, to_array<Strides>(to_vector(x.strides()), "strides of x"),
                                 to_array<Strides>(to_vector(y.strides()), "strides of y"), memory, *dtype, p);
  // A graph's input may begin anywhere, and Inductor may lay out anew what a match has seen.
  if (refusal || !is_aligned(x) || !is_aligned(y)) {
    torch::stable::copy_(out, torch::stable::matmul(x, torch::stable::transpose(y, 2, 3)));
    return out;
  }
  p.x.data = x.data_ptr(), p.y.data = y.data_ptr(), p.out.data = out.data_ptr();
  const CudaScope scope(x);
  STD_TORCH_CHECK(compute_capability_major() >= 8 && max_shared_bytes() >= kMostSharedBytes,
                  "strided_bmm: a GPU of compute capability 8.0 or later with ", kMostSharedBytes, " bytes of shared memory a block is needed");
  check_cuda((is_half(p.dtype) ? launch_mma : launch_fma)(p, sm_count(), scope.stream()), "strided_bmm");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { direct::implement<&strided_bmm>(m, "CUDA", "strided_bmm"); }

}  // namespace fusebackend::strided_bmm
