"""What a product of copies makes a device do: in the kernels, which copy nothing, and as copies and a library's product."""

from __future__ import annotations

import dataclasses

from fusebackend import fx_utils as g
from fusebackend.patterns.strided_bmm.sites import Site
from fusebackend.patterns.strided_bmm.work import strided_product
from fusebackend.rewriting.library_product import library_product
from fusebackend.rewriting.pattern import Estimate, Workload


def estimate(site: Site) -> Estimate | Workload:
    """The work of both, or why nothing is saved."""
    if not site.copies:
        return Estimate(False, "no copy is saved: others read it too, or Inductor writes it where it computes what is copied")
    a, b = (g.value(operand) for operand in site.node.args[:2])
    batch, m, k = a.shape
    product = library_product(
        (batch, m, b.shape[2], k),
        a.dtype,
        a.device,
        copied=[g.value(copy).numel() for copy in site.copies],
        by_columns=(a.stride(1) == 1 != a.stride(2), b.stride(1) == 1 != b.stride(2)),
    )
    # A calibration that does not know these products knows such as contractions become.
    theirs = dataclasses.replace(product, kind=f"{product.kind} of strided_bmm", otherwise=product)
    return Workload((strided_product(site.layout, a.device),), (theirs,))
