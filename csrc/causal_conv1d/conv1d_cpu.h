// CPU kernels. The work is cut into independent units; a binding hands ranges of them to threads.
// Results do not depend on the cut.
#pragma once
#include "conv1d.h"

namespace fusebackend::conv1d {

int64_t forward_units(const ConvParams&);
int64_t backward_units(const BackwardParams&);

// Kernels of one width of vectors (cpu_kernels.h).
struct CpuKernels {
  void (*forward)(const ConvParams&, int64_t begin, int64_t end);
  void (*backward)(const BackwardParams&, int64_t begin, int64_t end);
};
CpuKernels avx512_kernels();  // null pointers where the compiler can't make them
const CpuKernels& cpu_kernels();  // the fastest that run here

// Whether channels are the lanes of vectors, rather than samples.
bool in_lanes(const ConvParams&);

// Channels that are worked on together: in lanes, parts of all; of rows, one or two cache lines' where channels are contiguous in some tensor.
int64_t rows_together(const ConvParams&);
int64_t rows_together(const BackwardParams&);
template <typename P>
int64_t row_groups(const P& p) { return (p.channels + rows_together(p) - 1) / rows_together(p); }

// Samples of their results that are made at once.
int64_t tile_of(const ConvParams&);
int64_t tiles_of(const ConvParams&);

}  // namespace fusebackend::conv1d
