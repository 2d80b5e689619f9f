// Sums in double precision whose error does not grow with the number of terms: what each addition rounds off is added up beside the sum (TwoSum
// of Knuth; Ogita, Rump and Oishi: Accurate sum and dot product, 2005). For results in double precision, which nothing rounds any more.
#pragma once

#include <cmath>

namespace fusebackend {

inline void add_compensated(double& sum, double& lost, double term) {
  const double total = sum + term, added = total - sum;
  lost += (sum - (total - added)) + (term - added);
  sum = total;
}

// Of infinite sums nothing is known that was lost.
inline double compensated(double sum, double lost) { return std::isfinite(lost) ? sum + lost : sum; }

}  // namespace fusebackend
