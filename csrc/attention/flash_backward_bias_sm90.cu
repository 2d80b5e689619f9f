// flash_backward_bias.cuh by wgmma, for heads of up to 64.
#include "attention/flash_backward_bias.cuh"
#include "attention/products_sm90.cuh"

namespace fusebackend::attention {
namespace {

template <typename T>
cudaError_t launch_dim(const Arguments& a, const Backward& p, const HeadPlan& plan, cudaStream_t stream) {
  return std::max(p.size.d, p.size.dv) <= 32 ? launch_flash_backward_bias_as<T, 32, 1, 8, 1, WgmmaProducts>(a, plan, stream)
                                             : launch_flash_backward_bias_as<T, 64, 1, 8, 1, WgmmaProducts>(a, plan, stream);
}

}  // namespace

cudaError_t launch_flash_backward_bias_wgmma(const Arguments& a, const Backward& p, const HeadPlan& plan, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(a, p, plan, stream) : launch_dim<__half>(a, p, plan, stream);
}

}  // namespace fusebackend::attention
