"""Compares a pattern's replacement with its search function, before the pattern is used.

For every example, the operators that the replacement calls must pass ``torch.library.opcheck``. On random inputs (of the
example's sizes, odd sizes, sizes of 1 and 0, with transposed, sliced, misaligned and expanded storage, large and tiny values,
inf and nan) the replacement must return the search function's shapes and dtypes. Its largest error, against the search
function in fp64, must be at most four times that of the search function. If the example requires grad, gradients are
compared in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusebackend import fx_utils as g
from fusebackend.cotangent import cotangent


class VerificationError(ValueError):
    """A replacement does not compute the same as its search function. The message lists the inputs where they differ."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison: what was compared, whether it passed, and what was found."""

    what: str
    ok: bool
    detail: str = ""


@dataclasses.dataclass
class Verification:
    """The result of :func:`fusebackend.verify`. ``str`` lists the checks."""

    pattern: str
    checks: list[Check] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks)

    def raise_if_wrong(self) -> None:
        """Raises VerificationError with the checks that failed."""
        wrong = [c for c in self.checks if not c.ok]
        if wrong:
            lines = "\n".join(f"  {c.what}: {c.detail}" for c in wrong[:8])
            count = f"{len(wrong)} of {len(self.checks)} checks"
            raise VerificationError(f"pattern {self.pattern!r}: the replacement is not the same ({count}):\n{lines}")

    def __str__(self) -> str:
        lines = [f"{self.pattern}: {sum(c.ok for c in self.checks)} of {len(self.checks)} checks passed"]
        for c in self.checks:
            lines.append(f"  {'ok  ' if c.ok else 'FAIL'} {c.what}{': ' + c.detail if c.detail else ''}")
        return "\n".join(lines)


def verify_traced(pattern: Any, *, seed: int = 0) -> Verification:
    """Verifies a :class:`fusebackend.declarative.traced_pattern.TracedPattern` on the CPU and, where there is one, on a GPU."""
    result = Verification(pattern.name)
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        for device in devices:
            for check in _traced(pattern, device):
                result.checks.append(dataclasses.replace(check, what=f"{device}, {check.what}"))
    return result


def _traced(pattern: Any, device: str) -> Iterator[Check]:
    for variant in pattern.variants:
        example = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in variant.example.items()}
        training = any(isinstance(v, torch.Tensor) and v.requires_grad for v in variant.example.values())
        label = ", ".join(f"{n} {g.spec(v)}" for n, v in example.items() if isinstance(v, torch.Tensor))
        if not training:
            yield from _operators(pattern.replace_fn, example, label)
        for how, arguments in _variations(variant, example):
            yield from _compare(pattern, arguments, f"{label}, {how}", training)


