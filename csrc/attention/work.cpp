#include "attention/work.h"

#include <algorithm>
#include <sstream>

#include "attention/heads.h"

namespace fusebackend::attention {
namespace {

// Of one kernel: `steps` tiles of queries by keys a block, each of which takes so many products of matrices of `dim` columns.
struct Kernel {
  int64_t blocks, steps, queries, keys, products, staged_rows;
  bool keeps_biases;  // between steps
};

struct Total {
  double kernels = 0, flops = 0, scores = 0, steps = 0, biases = 0, blocks = 1e18, staged_bytes = 0, scratch_bytes = 0;
};

int64_t padded_dim(const Problem& p) {
  const int64_t d = std::max(p.size.d, p.size.dv);
  return d <= 32 ? 32 : d <= 64 ? 64 : 128;
}

void add(Total& total, const Problem& p, const Kernel& k, int sm_count) {
  const double longest = double(ceil_div(k.blocks, int64_t(sm_count))) * double(k.steps), scores = longest * double(k.queries * k.keys);
  total.kernels += 1;
  total.flops += 2. * scores * double(padded_dim(p) * k.products);
  total.scores += scores;
  total.steps += longest;
  total.biases += k.keeps_biases ? 0 : scores * p.biases;
  total.blocks = std::min(total.blocks, double(k.blocks));
  total.staged_bytes += double(k.blocks * k.steps * k.staged_rows * padded_dim(p)) * 2;
}

// Half of the tiles lie beyond the diagonal.
int64_t seen(const Problem& p, int64_t tiles) { return p.causal ? (tiles + 1) / 2 : tiles; }

void add_copies(Total& total, const Problem& p) {
  const int64_t scores[5] = {p.size.b, p.size.g, p.size.h, p.size.t, p.size.s};
  for (int i = 0; i < p.biases; ++i) {
    if (has_vectors(p.bias[i], p.size.s)) continue;
    double bytes = element_size(p.bias[i].dtype);
    for (int d = 0; d < 5; ++d) bytes *= p.bias[i].stride[d] == 0 ? 1. : double(scores[d]);
    total.kernels += 1;
    total.scratch_bytes += 2 * bytes;
  }
}

void add_partial_sums(Total& total, const Backward& p, const HeadPlan& plan, int i) {
  if (!needs_partial_sums(p, plan, i)) return;
  total.kernels += 1;
  total.scratch_bytes += 2. * 4. * double(plan.blocks()) * double(p.size.t * p.size.s);
}

std::string text(const Total& t, bool window) {
  std::ostringstream out;
  out.precision(17);
  out << "window=" << window << " kernels=" << t.kernels << " flops=" << t.flops << " scores=" << t.scores << " steps=" << t.steps
      << " biases=" << t.biases << " blocks=" << t.blocks << " staged_bytes=" << t.staged_bytes << " scratch_bytes=" << t.scratch_bytes;
  return out.str();
}

bool is_empty(const Problem& p) { return p.size.heads() * p.size.t * p.size.s == 0; }

}  // namespace

std::string work_of(const Forward& p, int sm_count) {
  if (is_empty(p)) return "";
  Total total;
  if (is_window(p)) {
    const HeadPlan plan = plan_window_forward(p, sm_count);
    add(total, p, {plan.blocks(), plan.per_block, kWindow, window_columns(p.size.s), 2, 3 * kWindow, true}, sm_count);
  } else {
    const int64_t queries = flash_forward_queries(p), tiles = ceil_div(p.size.s, int64_t(64));
    add(total, p, {ceil_div(p.size.t, queries) * p.size.heads(), seen(p, tiles), queries, 64, 2, 128, false}, sm_count);
    add_copies(total, p);
  }
  return text(total, is_window(p));
}

std::string work_of(const Backward& p, int sm_count) {
  if (is_empty(p)) return "";
  Total total;
  int left = 0;  // gradients of biases that the kernels for dq, dk and dv do not sum
  int with = -1;
  for (int i = p.biases - 1; i >= 0; --i)
    if (p.dbias[i].size[0]) with = i, ++left;
  if (is_window(p)) {
    for (int i = 0; i < std::max(p.biases, 1); ++i) {
      if (left && !p.dbias[i].size[0]) continue;
      const HeadPlan plan = plan_window_backward(p, left ? i : -1, sm_count);
      add(total, p, {plan.blocks(), plan.per_block, window_columns(p.size.t), kWindow, 5, 5 * kWindow, true}, sm_count);
      if (left) add_partial_sums(total, p, plan, i);
      if (!left) break;
    }
  } else {
    if (with >= 0 && !fits_in_keys_kernel(p)) with = -1;
    const int64_t key_tiles = ceil_div(p.size.s, int64_t(64)), query_tiles = ceil_div(p.size.t, int64_t(64));
    const HeadPlan plan = plan_keys_kernel(p, with, sm_count);
    add(total, p, {key_tiles * plan.blocks(), seen(p, query_tiles) * plan.per_block, 64, 64, 4, 128, false}, sm_count);
    if (with >= 0) add_partial_sums(total, p, plan, with);
    add(total, p, {query_tiles * p.size.heads(), seen(p, key_tiles), 64, 64, 3, 128, false}, sm_count);
    for (int i = 0; i < p.biases; ++i) {
      if (!p.dbias[i].size[0] || i == with) continue;
      const HeadPlan own = plan_bias_kernel(p, i, sm_count);
      const int64_t tiles = key_tiles * ceil_div(p.size.t, int64_t(128));
      add(total, p, {tiles * own.blocks(), own.per_block, 128, 64, 2, 384, false}, sm_count);
      add_partial_sums(total, p, own, i);
    }
    total.kernels += 1;  // row_sums
    add_copies(total, p);
  }
  return text(total, is_window(p));
}

}  // namespace fusebackend::attention
