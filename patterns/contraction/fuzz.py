"""What the fuzzer draws for this family: products by broadcasting in the spellings that users write, sums of them, and near misses."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder

_KINDS = ("batch", "left", "right", "summed", "summed alone", "repeated", "one")


def contraction(b: Builder) -> bool | None:
    """``(x * y).sum(dims)`` of factors that are broadcast along some dims.

    Not of huge numbers: a product that overflows alone does not where it is added by one instruction, as in matrix products, so that a sum
    is infinite or NaN as the order and the instructions have it.
    """
    if not b.dtype.is_floating_point or b.special:
        return False
    kinds = ["left", "right", "summed", *(b.pick(_KINDS[:4] if b.chance(85) else _KINDS) for _ in range(b.integer(0, 2)))]
    kinds = [kinds[i] for i in b.permutation(len(kinds))]
    sizes = [1 if kind == "one" else b.pick((2, 3, 5, 4, 7, 8, 1)) for kind in kinds]
    x = _factor(b, kinds, sizes, {"batch", "left", "summed", "summed alone"})
    y = _factor(b, kinds, sizes, {"batch", "right", "summed"})
    large = b.chance(10)  # a number that would overflow the factor that is not as small
    if large:
        x = b.emit(f"{x} * 1e-38") or x
    product = b.emit(f"{x} * {y}")
    if product is None:
        return False
    if large:
        product = b.emit(f"{product} * {b.pick(('1e38', '-5e37', '1e37'))}") or product
    if b.chance(15):
        mask = _factor(b, kinds, sizes, set(b.pick((("summed",), ("batch", "left"), ("left", "summed"), ("right",)))))
        mask = b.emit(f"{mask} > 0") or mask
        product = b.emit(f"{product} * {mask}") or product
    if b.chance(20):
        weights = _factor(b, kinds, sizes, set(b.pick((("summed",), ("batch", "left"), ("left", "summed"), ("right",)))))
        product = b.emit(f"{product} * {weights}") or product
    if b.chance(15):
        product = b.emit(f"{product} * {b.number()}") or product
    if b.chance(15):
        b.emit(f"{product} + 1")
    dims = [d for d, kind in enumerate(kinds) if kind.startswith("summed")]
    if b.chance(20):
        dims = [d - len(kinds) for d in dims]
    tail = b.pick(("", "", ", keepdim=True", ", dtype=torch.float64" if b.chance(10) else ""))
    b.emit(f"{product}.{b.pick(('sum', 'sum', 'mean'))}({tuple(dims)}{tail})")


def _factor(b: Builder, kinds: list[str], sizes: list[int], own: set[str]) -> str:
    """A factor of that product: its own dims unsqueezed, or expanded."""
    shape = [size if kind in own or size == 1 else 1 for kind, size in zip(kinds, sizes)]
    expanded = b.chance(25)
    x = b.operand(tuple(n for n, kind in zip(shape, kinds) if kind in own))
    for d, kind in enumerate(kinds):
        if kind not in own:
            x = b.emit(f"{x}.unsqueeze({d})", moves=True) or x
    if expanded:
        full = ", ".join(str(size) if kind != "repeated" else "1" for kind, size in zip(kinds, sizes))
        x = b.emit(f"{x}.expand({full})", moves=True) or x
    return x


CORES = (contraction,)
