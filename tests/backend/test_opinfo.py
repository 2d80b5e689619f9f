"""PyTorch's own samples for the operators of the families: ``fuse`` gives eager's values, strides, dtypes and gradients."""

import pytest
import torch

pytest.importorskip("expecttest", reason="the test extra is not installed")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

NAMES = {
    "add",
    "sub",
    "permute",
    "transpose",
    "index_add",
    "index_put",
    "index_select",
    "scatter_add",
    "gather",
    "nn.functional.embedding",
    "nn.functional.conv1d",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "nn.functional.linear",
}
OPS = {f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}": op for op in op_db if op.name in NAMES}
SAMPLES = 14  # of each operator and dtype, spread over its list


def run(fn, sample, grad):
    leaves = []

    def prepare(value):
        if not isinstance(value, torch.Tensor):
            return value
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) if 0 not in value.stride() else value.clone()
        copy = copy.copy_(value.detach()).requires_grad_(grad and value.is_floating_point())
        if copy.requires_grad:
            leaves.append(copy)
        return copy

    arguments = torch.utils._pytree.tree_map(prepare, (sample.input, *sample.args))
    out = fn(*arguments, **torch.utils._pytree.tree_map(prepare, sample.kwargs))
    if grad and isinstance(out, torch.Tensor) and out.requires_grad:
        return out.detach(), torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    return out, ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(OPS))
def test_opinfo(name, dtype):
    op = OPS[name]
    if dtype not in op.supported_dtypes("cpu"):
        pytest.skip(f"{name} does not take {dtype} on the CPU")
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    compiled_samples = 0
    for sample in samples[:: max(1, len(samples) // SAMPLES)]:
        torch._dynamo.reset()
        grad = op.supports_autograd
        try:
            expected = run(op.op, sample, grad)
            plain = run(torch.compile(op.op, backend="aot_eager"), sample, grad)
        except Exception:
            continue  # not something that runs, or compiles, without us
        compiled = torch.compile(op.op, backend="fuse", options={"fuse.interpret": True, "fuse.strict": True})
        got = run(compiled, sample, grad)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(got, expected, **tolerance)
        for a, b in zip(torch.utils._pytree.tree_leaves(got[0]), torch.utils._pytree.tree_leaves(plain[0])):
            if isinstance(a, torch.Tensor):
                assert a.stride() == b.stride() and a.dtype == b.dtype
        compiled_samples += 1
    assert compiled_samples > 0
