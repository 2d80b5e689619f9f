// flash_forward.cuh by mma.sync.
#include "attention/flash_forward.cuh"
#include "attention/products.cuh"

namespace fusebackend::attention {
namespace {

template <typename T, int kD>
cudaError_t launch_queries(const Forward& p, cudaStream_t stream) {
  return flash_forward_queries(p) == 64 ? launch_flash_forward_as<T, kD, 1, 4, kD == 32 ? 4 : 3, MmaProducts>(p, stream)
                                        : launch_flash_forward_as<T, kD, 2, 4, 2, MmaProducts>(p, stream);
}

template <typename T>
cudaError_t launch_dim(const Forward& p, cudaStream_t stream) {
  const int64_t d = std::max(p.size.d, p.size.dv);
  if (d <= 32) return launch_queries<T, 32>(p, stream);
  if (d <= 64) return launch_queries<T, 64>(p, stream);
  return launch_flash_forward_as<T, 128, 1, 4, 2, MmaProducts>(p, stream);
}

}  // namespace

cudaError_t launch_flash_forward(const Forward& p, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(p, stream) : launch_dim<__half>(p, stream);
}

}  // namespace fusebackend::attention
