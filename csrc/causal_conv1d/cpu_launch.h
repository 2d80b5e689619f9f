// How the CPU kernels' work is cut into independent units, ranges of which a binding hands to threads, and which kernels run here.
#pragma once
#include "causal_conv1d/params.h"

namespace fusebackend::causal_conv1d {

// Units of a forward convolution: some channels, and some samples of their results, of one batch entry. Results do not depend on the cut.
struct ForwardUnits {
  bool channels_in_lanes;  // of vectors, instead of samples
  int64_t channels;        // of a unit
  int64_t groups;          // of so many channels
  int64_t samples;         // of a unit
  int64_t tiles;           // of so many samples, in a row
};
ForwardUnits forward_units(const ConvParams&);

// Channels of a unit of a backward convolution, which takes whole rows and all batch entries.
int64_t backward_unit_channels(const BackwardParams&);

// Kernels of one width of vectors (cpu_kernels.h).
struct CpuKernels {
  void (*forward)(const ConvParams&, int64_t begin, int64_t end);
  void (*backward)(const BackwardParams&, int64_t begin, int64_t end);
};
CpuKernels avx512_kernels();
const CpuKernels& cpu_kernels();  // the fastest that run on this processor

}  // namespace fusebackend::causal_conv1d
