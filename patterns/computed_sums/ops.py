"""The operators ``fusebackend::computed_sums`` and ``computed_rows`` and their references in PyTorch. The kernels are in
csrc/computed_sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusebackend import fx_utils as g
from fusebackend.native import arguments, ops
from fusebackend.patterns.computed_sums import program as programs

#: Those that the kernels read, and in which they return sums.
RESULTS = frozenset({torch.float32, torch.float16, torch.bfloat16})
READ = RESULTS | {torch.bool, torch.uint8}
#: Rows that a call may have: the kernels count them in 31 bits.
MOST_ROWS = 2**31 - 1
_LETTERS = {torch.float32: "f", torch.float16: "h", torch.bfloat16: "b"}


def reference(
    inputs: Sequence[torch.Tensor],
    program: str,
    dtypes: Sequence[torch.dtype],
    batch_dims: int = 0,
    means: bool = False,
    order: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """What the kernels compute.

    Args:
        inputs: 1 to 16 tensors of one rank, at least 2, whose sizes broadcast; at least one has the full size. One of a single dim has a
            number for each column, wherever that dim is. Read where they lie if the dims before the last one lie in memory like one dim,
            or are broadcast along the outermost and the innermost of them, and the last one side by side; copied otherwise.
        program: what is summed (:mod:`fusebackend.patterns.computed_sums.program`).
        dtypes: of the sums.
        batch_dims: how many of the outermost dims are kept, as that of images of which each is summed by itself.
        means: whether the sums are multiplied by the reciprocal of the number of their terms.
        order: the dims from the outermost to the innermost, as ``torch.permute`` takes them: the result is that of inputs permuted so,
            without the views, which take the host time. By default the dims as they are.

    Returns:
        The sums over all dims but the first ``batch_dims`` and the last one, contiguous. Sums are made in fp32, what blocks of threads
        leave is added in fp64, and rounded once. The order of the additions depends on the shape, the strides and the device alone.
    """
    inputs = _walked(inputs, order)
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    dims, add = list(range(batch_dims, len(shape) - 1)), torch.mean if means else torch.sum
    return [add(t.expand(shape), dims).to(dtype) for t, dtype in zip(programs.evaluate(program, inputs, len(dtypes)), dtypes)]


def _walked(inputs: Sequence[torch.Tensor], order: Sequence[int] | None) -> list[torch.Tensor]:
    """The inputs, permuted; those of one dim have the columns, and stay."""
    return [t if order is None or t.dim() == 1 else t.permute(*order) for t in inputs]


def _unordered(walked: Sequence[Any], order: Sequence[int] | None) -> list[Any]:
    """One value a dim, given in that order: in the order of the tensors' dims."""
    return list(walked) if order is None else [walked[order.index(d)] for d in range(len(order))]


def letters(dtypes: Iterable[torch.dtype]) -> str:
    """The argument ``types`` of the operators: a letter for each result. AOTInductor has no lists of dtypes."""
    return "".join(_LETTERS[t] for t in dtypes)


def _dtypes(types: str) -> list[torch.dtype]:
    known = {letter: dtype for dtype, letter in _LETTERS.items()}
    torch._check(set(types) <= set(known), lambda: f"computed_sums: results are of types f (fp32), h (fp16) and b (bf16), not {types!r}")
    return [known[t] for t in types]


