// What a product makes a GPU do, in physical quantities, for estimates of its time.
#pragma once

#include <string>

#include "fp32_matmul/fp32_matmul.h"

namespace fusebackend::fp32_matmul {

// "name=value" pairs, separated by spaces. A product that is computed in pieces is described as if it were computed at once.
//   wgmma, mma      1 for the kernel; neither for ffma
//   blocks          thread blocks that run
//   flops           multiplications and additions of the thread block that has most of them, on padded tiles, each product of planes counted
//   exact_flops     the same where the wgmma kernel adds without error (kExactSumsBelowK); flops is 0 then
//   ends            prologues and epilogues of that thread block's tiles
//   parts           parts of a tile that is split along K; 0 if none is
//   shares          1 if tiles are split where equal shares of the work end, not into equal parts
//   swaps           1 if the transposed product is computed
//   unpaired        1 if results are stored one by one
//   staged_bytes    that all thread blocks read into shared memory
//   a_mn_inner, b_mn_inner   1 if the operand's free index is innermost in its planes
//   a_gathers, b_gathers     1 if the operand is read element by element to be split
//   a_plane_bytes, b_plane_bytes   of the planes, with what pads their rows
std::string work_of(const Problem& p, Kernel kernel, int sm_count);

}  // namespace fusebackend::fp32_matmul
