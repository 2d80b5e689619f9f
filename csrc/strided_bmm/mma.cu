// Launches the kernels for 16-bit elements.
#include "strided_bmm/kernel.cuh"
#include "strided_bmm/mma_products.cuh"

namespace fusebackend::strided_bmm {

cudaError_t launch_mma(const Problem& p, int multiprocessors, cudaStream_t stream) {
  if (p.dtype == DType::kFloat16) return Launch<__half, MmaProducts>::run(p, multiprocessors, stream);
  return Launch<__nv_bfloat16, MmaProducts>::run(p, multiprocessors, stream);
}

}  // namespace fusebackend::strided_bmm
