#include <algorithm>

#include "common/integer_math.h"
#include "small_bmm/small_bmm.h"

namespace fusebackend::small_bmm {
namespace {

constexpr int kVector = 4;             // elements
constexpr int kBlockBytes = 16 << 10;  // of both operands that a block reads: enough blocks of a multiprocessor read while others compute

bool aligned(const void* data, int itemsize) { return reinterpret_cast<uintptr_t>(data) % (kVector * itemsize) == 0; }

}  // namespace

Plan make_plan(const Problem& p) {
  Plan plan{};
  const int itemsize = element_size(p.dtype);
  plan.vectors = p.m % kVector == 0 && p.n % kVector == 0 && p.k % kVector == 0 && aligned(p.a, itemsize) && aligned(p.b, itemsize);
  plan.row_tile = plan.vectors && p.m > 16 ? 4 : 2;
  const int columns = plan.vectors ? kVector : 1;
  plan.threads_a_product = int(ceil_div(p.m, plan.row_tile) * ceil_div(p.n, columns));
  // Threads that read one column of several rows must read from different banks: the pitch is odd, in vectors or in elements.
  const int a_row = p.a_transposed ? p.m : p.k, b_row = p.b_transposed ? p.k : p.n;
  const auto odd = [&](int row) { return plan.vectors ? (row / kVector | 1) * kVector : row | 1; };
  plan.a_pitch = odd(a_row), plan.b_pitch = odd(b_row);
  // By columns, a thread reads four rows of b that follow one another, which an odd pitch would put into few banks.
  const int chunks = p.k / kVector;
  if (plan.vectors && p.b_transposed && chunks > 1 && (chunks & (chunks - 1)) == 0) plan.b_pitch = b_row, plan.b_swizzle = chunks - 1;
  const int a_rows = p.a_transposed ? p.k : p.m, b_rows = p.b_transposed ? p.n : p.k;
  const int elements = a_rows * plan.a_pitch + b_rows * plan.b_pitch;
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
