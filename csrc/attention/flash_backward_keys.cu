// flash_backward_keys.cuh by mma.sync.
#include "attention/flash_backward_keys.cuh"
#include "attention/products.cuh"

namespace fusebackend::attention {
namespace {

template <typename T>
cudaError_t launch_dim(const Arguments& a, const Backward& p, const HeadPlan& plan, bool sums_bias, cudaStream_t stream) {
  const int64_t d = std::max(p.size.d, p.size.dv);
  if (d <= 32) return launch_flash_backward_keys_as<T, 32, 3, MmaProducts>(a, plan, sums_bias, stream);
  if (d <= 64) return launch_flash_backward_keys_as<T, 64, 2, MmaProducts>(a, plan, sums_bias, stream);
  return launch_flash_backward_keys_as<T, 128, 2, MmaProducts>(a, plan, sums_bias, stream);
}

}  // namespace

cudaError_t launch_flash_backward_keys(const Arguments& a, const Backward& p, const HeadPlan& plan, bool sums_bias, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(a, p, plan, sums_bias, stream) : launch_dim<__half>(a, p, plan, sums_bias, stream);
}

}  // namespace fusebackend::attention
