#include <immintrin.h>

#include "cpu_blocks.h"

namespace fusebackend::tile {
namespace {

struct Wide {
  uint64_t part[2];
};

// memcpy for rows that are mostly short: a call costs as much as the copy.
void copy_row(char* to, const char* from, int64_t bytes) {
  typedef char Vector __attribute__((vector_size(32), aligned(1), may_alias));
  constexpr int64_t kBytes = sizeof(Vector);
  if (bytes < kBytes || bytes > 4096) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i + kBytes <= bytes; i += kBytes) *reinterpret_cast<Vector*>(to + i) = *reinterpret_cast<const Vector*>(from + i);
  const int64_t last = bytes - kBytes;  // overlaps what was copied
  *reinterpret_cast<Vector*>(to + last) = *reinterpret_cast<const Vector*>(from + last);
}

// Rows of one to two vectors.
template <typename Vector>
void copy_short_rows(char* to, const char* from, const Table& table, int64_t rows, int64_t bytes) {
  const int64_t last = bytes - int64_t(sizeof(Vector));
  for (int64_t i = 0; i < rows; ++i, to += bytes) {
    Vector head, tail;
    std::memcpy(&head, from + table[i], sizeof head);
    std::memcpy(&tail, from + table[i] + last, sizeof tail);
    std::memcpy(to, &head, sizeof head);
    std::memcpy(to + last, &tail, sizeof tail);
  }
}

// Rows of a run, one behind the other in the output.
void copy_rows(char* to, const char* from, const Table& table, int64_t rows, int64_t bytes) {
  if (bytes > 64)
    for (int64_t i = 0; i < rows; ++i) copy_row(to + i * bytes, from + table[i], bytes);
  else if (bytes >= 32) copy_short_rows<__m256i>(to, from, table, rows, bytes);
  else if (bytes >= 16) copy_short_rows<__m128i>(to, from, table, rows, bytes);
  else if (bytes >= 8) copy_short_rows<uint64_t>(to, from, table, rows, bytes);
  else if (bytes >= 4) copy_short_rows<uint32_t>(to, from, table, rows, bytes);
  else copy_short_rows<uint16_t>(to, from, table, rows, bytes);
}

template <typename E>
void copy(const Plan& plan, const Cut& cut, int64_t begin, int64_t end) {
  constexpr int64_t kW = sizeof(E);
  const Problem& p = plan.problem;
  const auto out = [&](const Block& block) { return p.data[kOut] + block.offset[kOut]; };
  const auto in = [&](const Block& block) { return p.data[kA] + block.offset[kA]; };
  const int64_t out_q = p.strides[kOut][cut.q] * kW, in_q = p.strides[kA][cut.q] * kW;
  if (cut.movement == Movement::kRows && cut.run_rank == 1) {  // parts of long rows
    for_blocks(plan, cut, begin, end, [&](const Block& block) { std::memcpy(out(block), in(block), block.run * kW); });
  } else if (cut.movement == Movement::kRows) {
    const Table table(plan, cut, kA, 1);
    const int64_t row = p.sizes[0];
    for_blocks(plan, cut, begin, end, [&](const Block& block) { copy_rows(out(block), in(block), table, block.run / row, row * kW); });
  } else if (cut.movement == Movement::kGather) {
    const Table table(plan, cut, kA);
    for_blocks(plan, cut, begin, end, [&](const Block& block) {
      for (int64_t q = 0; q < block.rows; ++q) gather<E>(out(block) + q * out_q, in(block) + q * in_q, table, block.run, cut.run_rank == 1);
    });
  } else if constexpr (SquareTranspose<E>::kN > 1) {
    const Table table(plan, cut, kA);
    for_blocks(plan, cut, begin, end, [&](const Block& block) {
      char* to = out(block);
      transpose_squares<E>(in(block), table.data(), block.run, block.rows,
                           [&](int64_t q, int64_t o, auto vector) { std::memcpy(to + q * out_q + o * kW, &vector, sizeof vector); });
    });
  }
}

}  // namespace

void permute_copy_cpu(const Plan& plan, const Cut& cut, int64_t begin, int64_t end) {
  switch (plan.problem.element_bytes) {
    case 1: return copy<uint8_t>(plan, cut, begin, end);
    case 2: return copy<uint16_t>(plan, cut, begin, end);
    case 4: return copy<uint32_t>(plan, cut, begin, end);
    case 8: return copy<uint64_t>(plan, cut, begin, end);
    case 16: return copy<Wide>(plan, cut, begin, end);
  }
}

}  // namespace fusebackend::tile
