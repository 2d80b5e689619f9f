// Operators without tensors, compiled into every library: what Python asks of the kernels, where there is no GPU as well.
//
//   fp32_matmul_constant(str name) -> float: the constants of the kernels that Python needs too.
//   fp32_matmul_work(int[] sizes, int[] a, int[] b, int[] device) -> str: what a product makes a GPU do (work.h).
//       sizes: m, n, k and batch.  a, b: of each operand, the strides of its rows, columns and batch in elements, and how many bytes behind
//       an aligned address it begins.  device: compute capability, major and minor, number of multiprocessors, and whether the library
//       has the wgmma kernel.
#include <string>
#include <vector>

#include "common/binding.h"
#include "fp32_matmul/constants.h"
#include "fp32_matmul/work.h"

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

Matrix imagined(const std::vector<int64_t>& x) {
  STD_TORCH_CHECK(x.size() == 4, "fp32_matmul_work: an operand is three strides and an offset");
  return {reinterpret_cast<const float*>(x[3]), x[0], x[1], x[2]};
}

std::string fp32_matmul_work(const std::vector<int64_t>& sizes, const std::vector<int64_t>& a, const std::vector<int64_t>& b,
                             const std::vector<int64_t>& device) {
  STD_TORCH_CHECK(sizes.size() == 4 && device.size() == 4 && device[2] > 0, "fp32_matmul_work: four sizes, and four facts of a device");
  Problem p = {};
  p.m = sizes[0], p.n = sizes[1], p.k = sizes[2], p.batch = sizes[3];
  p.a = imagined(a), p.b = imagined(b);
  p.c_row = p.n, p.c_col = 1, p.c_batch = p.m * p.n;
  return work_of(p, default_kernel(int(device[0]), int(device[1]), device[3] != 0), int(device[2]));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("fp32_matmul_constant", TORCH_BOX(&fp32_matmul_constant));
  m.impl("fp32_matmul_work", TORCH_BOX(&fp32_matmul_work));
}

}  // namespace fusebackend::fp32_matmul
