// Attention in short windows, backward: a thread block computes one head after another, a warp 16 keys of each. Scores are computed
// transposed, so that probabilities and their gradients are the left operands of dv and dk as they stand in registers; only dq needs them
// from all warps, by way of shared memory. The gradient of one bias is summed in registers over the block's heads.
//
// What a query's gradients of scores have in common, the sum of probabilities times their gradients, is summed over the keys: the sum of
// grad * out, which is the same, has the rounding of out in it, and that is more than what is left where one key has nearly all the weight.
#include "attention/launchers.h"
#include "attention/transposed_scores.cuh"
#include "attention/window.cuh"

namespace fusebackend::attention {
namespace {

template <int kD>
struct BackwardStage {
  static constexpr int kBytes = Tile<kD>::bytes(kWindow);
  static constexpr int kQ = 0, kK = kBytes, kV = 2 * kBytes, kGrad = 3 * kBytes, kResult = 4 * kBytes, kAll = 5 * kBytes;
};

using ScoreTile = Tile<kWindow>;  // of the scores' gradient, a row a key

// Sums over the 8 lanes that share c = lane % 4, of two queries 8 * j + 2 * c each. Of each j one lane gets it: queries 2 * lane and the next.
__device__ __forceinline__ float2 sum_of_keys(float (&x)[8][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int count = 4; count > 0; count /= 2) {
    const bool upper = lane & (4 * count);
#pragma unroll
    for (int j = 0; j < count; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float given = upper ? x[j][e] : x[j + count][e], kept = upper ? x[j + count][e] : x[j][e];
        x[j][e] = kept + __shfl_xor_sync(~0u, given, 4 * count);
      }
  }
  return {x[0][0], x[0][1]};
}

template <typename T, int kD, int kTiles, bool kSumsBias>
__global__ __launch_bounds__(kWindowThreads, kD == 32 ? kWindowBackwardBlocks : kWideWindowBackwardBlocks) void attention_window_backward(
    const __grid_constant__ Arguments a) {
  using Rows = Tile<kD>;
  using Stage = BackwardStage<kD>;
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(128) char score_gradient[ScoreTile::bytes(kWindow)];
  constexpr int kWarps = kWindowThreads / 32;
  __shared__ float log2_sums[kWindow], large_maximum[kWindow];
  __shared__ float2 warp_deltas[kWarps][kWindow / 2], deltas[kWarps][kWindow / 2];  // of two queries; a copy for each warp
  const uint32_t shared0 = shared_address(shared), score_gradient0 = shared_address(score_gradient);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t kept = blockIdx.x / a.chunks * a.inner;
  const uint32_t begin = blockIdx.x % a.chunks * a.per_block, end = min(begin + a.per_block, a.inner);

  const auto copy = [&](uint32_t head, int stage) {
    const HeadIndex index(a, kept + head);
    const uint32_t to = shared0 + stage * Stage::kAll;
    Rows::template load<kWindow, kWindowThreads>(to + Stage::kQ, rows_of<const T>(a.q, index), a.q.row, 0, a.t, a.d);
    Rows::template load<kWindow, kWindowThreads>(to + Stage::kK, rows_of<const T>(a.k, index), a.k.row, 0, a.s, a.d);
    Rows::template load<kWindow, kWindowThreads>(to + Stage::kV, rows_of<const T>(a.v, index), a.v.row, 0, a.s, a.dv);
    Rows::template load<kWindow, kWindowThreads>(to + Stage::kGrad, rows_of<const T>(a.grad, index), a.grad.row, 0, a.t, a.dv);
  };
  const int own_row = threadIdx.x % kWindow;
  const auto statistics_of = [&](uint32_t head) {
    const HeadIndex index(a, kept + head);
    return own_row < a.t ? __ldg(index.statistics(a) + own_row) : float2{0.f, INFINITY};
  };

  copy(begin, 0);
  cp_async_commit();
  float2 statistics = statistics_of(begin);
  WindowBiases<T, kTiles, true> biases;
  float bias_gradient[kSumsBias ? kTiles : 1][4] = {};
  for (uint32_t head = begin; head < end; ++head) {
    const int stage = (head - begin) & 1;
    const float2 own_statistics = statistics;
    if (head + 1 < end) {
      copy(head + 1, stage ^ 1);
      statistics = statistics_of(head + 1);
    }
    cp_async_commit();
    const HeadIndex index(a, kept + head);
    biases.load(a, index, head == begin);
    const bool large = is_large(own_statistics.x);
    if (threadIdx.x < kWindow) {
      const float maximum = own_statistics.x, log_sum = unmarked(own_statistics.y);
      log2_sums[own_row] = large ? log_sum * kLog2e : (maximum + log_sum) * kLog2e;  // of padded queries infinity: their probabilities are 0
      large_maximum[own_row] = large ? maximum : 0.f;
    }
    cp_async_wait<1>();
    const bool any_special = __syncthreads_or(large || !has_score_gradients(own_statistics.y));
    char* const here = shared + stage * Stage::kAll;
    const uint32_t from = shared0 + stage * Stage::kAll;

    float p[kTiles][4] = {}, dp[kTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      uint32_t left[4];
      Rows::left(left, from + Stage::kK, 16 * warp + lane % 16, k);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b[4];
        Rows::right(b, from + Stage::kQ, j, k);
        mma<T>(p[j], left, b[0], b[1]);
        if (j + 1 < kTiles) mma<T>(p[j + 1 < kTiles ? j + 1 : j], left, b[2], b[3]);
      }
    }
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      uint32_t left[4];
      Rows::left(left, from + Stage::kV, 16 * warp + lane % 16, k);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b[4];
        Rows::right(b, from + Stage::kGrad, j, k);
        mma<T>(dp[j], left, b[0], b[1]);
        if (j + 1 < kTiles) mma<T>(dp[j + 1 < kTiles ? j + 1 : j], left, b[2], b[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[j][e] = fmaf(p[j][e], a.scale, biases.sum[j][e]);
    if (any_special) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) p[j][e] -= large_maximum[8 * j + 2 * c + e % 2];
    }
    float products[8][2] = {};
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 log2_sum = *reinterpret_cast<const float2*>(&log2_sums[8 * j + 2 * c]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[j][e] = exp2_fast(fmaf(p[j][e], kLog2e, -(e % 2 ? log2_sum.y : log2_sum.x)));
        products[j][e % 2] = fmaf(p[j][e], dp[j][e], products[j][e % 2]);
      }
    }
    warp_deltas[warp][lane] = sum_of_keys(products);
    __syncthreads();
    float2 delta = warp_deltas[0][lane];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) delta.x += warp_deltas[w][lane].x, delta.y += warp_deltas[w][lane].y;
    deltas[warp][lane] = delta;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 two = deltas[warp][4 * j + c];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dp[j][e] = p[j][e] * (dp[j][e] - (e % 2 ? two.y : two.x));
      }
    }
    if (any_special) clear_score_gradients(dp, a, index, 2 * c);
    if constexpr (kSumsBias) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) bias_gradient[j][e] += dp[j][e];
    }

    float result[kD / 8][4] = {};
    const auto add_product = [&](const float(&left)[kTiles][4], uint32_t right, auto also) {
#pragma unroll
      for (int k = 0; k < (kTiles + 1) / 2; ++k) {
        const bool whole = 2 * k + 1 < kTiles;
        const float(&x)[4] = left[2 * k];
        const float(&y)[4] = left[whole ? 2 * k + 1 : 2 * k];
        const uint32_t packed[4] = {Half2<T>::pack(x[0], x[1]), Half2<T>::pack(x[2], x[3]), whole ? Half2<T>::pack(y[0], y[1]) : 0u,
                                    whole ? Half2<T>::pack(y[2], y[3]) : 0u};
        also(k, packed);
#pragma unroll
        for (int j = 0; j < kD / 8; j += 2) {
          uint32_t b[4];
          Rows::right_transposed(b, right, k, j);
          mma<T>(result[j], packed, b[0], b[1]);
          mma<T>(result[j + 1], packed, b[2], b[3]);
        }
      }
    };
    add_product(p, from + Stage::kGrad, [](int, const uint32_t(&)[4]) {});
    store_rows<kD>(here + Stage::kV, 16 * warp, result, 1.f, 1.f, rows_of<T>(a.dv_out, index), a.dv_out.row, 16 * warp, a.s, a.dv);
