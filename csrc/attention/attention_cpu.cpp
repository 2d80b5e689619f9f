// Attention on the CPU, a row of scores at a time, in fp32. Every sum is in one order, whatever the number of threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/attention.h"
#include "common/cpu_half.h"

namespace fusebackend::attention {
namespace {

float load(const char* data, int64_t index, DType type) {
  switch (type) {
    case DType::kFloat32: return reinterpret_cast<const float*>(data)[index];
    case DType::kFloat16: return widen(reinterpret_cast<const Float16*>(data)[index]);
    default: return widen(reinterpret_cast<const BFloat16*>(data)[index]);
  }
}

void store(char* data, int64_t index, DType type, float f) {
  switch (type) {
    case DType::kFloat32: return narrow(f, reinterpret_cast<float*>(data)[index]);
    case DType::kFloat16: return narrow(f, reinterpret_cast<Float16*>(data)[index]);
    default: return narrow(f, reinterpret_cast<BFloat16*>(data)[index]);
  }
}

struct Head {
  int64_t b, g, h, index;
};

Head head_at(const Sizes& size, int64_t i) { return {i / (size.g * size.h), i / size.h % size.g, i % size.h, i}; }

int64_t offset_of(const Rows& rows, const Head& head) { return head.b * rows.stride[0] + head.g * rows.stride[1] + head.h * rows.stride[2]; }

using Matrix = std::vector<float>;

// The rows of a head, row after row.
void read(Matrix& to, const Rows& from, const Head& head, int64_t count, int64_t columns, DType type) {
  to.resize(count * columns);
  const int64_t base = offset_of(from, head);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t c = 0; c < columns; ++c) to[r * columns + c] = load(from.data, base + r * from.stride[3] + c, type);
}

void write(const Rows& to, const Head& head, int64_t row, const float* from, int64_t columns, DType type) {
  const int64_t base = offset_of(to, head) + row * to.stride[3];
  for (int64_t c = 0; c < columns; ++c) store(to.data, base + c, type, from[c]);
}

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(float* to, const float* from, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

// The scores of query t.
void score_row(float* scores, const Problem& p, const Head& head, int64_t t, const float* q, const float* k) {
  for (int64_t s = 0; s < p.size.s; ++s) scores[s] = p.scale * dot(q, k + s * p.size.d, p.size.d);
  for (int i = 0; i < p.biases; ++i) {
    const Bias& bias = p.bias[i];
    const int64_t base = head.b * bias.stride[0] + head.g * bias.stride[1] + head.h * bias.stride[2] + t * bias.stride[3];
    for (int64_t s = 0; s < p.size.s; ++s) scores[s] += load(bias.data, base + s * bias.stride[4], bias.dtype);
  }
  if (p.causal)
    for (int64_t s = t + 1; s < p.size.s; ++s) scores[s] = -INFINITY;
}

// What the probability of query t and key s is multiplied by.
float kept_factor(const Problem& p, const Head& head, int64_t t, int64_t s) {
  if (!p.kept) return 1;
  const int64_t word = (head.index * kept_words(p.size.s) + s / kWordKeys) * kept_queries(p.size.t) + t;
  return p.kept[word] >> (s % kWordKeys) & 1 ? p.kept_scale : 0;
}

// What the gradients of a head are computed from.
struct HeadInputs {
  Matrix q, k, v, grad;

  HeadInputs(const Backward& p, const Head& head) {
    read(q, p.q, head, p.size.t, p.size.d, p.dtype);
    read(k, p.k, head, p.size.s, p.size.d, p.dtype);
    read(v, p.v, head, p.size.s, p.size.dv, p.dtype);
    read(grad, p.grad, head, p.size.t, p.size.dv, p.dtype);
  }

  // The probabilities of query t, as they are multiplied by v, and the gradient of its scores.
  void row(const Backward& p, const Head& head, int64_t t, float* probabilities, float* gradient) const {
    score_row(probabilities, p, head, t, &q[t * p.size.d], k.data());
    const float* statistics = p.statistics + (head.index * p.size.t + t) * kStatistics;
    const bool has_gradients = has_score_gradients(statistics[1]);
    const float log_sum = unmarked(statistics[1]);
    const float* grad_row = &grad[t * p.size.dv];
    // Not grad * out: where one key has nearly all the weight, what is left is less than the rounding of `out`.
    float delta = 0;
    for (int64_t s = 0; s < p.size.s; ++s) {
      probabilities[s] = std::exp((probabilities[s] - statistics[0]) - log_sum);
      gradient[s] = kept_factor(p, head, t, s) * dot(grad_row, &v[s * p.size.dv], p.size.dv);
      delta += probabilities[s] * gradient[s];
    }
    for (int64_t s = 0; s < p.size.s; ++s) {
      gradient[s] = has_gradients ? probabilities[s] * (gradient[s] - delta) : 0;
      probabilities[s] *= kept_factor(p, head, t, s);
    }
  }
};

}  // namespace

void mask_bits_cpu(const MaskBits& p, int64_t begin, int64_t end) {
  const int64_t words = kept_words(p.size[4]), queries = kept_queries(p.size[3]);
  for (int64_t i = begin; i < end; ++i) {
    const Head head = head_at({p.size[0], p.size[1], p.size[2]}, i);
    const uint8_t* const from = p.from + head.b * p.stride[0] + head.g * p.stride[1] + head.h * p.stride[2];
    uint64_t* const to = p.to + i * words * queries;
    std::fill(to, to + words * queries, 0);
    for (int64_t t = 0; t < p.size[3]; ++t)
      for (int64_t s = 0; s < p.size[4]; ++s)
        to[s / kWordKeys * queries + t] |= uint64_t(from[t * p.stride[3] + s * p.stride[4]] != 0) << (s % kWordKeys);
  }
}

void forward_cpu(const Forward& p, int64_t begin, int64_t end) {
  Matrix q, k, v, scores(p.size.s), out(p.size.dv);
  for (int64_t i = begin; i < end; ++i) {
    const Head head = head_at(p.size, i);
    read(q, p.q, head, p.size.t, p.size.d, p.dtype);
    read(k, p.k, head, p.size.s, p.size.d, p.dtype);
    read(v, p.v, head, p.size.s, p.size.dv, p.dtype);
    for (int64_t t = 0; t < p.size.t; ++t) {
      score_row(scores.data(), p, head, t, &q[t * p.size.d], k.data());
      const float maximum = *std::max_element(scores.begin(), scores.end());
      float sum = 0;
      std::fill(out.begin(), out.end(), 0.f);
      for (int64_t s = 0; s < p.size.s; ++s) {
        const float e = std::exp(scores[s] - maximum);
        sum += e;
        add_scaled(out.data(), &v[s * p.size.dv], e * kept_factor(p, head, t, s), p.size.dv);
      }
      for (float& x : out) x /= sum;
      write(p.out, head, t, out.data(), p.size.dv, p.dtype);
      float* statistics = p.statistics + (i * p.size.t + t) * kStatistics;
      statistics[0] = maximum, statistics[1] = std::log(sum);
    }
  }
}

void backward_cpu(const Backward& p, int64_t begin, int64_t end) {
  Matrix probabilities(p.size.s), gradient(p.size.s), dq(p.size.d), dk, dv;
  for (int64_t i = begin; i < end; ++i) {
    const Head head = head_at(p.size, i);
    const HeadInputs inputs(p, head);
    dk.assign(p.size.s * p.size.d, 0), dv.assign(p.size.s * p.size.dv, 0);
    for (int64_t t = 0; t < p.size.t; ++t) {
      inputs.row(p, head, t, probabilities.data(), gradient.data());
      std::fill(dq.begin(), dq.end(), 0.f);
      for (int64_t s = 0; s < p.size.s; ++s) {
        add_scaled(&dv[s * p.size.dv], &inputs.grad[t * p.size.dv], probabilities[s], p.size.dv);
        add_scaled(&dk[s * p.size.d], &inputs.q[t * p.size.d], p.scale * gradient[s], p.size.d);
        add_scaled(dq.data(), &inputs.k[s * p.size.d], p.scale * gradient[s], p.size.d);
      }
      write(p.dq, head, t, dq.data(), p.size.d, p.dtype);
    }
    for (int64_t s = 0; s < p.size.s; ++s) {
      write(p.dk, head, s, &dk[s * p.size.d], p.size.d, p.dtype);
      write(p.dv, head, s, &dv[s * p.size.dv], p.size.dv, p.dtype);
    }
  }
}

void bias_gradient_cpu(const Backward& p, int i, int64_t begin, int64_t end) {
  const BiasGradient& dbias = p.dbias[i];
  const int64_t* size = dbias.size;
  const int64_t sizes[3] = {p.size.b, p.size.g, p.size.h};
  Matrix probabilities(p.size.s), gradient(p.size.s), sum;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t at[3] = {unit / (size[1] * size[2]), unit / size[2] % size[1], unit % size[2]};
    int64_t first[3], last[3];
    for (int d = 0; d < 3; ++d) {
      first[d] = size[d] == 1 ? 0 : at[d];
      last[d] = size[d] == 1 ? sizes[d] : at[d] + 1;
    }
    sum.assign(size[3] * size[4], 0);
    for (int64_t b = first[0]; b < last[0]; ++b)
      for (int64_t g = first[1]; g < last[1]; ++g)
        for (int64_t h = first[2]; h < last[2]; ++h) {
          const Head head{b, g, h, (b * p.size.g + g) * p.size.h + h};
          const HeadInputs inputs(p, head);
          for (int64_t t = 0; t < p.size.t; ++t) {
            inputs.row(p, head, t, probabilities.data(), gradient.data());
            float* row = &sum[size[3] == 1 ? 0 : t * size[4]];
            for (int64_t s = 0; s < p.size.s; ++s) row[size[4] == 1 ? 0 : s] += gradient[s];
          }
        }
    for (int64_t j = 0; j < size[3] * size[4]; ++j) store(dbias.data, unit * size[3] * size[4] + j, dbias.dtype, sum[j]);
  }
}

}  // namespace fusebackend::attention
