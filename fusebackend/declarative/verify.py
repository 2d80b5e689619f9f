"""Compares a pattern's replacement with its search function, before the pattern is used.

For every example, the operators that the replacement calls must pass ``torch.library.opcheck``. On random inputs (of the
example's sizes, odd sizes, sizes of 1 and 0, with transposed, sliced, misaligned and expanded storage, large and tiny values,
inf and nan: :mod:`fusebackend.declarative.variations`) the replacement must return the search function's shapes and dtypes. Its largest
error, against the search function in fp64, must be at most four times that of the search function. If the example requires grad,
gradients are compared in the same way. What is not finite may also be as the operations give it that Inductor decomposes the search
function into: a fused kernel of eager's is not always the same there.

Each call is watched (:mod:`fusebackend.declarative.watched_call`): the replacement must not write to its arguments, its operators must do
what their schemas and fakes say, and a second call must give the same and leave the first result as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fusebackend import fx_utils as g
from fusebackend.cotangent import cotangent
from fusebackend.declarative import devices
from fusebackend.declarative.examples import without_grad
from fusebackend.declarative.replica import like
from fusebackend.declarative.specialization import Form, with_dtype
from fusebackend.declarative.trace import outside_of_compiles
from fusebackend.declarative.variations import variations
from fusebackend.declarative.watched_call import watched_call

Results = list[tuple[str, torch.Tensor]]

_NOT_FINITE = "inf or nan"


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
    notes: list[str] = dataclasses.field(default_factory=list)

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
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])


def verify_traced(pattern: Any, *, seed: int = 0) -> Verification:
    """Verifies a :class:`fusebackend.declarative.traced_pattern.TracedPattern` on each device of this machine that its replacement runs
    on, in the dtypes of its examples and in the others that it is registered for.

    What fails in a dtype that only ``"any"`` asked for is left out of the pattern, with a note.
    """
    result = Verification(pattern.name)
    here = [d for d in ("cpu", "cuda") if devices.available(d)]
    postponed: dict[str, None] = {}
    for variant in pattern.variants:
        able = [d for d in here if pattern.runs_on(variant, d)]
        for device in able:
            checks = verify_variant(variant, device, seed=seed)
            variant.verified[device] = why_wrong(checks)
            result.checks += checks
            for dtype in pattern.accepted.dtypes or ():
                example = with_dtype(variant.example, dtype)
                if Form.of_example(example) == Form.of_example(variant.example) or dtype in pattern.left_out:
                    continue
                checks = verify_variant(variant, device, example=example, brief=True, seed=seed)
                wrong = why_wrong(checks)
                if wrong is not None and pattern.accepted.any_dtype:
                    pattern.left_out[dtype] = wrong
                    result.notes.append(f"not for {dtype}: {wrong}")
                else:
                    result.checks += checks
        if not able:
            operator = devices.lacking(variant.replace.graph, here[0] if here else "cpu")
            where = pattern.on or (operator and devices.devices_of(operator)) or ()
            postponed[f"verification is postponed to the first compile on {devices.spelled(where)}, where {operator or 'it'} runs"] = None
    result.notes += postponed
    return result


def why_wrong(checks: list[Check]) -> str | None:
    """The first check that failed, in words; None if all passed."""
    wrong = next((c for c in checks if not c.ok), None)
    return None if wrong is None else f"{wrong.what}: {wrong.detail}"


def verify_variant(variant: Any, device: str, *, example: dict[str, Any] | None = None, brief: bool = False, seed: int = 0) -> list[Check]:
    """Compares the two functions of a :class:`fusebackend.declarative.variant.Variant` on a type of device.

    May be called while a graph is compiled.

    Args:
        example: the arguments to begin with, whose dtypes may be others than those of the variant; None takes its own.
        brief: compares on few inputs, where a variant of another dtype or rank was compared on all.
    """
    with outside_of_compiles(), torch.random.fork_rng():
        torch.manual_seed(seed)
        given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in (example or variant.example).items()}
        return [dataclasses.replace(c, what=f"{device}, {c.what}") for c in _checks(variant, given, brief)]


def _checks(variant: Any, example: dict[str, Any], brief: bool) -> Iterator[Check]:
    if variant.derived:
        return  # its gradients are the search function's, and its results those of the variant for inference
    training = any(isinstance(v, torch.Tensor) and v.requires_grad for v in variant.example.values())
    label = ", ".join(f"{n} {g.spec(v)}" for n, v in example.items() if isinstance(v, torch.Tensor))
    if not training and not brief:
        yield from _operators(variant.replace_fn, example, label)
    for how, arguments in variations(variant, example, brief):
        yield from _compare(variant, arguments, f"{label}, {how}", training)


def _operators(replace_fn: Callable, example: dict[str, Any], label: str) -> Iterator[Check]:
    try:
        with torch.no_grad():
            call = watched_call(replace_fn, without_grad(example), training=False)
    except Exception as error:
        cure = "devices= says on which devices it runs, if not on this one"
        yield Check(f"{label}, as given", False, f"the replacement raised {type(error).__name__}: {_first_line(error)} ({cure})")
        return
    for op, (args, kwargs) in call.operators.items():
        try:
            torch.library.opcheck(op, args, kwargs)
            yield Check(f"{label}, opcheck of {op}", True)
        except Exception as error:
            yield Check(f"{label}, opcheck of {op}", False, _first_line(error))


def _compare(variant: Any, arguments: dict[str, Any], what: str, training: bool) -> Iterator[Check]:
    try:
        expected = watched_call(variant.search_fn, arguments, training).results
    except Exception:
        return  # the search function does not accept this input
    try:
        exact = watched_call(variant.search_fn, {n: _double(v) for n, v in arguments.items()}, training).results
    except Exception:
        exact = expected
    try:
        problem = _problem_of_replacement(variant.replace_fn, arguments, training, expected, exact)
    except Exception as error:
        problem = f"the replacement raised {type(error).__name__}: {_first_line(error)}"
    if problem is not None and _NOT_FINITE in problem:
        # One kernel of eager's may treat what is not finite otherwise than the operations that Inductor makes of it, which are replaced.
        try:
            plain = _decomposed(variant.search_fn, arguments, training)
            problem = _problem_of_replacement(variant.replace_fn, arguments, training, plain, exact)
        except Exception as error:
            problem = f"{problem} (its decomposition could not be run: {type(error).__name__}: {_first_line(error)})"
    yield Check(what + (" (with gradients)" if training else ""), problem is None, problem or "")


def _decomposed(fn: Callable, arguments: dict[str, Any], training: bool) -> Results:
    """What ``fn`` gives, gradients included, in the operations that Inductor decomposes its forward and its backward into."""
    from torch._inductor import decomposition  # heavy, and rarely needed
    from torch.fx.experimental.proxy_tensor import make_fx

    given = {n: v.detach() for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    leaves = [n for n in given if arguments[n].requires_grad] if training else []
    names: list[str] = []

    def results(*tensors: torch.Tensor) -> list[torch.Tensor]:
        # Gradients are taken while the graph is traced: the operations of a decomposed forward need not have any.
        named = {n: t.detach().requires_grad_(n in leaves) for n, t in zip(given, tensors)}
        outputs = [o for o in tree_leaves(fn(**{**arguments, **named})) if isinstance(o, torch.Tensor)]
        gradients: tuple[torch.Tensor | None, ...] = ()
        if training:
            gradients = torch.autograd.grad(outputs, [named[n] for n in leaves], list(map(cotangent, outputs)), allow_unused=True)
        named_gradients = [(f"gradient of {n}", d) for n, d in zip(leaves, gradients) if d is not None]
        names[:] = [*(f"output {i}" for i in range(len(outputs))), *(n for n, _ in named_gradients)]
        return [*(o.detach() for o in outputs), *(d for _, d in named_gradients)]

    graph = make_fx(results, decomposition_table=decomposition.select_decomp_table())(*given.values())
    return list(zip(names, graph(*given.values())))


def _problem_of_replacement(
    replace_fn: Callable, arguments: dict[str, Any], training: bool, expected: Results, exact: Results
) -> str | None:
    first = watched_call(replace_fn, arguments, training)
    kept = [(n, r.clone()) for n, r in first.results]
    second = watched_call(replace_fn, arguments, training)
    wrong = next(iter(first.problems), None) or _difference(expected, kept, exact)
    if wrong:
        return wrong
    if any(g.share_storage(a, b) for _, a in first.results for _, b in second.results):
        return "a second call returns the memory that the first returned"
    if not all(_same_bits(now, before) for (_, now), (_, before) in zip(first.results, kept)):
        return "a second call changes what the first returned"
    wrong = next(iter(second.problems), None) or _difference(expected, second.results, exact)
    return f"only the first call is right: {wrong}" if wrong else None


def _difference(expected: Results, got: Results, exact: Results) -> str | None:
    if [n for n, _ in expected] != [n for n, _ in got]:
        return f"it gives {', '.join(n for n, _ in got)}; the search function {', '.join(n for n, _ in expected)}"
    for (name, e), (_, r), (_, x) in zip(expected, got, exact):
        problem = _problem(e, r, x)
        if problem:
            return f"{name}: {problem}"
    return None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _double(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return like(value, value.detach().to(torch.complex128 if value.is_complex() else torch.float64))


def _problem(expected: torch.Tensor, got: torch.Tensor, exact: torch.Tensor) -> str | None:
    for attribute in ("shape", "dtype", "device"):
        if getattr(expected, attribute) != getattr(got, attribute):
            return f"{attribute} {getattr(expected, attribute)} became {getattr(got, attribute)}"
    if expected.is_complex():
        expected, got, exact = (torch.view_as_real(t.resolve_conj()) for t in (expected, got, exact))
    if not expected.is_floating_point():
        return None if torch.equal(expected, got) else "the values differ"
    if expected.numel() == 0:
        return None
    special = ~torch.isfinite(expected)
    if not torch.allclose(expected[special], got[special], rtol=0, atol=0, equal_nan=True):
        return f"{_NOT_FINITE} are at different positions"
    finite = ~special & torch.isfinite(exact)
    if not torch.isfinite(got[finite]).all():
        return f"{_NOT_FINITE} where the search function gives a finite number"
    truth = exact[finite].double()
    scale = truth.abs().max().item() if truth.numel() else 0.0
    theirs, ours = ((t[finite].double() - truth).abs().max().item() if truth.numel() else 0.0 for t in (expected, got))
    allowed = 4 * theirs + 4 * torch.finfo(expected.dtype).eps * scale
    if ours <= allowed:
        return None
    return f"largest error {ours:.2e} against fp64, the search function's is {theirs:.2e} (allowed {allowed:.2e})"
