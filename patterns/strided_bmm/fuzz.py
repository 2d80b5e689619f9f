"""What the fuzzer draws for this family: products of batches whose dims stand in any order."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder


def strided_bmm(b: Builder) -> bool | None:
    """``einsum`` of two tensors with an outer and an inner batch dim, rows or columns, and terms.

    Not of huge numbers: whether a sum of products overflows depends on the order of its terms.
    """
    if not b.dtype.is_floating_point or b.special:
        return False
    sizes = {"b": b.pick((2, 1, 3)), "h": b.pick((8, 16, 3, 24)), **{d: b.pick((8, 4, 5, 16, 24)) for d in "mnk"}}
    x, y, out = ("".join(dims[i] for i in b.permutation(len(dims))) for dims in ("bhmk", "bhnk", "bhmn"))
    left, right = (b.operand(tuple(sizes[d] for d in dims)) for dims in (x, y))
    b.emit(f"torch.einsum('{x},{y}->{out}', {left}, {right})")


CORES = (strided_bmm,)
