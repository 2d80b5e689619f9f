// Two neighbouring 16-bit columns of a plane, on their way to the word of a fragment.
#pragma once
#include <cstdint>

namespace fusebackend::depthwise_conv {

// As one word of memory, or, where rows need not begin at even columns, as two halves, which are put together when they are there.
template <bool kWord>
struct ColumnPair {
  uint32_t low, high;

  // Columns `column` and the next one, of which the first is at `at`; what is outside is zero.
  __device__ __forceinline__ void load(const uint16_t* at, int column, int width, bool inside) {
    low = high = 0;
    if constexpr (kWord) {
      if (inside && unsigned(column) < unsigned(width)) low = __ldg(reinterpret_cast<const uint32_t*>(at));
    } else {
      if (inside && unsigned(column) < unsigned(width)) low = __ldg(at);
      if (inside && unsigned(column + 1) < unsigned(width)) high = __ldg(at + 1);
    }
  }
  __device__ __forceinline__ uint32_t word() const { return kWord ? low : low | high << 16; }
};

}  // namespace fusebackend::depthwise_conv