def _domain(inputs: Sequence[torch.Tensor], program: str, types: str, order: Sequence[int] | None) -> list[Any]:
    """The sizes to which those of the inputs broadcast, in the order in which the dims are walked; refuses what the kernels refuse."""
    try:
        programs.check_types(program, [t.dtype for t in inputs], len(types))
    except ValueError as error:
        raise RuntimeError(f"computed_sums: {error}") from error
    ranks = [t.dim() for t in inputs]
    rank = max(ranks)
    fits = rank >= 2 and set(ranks) <= {1, rank}
    torch._check(fits, lambda: f"computed_sums: inputs are of one rank >= 2, or have the columns as their one dim; not of {ranks}")
    torch._check(
        order is None or sorted(order) == list(range(rank)),
        lambda: f"computed_sums: order {order} does not name each of the dims 0 to {rank - 1} once",
    )
    for k, t in enumerate(inputs):
        arguments.check_device("computed_sums", inputs[0], **{f"input {k}": t})
    _dtypes(types)
    read = {t.dtype for t in inputs}
    torch._check(read <= READ, lambda: f"computed_sums: {read} are not supported")
    domain: list[Any] = [1] * rank
    shapes = [[1] * (rank - t.dim()) + list(t.shape) for t in _walked(inputs, order)]
    for k, (t, shape) in enumerate(zip(inputs, shapes)):
        for d, size in enumerate(shape):
            fits = any(arguments.are_same(a, b) for a, b in ((size, domain[d]), (size, 1), (domain[d], 1)))
            torch._check(fits, lambda: f"computed_sums: input {k} of sizes {tuple(t.shape)} does not broadcast to {domain}")  # noqa: B023
            if arguments.are_same(domain[d], 1):
                domain[d] = size
    full = any(arguments.same_sizes(shape, domain) for shape in shapes)
    torch._check(full, lambda: f"computed_sums: no input has the sizes to which all of them broadcast, {domain}")
    return domain


