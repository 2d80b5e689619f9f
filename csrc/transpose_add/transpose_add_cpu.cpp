#include <algorithm>

#include "common/tile/cpu_blocks.h"
#include "transpose_add/cpu_arithmetic.h"
#include "transpose_add/transpose_add.h"

namespace fusebackend::transpose_add {

using namespace tile;

namespace {

// Contiguous rows of an operand, for one block.
struct Rows {
  const char* data;
  int64_t stride;  // bytes
};

constexpr int64_t kBufferBytes = 96 * 1024;  // holds any block of squares: kMaxRun elements by a cache line of rows, and half as much again

// The rows of an operand that is contiguous along them; of others, which are constant or have to be transposed, copies in `buffer`.
template <typename E>
Rows block_rows(const Plan& plan, const Blocking& blocking, const OffsetTable (&tables)[2], Operand operand, const Block& block, char* buffer) {
  constexpr int64_t kW = sizeof(E);
  const Problem& p = plan.problem;
  const char* from = p.data[operand] + block.offset[operand];
  const int64_t from_q = p.strides[operand][blocking.row_dim] * kW, stride = block.run * kW;
  if (is_dense(plan, blocking, operand)) return {from, from_q};
  if (is_constant(plan, blocking, operand)) {
    for (int64_t q = 0; q < block.rows; ++q) {
      E value;
      std::memcpy(&value, from + q * from_q, kW);
      std::fill_n(reinterpret_cast<E*>(buffer + q * stride), block.run, value);
    }
  } else {
    transpose_squares<E>(from, tables[operand - kX].data(), block.run, block.rows,
                         [&](int64_t q, int64_t o, auto vector) { std::memcpy(buffer + q * stride + o * kW, &vector, sizeof vector); });
  }
  return {buffer, stride};
}

template <typename Arithmetic, typename Real>
void add_as(const Plan& plan, const Blocking& blocking, Real alpha, int64_t begin, int64_t end) {
  using T = typename Arithmetic::Element;
  using E = std::conditional_t<sizeof(T) == 1, uint8_t,
            std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
  const Problem& p = plan.problem;
  const auto factor = static_cast<typename Arithmetic::Scalar>(alpha);
  constexpr int64_t kW = sizeof(T);
  const int64_t out_q = p.strides[kOut][blocking.row_dim] * kW;
  const auto at = [&](Operand operand, const Block& block) { return p.data[operand] + block.offset[operand]; };

  const OffsetTable tables[2] = {{plan, blocking, kX}, {plan, blocking, kY}};
  if (blocking.movement != Movement::kSquares) {
    alignas(64) char buffer[2][kGatherRun * kW];
    const bool dense[2] = {is_dense(plan, blocking, kX), is_dense(plan, blocking, kY)};
    for_blocks(plan, blocking, begin, end, [&](const Block& block) {
      for (int64_t q = 0; q < block.rows; ++q) {
        const T* rows[2];
        for (int i = 0; i < 2; ++i) {
          const char* from = at(Operand(kX + i), block) + q * p.strides[kX + i][blocking.row_dim] * kW;
          if (!dense[i]) gather<E>(buffer[i], from, tables[i], block.run, blocking.run_rank == 1);
          rows[i] = reinterpret_cast<const T*>(dense[i] ? from : buffer[i]);
        }
        Arithmetic::add(reinterpret_cast<T*>(at(kOut, block) + q * out_q), rows[0], rows[1], block.run, factor);
      }
    });
    return;
  }

  alignas(64) char buffer[2][kBufferBytes];
  for_blocks(plan, blocking, begin, end, [&](const Block& block) {
    char* out = at(kOut, block);
    if constexpr (Arithmetic::kOnVectors) {  // added where squares leave the registers
      const bool transposes_x = !is_dense(plan, blocking, kX) && !is_constant(plan, blocking, kX);
      const Operand transposed = transposes_x ? kX : kY;
      const Rows other = block_rows<E>(plan, blocking, tables, transposes_x ? kY : kX, block, buffer[0]);
      const auto squares = [&](auto sum) {
        const int64_t* table = tables[transposed - kX].data();
        transpose_squares<E>(at(transposed, block), table, block.run, block.rows, [&](int64_t q, int64_t o, auto vector) {
          decltype(vector) row;
          std::memcpy(&row, other.data + q * other.stride + o * kW, sizeof row);
          vector = sum(vector, row);
          std::memcpy(out + q * out_q + o * kW, &vector, sizeof vector);
        });
      };
      if (transposes_x) squares([&](auto x, auto y) { return Arithmetic::add(x, y, factor); });
      else squares([&](auto y, auto x) { return Arithmetic::add(x, y, factor); });
    } else {
      const Rows x = block_rows<E>(plan, blocking, tables, kX, block, buffer[0]);
      const Rows y = block_rows<E>(plan, blocking, tables, kY, block, buffer[1]);
      for (int64_t q = 0; q < block.rows; ++q)
        Arithmetic::add(reinterpret_cast<T*>(out + q * out_q), reinterpret_cast<const T*>(x.data + q * x.stride),
                        reinterpret_cast<const T*>(y.data + q * y.stride), block.run, factor);
    }
  });
}

}  // namespace

void add_cpu(const Plan& plan, const Blocking& blocking, DType type, Alpha alpha, int64_t begin, int64_t end) {
  switch (type) {
    case DType::kFloat64: return add_as<Arithmetic<double>>(plan, blocking, alpha.real, begin, end);
    case DType::kFloat32: return add_as<Arithmetic<float>>(plan, blocking, alpha.real, begin, end);
    case DType::kFloat16: return add_as<HalfArithmetic<Half>>(plan, blocking, alpha.real, begin, end);
    case DType::kBFloat16: return add_as<HalfArithmetic<BFloat16>>(plan, blocking, alpha.real, begin, end);
    case DType::kInt64: return add_as<Arithmetic<uint64_t>>(plan, blocking, alpha.integer, begin, end);
    case DType::kInt32: return add_as<Arithmetic<uint32_t>>(plan, blocking, alpha.integer, begin, end);
    case DType::kInt16: return add_as<Arithmetic<uint16_t>>(plan, blocking, alpha.integer, begin, end);
    case DType::kInt8:
    case DType::kUInt8: return add_as<Arithmetic<uint8_t>>(plan, blocking, alpha.integer, begin, end);
  }
}

}  // namespace fusebackend::transpose_add
