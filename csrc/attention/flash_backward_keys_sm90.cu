// flash_backward_keys.cuh by wgmma, for heads of up to 64.
#include "attention/flash_backward_keys.cuh"
#include "attention/products_sm90.cuh"

namespace fusebackend::attention {
namespace {

template <typename T>
cudaError_t launch_dim(const Arguments& a, const Backward& p, const HeadPlan& plan, bool sums_bias, cudaStream_t stream) {
  return std::max(p.size.d, p.size.dv) <= 32 ? launch_flash_backward_keys_as<T, 32, 3, WgmmaProducts>(a, plan, sums_bias, stream)
                                             : launch_flash_backward_keys_as<T, 64, 3, WgmmaProducts>(a, plan, sums_bias, stream);
}

}  // namespace

cudaError_t launch_flash_backward_keys_wgmma(const Arguments& a, const Backward& p, const HeadPlan& plan, bool sums_bias, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(a, p, plan, sums_bias, stream) : launch_dim<__half>(a, p, plan, sums_bias, stream);
}

}  // namespace fusebackend::attention