def _fake(
    inputs: Sequence[torch.Tensor],
    program: str,
    types: str,
    batch_dims: int = 0,
    means: bool = False,
    order: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    domain = _domain(inputs, program, types, order)
    fits = 0 <= batch_dims <= len(domain) - 2
    torch._check(fits, lambda: f"computed_sums: batch_dims = {batch_dims}; of {len(domain)} dims 0 to {len(domain) - 2} are accepted")
    return [inputs[0].new_empty([*domain[:batch_dims], domain[-1]], dtype=dtype) for dtype in _dtypes(types)]


def rows_reference(
    inputs: Sequence[torch.Tensor],
    program: str,
    dtypes: Sequence[torch.dtype],
    keeps_order: bool = False,
    order: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """What the kernels of ``computed_rows`` compute: every ``out`` of the program as a tensor of the full size.

    Args:
        inputs, program, dtypes, order: as for :func:`reference`.
        keeps_order: whether the results lie in memory like the first input of the full size, if there are no gaps in that, as Inductor
            may lay out a convolution's result otherwise than the graph says; otherwise in ``order``, without gaps.
    """
    walked = _walked(inputs, order)
    domain = torch.broadcast_shapes(*(t.shape for t in walked))
    back = _unordered(range(len(domain)), order)
    shape = [domain[d] for d in back]
    strides = _strides_like(inputs, shape) if keeps_order else _laid_out(shape, order)
    values = [t.to(dtype).expand(domain).permute(back) for t, dtype in zip(programs.evaluate(program, walked, len(dtypes)), dtypes)]
    return [torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device).copy_(t) for t in values]


def _laid_out(shape: Sequence[Any], order: Sequence[int] | None) -> list[Any]:
    """The strides without gaps, by dim, of dims that lie in memory in that order."""
    order = range(len(shape)) if order is None else order
    strides: list[Any] = [1] * len(order)
    for outer, inner in zip(reversed(order[:-1]), reversed(order[1:])):
        strides[outer] = strides[inner] if arguments.are_same(shape[inner], 0) else strides[inner] * shape[inner]
    return strides


def _strides_like(inputs: Sequence[torch.Tensor], shape: Sequence[Any]) -> list[Any]:
    full = next((t for t in inputs if arguments.same_sizes(t.shape, shape)), None)
    known = None if full is None else g.hints(full.stride())
    if full is not None and known is not None:
        found = _laid_out(shape, sorted(range(len(shape)), key=lambda d: -known[d]))
        if all(arguments.are_same(n, 1) or arguments.are_same(a, b) for n, a, b in zip(shape, found, full.stride())):
            return found
    return _laid_out(shape, None)


def _rows_fake(
    inputs: Sequence[torch.Tensor], program: str, types: str, keeps_order: bool = False, order: Sequence[int] | None = None
) -> list[torch.Tensor]:
    sizes = _unordered(_domain(inputs, program, types, order), order)
    strides = _strides_like(inputs, sizes) if keeps_order else _laid_out(sizes, order)
    return [inputs[0].new_empty_strided(sizes, strides, dtype=dtype) for dtype in _dtypes(types)]


def _on_cpu(inputs: Sequence[torch.Tensor], program: str, types: str, *settings: Any) -> list[torch.Tensor]:
    _fake(inputs, program, types, *settings)
    return reference(inputs, program, _dtypes(types), *settings)


def _rows_on_cpu(
    inputs: Sequence[torch.Tensor], program: str, types: str, keeps_order: bool = False, order: Sequence[int] | None = None
) -> list[torch.Tensor]:
    _domain(inputs, program, types, order)
    return rows_reference(inputs, program, _dtypes(types), keeps_order, order)


# Implemented by csrc/computed_sums on GPUs. Any layout is read.
computed_sums = ops.define(
    "computed_sums(Tensor[] inputs, str program, str types, int batch_dims=0, bool means=False, int[]? order=None) -> Tensor[]",
    fake=_fake,
    python_kernels={"CPU": _on_cpu},
)
computed_rows = ops.define(
    "computed_rows(Tensor[] inputs, str program, str types, bool keeps_order=False, int[]? order=None) -> Tensor[]",
    fake=_rows_fake,
    python_kernels={"CPU": _rows_on_cpu},
)


def kind(sizes: Sequence[int], strides: Sequence[int], domain: Sequence[int], batch_dims: int = 0) -> str | None:
    """How an input lies, as a letter (csrc/computed_sums/computed_sums.h, ``Kind``); None if it is copied first.

    Args:
        sizes, strides: of the input.
        domain: the sizes to which those of all inputs broadcast.
        batch_dims: as for :func:`reference`.
    """
    return ops.ask("computed_sums_kind", tuple(sizes), tuple(strides), tuple(domain), batch_dims) or None


def plan_facts(
    dtypes: Sequence[torch.dtype],
    kinds: str,
    outs: int,
    rows: int,
    columns: int,
    multiprocessors: int,
    misaligned: int = 0,
    stored: Sequence[torch.dtype] = (),
    batch: int = 1,
) -> Mapping[str, float]:
    """How a GPU computes it (csrc/computed_sums/computed_sums.h, ``Plan``), of inputs that need not exist.

    Args:
        dtypes, kinds: of the inputs; a letter for each (:func:`kind`).
        outs: how many results the program has.
        stored: as what they are stored; none if they are added.
        misaligned: how many bytes behind an aligned address they begin. Full rows follow one another without a gap.
        batch: how many times so many rows there are, each added by themselves.
    """
    return _plan(list(dtypes), kinds, outs, list(stored), batch, rows, columns, multiprocessors, misaligned)


def compile_kernel(
    program: str,
    dtypes: Sequence[torch.dtype],
    kinds: str,
    outs: int,
    architecture: str,
    vector: int = 0,
    stored: Sequence[torch.dtype] = (),
) -> Mapping[str, float] | str:
    """Compiles the kernel for an architecture such as ``"sm_90"``, for which no GPU is needed. A process compiles none twice.

    Args:
        dtypes, kinds, outs, stored: as for :func:`plan_facts`.
        vector: how many columns a thread has (``plan_facts(...)["vector"]``); 0 for the most that are possible.

    Returns:
        What it takes: ``registers``, ``stack_bytes``, ``spill_bytes`` and ``code_bytes``. Where it can't be compiled, the reason.

    Raises:
        RuntimeError: the program is malformed.
    """
    told = ops.ask("computed_sums_compile", program, tuple(dtypes), kinds, outs, tuple(stored), vector, architecture)
    return told.removeprefix("failed: ") if told.startswith("failed: ") else ops.facts(lambda: told)


def compilations() -> int:
    """How many kernels this process has compiled."""
    return int(_compilations()["compilations"])


# Implemented by csrc/computed_sums/bind.cpp.
ops.define_facts("computed_sums_kind(int[] sizes, int[] strides, int[] domain, int batch_dims) -> str")
_plan = ops.define_facts(
    "computed_sums_plan(ScalarType[] dtypes, str kinds, int outs, ScalarType[] stored, int batch, int rows, int columns,"
    " int multiprocessors, int misaligned) -> str"
)
ops.define_facts(
    "computed_sums_compile(str program, ScalarType[] dtypes, str kinds, int outs, ScalarType[] stored, int vector, str architecture) -> str"
)
_compilations = ops.define_facts("computed_sums_compilations() -> str")