#pragma unroll
    for (int j = 0; j < kD / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) result[j][e] = 0;
    add_product(dp, from + Stage::kQ, [&](int k, const uint32_t(&packed)[4]) {
      // A row a key; the fragment's second half are queries 8 further on.
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ScoreTile::store_pair(score_gradient, 16 * warp + g + i % 2 * 8, 16 * k + i / 2 * 8 + 2 * c, packed[i]);
    });
    store_rows<kD>(here + Stage::kResult, 16 * warp, result, a.scale, a.scale, rows_of<T>(a.dk, index), a.dk.row, 16 * warp, a.s, a.d);
    __syncthreads();

    float dq[kD / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kWindow / 16; ++k) {
      uint32_t left[4];
      ScoreTile::left_transposed(left, score_gradient0, warp, 16 * k);
#pragma unroll
      for (int j = 0; j < kD / 8; j += 2) {
        uint32_t b[4];
        Rows::right_transposed(b, from + Stage::kK, k, j);
        mma<T>(dq[j], left, b[0], b[1]);
        mma<T>(dq[j + 1], left, b[2], b[3]);
      }
    }
    store_rows<kD>(here + Stage::kQ, 16 * warp, dq, a.scale, a.scale, rows_of<T>(a.dq, index), a.dq.row, 16 * warp, a.t, a.d);
    __syncthreads();  // the next copy overwrites what this head was read from
  }
  cp_async_wait<0>();

  if constexpr (kSumsBias) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int s = 16 * warp + g + e / 2 * 8, t = 8 * j + 2 * c + e % 2;
        if (s < a.s && t < a.t) store_bias_gradient<T>(a, blockIdx.x, t, s, bias_gradient[j][e]);
      }
  }
}

