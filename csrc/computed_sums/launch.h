// Runs the kernels on the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "computed_sums/computed_sums.h"

namespace fusebackend::computed_sums {

// The kernel of a variant for the current device: compiled and loaded at the first call. Throws std::runtime_error: it can't be.
struct Kernel;
const Kernel& kernel_of(const Variant& v);

// `p` has everything but the plan; `p.out` are the results. `partials` has room for as many numbers as the plan says, for each sum.
cudaError_t launch(const Kernel& kernel, const Variant& v, const Plan& plan, Arguments p, float* partials, cudaStream_t stream);

// Adds what the blocks of the first kernel leave (partials.cu).
cudaError_t launch_partials(const Arguments& p, int sums, const float* partials, cudaStream_t stream);

}  // namespace fusebackend::computed_sums
