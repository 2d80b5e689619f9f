"""Casts of many tensors: the bits, strides and dtypes of ``to``, of whole and cut chunks, misaligned tensors, more than a launch takes."""

import pytest
import torch

from fusebackend.patterns.foreach_cast import groups
from fusebackend.patterns.foreach_cast.ops import CASTS, foreach_cast

pytestmark = pytest.mark.usefixtures("library")

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
#: Rounded to even, to the largest, to infinity, to the smallest, to zero.
EXTREMES = [float(x) for x in "0 -0 1 65504 65520 65536 3.4e38 -3.4e38 inf -inf nan 1e-8 6e-8 1e-40 1.00390625 2049".split()]


def check(tensors, dtype):
    results = foreach_cast(tensors, dtype)
    assert len(results) == len(tensors)
    for found, x in zip(results, tensors):
        assert found.dtype == dtype and found.stride() == x.stride() and found.device == x.device
        wanted = x.to(dtype)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        numbers = ~wanted.isnan()
        assert torch.equal(torch.signbit(found.float())[numbers], torch.signbit(wanted.float())[numbers])
    return results


@pytest.mark.parametrize(("before", "after"), sorted(CASTS, key=str), ids=str)
class TestEveryPair:
    def test_sizes(self, device, before, after):
        """One element, tails of eight, a chunk of 4096 less, more and exactly; no elements; no dims."""
        shapes = [(), (1,), (7,), (8,), (3, 5), (4095,), (4096,), (4097,), (64, 64), (9, 1000), (0, 3), (2, 3, 4, 5)]
        check([torch.randn(s, device=device).to(before) for s in shapes], after)

    def test_memory_orders(self, device, before, after):
        x = torch.randn(6, 8, 5, 7, device=device).to(before)
        check([x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2), x[1:3], x[0, 0].t()], after)

    @pytest.mark.parametrize("offset", [1, 2, 4, 8])
    def test_misaligned(self, device, before, after, offset):
        x = torch.randn(20_000, device=device).to(before)
        check([x[offset:], x[: 20_000 - offset], x[offset : offset + 4096]], after)

    def test_more_than_one_launch_takes(self, device, before, after):
        x = torch.randn(400, 17, device=device).to(before)
        results = check([*x], after)
        assert len({r.data_ptr() for r in results}) == 400

    def test_extreme_numbers(self, device, before, after):
        x = torch.tensor(EXTREMES * 3, device=device).to(before)
        check([x, x[1:]], after)


def test_every_half_is_widened_exactly(device):
    bits = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16)
    for dtype in (f16, bf16):
        check([bits.view(dtype), bits.view(dtype)[3:]], f32)


@pytest.mark.cuda
def test_one_launch_takes_a_group():
    """The matcher's largest group is one launch: no second kernel, and a result for each."""
    tensors = [torch.randn(100, device="cuda") for _ in range(groups._MOST_CASTS)]
    foreach_cast(tensors, bf16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        foreach_cast(tensors, bf16)
        torch.cuda.synchronize()
    launches = sum(e.count for e in profile.key_averages() if "foreach_cast_chunks" in e.key)
    assert launches == 1


@pytest.mark.cuda
def test_current_stream_and_cuda_graphs():
    x = [torch.randn(5000, device="cuda"), torch.randn(33, device="cuda")]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check(x, bf16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = foreach_cast(x, bf16)
    for t in x:
        t.normal_()
    graph.replay()
    assert all(torch.equal(r, t.bfloat16()) for r, t in zip(results, x))


@pytest.mark.cuda
def test_in_a_compiled_model():
    """Taken in training under autocast on a GPU, with the bits that Inductor computes."""
    import fusebackend

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6))).cuda()
    x = torch.randn(64, 128, device="cuda")

    def trained(compiled):
        model.zero_grad()
        with torch.autocast("cuda", bf16):
            out = compiled(x)
        out.float().square().sum().backward()
        return [out, *(p.grad.clone() for p in model.parameters())]

    results = trained(torch.compile(model, backend="fuse", options={"fuse.patterns": "foreach_cast", "fuse.strict": True}))
    assert fusebackend.last_report().counts() == {"foreach_cast": 2}
    torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(results, trained(torch.compile(model))))


@pytest.mark.cuda
def test_refused_on_gpus():
    x = torch.randn(4, 6, device="cuda")
    for tensors, dtype, reason in [
        ([x.double()], bf16, "not supported"),
        ([x, x.half()], bf16, r"tensors\[1\]"),
        ([x, x.cpu()], bf16, "device"),
        ([x, x[:, ::2]], bf16, "has gaps"),
        ([x[:1].expand(4, 6)], f16, "has gaps, or elements that share memory"),
    ]:
        with pytest.raises(RuntimeError, match=reason):
            foreach_cast(tensors, dtype)