template <typename T, int kD, int kTiles, bool kSumsBias>
cudaError_t launch(const Backward& p, int summed, float* partial_sums, int sm_count, cudaStream_t stream) {
  constexpr int kBytes = 2 * BackwardStage<kD>::kAll;
  const auto kernel = attention_window_backward<T, kD, kTiles, kSumsBias>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, kBytes); error != cudaSuccess) return error;
  const HeadPlan plan = plan_window_backward(p, summed, sm_count);
  Arguments a = backward_arguments(p, plan);
  if (kSumsBias) sum_bias_gradient(a, p, plan, summed, partial_sums);
  kernel<<<unsigned(plan.blocks()), kWindowThreads, kBytes, stream>>>(a);
  return cudaGetLastError();
}

template <typename T, int kD, int kTiles>
cudaError_t launch_summed(const Backward& p, int summed, float* partial_sums, int sm_count, cudaStream_t stream) {
  return summed >= 0 ? launch<T, kD, kTiles, true>(p, summed, partial_sums, sm_count, stream)
                     : launch<T, kD, kTiles, false>(p, summed, partial_sums, sm_count, stream);
}

template <typename T>
cudaError_t launch_dim(const Backward& p, int summed, float* partial_sums, int sm_count, cudaStream_t stream) {
  const bool narrow = std::max(p.size.d, p.size.dv) <= 32, few = window_columns(p.size.t) == 56;
  if (narrow) return few ? launch_summed<T, 32, 7>(p, summed, partial_sums, sm_count, stream)
                         : launch_summed<T, 32, 8>(p, summed, partial_sums, sm_count, stream);
  return few ? launch_summed<T, 64, 7>(p, summed, partial_sums, sm_count, stream)
             : launch_summed<T, 64, 8>(p, summed, partial_sums, sm_count, stream);
}

}  // namespace

cudaError_t launch_window_backward(const Backward& p, int summed, float* partial_sums, int sm_count, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(p, summed, partial_sums, sm_count, stream)
                                     : launch_dim<__half>(p, summed, partial_sums, sm_count, stream);
}

}  // namespace fusebackend::attention
