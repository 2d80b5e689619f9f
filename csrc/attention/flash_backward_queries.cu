// Attention backward for any length, dq: a thread block computes 64 queries of a head, a warp 16, and walks along the keys in tiles of 64.
#include "attention/flash.cuh"
#include "attention/launchers.h"
#include "attention/score_gradient.cuh"

namespace fusebackend::attention {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kQueries = 16 * kWarps;

template <int kD>
struct FlashBackwardQueries {
  static constexpr int kTile = Tile<kD>::bytes(64);
  static constexpr int kQ = 0, kGrad = kTile, kStages = 2 * kTile;
  static constexpr int kK = 0, kV = kTile, kStage = 2 * kTile;  // of a stage
  static constexpr int kBytes = kStages + 2 * kStage;
};

template <typename T, int kD, int kBlocks>
__global__ __launch_bounds__(kThreads, kBlocks) void attention_flash_backward_queries(const __grid_constant__ Arguments a, uint32_t tiles) {
  using Layout = FlashBackwardQueries<kD>;
  using Queries = Tile<kD>;
  using Keys = Tile<kD, Order::kByVector>;
  extern __shared__ __align__(128) char shared[];
  const uint32_t shared0 = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const HeadIndex index(a, blockIdx.x / tiles);
  const int first = int(a.causal ? tiles - 1 - blockIdx.x % tiles : blockIdx.x % tiles) * kQueries;
  const int t = first + 16 * warp + g;  // the first of this lane's two queries
  const T *k = rows_of<const T>(a.k, index), *v = rows_of<const T>(a.v, index);
  const int end = key_end(a, first + kQueries);

  const auto copy = [&](int key, int stage) {
    const uint32_t to = shared0 + Layout::kStages + stage * Layout::kStage;
    Keys::template load<kKeys, kThreads>(to + Layout::kK, k, a.k.row, key, a.s, a.d);
    Keys::template load<kKeys, kThreads>(to + Layout::kV, v, a.v.row, key, a.s, a.dv);
  };
  Queries::template load<kQueries, kThreads>(shared0 + Layout::kQ, rows_of<const T>(a.q, index), a.q.row, first, a.t, a.d);
  Queries::template load<kQueries, kThreads>(shared0 + Layout::kGrad, rows_of<const T>(a.grad, index), a.grad.row, first, a.t, a.dv);
  copy(0, 0);
  cp_async_commit();
  const QueryRows<1> rows(a, index, t);

  float dq[1][kD / 8][4] = {};
  RowBiases<T, 1> biases;
  for (int key = 0, stage = 0; key < end; key += kKeys, stage ^= 1) {
    biases.prefetch(a, index, t, key + 8 * c);
    cp_async_wait<0>();
    __syncthreads();
    if (key + kKeys < end) copy(key + kKeys, stage ^ 1);
    cp_async_commit();
    const uint32_t k_tile = shared0 + Layout::kStages + stage * Layout::kStage + Layout::kK, v_tile = k_tile + Layout::kV;
    float ds[1][8][4];
    score_gradient<T, kD>(ds, a, index, biases, rows, shared0 + Layout::kQ, shared0 + Layout::kGrad, 16 * warp, k_tile, v_tile, t, first, key);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      uint32_t left[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) left[x] = Half2<T>::pack(ds[0][2 * i + x / 2][x % 2 * 2], ds[0][2 * i + x / 2][x % 2 * 2 + 1]);
#pragma unroll
      for (int j = 0; j < kD / 8; j += 2) {
        uint32_t b[4];
        Keys::right_transposed(b, k_tile, i, j);
        mma<T>(dq[0][j], left, b[0], b[1]);
        mma<T>(dq[0][j + 1], left, b[2], b[3]);
      }
    }
  }
  store_rows<kD>(shared + Layout::kQ, 16 * warp, dq[0], a.scale, a.scale, rows_of<T>(a.dq, index), a.dq.row, first + 16 * warp, a.t, a.d,
                 [](int r) { return r; });
}

template <typename T, int kD>
cudaError_t launch(const Arguments& a, const Backward& p, cudaStream_t stream) {
  using Layout = FlashBackwardQueries<kD>;
  const auto kernel = attention_flash_backward_queries<T, kD, kD == 128 ? 2 : 3>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, Layout::kBytes); error != cudaSuccess) return error;
  const int64_t tiles = ceil_div(p.size.t, kQueries), blocks = tiles * p.size.heads();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<unsigned(blocks), kThreads, Layout::kBytes, stream>>>(a, uint32_t(tiles));
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_dim(const Arguments& a, const Backward& p, cudaStream_t stream) {
  const int64_t d = std::max(p.size.d, p.size.dv);
  if (d <= 32) return launch<T, 32>(a, p, stream);
  if (d <= 64) return launch<T, 64>(a, p, stream);
  return launch<T, 128>(a, p, stream);
}

}  // namespace

cudaError_t launch_flash_backward_queries(const Arguments& a, const Backward& p, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(a, p, stream) : launch_dim<__half>(a, p, stream);
}

}  // namespace fusebackend::attention
