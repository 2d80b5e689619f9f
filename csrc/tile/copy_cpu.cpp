#include "cpu_blocks.h"

namespace fusebackend::tile {
namespace {

struct Wide {
  uint64_t part[2];
};

template <typename E>
void copy(const Plan& plan, int64_t begin, int64_t end) {
  constexpr int64_t kW = sizeof(E);
  const Problem& p = plan.problem;
  const int dim = block_dim(plan);
  const int64_t out_o = p.strides[kOut][0] * kW, out_q = p.strides[kOut][dim] * kW;
  const int64_t in_o = p.strides[kA][0] * kW, in_q = p.strides[kA][dim] * kW;
  for_blocks(plan, begin, end, [&](const Block& block) {
    char* out = p.data[kOut] + block.offset[kOut];
    const char* in = p.data[kA] + block.offset[kA];
    if (out_o != kW) return copy_elements<E>(in, in_o, in_q, out, out_o, out_q, block.o, block.q);
    if (in_o != kW) return transpose_block<E>(in, in_o, in_q, out, out_q, block.o, block.q);
    for (int64_t q = 0; q < block.q; ++q) copy_row(out + q * out_q, in + q * in_q, block.o * kW);
  });
}

}  // namespace

int64_t cpu_unit_elements(const Plan& plan) {
  if (plan.route == Route::kEmpty) return 0;
  const BlockShape shape = block_shape(plan);
  return shape.o * shape.q;
}

int64_t cpu_units(const Plan& plan) {
  if (plan.route == Route::kEmpty) return 0;
  const Problem& p = plan.problem;
  const BlockShape shape = block_shape(plan);
  const int dim = block_dim(plan);
  int64_t units = 1;
  for (int d = 0; d < p.rank; ++d) {
    const int64_t block = d == 0 ? shape.o : d == dim ? shape.q : 1;
    units *= (p.sizes[d] + block - 1) / block;
  }
  return units;
}

void permute_copy_cpu(const Plan& plan, int64_t begin, int64_t end) {
  switch (plan.problem.element_bytes) {
    case 1: return copy<uint8_t>(plan, begin, end);
    case 2: return copy<uint16_t>(plan, begin, end);
    case 4: return copy<uint32_t>(plan, begin, end);
    case 8: return copy<uint64_t>(plan, begin, end);
    case 16: return copy<Wide>(plan, begin, end);
  }
}

}  // namespace fusebackend::tile
