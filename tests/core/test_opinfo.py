"""PyTorch's own samples (OpInfo) of the operators that the families rewrite: as given, non-contiguous, and in reversed memory order.

``fuse`` must give eager's values, strides, dtypes and gradients, and each call of this package's operators must pass ``opcheck``.
About three samples of each operator are run, in less usual dtypes one. ``FUSEBACKEND_TEST_OPINFO=N`` runs about N, ``=all`` runs all in
every memory order.
"""

import dataclasses
import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

pytest.importorskip("expecttest", reason="the test extra is not installed")
from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo import core  # noqa: E402

from fusebackend.fuzz import compare  # noqa: E402
from fusebackend.fuzz.programs import Program  # noqa: E402
from fusebackend.fuzz.tensors import nudged  # noqa: E402
from fusebackend.rewriting.family import families  # noqa: E402

# Views alone match no pattern: their results are also made contiguous, and added to a contiguous tensor.
VIEWS = {"permute", "transpose", "t", "movedim", "expand", "T", "mT"}
NAMES = {name for family in families().values() for name in family.samples}
OPS = {op.name + ("." + op.variant_test_name if op.variant_test_name else ""): op for op in op_db if op.name in NAMES}
#: Those in which every operator is sampled, and those of which one sample is enough unless all are asked for.
MAIN_DTYPES = [torch.float32, torch.bfloat16, torch.int64]
OTHER_DTYPES = [torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64]
SETTING = os.environ.get("FUSEBACKEND_TEST_OPINFO", "3")


def reversed_order(tensor):
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


LAYOUTS = {"as given": lambda t: t, "non-contiguous": None, "reversed": reversed_order}


@dataclasses.dataclass(frozen=True)
class Given:
    """An input of a program, made from an existing tensor; has what the fuzzer uses of a ``Spec``."""

    tensor: torch.Tensor
    grad: bool
    fill: str = "given"
    reaches_no_row = False

    @property
    def dtype(self):
        return self.tensor.dtype

    def make(self, device, widen=False, nudge=None, absolute=False):
        source = nudged(self.tensor.double() if widen and self.tensor.is_floating_point() else self.tensor, nudge)
        if absolute and source.is_floating_point():
            source = source.abs()
        if 0 in self.tensor.stride():
            made = source.clone()
        else:
            made = torch.empty_strided(self.tensor.shape, self.tensor.stride(), dtype=source.dtype, device=device).copy_(source)
        return (made.requires_grad_(), made) if self.grad else (made, None)


@dataclasses.dataclass(frozen=True)
class Sample(Program):
    """A sample of an operator as a program of the fuzzer."""

    fn: object = None

    def function(self, wide=False):
        return self.fn

    def source(self):
        return ""

    def graph(self, inputs):
        return make_fx(self.fn)(*(t.detach().requires_grad_(t.requires_grad) for t in inputs))


class Recorder(TorchDispatchMode):
    """Records the arguments of one call of each of this package's operators for each combination of dtypes and ranks."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fusebackend" and not any(isinstance(a, FakeTensor) for a in args):
            tensors = [(a.dtype, a.dim()) if isinstance(a, torch.Tensor) else None for a in args]
            copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            self.calls.setdefault((func, str(tensors)), (copies, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def sample_program(op, sample, layout):
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in positions]
    change = LAYOUTS[layout]
    if layout == "non-contiguous":
        tensors = [torch.testing._internal.common_utils.noncontiguous_like(t) for t in tensors]
    else:
        tensors = [change(t) for t in tensors]

    def fn(*given):
        filled = list(leaves)
        for i, tensor in zip(positions, given):
            filled[i] = tensor
        first, args, kwargs = tree_unflatten(filled, structure)
        out = op.op(first, *args, **kwargs)
        if op.name in VIEWS and isinstance(out, torch.Tensor) and out.dim():
            dense = torch.ones(out.shape, dtype=out.dtype, device=out.device)
            return out, out.contiguous(), out + dense
        return [out] if isinstance(out, torch.Tensor) else list(out)

    grad = op.supports_autograd
    return Sample(tuple(Given(t.detach(), grad and t.is_floating_point()) for t in tensors), (), (), fn=fn)


def chosen(samples, dtype):
    """Some samples, evenly spread over the list, each in the next layout; or all samples in all layouts."""
    samples = [s for s in samples if not s.kwargs.get("dropout_p")]  # compiled code drops others
    if SETTING == "all":
        return [(s, layout) for s in samples for layout in LAYOUTS]
    count = int(SETTING) if dtype in MAIN_DTYPES else 1
    part = samples[len(samples) // 2 :][:1] if count == 1 else samples[:: max(1, len(samples) // count)]
    return [(s, list(LAYOUTS)[i % len(LAYOUTS)]) for i, s in enumerate(part)]


@pytest.fixture(autouse=True)
def no_test_case(monkeypatch):
    """PyTorch searches the whole stack, with its source lines, for the ``unittest.TestCase`` that asks for samples; there is none here."""
    monkeypatch.setattr(core, "extract_test_fn", lambda: None)
    monkeypatch.setattr(common_utils, "extract_test_fn", lambda: None)


@pytest.mark.parametrize("dtype", MAIN_DTYPES + OTHER_DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(OPS))
def test_opinfo(name, dtype, device):
    op = OPS[name]
    if dtype not in op.supported_dtypes(device.type):
        pytest.skip(f"{name} does not take {dtype} on {device.type}")
    compared, wrong = 0, []
    recorder = Recorder()
    with recorder:
        for sample, layout in chosen(op.sample_inputs(device, dtype, requires_grad=False), dtype):
            comparison = compare.check(sample_program(op, sample, layout), device.type)
            compared += comparison.skipped is None
            wrong += [f"{layout}, {sample}: {comparison}"] if comparison.wrong else []
    assert not wrong, "\n".join(wrong)
    assert compared
    for (ours, _), (args, kwargs) in recorder.calls.items():
        torch.library.opcheck(ours, tuple(args), kwargs)
