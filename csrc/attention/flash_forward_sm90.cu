// flash_forward.cuh by wgmma, for heads of up to 64.
#include "attention/flash_forward.cuh"
#include "attention/products_sm90.cuh"

namespace fusebackend::attention {
namespace {

template <typename T, int kD>
cudaError_t launch_queries(const Forward& p, cudaStream_t stream) {
  return flash_forward_queries(p) == 64 ? launch_flash_forward_as<T, kD, 1, 4, 4, WgmmaProducts>(p, stream)
                                        : launch_flash_forward_as<T, kD, 1, 8, 2, WgmmaProducts>(p, stream);
}

template <typename T>
cudaError_t launch_dim(const Forward& p, cudaStream_t stream) {
  return std::max(p.size.d, p.size.dv) <= 32 ? launch_queries<T, 32>(p, stream) : launch_queries<T, 64>(p, stream);
}

}  // namespace

cudaError_t launch_flash_forward_wgmma(const Forward& p, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(p, stream) : launch_dim<__half>(p, stream);
}

}  // namespace fusebackend::attention
