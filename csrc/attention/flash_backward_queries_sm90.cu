// flash_backward_queries.cuh by wgmma, for heads of up to 64.
#include "attention/flash_backward_queries.cuh"
#include "attention/products_sm90.cuh"

namespace fusebackend::attention {
namespace {

template <typename T>
cudaError_t launch_dim(const Arguments& a, const Backward& p, cudaStream_t stream) {
  return std::max(p.size.d, p.size.dv) <= 32 ? launch_flash_backward_queries_as<T, 32, 4, 3, WgmmaProducts>(a, p, stream)
                                             : launch_flash_backward_queries_as<T, 64, 4, 3, WgmmaProducts>(a, p, stream);
}

}  // namespace

cudaError_t launch_flash_backward_queries_wgmma(const Arguments& a, const Backward& p, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(a, p, stream) : launch_dim<__half>(a, p, stream);
}

}  // namespace fusebackend::attention
