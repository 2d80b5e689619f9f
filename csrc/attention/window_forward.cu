// Attention in short windows, forward: a thread block computes one head after another, a warp 16 queries of each. Scores and probabilities
// stay in registers, as do the biases of all heads that share them; the next head is copied to shared memory meanwhile.
#include "attention/launchers.h"
#include "attention/window.cuh"

namespace fusebackend::attention {
namespace {

template <int kD>
struct ForwardStage {
  static constexpr int kBytes = Tile<kD>::bytes(kWindow);
  static constexpr int kQ = 0, kK = kBytes, kV = 2 * kBytes, kAll = 3 * kBytes;
};

template <typename T, int kD, int kTiles>
__global__ __launch_bounds__(kWindowThreads, kD == 32 ? kWindowForwardBlocks : kWideWindowForwardBlocks) void attention_window_forward(const __grid_constant__ Arguments a) {
  using Rows = Tile<kD>;
  using Stage = ForwardStage<kD>;
  extern __shared__ __align__(128) char shared[];
  const uint32_t shared0 = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t kept = blockIdx.x / a.chunks * a.inner;
  const uint32_t begin = blockIdx.x % a.chunks * a.per_block, end = min(begin + a.per_block, a.inner);

  const auto copy = [&](uint32_t head, int stage) {
    const HeadIndex index(a, kept + head);
    const uint32_t to = shared0 + stage * Stage::kAll;
    Rows::template load<kWindow, kWindowThreads>(to + Stage::kQ, rows_of<const T>(a.q, index), a.q.row, 0, a.t, a.d);
    Rows::template load<kWindow, kWindowThreads>(to + Stage::kK, rows_of<const T>(a.k, index), a.k.row, 0, a.s, a.d);
    Rows::template load<kWindow, kWindowThreads>(to + Stage::kV, rows_of<const T>(a.v, index), a.v.row, 0, a.s, a.dv);
  };

  copy(begin, 0);
  cp_async_commit();
  WindowBiases<T, kTiles, false> biases;
  for (uint32_t head = begin; head < end; ++head) {
    const int stage = (head - begin) & 1;
    if (head + 1 < end) copy(head + 1, stage ^ 1);
    cp_async_commit();
    const HeadIndex index(a, kept + head);
    biases.load(a, index, head == begin);
    cp_async_wait<1>();
    __syncthreads();
    const uint32_t from = shared0 + stage * Stage::kAll;

    float p[kTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      uint32_t q[4];
      Rows::left(q, from + Stage::kQ, 16 * warp + lane % 16, k);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b[4];
        Rows::right(b, from + Stage::kK, j, k);
        mma<T>(p[j], q, b[0], b[1]);
        if (j + 1 < kTiles) mma<T>(p[j + 1 < kTiles ? j + 1 : j], q, b[2], b[3]);
      }
    }
    float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[j][e] = fmaf(p[j][e], a.scale, biases.sum[j][e]);
        maximum[e / 2] = fmaxf(maximum[e / 2], p[j][e]);
      }
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = quad_max(maximum[r]);
      shift[r] = -maximum[r] * kLog2e;
      if (is_large(maximum[r])) {
        shift[r] = 0;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) p[j][2 * r] -= maximum[r], p[j][2 * r + 1] -= maximum[r];
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[j][e] = exp2_fast(fmaf(p[j][e], kLog2e, shift[e / 2]));
        sum[e / 2] += p[j][e];
      }
    float out[kD / 8][4] = {};
#pragma unroll
    for (int k = 0; k < (kTiles + 1) / 2; ++k) {
      const bool whole = 2 * k + 1 < kTiles;
      const float(&next)[4] = p[whole ? 2 * k + 1 : 2 * k];
      const uint32_t left[4] = {Half2<T>::pack(p[2 * k][0], p[2 * k][1]), Half2<T>::pack(p[2 * k][2], p[2 * k][3]),
                                whole ? Half2<T>::pack(next[0], next[1]) : 0u, whole ? Half2<T>::pack(next[2], next[3]) : 0u};
#pragma unroll
      for (int j = 0; j < kD / 8; j += 2) {
        uint32_t b[4];
        Rows::right_transposed(b, from + Stage::kV, k, j);
        mma<T>(out[j], left, b[0], b[1]);
        mma<T>(out[j + 1], left, b[2], b[3]);
      }
    }
    sum[0] = quad_sum(sum[0]), sum[1] = quad_sum(sum[1]);
    // The warp's queries make room for its results.
    store_rows<kD>(shared + stage * Stage::kAll + Stage::kQ, 16 * warp, out, 1.f / sum[0], 1.f / sum[1], rows_of<T>(a.out, index),
                   a.out.row, 16 * warp, a.t, a.dv);
    if (c == 0) {
      float2* statistics = index.statistics(a);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int t = 16 * warp + g + 8 * r;
        if (t < a.t) statistics[t] = {maximum[r], __logf(sum[r])};
      }
    }
    __syncthreads();  // the next copy overwrites what this head was read from
  }
  cp_async_wait<0>();
}

template <typename T, int kD, int kTiles>
cudaError_t launch(const Forward& p, int sm_count, cudaStream_t stream) {
  constexpr int kBytes = 2 * ForwardStage<kD>::kAll;
  const auto kernel = attention_window_forward<T, kD, kTiles>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, kBytes); error != cudaSuccess) return error;
  const HeadPlan plan = plan_window_forward(p, sm_count);
  kernel<<<unsigned(plan.blocks()), kWindowThreads, kBytes, stream>>>(forward_arguments(p, plan));
  return cudaGetLastError();
}

template <typename T, int kD>
cudaError_t launch_tiles(const Forward& p, int sm_count, cudaStream_t stream) {
  return window_columns(p.size.s) == 56 ? launch<T, kD, 7>(p, sm_count, stream) : launch<T, kD, 8>(p, sm_count, stream);
}

template <typename T>
cudaError_t launch_dim(const Forward& p, int sm_count, cudaStream_t stream) {
  return std::max(p.size.d, p.size.dv) <= 32 ? launch_tiles<T, 32>(p, sm_count, stream) : launch_tiles<T, 64>(p, sm_count, stream);
}

}  // namespace

cudaError_t launch_window_forward(const Forward& p, int sm_count, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(p, sm_count, stream) : launch_dim<__half>(p, sm_count, stream);
}

}  // namespace fusebackend::attention
