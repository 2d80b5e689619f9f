// The gradient of a tile of scores, of which a warp has 16 queries or 32 and all 64 keys (in Order::kByVector).
#pragma once

#include "attention/flash.cuh"

namespace fusebackend::attention {

// The RowSums of a lane's queries, and their maxima where these are large.
template <int kTiles>
struct QueryRows {
  float log2_sum[kTiles][2], delta[kTiles][2], large_maximum[kTiles][2];
  bool any_large = false;

  __device__ __forceinline__ QueryRows(const Arguments& a, const HeadIndex& index, int t) {
    const float2* statistics = index.statistics(a);
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = t + 16 * m + 8 * r;
        const bool exists = query < a.t;
        const RowSums& sums = index.row_sums(a)[query / kRowSumQueries];
        const float2 row = exists ? __ldg(statistics + query) : float2{};
        const float maximum = row.x;
        log2_sum[m][r] = exists && has_score_gradients(row.y) ? __ldg(sums.log2_sum + query % kRowSumQueries) : INFINITY;
        delta[m][r] = exists ? __ldg(sums.delta + query % kRowSumQueries) : 0.f;
        large_maximum[m][r] = is_large(maximum) ? maximum : 0.f;
        any_large |= is_large(maximum);
      }
  }
};

// kPrefetches: whether the tile of the next keys comes after this one.
// `first_row`: the warp's first row in the tiles of queries. `t`, `key`: the lane's first query, the tile's first key.
template <typename Product, bool kPrefetches, typename T, int kTiles>
__device__ __forceinline__ void score_gradient(float (&ds)[kTiles][8][4], const Arguments& a, const HeadIndex& index,
                                               RowBiases<T, kTiles>& biases, const QueryRows<kTiles>& rows, uint32_t q_tile,
                                               uint32_t grad_tile, int first_row, uint32_t k_tile, uint32_t v_tile, int t, int first_query,
                                               int key) {
  const int c = threadIdx.x % 4;
  float p[kTiles][8][4];
  Product::start_scores(p, q_tile, first_row, k_tile);
  Product::start_scores(ds, grad_tile, first_row, v_tile);
  Product::template wait<1>(p);
  biases.add(a, index, p, t, key + 8 * c);
  if (kPrefetches) biases.prefetch(a, key + kKeys + 8 * c, key + kKeys);
  if (is_masked(a, first_query, key)) mask_scores(a, p, t, key);
  Product::template wait<0>(ds);
  if (a.kept) {
    const KeptKeys<kTiles> kept(a, index, t, key);
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[m][j][e] = kept(m, j, e) ? ds[m][j][e] * a.kept_scale : 0.f;
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (rows.any_large) p[m][j][e] -= rows.large_maximum[m][e / 2];
        ds[m][j][e] = exp2_fast(fmaf(p[m][j][e], kLog2e, -rows.log2_sum[m][e / 2])) * (ds[m][j][e] - rows.delta[m][e / 2]);
      }
}

}  // namespace fusebackend::attention
