#include "common/tile/cpu_blocks.h"
#include "permute/permute.h"

namespace fusebackend::permute {

using namespace tile;

namespace {

struct Bytes16 {
  uint64_t half[2];
};

// As memcpy, which for a short row takes longer to call than to copy.
void copy_row(char* to, const char* from, int64_t bytes) {
  typedef char Vector __attribute__((vector_size(32), aligned(1), may_alias));
  constexpr int64_t kBytes = sizeof(Vector);
  if (bytes < kBytes || bytes > 4096) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i + kBytes <= bytes; i += kBytes) *reinterpret_cast<Vector*>(to + i) = *reinterpret_cast<const Vector*>(from + i);
  const int64_t last = bytes - kBytes;  // overlaps what is copied already
  *reinterpret_cast<Vector*>(to + last) = *reinterpret_cast<const Vector*>(from + last);
}

struct Bytes32 {
  uint64_t quarter[4];
};

// Copies rows of one to two vectors.
template <typename Vector>
void copy_short_rows(char* to, const char* from, const OffsetTable& table, int64_t rows, int64_t bytes) {
  const int64_t last = bytes - int64_t(sizeof(Vector));
  for (int64_t i = 0; i < rows; ++i, to += bytes) {
    Vector head, tail;
    std::memcpy(&head, from + table[i], sizeof head);
    std::memcpy(&tail, from + table[i] + last, sizeof tail);
    std::memcpy(to, &head, sizeof head);
    std::memcpy(to + last, &tail, sizeof tail);
  }
}

// Copies the rows of a run, which follow one another in the output.
void copy_rows(char* to, const char* from, const OffsetTable& table, int64_t rows, int64_t bytes) {
  if (bytes > 64)
    for (int64_t i = 0; i < rows; ++i) copy_row(to + i * bytes, from + table[i], bytes);
  else if (bytes >= 32) copy_short_rows<Bytes32>(to, from, table, rows, bytes);
  else if (bytes >= 16) copy_short_rows<Bytes16>(to, from, table, rows, bytes);
  else if (bytes >= 8) copy_short_rows<uint64_t>(to, from, table, rows, bytes);
  else if (bytes >= 4) copy_short_rows<uint32_t>(to, from, table, rows, bytes);
  else copy_short_rows<uint16_t>(to, from, table, rows, bytes);
}

template <typename E>
void copy(const Plan& plan, const Blocking& blocking, int64_t begin, int64_t end) {
  constexpr int64_t kW = sizeof(E);
  const Problem& p = plan.problem;
  const auto out = [&](const Block& block) { return p.data[kOut] + block.offset[kOut]; };
  const auto in = [&](const Block& block) { return p.data[kX] + block.offset[kX]; };
  const int64_t out_q = p.strides[kOut][blocking.row_dim] * kW, in_q = p.strides[kX][blocking.row_dim] * kW;
  if (blocking.movement == Movement::kRows && blocking.run_rank == 1) {  // parts of long rows
    for_blocks(plan, blocking, begin, end, [&](const Block& block) { std::memcpy(out(block), in(block), block.run * kW); });
  } else if (blocking.movement == Movement::kRows) {
    const OffsetTable table(plan, blocking, kX, 1);
    const int64_t row = p.sizes[0];
    for_blocks(plan, blocking, begin, end, [&](const Block& block) { copy_rows(out(block), in(block), table, block.run / row, row * kW); });
  } else if (blocking.movement == Movement::kGather) {
    const OffsetTable table(plan, blocking, kX);
    for_blocks(plan, blocking, begin, end, [&](const Block& block) {
      for (int64_t q = 0; q < block.rows; ++q) gather<E>(out(block) + q * out_q, in(block) + q * in_q, table, block.run, blocking.run_rank == 1);
    });
  } else if constexpr (SquareTranspose<E>::kN > 1) {
    const OffsetTable table(plan, blocking, kX);
    for_blocks(plan, blocking, begin, end, [&](const Block& block) {
      char* to = out(block);
      transpose_squares<E>(in(block), table.data(), block.run, block.rows,
                           [&](int64_t q, int64_t o, auto vector) { std::memcpy(to + q * out_q + o * kW, &vector, sizeof vector); });
    });
  }
}

}  // namespace

void copy_cpu(const Plan& plan, const Blocking& blocking, int64_t begin, int64_t end) {
  switch (plan.problem.element_bytes) {
    case 1: return copy<uint8_t>(plan, blocking, begin, end);
    case 2: return copy<uint16_t>(plan, blocking, begin, end);
    case 4: return copy<uint32_t>(plan, blocking, begin, end);
    case 8: return copy<uint64_t>(plan, blocking, begin, end);
    case 16: return copy<Bytes16>(plan, blocking, begin, end);
  }
}

}  // namespace fusebackend::permute
