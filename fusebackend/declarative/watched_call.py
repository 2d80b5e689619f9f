"""Runs a function on copies of its arguments, and watches what it does besides returning results.

What a graph does not show is found here: memory that is written in secret, a result that is an argument after all, a fake that promises
other strides than the kernel gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._prims_common import check_significant_strides
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fusebackend import fx_utils as g
from fusebackend.cotangent import cotangent
from fusebackend.declarative.replica import memory, replica

_PYTORCHS_OWN = ("aten", "prims", "prim", "inductor")


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call gave.

    Attributes:
        results: outputs and, in training, gradients, each with its name.
        operators: the operators that are not part of PyTorch, each with the arguments of its first call.
        problems: what went on that neither the results nor the operators' schemas and fakes show.
    """

    results: list[tuple[str, torch.Tensor]]
    operators: dict[torch._ops.OpOverload, tuple[tuple, dict[str, Any]]]
    problems: list[str]


def watched_call(fn: Callable, arguments: dict[str, Any], training: bool) -> Call:
    """Calls ``fn(**arguments)``, with gradients of those arguments that require grad if ``training``.

    The arguments are copied: whatever happens to them stays without consequences.
    """
    arguments = {n: replica(v) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    tensors = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    before = {n: memory(v) for n, v in tensors.items()}
    with _Watch() as watch:
        outputs = [o for o in tree_leaves(fn(**arguments)) if isinstance(o, torch.Tensor)]
        results = [(f"output {i}", o) for i, o in enumerate(outputs)]
        if training:
            leaves = {n: v for n, v in tensors.items() if v.requires_grad}
            gradients = torch.autograd.grad(outputs, list(leaves.values()), list(map(cotangent, outputs)), allow_unused=True)
            results += [(f"gradient of {n}", d) for n, d in zip(leaves, gradients) if d is not None]
    problems = dict.fromkeys(watch.problems)
    if not problems:
        problems = {f"it writes to its argument {n!r}": None for n, v in tensors.items() if not torch.equal(before[n], memory(v))}
    return Call([(n, o.detach()) for n, o in results], watch.operators, list(problems))


class _Watch(TorchDispatchMode):
    """Compares each operator that is not part of PyTorch with its schema and its fake, whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[torch._ops.OpOverload, tuple[tuple, dict[str, Any]]] = {}
        self.problems: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.namespace in _PYTORCHS_OWN:
            return func(*args, **kwargs)
        if func not in self.operators:
            self.operators[func] = tree_map(_replica, (args, kwargs))
        promised, problem = _promised(func, args, kwargs)
        given = [(argument, t, memory(t)) for argument, t in _tensors_of(func, args, kwargs)]
        results = func(*args, **kwargs)
        problems = [] if problem is None else [problem]
        for argument, tensor, before in given:
            if not (argument.alias_info and argument.alias_info.is_write) and not torch.equal(before, memory(tensor)):
                problems.append(f"it writes to its argument {argument.name!r}, which its schema does not say")
        problems += _undeclared_aliases(func, given, results)
        if promised is not None:
            problems += _broken_promises(promised, results)
        self.problems += [f"{func}: {p}" for p in problems]
        return results


def _replica(value: Any) -> Any:
    return replica(value) if isinstance(value, torch.Tensor) else value


def _tensors_of(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each tensor that the operator is given, with the argument of the schema that it is given as."""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield argument, leaf


def _promised(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, str | None]:
    """What the operator's fake gives for these arguments; None where the operator must run for that. And what is wrong with the fake."""
    mode = FakeTensorMode()
    fake_args, fake_kwargs = tree_map(
        lambda v: mode.from_tensor(v.detach(), static_shapes=True) if isinstance(v, torch.Tensor) else v, (args, kwargs)
    )
    try:
        with mode:
            return func(*fake_args, **fake_kwargs), None
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None, None
    except Exception as error:
        return None, f"its fake raised {type(error).__name__}: {str(error).strip().splitlines()[:1]}"


def _broken_promises(promised: Any, results: Any) -> Iterator[str]:
    fakes, reals = tree_leaves(promised), tree_leaves(results)
    if len(fakes) != len(reals):
        yield f"its fake gives {len(fakes)} results, the kernel {len(reals)}"
        return
    for fake, real in zip(fakes, reals):
        if not isinstance(fake, torch.Tensor) or not isinstance(real, torch.Tensor):
            continue
        for what in ("dtype", "device", "layout", "shape"):
            if getattr(fake, what) != getattr(real, what):
                yield f"its fake gives {what} {getattr(fake, what)}, the kernel {getattr(real, what)}"
                return
        if real.layout is torch.strided and not check_significant_strides(fake, real, only_cuda=False)[0]:
            yield f"its fake gives strides {tuple(fake.stride())}, the kernel {tuple(real.stride())} for shape {g.spec(real)}"
            return


def _undeclared_aliases(func: torch._ops.OpOverload, given: list, results: Any) -> Iterator[str]:
    earlier: dict[StorageWeakRef, str] = {}
    for argument, tensor, _ in given:
        if argument.alias_info is None:
            earlier.setdefault(_storage(tensor), f"its argument {argument.name!r}")
    if any(r.alias_info is not None for r in func._schema.returns):
        return
    for position, result in enumerate(r for r in tree_leaves(results) if isinstance(r, torch.Tensor)):
        owner = earlier.setdefault(_storage(result), f"its result {position}")
        if owner != f"its result {position}":
            yield f"its result {position} shares memory with {owner}, which its schema does not say"


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
