"""The operators on a CPU, where they run their PyTorch references, and the constants that the kernels tell."""

import pytest
import torch

from fusebackend.native import loader
from fusebackend.native import ops as native_ops
from fusebackend.patterns.fp32_matmul.ops import constant

ops = torch.ops.fusebackend
pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("alpha, beta", [(1.0, 0.0), (-0.5, 2.0)])
def test_op_on_cpu(alpha, beta):
    a, b, d = torch.randn(3, 5, 7), torch.randn(3, 9, 7).mT, torch.randn(9)
    torch.library.opcheck(ops.matmul.default, (a, b, d, alpha, beta))
    torch.testing.assert_close(ops.matmul(a, b, d, alpha, beta), alpha * (a @ b) + beta * d)


@pytest.mark.parametrize("inner", [-1, -2])
@pytest.mark.parametrize("shape", [(5, 70), (3, 5, 70)])
def test_planes_sum_to_the_operand(shape, inner):
    x = torch.randn(shape) * torch.exp(8 * torch.randn(shape))
    x[..., 0, 0], x[..., 1, 1] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    torch.library.opcheck(ops.matmul_planes.default, (x, inner))
    planes = ops.matmul_planes(x, inner)
    inner_size = x.shape[inner]
    assert planes.shape[-1] % 64 == 0 and planes.isfinite().all()
    total = planes[..., :inner_size].double().sum(1)
    total = total if x.dim() == 3 else total[0]
    raised = (total if inner == -1 else total.mT) / x.double() - 1
    assert ((raised >= 0) & (raised < 2.0**-24)).all()


def test_planes_of_integers_are_exact():
    x = torch.randint(-(2**16), 2**16, (40, 70)).float()
    assert torch.equal(ops.matmul_planes(x, -1)[0, :, :, :70].double().sum(0).float(), x)


def test_the_library_tells_its_constants():
    assert constant("tile_m") == 128 and constant("planes_limit") == 2**30 and constant("half_ulp") == 1.5 * 2.0**-26
    with torch._subclasses.FakeTensorMode():
        native_ops._answer.cache_clear()
        assert constant("exact_sums_below_k") == 768
    with pytest.raises(RuntimeError, match="no constant warp_size"):
        constant("warp_size")


def test_without_a_library_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(loader, "load", lambda: loader.Native(reason="no C++ compiler found"))
    with pytest.raises(RuntimeError, match="no native library: no C\\+\\+ compiler found"):
        constant("tile_m")
