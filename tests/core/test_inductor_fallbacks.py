"""Inductor's option ``implicit_fallbacks=False``: operators without a lowering fail the compile, and so ours need one."""

import subprocess
import sys

import pytest
import torch
from stand_in_calibrations import FASTER_US

import fusebackend
from fusebackend import Match, Pattern
from fusebackend.native import fallbacks

aten = torch.ops.aten


@pytest.fixture
def without_lowerings():
    """No operator but PyTorch's has a lowering, as in a new process."""
    from torch._inductor import lowering

    mine = [op for op in lowering.lowerings if isinstance(op, torch._ops.OpOverload) and not torch._library.utils.is_builtin(op)]
    before = {op: lowering.lowerings.pop(op) for op in mine}
    yield
    lowering.lowerings.update(before)


def compiled(fn, *inputs, **options):
    with torch._inductor.config.patch(force_disable_caches=True):
        result = torch.compile(fn, backend="fuse", options={"implicit_fallbacks": False, **options})(*inputs)
    return result, fusebackend.last_report()


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("pattern", "fn", "shapes"),
    [
        ("index_add", lambda x, s: x.index_add(0, torch.arange(0, 6, 2), s), [(6, 40), (3, 40)]),
        ("index_add", lambda x, s: (x * 2).index_add_(0, torch.arange(0, 6, 2), s), [(6, 40), (3, 40)]),
        ("permute", lambda x: x.transpose(0, 1).contiguous(), [(5, 7)]),
        ("transpose_add", lambda x, y: x.mT + y, [(5, 7), (7, 5)]),
    ],
)
def test_each_familys_operators_have_a_lowering(library, without_lowerings, pattern, fn, shapes):
    inputs = [torch.randn(shape) for shape in shapes]
    result, report = compiled(fn, *inputs, **{"fuse.gate": "off"})
    torch.testing.assert_close(result, fn(*inputs))
    assert {s.pattern for s in report.substitutions} == {pattern}


@pytest.mark.codegen
def test_by_default_options(library, without_lowerings, calibrated):
    calibrated(FASTER_US)
    x, i, s = torch.zeros(50, 256), torch.randint(0, 50, (2000,)), torch.randn(2000, 256)
    result, report = compiled(lambda x, i, s: x.index_add(0, i, s), x, i, s)
    torch.testing.assert_close(result, x.index_add(0, i, s))
    assert report.substitutions


@pytest.mark.codegen
def test_operators_of_users_have_one_too(without_lowerings, temporary_pattern):
    own = torch.library.Library("test_fallbacks", "FRAGMENT")
    own.define("halve(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    own.impl("halve", lambda x: x / 2, "CompositeExplicitAutograd")
    torch.library.register_fake("test_fallbacks::halve", torch.empty_like, lib=own)

    class Halve(Pattern):
        name, anchors = "halve", (aten.sin.default,)

        def match(self, node):
            return Match((node,), lambda e: e.call(torch.ops.test_fallbacks.halve.default, node.args[0]))

    temporary_pattern(Halve())
    x = torch.randn(8)
    result, _ = compiled(torch.sin, x)
    assert torch.equal(result, x / 2)


@pytest.mark.codegen
def test_a_kernel_of_a_user_has_one(without_lowerings):
    source = "// no kernel is registered: the reference runs\n"
    op = fusebackend.load_kernel(
        "test_fallbacks_kernel::double",
        sources={"double.cpp": source},
        schema="(Tensor x) -> Tensor",
        fake=torch.empty_like,
        reference=lambda x: 2 * x,
    )
    x = torch.randn(8)
    result, _ = compiled(lambda x: op(x) + 1, x)
    assert torch.equal(result, 2 * x + 1)


def test_importing_the_package_does_not_import_inductors_lowerings():
    program = "import fusebackend, sys, torch; fusebackend.register; print('torch._inductor.lowering' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_lowering_that_is_there_is_kept(without_lowerings):
    from torch._inductor import lowering

    fallbacks.register()
    before = dict(lowering.lowerings)
    fallbacks.register()
    assert all(before[op] is lowered for op, lowered in lowering.lowerings.items())
