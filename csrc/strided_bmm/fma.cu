// Launches the kernels for fp32.
#include <type_traits>

#include "strided_bmm/fma_entries.cuh"
#include "strided_bmm/fma_products.cuh"
#include "strided_bmm/kernel.cuh"

namespace fusebackend::strided_bmm {

template <typename Traits>
using Fma = std::conditional_t<Traits::kHasWarpPerEntry, FmaEntries<Traits>, FmaProducts<Traits>>;

cudaError_t launch_fma(const Problem& p, int multiprocessors, cudaStream_t stream) { return Launch<float, Fma>::run(p, multiprocessors, stream); }

}  // namespace fusebackend::strided_bmm
