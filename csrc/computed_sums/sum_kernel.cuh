R"cuda(
// The kernel that adds what a program gives, of each image by itself. The order of the additions follows from the shape alone.

constexpr int kStepsOfASum = 16;  // that are added one after the other, before they are added to a second sum: errors grow with these

FUNCTION void store_result(void* out, long long i, float value, int type) {
  if (type == 'f') static_cast<float*>(out)[i] = value;
  else static_cast<unsigned short*>(out)[i] = type == 'h' ? to_fp16(value) : to_bf16(value);
}

extern "C" __global__ void __launch_bounds__(kMostThreads, kBlocks) computed_sums_rows(const Arguments p) {
  extern __shared__ float shared[];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const unsigned tile = blockIdx.x % p.tiles, part = blockIdx.x / p.tiles, image = part / p.splits, split = part - image * p.splits;
  const int lane = threadIdx.x / p.tile_vectors, vector = threadIdx.x - lane * p.tile_vectors;
  const long long column = (static_cast<long long>(tile) * p.tile_vectors + vector) * kVector;
  const bool active = lane < p.lanes && column < p.columns;
  const auto second = [&](int s, int i) -> float& { return shared[(s * kVector + i) * blockDim.x + threadIdx.x]; };

  if (active) {
    const unsigned end = (image + 1) * p.rows, stride = p.lanes * p.splits;
    unsigned row = image * p.rows + split * p.lanes + lane;
    const Operands operands(p, column, row);
    float sum[kOuts][kVector] = {};
#pragma unroll
    for (int s = 0; s < kOuts; ++s) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) second(s, i) = 0.0f;
    }
    const auto add_to_second = [&] {
#pragma unroll
      for (int s = 0; s < kOuts; ++s) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) second(s, i) += sum[s][i], sum[s][i] = 0.0f;
      }
    };
    int steps = 0;
    for (; row + (kRowsAtOnce - 1) * stride < end; row += kRowsAtOnce * stride) {
      Row rows[kRowsAtOnce];
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) operands.load_row(p, row + u * stride, rows[u]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        float tree[kRowsAtOnce][kOuts];
#pragma unroll
        for (int u = 0; u < kRowsAtOnce; ++u) operands.outs_of(p, rows[u], i, tree[u]);
#pragma unroll
        for (int s = 0; s < kOuts; ++s) {
#pragma unroll
          for (int half = kRowsAtOnce / 2; half > 0; half /= 2) {
#pragma unroll
            for (int u = 0; u < half; ++u) tree[u][s] += tree[u + half][s];
          }
          sum[s][i] += tree[0][s];
        }
      }
      if (++steps == kStepsOfASum) {
        steps = 0;
        add_to_second();
      }
    }
    if constexpr (kRowsAtOnce > 1) {  // fewer rows than a step has
#pragma unroll 1
      for (; row < end; row += stride) {
        Row last;
        operands.load_row(p, row, last);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          float terms[kOuts];
          operands.outs_of(p, last, i, terms);
#pragma unroll
          for (int s = 0; s < kOuts; ++s) sum[s][i] += terms[s];
        }
      }
    }
    add_to_second();
  }
  // The lanes' sums, in a tree: the upper half of them is added to the lower.
  for (int count = p.lanes; count > 1;) {
    const int half = (count + 1) / 2;
    __syncthreads();
    if (active && lane < count - half) {
#pragma unroll
      for (int j = 0; j < kOuts * kVector; ++j) shared[j * blockDim.x + threadIdx.x] += shared[j * blockDim.x + threadIdx.x + half * p.tile_vectors];
    }
    count = half;
  }
  if (!active || lane != 0) return;
#pragma unroll 1
  for (int s = 0; s < kOuts; ++s) {
    if (p.finished) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) store_result(p.out[s], image * p.columns + column + i, second(s, i) * p.scale, p.results[s]);
    } else {
      float* const sums = static_cast<float*>(p.out[0]) + ((static_cast<long long>(s) * p.batch + image) * p.splits + split) * p.columns + column;
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] = second(s, i);
    }
  }
}
)cuda"
