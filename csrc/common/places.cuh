// Where an element of several dims is, of its number: divisions, innermost dim first.
#pragma once

#include "common/integer_math.h"

namespace fusebackend {

__device__ __forceinline__ void divide(int64_t n, int64_t d, int64_t& quotient, int64_t& rest) {
  quotient = (n | d) >> 32 ? n / d : int64_t(uint32_t(n) / uint32_t(d));  // in 32 bits where both fit, which takes a third of the instructions
  rest = n - quotient * d;
}

// The place along one dim, the innermost of those that `left` counts; what is left counts the others. `by` divides by `size`, of numbers below 2^31.
__device__ __forceinline__ int64_t take(int64_t& left, bool is_small, const FastDiv& by, int64_t size) {
  int64_t found;
  if (is_small) {
    uint32_t quotient, rest;
    by.divmod(uint32_t(left), quotient, rest);
    left = quotient, found = rest;
  } else {
    divide(left, size, left, found);
  }
  return found;
}

}  // namespace fusebackend
