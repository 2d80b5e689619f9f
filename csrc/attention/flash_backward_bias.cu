// flash_backward_bias.cuh by mma.sync.
#include "attention/flash_backward_bias.cuh"
#include "attention/products.cuh"

namespace fusebackend::attention {
namespace {

template <typename T>
cudaError_t launch_dim(const Arguments& a, const Backward& p, const HeadPlan& plan, cudaStream_t stream) {
  const int64_t d = std::max(p.size.d, p.size.dv);
  if (d <= 32) return launch_flash_backward_bias_as<T, 32, 2, 4, 2, MmaProducts>(a, plan, stream);
  if (d <= 64) return launch_flash_backward_bias_as<T, 64, 2, 4, 2, MmaProducts>(a, plan, stream);
  return launch_flash_backward_bias_as<T, 128, 1, 8, 1, MmaProducts>(a, plan, stream);
}

}  // namespace

cudaError_t launch_flash_backward_bias(const Arguments& a, const Backward& p, const HeadPlan& plan, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(a, p, plan, stream) : launch_dim<__half>(a, p, plan, stream);
}

}  // namespace fusebackend::attention
