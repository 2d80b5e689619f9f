#include "attention/work.h"

#include <algorithm>

#include "attention/routes.h"
#include "common/facts.h"

namespace fusebackend::attention {
namespace {

// Of one kernel: `steps` tiles of queries by keys a block, each of which takes so many products of matrices of `dim` columns. Biases are read at
// `bias_steps` of them.
struct Kernel {
  int64_t blocks, steps, queries, keys, products, staged_rows, bias_steps;
  bool stages_bias = false;  // of a step's scores, in 16 bits
};

struct Total {
  bool pipelined = false, stored = false;
  double kernels = 0, flops = 0, scores = 0, steps = 0, biases = 0, blocks = 1e18, staged_bytes = 0, scratch_bytes = 0;
};

int64_t padded_dim(const Problem& p) {
  const int64_t d = std::max(p.size.d, p.size.dv);
  return d <= 32 ? 32 : d <= 64 ? 64 : 128;
}

void add(Total& total, const Problem& p, const Kernel& k, int sm_count) {
  const double blocks = double(ceil_div(k.blocks, int64_t(sm_count))), longest = blocks * double(k.steps), tile = double(k.queries * k.keys);
  const double scores = longest * tile;
  total.kernels += 1;
  total.flops += 2. * scores * double(padded_dim(p) * k.products);
  total.scores += scores;
  total.steps += longest;
  total.biases += blocks * double(k.bias_steps) * tile * p.biases;
  total.blocks = std::min(total.blocks, double(k.blocks));
  total.staged_bytes += double(k.blocks * k.steps * (k.staged_rows * padded_dim(p) + (k.stages_bias ? k.queries * k.keys : 0))) * 2;
}

// Of the heads of a window kernel's block, those at which it reads biases: it walks first along the dimensions on which no bias depends.
int64_t bias_heads(const Problem& p, const HeadPlan& plan) {
  int64_t sharing = 1;
  for (int i = 2; i >= plan.kept_dims; --i) {
    for (int j = 0; j < p.biases; ++j)
      if (p.bias[j].stride[plan.dim[i]] != 0 && plan.size[i] > 1) return ceil_div(plan.per_block, sharing);
    sharing *= plan.size[i];
  }
  return 1;
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

// The kernel that reads stored gradients: each of its steps is a head's tile, of which it multiplies two times. It computes no scores.
void add_stored(Total& total, const Problem& p, const StoredPlan& plan, int sm_count) {
  const int64_t blocks = ceil_div(p.size.t, int64_t(kStoredTile)) * plan.heads.blocks();
  const int64_t steps = seen(p, ceil_div(p.size.s, int64_t(kStoredTile))) * plan.heads.per_block;
  const int64_t tile = kStoredTile * kStoredTile;
  const double longest = double(ceil_div(blocks, int64_t(sm_count))) * double(steps);
  total.kernels += 1;
  total.stored = true;
  total.flops += 2. * longest * double(tile * (padded_dim(p) + kStoredTile));
  total.steps += longest;
  total.blocks = std::min(total.blocks, double(blocks));
  total.staged_bytes += double(blocks * steps * (tile + kStoredTile * padded_dim(p))) * 2;
}

std::string text(const Total& t, bool window) {
  FactText facts;
  facts.add("window", window).add("pipelined", t.pipelined).add("stored", t.stored).add("kernels", t.kernels).add("flops", t.flops).add("scores", t.scores)
      .add("steps", t.steps).add("biases", t.biases).add("blocks", t.blocks).add("staged_bytes", t.staged_bytes).add("scratch_bytes", t.scratch_bytes);
  return facts.str();
}

bool is_empty(const Problem& p) { return p.size.heads() * p.size.t * p.size.s == 0; }

}  // namespace

std::string work_of(const Forward& p, int sm_count, int capability_major) {
  if (is_empty(p)) return "";
  Total total;
  if (is_window(p)) {
    const HeadPlan plan = plan_window_forward(p, sm_count);
    add(total, p, {plan.blocks(), plan.per_block, kWindow, window_columns(p.size.s), 2, 3 * kWindow, bias_heads(p, plan)}, sm_count);
  } else {
    StagedBiases staged = {-1, -1};
    const bool pipelined = takes_pipelined_forward(p, uses_wgmma(p, capability_major), staged);
    const int64_t queries = pipelined ? pipelined_forward_queries(p) : flash_forward_queries(p), tiles = ceil_div(p.size.s, int64_t(64));
    const int64_t steps = seen(p, tiles);
    total.pipelined = pipelined;
    add(total, p, {ceil_div(p.size.t, queries) * p.size.heads(), steps, queries, 64, 2, 128, steps, pipelined && staged.tile >= 0}, sm_count);
    add_copies(total, p);
  }
  return text(total, is_window(p));
}

std::string work_of(const Backward& p, int sm_count, int capability_major) {
  if (is_empty(p)) return "";
  Total total;
  int left = 0;  // gradients of biases
  for (int i = 0; i < p.biases; ++i)
    if (p.dbias[i].size[0]) ++left;
  if (is_window(p)) {
    for (int i = 0; i < std::max(p.biases, 1); ++i) {
      if (left && !p.dbias[i].size[0]) continue;
      const HeadPlan plan = plan_window_backward(p, left ? i : -1, sm_count);
      add(total, p, {plan.blocks(), plan.per_block, window_columns(p.size.t), kWindow, 5, 5 * kWindow, bias_heads(p, plan)}, sm_count);
      if (left) add_partial_sums(total, p, plan, i);
      if (!left) break;
    }
  } else {
    const BackwardRoute route = backward_route(p, uses_wgmma(p, capability_major), sm_count);
    const int64_t key_tiles = ceil_div(p.size.s, int64_t(64)), query_tiles = ceil_div(p.size.t, int64_t(64));
    if (route.kind == BackwardRoute::kAny) {
      const HeadPlan plan = plan_keys_kernel(p, route.summed, sm_count);
      const int64_t steps = seen(p, query_tiles) * plan.per_block;
      add(total, p, {key_tiles * plan.blocks(), steps, 64, 64, 4, 128, steps}, sm_count);
      if (route.summed >= 0) add_partial_sums(total, p, plan, route.summed);
    } else {
      constexpr int64_t kKeys = kPipelinedBackwardKeys;
      const int64_t steps = seen(p, query_tiles);
      total.pipelined = true;
      add(total, p, {ceil_div(p.size.s, kKeys) * p.size.heads(), steps, 64, kKeys, 4, 128, steps, route.tile_bias >= 0}, sm_count);
    }
    if (route.kind == BackwardRoute::kStored) {
      const StoredPlan plan = plan_stored(p, route.summed, sm_count);
      add_stored(total, p, plan, sm_count);
      add_partial_sums(total, p, plan.heads, route.summed);
      total.kernels += double(2 * (plan.launches - 1));
      total.scratch_bytes += 2. * double(p.size.heads()) * double(plan.head_bytes);
    } else {
      add(total, p, {query_tiles * p.size.heads(), seen(p, key_tiles), 64, 64, 3, 128, seen(p, key_tiles)}, sm_count);
    }
    for (int i = 0; i < p.biases; ++i) {
      if (!p.dbias[i].size[0] || i == route.summed) continue;
      const HeadPlan own = plan_bias_kernel(p, i, sm_count);
      const int64_t tiles = key_tiles * ceil_div(p.size.t, int64_t(128));
      add(total, p, {tiles * own.blocks(), own.per_block, 128, 64, 2, 384, own.per_block}, sm_count);
      add_partial_sums(total, p, own, i);
    }
    total.kernels += 1;  // row_sums
    add_copies(total, p);
  }
  return text(total, is_window(p));
}

}  // namespace fusebackend::attention
