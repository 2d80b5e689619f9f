// How a product is halved so that its planes need less memory, and what that costs.
#pragma once
#include <utility>

#include "fp32_matmul/launch.h"

namespace fusebackend::fp32_matmul {

// Planes of up to so many bytes are not divided, unless they must be: more launches, for memory that hardly a step runs short of.
constexpr size_t kFewPlanes = size_t(128) << 20;

// How much longer all pieces may take than the whole, where they are not needed and memory is saved by them.
constexpr double kMostSlowdown = 1.03;

enum class Index { kNone, kBatch, kM, kN, kK };

struct Halves {
  Index index = Index::kNone;        // that is halved; kNone where there is no way
  int64_t size = 0;                  // of the first half
  double cost = 0;                   // of both, as cost_of says
  bool keeps = false;                // whether the planes of the operand that both need, B along m and A along n, are made once

  // Of p, which has more than `size` of that index. Along k the second is added to the first.
  std::pair<Problem, Problem> of(const Problem& p) const;
};

// What a product takes at once, its planes that are yet to be made and its launches counted, in the microseconds of plan_wgmma's model.
double cost_of(const Problem& p, Kernel kernel, int sm_count);

// How to halve a product. Of the ways that cost at most `allowed` the one that leaves the fewest planes, else the cheapest.
// `a_bytes`, `b_bytes`: of planes that are to be made; 0 for an operand that came with them, which stays whole.
// `most_kept`: bytes of planes that may be kept from the first half to the second.
Halves best_halves(const Problem& p, size_t a_bytes, size_t b_bytes, size_t most_kept, double allowed, Kernel kernel, int sm_count);

}  // namespace fusebackend::fp32_matmul
