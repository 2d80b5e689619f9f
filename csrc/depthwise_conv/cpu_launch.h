// Which CPU kernel computes a convolution, and how its work is cut into independent units, ranges of which a binding hands to threads.
#pragma once
#include <string>
#include <vector>

#include "depthwise_conv/params.h"

namespace fusebackend::depthwise_conv {

int64_t forward_units(const ForwardParams&);
void forward(const ForwardParams&, int64_t begin, int64_t end);

// x's gradient as convolutions of the incoming gradient with reversed taps: one for each remainder of rows and columns by the strides, since each
// has taps of its own. Empty where plain loops (cpu_loops.h) compute it.
std::vector<ForwardParams> input_grad_convolutions(const InputGradParams&);

// In how many parts of the batch the weight's gradient is computed, whatever the number of threads; 0 where plain loops compute it.
int64_t weight_grad_parts(const WeightGradParams&);
// Numbers of partial sums, for all parts.
int64_t weight_grad_partials(const WeightGradParams&, int64_t parts);
int64_t weight_grad_units(const WeightGradParams&, int64_t parts);
void weight_grad(const WeightGradParams&, double* partial, int64_t parts, int64_t begin, int64_t end);
// Adds up the parts, in their order.
void reduce_weight_grad(const WeightGradParams&, const double* partial, int64_t parts);

// For estimates: "name=value" pairs, separated by spaces.
//   channels, planes   1 for the kind of kernel; neither for plain loops
//   products           multiplications, with those of lanes that no result is in
//   loaded             elements of the tiles that come to scratch
//   kernels            that are run one after the other
std::string cpu_forward_work(const ForwardParams&);
std::string cpu_input_grad_work(const InputGradParams&);
std::string cpu_weight_grad_work(const WeightGradParams&);

// Kernels of one width of vectors (cpu_vector_kernels.h).
struct CpuKernels {
  int64_t lanes;
  void (*forward_channels)(const ForwardParams&, int64_t begin, int64_t end);
  void (*forward_planes)(const ForwardParams&, int64_t begin, int64_t end);
  void (*weight_grad_channels)(const WeightGradParams&, double* partial, int64_t parts, int64_t begin, int64_t end);
  void (*weight_grad_planes)(const WeightGradParams&, double* partial, int64_t parts, int64_t begin, int64_t end);
};
CpuKernels avx512_kernels();

}  // namespace fusebackend::depthwise_conv
