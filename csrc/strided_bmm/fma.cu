// Launches the kernels for fp32.
#include "strided_bmm/fma_products.cuh"
#include "strided_bmm/kernel.cuh"

namespace fusebackend::strided_bmm {

cudaError_t launch_fma(const Problem& p, int multiprocessors, cudaStream_t stream) { return Launch<float, FmaProducts>::run(p, multiprocessors, stream); }

}  // namespace fusebackend::strided_bmm
