#include <algorithm>

#include "common/integer_math.h"
#include "small_bmm/small_bmm.h"

namespace fusebackend::small_bmm {
namespace {

constexpr int kVectorShift = 2, kVector = 1 << kVectorShift;  // elements
constexpr int kBankBytes = 128;        // of all banks of shared memory
constexpr int kBlockBytes = 16 << 10;  // of both operands that a block reads: enough blocks of a multiprocessor read while others compute

bool aligned(const void* data, int itemsize) { return reinterpret_cast<uintptr_t>(data) % (kVector * itemsize) == 0; }

// Rows of which threads read elements, or vectors, side by side: these are in different banks as they are.
Placement rows_read_across(int length) { return {length, 0, 0}; }

// Rows of which threads read the same element, or vector, each of another row. Vectors of rows that begin at the same bank change places, where
// there is a power of two of them; otherwise the distance of rows is odd.
//   least_shift: threads next to one another read rows that are 2^least_shift apart.
Placement rows_read_along(int length, int itemsize, bool vectors, int least_shift) {
  const int chunks = length / kVector;
  if (!vectors) return {length | 1, 0, 0};
  if ((chunks & (chunks - 1)) != 0) return {(chunks | 1) * kVector, 0, 0};
  int shift = 0;
  while ((length * itemsize << shift) < kBankBytes) ++shift;  // rows that lie beside one another in the banks
  return {length, chunks - 1, std::max(shift, least_shift)};
}

}  // namespace

Plan make_plan(const Problem& p) {
  Plan plan{};
  const int itemsize = element_size(p.dtype);
  plan.vectors = p.m % kVector == 0 && p.n % kVector == 0 && p.k % kVector == 0 && aligned(p.a, itemsize) && aligned(p.b, itemsize);
  plan.row_tile = plan.vectors && p.m > 16 ? 4 : 2;
  const int columns = plan.vectors ? kVector : 1;
  plan.threads_a_product = int(ceil_div(p.m, plan.row_tile) * ceil_div(p.n, columns));
  plan.a = p.a_transposed ? rows_read_across(p.m) : rows_read_along(p.k, itemsize, plan.vectors, 0);
  plan.b = p.b_transposed ? rows_read_along(p.k, itemsize, plan.vectors, kVectorShift) : rows_read_across(p.n);
  const int a_rows = p.a_transposed ? p.k : p.m, b_rows = p.b_transposed ? p.n : p.k;
  const int elements = a_rows * plan.a.pitch + b_rows * plan.b.pitch;
  const int at_once = std::max(kThreads / plan.threads_a_product, 1);  // products that a block computes side by side
  const int wanted = kBlockBytes / ((p.m * p.k + p.k * p.n) * itemsize);
  plan.products = int(std::min<int64_t>(round_up(std::max(wanted, 1), at_once), round_up(std::max<int64_t>(p.batch, 1), at_once)));
  plan.shared_bytes = plan.products * elements * itemsize;
  constexpr int kMostShared = 48 << 10;
  while (plan.shared_bytes > kMostShared && plan.products > 1) plan.products /= 2, plan.shared_bytes = plan.products * elements * itemsize;
  plan.blocks = ceil_div(p.batch, plan.products);
  return plan;
}

}  // namespace fusebackend::small_bmm
