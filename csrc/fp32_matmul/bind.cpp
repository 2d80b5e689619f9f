// fusebackend::fp32_matmul_constant(str name) -> float: the constants of the kernels that Python needs too. Compiled into every library.
#include <string>

#include "common/binding.h"
#include "fp32_matmul/constants.h"

namespace fusebackend::fp32_matmul {
namespace {

double fp32_matmul_constant(const std::string& name) {
  if (name == "tile_m") return kTileM;
  if (name == "tile_n") return kTileN;
  if (name == "block_k") return kBlockK;
  if (name == "exact_sums_below_k") return kExactSumsBelowK;
  if (name == "planes_limit") return double(kPlanesLimit);
  if (name == "pitch_multiple") return double(kPitchMultiple);
  if (name == "half_ulp") return kHalfUlp;
  STD_TORCH_CHECK(false, "fp32_matmul_constant: there is no constant ", name);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("fp32_matmul_constant", TORCH_BOX(&fp32_matmul_constant));
}

}  // namespace fusebackend::fp32_matmul
