"""What ``python -m fusebackend bench kernels`` times of this family: the backward of batch norm with the function behind it, its sums and
its gradient, and the result of a norm whose statistics are there, of images and of rows; squeeze and excitation's means of such results
over each image, and the gradient of its gates; random ones."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, LEAST_BYTES, MOST_BYTES, log_uniform, rows_or_image, size, tensor
from fusebackend.patterns.column_moments.bench import wide

aten = torch.ops.aten


#: The function behind the norm, and its gradient: of the gradient of its result and of what it is given.
BEHIND: dict[str, tuple[Callable, Callable]] = {
    "none": (lambda u: u, lambda dy, u: dy),
    "relu": (torch.relu, lambda dy, u: aten.threshold_backward(dy, u, 0)),
    "silu": (torch.nn.functional.silu, aten.silu_backward),
    "hardswish": (torch.nn.functional.hardswish, aten.hardswish_backward),
    "gelu": (torch.nn.functional.gelu, aten.gelu_backward),
}


#: The gradient that comes from what reads the result: of how many tensors, and of how many vectors of each image, and how.
UPSTREAM: dict[str, tuple[int, int, Callable]] = {
    "": (1, 0, lambda dy: wide(dy)),
    "two": (2, 0, lambda a, b: wide(a + b)),  # the result is read twice, as before a residual connection
    "masked": (3, 0, lambda a, b, y: wide(torch.where(y <= 0, 0.0, a + b))),  # and goes through a ReLU whose result is kept
    "gated": (1, 2, lambda dy, gate, shift: wide(dy * gate + shift)),  # squeeze and excitation
}


def _gradient(behind: str, upstream: str, tensors: Sequence[torch.Tensor], vectors: Sequence[torch.Tensor]):
    """The gradient before the function behind the norm, and the centred tensor."""
    *dy, x = tensors
    mean, scale, weight, bias = map(wide, vectors[:4])
    centred = wide(x) - mean
    gradient = UPSTREAM[upstream][2](*dy, *vectors[6:])
    return BEHIND[behind][1](gradient, centred * scale * weight + bias), centred


def norm_sums(behind: str, upstream: str, tensors: int, *inputs: torch.Tensor):
    """The gradients of a batch norm's bias and of its weight, (..., channels) -> (channels,) each."""
    full, vectors = inputs[:tensors], inputs[tensors:]
    dz, centred = _gradient(behind, upstream, full, vectors)
    dims = tuple(range(full[0].dim() - 1))
    return dz.sum(dims), (dz * centred).sum(dims) * wide(vectors[1])


def norm_gradient(behind: str, upstream: str, tensors: int, *inputs: torch.Tensor):
    """The gradient of what a batch norm is given, whose two sums are there, (..., channels) -> the same."""
    full, vectors = inputs[:tensors], inputs[tensors:]
    dz, centred = _gradient(behind, upstream, full, vectors)
    count = full[0].numel() // full[0].shape[-1]
    _, scale, weight, _, first, second = map(wide, vectors[:6])
    return ((dz - centred * (second / count * scale * scale) - first / count) * (scale * weight)).to(full[0].dtype)


def norm_result(behind: str, upstream: str, tensors: int, *inputs: torch.Tensor):
    """A norm with the function behind it, whose statistics are there, and with what is added between, (..., channels) -> the same."""
    (x, *others), vectors = inputs[:tensors], [wide(v) for v in inputs[tensors:]]
    mean, scale, weight, bias = vectors[:4]
    normalised = (wide(x) - mean) * scale * weight + bias
    for i, other in enumerate(others):  # the second is a norm's result too
        normalised = normalised + (wide(other) if i == 0 else (wide(other) - bias) * weight * mean + scale)
    return BEHIND[behind][0](normalised).to(x.dtype)


def squeezed(behind: str, upstream: str, tensors: int, *inputs: torch.Tensor):
    """The means of such results over each image, (images, ..., channels) -> (images, channels)."""
    return norm_result(behind, upstream, tensors, *inputs).mean(tuple(range(1, inputs[0].dim() - 1)))


