// CPU kernels. The work is cut into independent units; a binding hands ranges of them to threads.
// Results do not depend on the cut.
#pragma once
#include "conv1d.h"

namespace fusebackend::conv1d {

int64_t forward_units(const ConvParams&);
void forward_cpu(const ConvParams&, int64_t begin, int64_t end);

int64_t backward_units(const BackwardParams&);
void backward_cpu(const BackwardParams&, int64_t begin, int64_t end);

}  // namespace fusebackend::conv1d
