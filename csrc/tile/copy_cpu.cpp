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
  alignas(64) char buffer[kBlockBytes];
  const int64_t out_o = p.strides[kOut][0] * kW, out_q = p.strides[kOut][plan.staged_dim] * kW;
  for_blocks(plan, begin, end, [&](const Block& block) {
    const Rows rows = block_rows<E>(plan, kA, block, buffer);
    char* out = p.data[kOut] + block.offset[kOut];
    for (int64_t q = 0; q < block.q; ++q) {
      if (out_o == kW)
        std::memcpy(out + q * out_q, rows.data + q * rows.stride, block.o * kW);
      else
        for (int64_t o = 0; o < block.o; ++o) std::memcpy(out + q * out_q + o * out_o, rows.data + q * rows.stride + o * kW, kW);
    }
  });
}

}  // namespace

int64_t cpu_unit_elements(const Plan& plan) {
  const BlockShape shape = block_shape(plan);
  return std::min(shape.o, plan.problem.sizes[0]) * shape.q;
}

int64_t cpu_units(const Plan& plan) {
  if (plan.route == Route::kEmpty) return 0;
  const Problem& p = plan.problem;
  const BlockShape shape = block_shape(plan);
  int64_t units = 1;
  for (int d = 0; d < p.rank; ++d) {
    const int64_t block = d == 0 ? shape.o : plan.route == Route::kTiles && d == plan.staged_dim ? shape.q : 1;
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