def gate_gradient(behind: str, upstream: str, tensors: int, *inputs: torch.Tensor):
    """The gradient of what such results were multiplied by, (images, ..., channels) -> (images, channels)."""
    *dy, x = inputs[:tensors]
    gradient = UPSTREAM[upstream][2](*dy, *inputs[tensors + 6 :])
    result = norm_result(behind, "", 1, x, *inputs[tensors:])
    return (gradient * wide(result)).sum(tuple(range(1, x.dim() - 1))).to(x.dtype)


FORMS: dict[str, Callable] = {
    **{"sums": norm_sums, "gradient": norm_gradient, "result": norm_result},
    **{"squeezed": squeezed, "gate gradient": gate_gradient},
}
#: Those that have no gradient of a result, and those that sum each image.
_FORWARD, _OF_IMAGES = frozenset({"result", "squeezed"}), frozenset({"squeezed", "gate gradient"})


def _case(form: str, behind: str, kind: str, shape: tuple[int, ...], upstream: str = "", narrow: bool = False) -> Case:
    """``narrow``: vectors are of the dtype of the tensors, as in inference, and not of fp32."""
    more, of_images, _ = UPSTREAM[upstream]
    tensors = more + (form not in _FORWARD)

    def inputs(device: torch.device) -> tuple:
        vector = FLOATS[kind] if narrow else torch.float32
        image = (shape[0], *[1] * (len(shape) - 2), shape[-1])
        return (
            *(tensor(shape, FLOATS[kind], device) for _ in range(tensors)),
            *(tensor(shape[-1:], vector, device) for _ in range(6)),
            *(tensor(image, FLOATS[kind], device) for _ in range(of_images)),
        )

    names = (form, behind, upstream, kind, "narrow" if narrow else "", "x".join(map(str, shape)))
    return Case(" ".join(filter(None, names)), functools.partial(FORMS[form], behind, upstream, tensors), inputs)


def cases() -> list[Case]:
    few = 1 if torch.cuda.is_available() else 32  # times fewer images
    shapes = [(256, 112, 112, 32), (256, 112, 112, 96), (256, 56, 56, 144), (256, 28, 28, 240), (256, 14, 14, 672), (256, 7, 7, 1152)]
    found = [_case(form, "silu", "bf16", (max(1, n // few), *rest)) for form in FORMS for n, *rest in shapes]
    found += [_case(form, behind, "bf16", (256 // few, 56, 56, 64)) for form in FORMS for behind in BEHIND if behind != "silu"]
    found += [_case(form, "none", "bf16", (256 // few, 56, 56, 64), "masked") for form in FORMS]
    found += [_case(form, "silu", "bf16", (max(2, 256 // few), 28, 28, 240), "gated") for form in ("sums", "gradient")]
    found.append(_case("squeezed", "gelu", "bf16", (8, 50, 80, 384)))
    return found + [_case(form, "relu", "fp32", (128 // min(few, 128), 56, 56, 64)) for form in FORMS]


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Of rows and of images whose channels lie innermost; of forms that sum each image, the rows are sequences."""
    while True:
        kind = draw.choice(list(FLOATS))
        form, behind = draw.choice(("sums", "gradient", "result", "squeezed", "gate gradient")), draw.choice(list(BEHIND))
        upstream, narrow = draw.choice(("", *UPSTREAM)), draw.random() < 0.3
        elements = scale * log_uniform(draw, LEAST_BYTES, MOST_BYTES) / FLOATS[kind].itemsize
        shape = rows_or_image(draw, elements)
        if form in _OF_IMAGES and len(shape) == 2:
            rows, columns = shape
            sequences = size(draw, 1, rows)
            shape = sequences, rows // sequences, columns
        needs_batch, is_batch = form in _OF_IMAGES or upstream == "gated", len(shape) > 2 and shape[0] > 1
        if (needs_batch and not is_batch) or (upstream == "gated" and form in _FORWARD):
            continue
        if LEAST_BYTES * min(scale, 1) <= math.prod(shape) * FLOATS[kind].itemsize <= MOST_BYTES * scale:
            yield _case(form, behind, kind, shape, upstream, narrow)
