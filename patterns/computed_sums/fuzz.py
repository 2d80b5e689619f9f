"""What the fuzzer draws for this family: what is computed of tensors and of vectors that are broadcast along them, and sums of that."""

from __future__ import annotations

from fusebackend.fuzz.builder import Builder

_OF_ONE = (
    *("torch.sigmoid({})", "torch.relu({})", "torch.tanh({})", "F.silu({})", "F.gelu({})"),
    *("-{}", "{}.abs()", "{}.clamp(-1, 1)", "{} ** 2"),
)
_OF_TWO = ("{} - {}", "{} * {}", "{} + {}", "torch.where({} > 0, {}, 0.0)", "torch.maximum({}, {})", "torch.add({}, {}, alpha=0.5)")


def _computed(b: Builder) -> str | None:
    """What a few functions compute of a tensor, others of its shape, and some that are broadcast along it."""
    if not b.dtype.is_floating_point:
        return None
    shape = b.shape(b.pick((2, 3, 4)))
    x = b.input(shape)
    if b.chance(25):
        x = b.emit(f"{x}.to(f32)") or x
    order = b.permutation(len(shape)) if b.chance(15) else None
    if order is not None:
        x = b.emit(f"{x}.permute({order})", moves=True) or x
    for _ in range(b.integer(1, 5)):
        if b.chance(35):
            x = b.emit(b.pick(_OF_ONE).format(x)) or x
            continue
        shape = tuple(b[x].shape)
        image = (shape[0], *[1] * (len(shape) - 2), shape[-1])
        broadcast = b.pick((shape[-1:], shape[-1:], shape, (*shape[:-1], 1), image, shape[-2:]))
        other = b.operand(broadcast)
        x = b.emit(b.pick(_OF_TWO).format(*((x, other) if b.chance(70) else (other, x)))) or x
    return x


def computed_sums(b: Builder) -> bool | None:
    """One to three sums or means of such values, over the same dims or not, or of each image, some of which need one another's results."""
    x = _computed(b)
    if x is None:
        return False
    dims = b[x].dim()
    last = b.integer(1, dims - 1)
    for _ in range(b.integer(1, 3)):
        end = last if b.chance(80) else b.integer(1, dims - 1)
        first = b.integer(0, end - 1)  # of the summed dims: those before it are a batch
        found = b.emit(f"{x}.{b.pick(('sum', 'sum', 'mean'))}({tuple(range(first, end))}, keepdim={b.chance(30)})")
        if found is None:
            return None
        if b.chance(30) and b[found].dim() == dims:
            x = b.emit(f"{x} - {found}") or x
        x = b.emit(f"{x} * {b.operand(b[x].shape[-1:])}") or x
    return None


def computed_rows(b: Builder) -> bool | None:
    """Such a value that a product reads, or that is returned, in 16 bits or not, with what else is computed of it."""
    x = _computed(b)
    if x is None:
        return False
    if b.chance(30):
        x = b.emit(f"{x}.to({b.pick(('bf16', 'f16', 'f32'))})") or x
    if b.chance(40):
        b.emit(f"{x} @ {b.input((b[x].shape[-1], 3), b[x].dtype)}")
    if b.chance(40):
        b.emit(b.pick(_OF_ONE).format(x))


CORES = (computed_sums, computed_rows)
