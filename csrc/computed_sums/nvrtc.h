// Compiles text by NVRTC, the compiler that comes with torch's CUDA packages, once for each variant and architecture, and keeps it for later processes.
#pragma once

#include <string>

#include "computed_sums/computed_sums.h"

namespace fusebackend::computed_sums {

struct Compiled {
  std::string machine_code;
  std::string failure;  // why there is none
  int registers, stack_bytes, spill_bytes;
};
// For "sm_90" and the like. The result stays where it is. Throws std::runtime_error: the program is malformed.
const Compiled& compiled(const Variant& v, const std::string& architecture);

// How often NVRTC was run in this process.
int64_t compilations();

}  // namespace fusebackend::computed_sums