class _Recorder(TorchDispatchMode):
    """Records the first call of each operator that is not part of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace not in ("aten", "prims", "prim", "inductor"):
            self.calls.setdefault(func, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _operators(replace_fn: Callable, example: dict[str, Any], label: str) -> Iterator[Check]:
    with _Recorder() as recorder, torch.no_grad():
        replace_fn(**{n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in example.items()})
    for op, (args, kwargs) in recorder.calls.items():
        try:
            torch.library.opcheck(op, args, kwargs)
            yield Check(f"{label}, opcheck of {op}", True)
        except Exception as error:
            yield Check(f"{label}, opcheck of {op}", False, str(error).strip().split("\n")[0])


def _variations(variant: Any, example: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "as given", example
    placeholders = dict(zip(variant.tensors, variant.search.inputs))
    symbols = list(dict.fromkeys(s.node.expr for p in placeholders.values() for s in p.meta["val"].shape if isinstance(s, torch.SymInt)))

    def resized(size_of: Callable[[int], int]) -> dict[str, Any]:
        sizes = {s: size_of(i) for i, s in enumerate(symbols)}
        new = dict(example)
        for name, p in placeholders.items():
            shape = [int(s.node.expr.subs(sizes)) if isinstance(s, torch.SymInt) else s for s in p.meta["val"].shape]
            new[name] = _random(example[name], shape)
        return new

    odd = (7, 13, 5, 11, 3, 17)
    yield "odd sizes", resized(lambda i: odd[i % 6])
    yield "larger odd sizes", resized(lambda i: (33, 65, 129, 3, 5, 7)[i % 6])
    for k in range(len(symbols)):
        for size in (1, 0):
            yield f"a size of {size}", resized([size if i == k else odd[i % 6] for i in range(len(symbols))].__getitem__)
    base = resized(lambda i: odd[i % 6])
    for how, change in _LAYOUTS.items():
        yield how, {n: _like(v, change(v.detach())) if isinstance(v, torch.Tensor) else v for n, v in base.items()}
    for how, change in _VALUES.items():
        floats = {n for n, v in base.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        yield how, {n: _like(v, change(v.detach())) if n in floats else v for n, v in base.items()}


def _random(like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if like.is_floating_point() or like.is_complex():
        new = torch.randn(shape, dtype=torch.float64 if like.is_floating_point() else like.dtype).to(like.dtype)
    elif like.dtype == torch.bool:
        new = torch.rand(shape) > 0.5
    else:  # integers may be indices: keep to the example's range
        low, high = (int(like.min()), int(like.max()) + 1) if like.numel() else (0, 1)
        new = torch.randint(low, high, shape).to(like.dtype)
    return _like(like, new.to(like.device))


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return new.detach().requires_grad_(old.requires_grad)


def _sliced(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t


def _misaligned(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)


def _with_specials(t: torch.Tensor) -> torch.Tensor:
    special = torch.tensor([float("inf"), -float("inf"), float("nan")], dtype=t.dtype, device=t.device)
    drawn = torch.randint(12, t.shape, device=t.device)  # at different positions in each argument
    return torch.where(drawn < 3, special[drawn.clamp(max=2)], t)


_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed storage": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "sliced storage": _sliced,
    "misaligned storage": _misaligned,
    "expanded storage": lambda t: t[:1].expand(t.shape) if t.dim() > 1 and t.shape[0] else t,
}
_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "large values": lambda t: t * 1e4,
    "tiny values": lambda t: t * 1e-4,
    "zeros": torch.zeros_like,
    "inf and nan": _with_specials,
}


def _compare(pattern: Any, arguments: dict[str, Any], what: str, training: bool) -> Iterator[Check]:
    try:
        expected = _run(pattern.search_fn, arguments, training)
    except Exception:
        return  # the search function does not accept this input
    try:
        got = _run(pattern.replace_fn, arguments, training)
    except Exception as error:
        yield Check(what, False, f"the replacement raised {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        return
    try:
        exact = _run(pattern.search_fn, {n: _double(v) for n, v in arguments.items()}, training)
    except Exception:
        exact = expected
    for (name, e), (_, r), (_, x) in zip(expected, got, exact):
        problem = _problem(e, r, x)
        if problem:
            yield Check(f"{what}, {name}", False, problem)
            return
    yield Check(what + (" (with gradients)" if training else ""), True)


def _run(fn: Callable, arguments: dict[str, Any], training: bool) -> list[tuple[str, torch.Tensor]]:
    arguments = {n: _like(v, v) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    outputs = [o for o in torch.utils._pytree.tree_leaves(fn(**arguments)) if isinstance(o, torch.Tensor)]
    results = [(f"output {i}", o) for i, o in enumerate(outputs)]
    if training:
        leaves = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad}
        gradients = torch.autograd.grad(outputs, list(leaves.values()), list(map(cotangent, outputs)), allow_unused=True)
        results += [(f"gradient of {n}", d) for n, d in zip(leaves, gradients) if d is not None]
    return [(n, o.detach()) for n, o in results]


def _double(value: Any) -> Any:
    return _like(value, value.detach().double()) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _problem(expected: torch.Tensor, got: torch.Tensor, exact: torch.Tensor) -> str | None:
    for attribute in ("shape", "dtype", "device"):
        if getattr(expected, attribute) != getattr(got, attribute):
            return f"{attribute} {getattr(expected, attribute)} became {getattr(got, attribute)}"
    if not expected.is_floating_point():
        return None if torch.equal(expected, got) else "the values differ"
    if expected.numel() == 0:
        return None
    finite = torch.isfinite(expected) & torch.isfinite(exact)
    if not torch.equal(expected[~torch.isfinite(expected)].nan_to_num(), got[~torch.isfinite(expected)].nan_to_num()):
        return "inf or nan are at different positions"
    if not torch.isfinite(got[finite]).all():
        return "inf or nan where the search function gives a finite number"
    truth = exact[finite].double()
    scale = truth.abs().max().item() if truth.numel() else 0.0
    theirs, ours = ((t[finite].double() - truth).abs().max().item() if truth.numel() else 0.0 for t in (expected, got))
    allowed = 4 * theirs + 4 * torch.finfo(expected.dtype).eps * scale
    if ours <= allowed:
        return None
    return f"largest error {ours:.2e} against fp64, the search function's is {theirs:.2e} (allowed {allowed:.2e})"
