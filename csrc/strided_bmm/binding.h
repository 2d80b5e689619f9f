// What the bindings share: a product as an operator describes it.
#pragma once

#include <algorithm>
#include <vector>

#include "common/binding.h"
#include "strided_bmm/strided_bmm.h"

namespace fusebackend::strided_bmm {

template <typename Array>
Array to_array(const std::vector<int64_t>& from, const char* what) {
  Array to;
  STD_TORCH_CHECK(from.size() == to.size(), "strided_bmm: ", what, ": ", to.size(), " numbers are needed");
  std::copy(from.begin(), from.end(), to.begin());
  return to;
}

}  // namespace fusebackend::strided_bmm
