// What attention makes a GPU do, in physical quantities, for estimates of its time.
#pragma once

#include <string>

#include "attention/attention.h"

namespace fusebackend::attention {

// "name=value" pairs, separated by spaces, summed over the kernels that run:
//
//   window          1 for the kernels of short windows, 0 for those of any length
//   pipelined       1 for the pipelined kernels of compute capability 9.0, else 0
//   stored          1 where gradients of scores are stored between kernels, else 0
//   kernels         that are launched
//   flops           multiplications and additions of tensor cores on the multiprocessor that has most of them, on padded tiles
//   scores          elements of scores that this multiprocessor computes, padded; each is an exponential
//   steps           tiles that this multiprocessor's blocks walk along, one after another
//   biases          elements of biases that this multiprocessor reads, each time that it does
//   blocks          of the kernel that has fewest
//   staged_bytes    that all blocks copy to shared memory
//   scratch_bytes   of partial sums, of stored gradients of scores and of biases' copies, written and read
std::string work_of(const Forward& p, int sm_count, int capability_major);
std::string work_of(const Backward& p, int sm_count, int capability_major);

}  // namespace fusebackend::attention
