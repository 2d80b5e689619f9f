// flash_backward_queries.cuh by mma.sync.
#include "attention/flash_backward_queries.cuh"
#include "attention/products.cuh"

namespace fusebackend::attention {
namespace {

template <typename T>
cudaError_t launch_dim(const Arguments& a, const Backward& p, cudaStream_t stream) {
  const int64_t d = std::max(p.size.d, p.size.dv);
  if (d <= 32) return launch_flash_backward_queries_as<T, 32, 4, 3, MmaProducts>(a, p, stream);
  if (d <= 64) return launch_flash_backward_queries_as<T, 64, 4, 3, MmaProducts>(a, p, stream);
  return launch_flash_backward_queries_as<T, 128, 4, 2, MmaProducts>(a, p, stream);
}

}  // namespace

cudaError_t launch_flash_backward_queries(const Arguments& a, const Backward& p, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(a, p, stream) : launch_dim<__half>(a, p, stream);
}

}  // namespace fusebackend::attention
