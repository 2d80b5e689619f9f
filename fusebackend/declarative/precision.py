"""Floating-point precision in a match: casts, numbers, and in which precision pattern and graph compute.

A trace of bf16 tensors holds casts, and where they stand depends on how a program is spelled: ``F.rms_norm`` rounds once, at its end;
a Llama's norm rounds before it multiplies by the weight. Casts are therefore seen through, and what was matched is then judged as a
whole: no operator of the graph may be more precise than the pattern's, so a replacement never loses precision.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import _disable_current_modes

from fusebackend import fx_utils as g
from fusebackend.declarative.examples import is_number
from fusebackend.rewriting.pattern import Reject

CAST = torch.ops.prims.convert_element_type.default

_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def is_cast(node: Any) -> bool:
    """Whether ``node`` converts between floating-point types that are compared here, or copies what was converted.

    The copy changes no number, and the memory order alone: PyTorch's backward of ``F.rms_norm`` on GPUs makes one of each cast.
    """
    if not isinstance(node, fx.Node):
        return False
    if node.target is torch.ops.aten.clone.default:
        return is_cast(node.args[0])
    return node.target is CAST and {g.value(node).dtype, g.value(node.args[0]).dtype} <= _BITS.keys()


def through_casts(node: fx.Node) -> fx.Node:
    """What ``node`` converts, through any number of casts; the node itself if it is none."""
    while is_cast(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_lossless_cast(node: Any) -> bool:
    """Whether ``node`` is a cast after which every number is what it was."""
    return is_cast(node) and represents(g.value(node).dtype, g.value(node.args[0]).dtype)


def represents(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of the type ``narrow`` is one of the type ``wide``."""
    return wide == narrow or (wide in (torch.float32, torch.float64) and _BITS.get(narrow, 99) < _BITS[wide])


def in_single(number: int | float) -> float:
    """A number as float32 holds it: operators on tensors of at most 32 bits compute with that."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return float(number)


def same_number(expected: Any, actual: Any, dtype: torch.dtype | None) -> bool:
    """Whether two numbers are the same for an operator whose result has ``dtype``."""
    if _equal(expected, actual):
        return True
    if isinstance(expected, int) and isinstance(actual, int):  # an index, maybe
        return False
    return dtype in (torch.float32, torch.float16, torch.bfloat16) and _equal(in_single(expected), in_single(actual))


def _equal(a: int | float, b: int | float) -> bool:
    return a == b and math.copysign(1, a) == math.copysign(1, b)  # the sign of a zero is one that copysign, or 1 / x, shows


def number_held_by(node: Any) -> int | float | None:
    """The number that a tensor without dims holds, where the graph says so: ``aten.full([], 2.0)``, or a constant of the program."""
    if not g.is_tensor(node) or g.value(node).dim() or g.value(node).dtype not in (*_BITS, torch.int64, torch.int32):
        return None
    if node.target is torch.ops.aten.lift_fresh_copy.default:
        return number_held_by(node.args[0])
    if is_cast(node):
        number = number_held_by(node.args[0])
    elif node.target is torch.ops.aten.full.default and is_number(node.args[1]):
        number = node.args[1]
    else:
        number = _constant(node)
    if number is None:
        return None
    with _disable_current_modes():
        return torch.full((), number, dtype=g.value(node).dtype).item()  # as the dtype rounds it


def _constant(node: fx.Node) -> int | float | None:
    """What an attribute of the graph holds, unless the graph writes to it."""
    held = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    if type(held) is not torch.Tensor or held.device.type != "cpu":
        return None
    reads = node.graph.find_nodes(op="get_attr", target=node.target)
    if any(g.is_mutating(user) for read in reads for user in read.users):
        return None
    with _disable_current_modes():
        return held.item()


def judge(pairs: Mapping[fx.Node, fx.Node], casts: Iterable[fx.Node], works_in: frozenset[torch.dtype], exact: bool) -> Reject | str:
    """Compares in which precision pattern and graph compute.

    Args:
        pairs: each matched node of the pattern with that of the graph.
        casts: of the graph, which were seen through.
        works_in: the floating-point types of the pattern's arguments and results.
        exact: whether the graph may not round more often than the pattern.

    Returns:
        Why the two do not fit together; or a note on what the replacement does not round, which is empty if it rounds as the graph does.
    """
    rounded: list[fx.Node] = [c for c in casts if is_cast(c) and not is_lossless_cast(c)]
    for expected, node in pairs.items():
        wanted, found = g.value(expected), g.value(node)
        if isinstance(found, torch.Tensor) and found.dtype is torch.bool and any(map(is_number, node.args)):
            # The number is rounded to the dtype that it is compared in.
            wide, narrow = ({g.value(n).dtype for n in of.all_input_nodes if g.is_tensor(n)} for of in (expected, node))
            if wide != narrow:
                what = f"{g.describe(node)} compares {_names(narrow)}, the pattern {_names(wide)}"
                return Reject(f"wrong dtype: {what}", node)
        if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor) or wanted.dtype == found.dtype:
            continue
        if not {wanted.dtype, found.dtype} <= _BITS.keys() or not represents(wanted.dtype, found.dtype):
            what = f"{g.describe(node)} computes in {_name(found.dtype)}, the pattern in {_name(wanted.dtype)}"
            return Reject(f"wrong dtype: {what}", node)
        if found.dtype not in works_in:
            return Reject(f"wrong dtype: {g.describe(node)} rounds to {_name(found.dtype)}, the pattern to nothing narrower", node)
        rounded.append(node)
    foreign = next((c for c in rounded if g.value(c).dtype not in works_in), None)
    if foreign is not None:
        return Reject(f"wrong dtype: the graph rounds to {_name(g.value(foreign).dtype)} between the operators", foreign)
    if rounded and (exact or inductor_config.emulate_precision_casts):
        what = f"the graph rounds to {_name(g.value(rounded[0]).dtype)} at {g.describe(rounded[0])}, where the pattern does not"
        return Reject(f"{what} (roundings='fewer' matches it)", rounded[0])
    return f"leaves out roundings to {_name(g.value(rounded[0]).dtype)} between the operators" if rounded else ""


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(map(_name, dtypes)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
