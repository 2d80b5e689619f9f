"""What products of small matrices make a device do: in the kernels, and in the library that Inductor calls."""

from __future__ import annotations

import torch

from fusebackend import fx_utils as g
from fusebackend.patterns.small_bmm.ops import plan_facts
from fusebackend.patterns.small_bmm.sites import Site
from fusebackend.rewriting.pattern import Work, Workload
from fusebackend.rewriting.workload import alignment, log2


def workload(site: Site) -> Workload:
    """That of ``small_bmm``, and of the library's product. Neither is fused with anything."""
    a, b = site.operands
    batch, m, k, n = (g.hint(size) or 0 for size in (*a.shape, b.shape[2]))
    itemsize = a.itemsize
    quantities = {
        "bytes": float(batch * (m * k + k * n + m * n) * itemsize),
        "products": float(batch * m * n * k),
        "matrices": float(batch),
    }
    shape = {
        "batch": log2(batch),
        "m": log2(m),
        "n": log2(n),
        "k": log2(k),
        "log2 itemsize": log2(itemsize),
        "bf16": float(a.dtype is torch.bfloat16),
        "a transposed": float(site.transposed[0]),
        "b transposed": float(site.transposed[1]),
        "a alignment": alignment((k if not site.transposed[0] else m) * itemsize),
        "b alignment": alignment((n if not site.transposed[1] else k) * itemsize),
        "dynamic": float(not all(isinstance(size, int) for size in (*a.shape, *b.shape))),
    }
    suffix = " cpu" if a.device.type == "cpu" else ""
    inductor = Work(f"library bmm{suffix}", quantities, shape)
    if suffix:
        return Workload((Work("small_bmm cpu", quantities, {**shape, "threads": log2(torch.get_num_threads())}),), (inductor,))
    misaligned = [(g.hint(t.storage_offset()) or 0) * itemsize % 16 for t in (a, b)]
    facts = plan_facts((batch, m, n, k), site.transposed, a.dtype, misaligned)
    more = {name.replace("_", " "): log2(facts[name]) for name in ("row_tile", "threads_a_product", "products", "shared_bytes")}
    ours = Work("small_bmm", {**quantities, "blocks": facts["blocks"]}, {**shape, **more, "vectors": facts["vectors"]})
    return Workload((ours,), (inductor,))
