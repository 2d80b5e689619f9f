// Elements as raw bits: copies keep NaN payloads, and kernels of types of one size share code.
//
// What happens to elements on their way is an Op:
//   Element                            the bits of one element
//   kIsSum                             whether there is a second input
//   op(a, b)                           of single elements
//   op.apply(first, second, swapped)   first[i] = op(first[i], second[i]), or op(second[i], first[i]) if swapped
#pragma once

#include <cstdint>

namespace fusebackend::tile {

struct alignas(16) Bits128 {
  uint32_t word[4];
};
template <int kBytes>
struct BitsOf;
template <> struct BitsOf<1> { using type = uint8_t; };
template <> struct BitsOf<2> { using type = uint16_t; };
template <> struct BitsOf<4> { using type = uint32_t; };
template <> struct BitsOf<8> { using type = uint64_t; };
template <> struct BitsOf<16> { using type = Bits128; };
template <int kBytes>
using Bits = typename BitsOf<kBytes>::type;

}  // namespace fusebackend::tile
