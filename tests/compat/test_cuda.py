"""CUDA's own: graphs, streams, devices, and memory that runs out."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusebackend
from fusebackend.patterns.fp32_matmul import match as matmul_family

ops = torch.ops.fusebackend
pytestmark = pytest.mark.cuda


class Model(nn.Module):
    def __init__(self, channels=64, taps=4):
        super().__init__()
        self.embedding = nn.Embedding(100, channels)
        self.weight = nn.Parameter(torch.randn(channels, 1, taps))
        self.bias = nn.Parameter(torch.randn(channels, 256))

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        return F.conv1d(F.pad(x, (self.weight.shape[2] - 1, 0)), self.weight, groups=x.shape[1]) @ self.bias.t()


@pytest.mark.codegen
def test_training_in_cuda_graphs():
    model = Model().cuda()
    compiled = torch.compile(model, backend="fuse", options={"mode": "reduce-overhead", "fuse.gate": "off"})

    def step(run, tokens):
        model.zero_grad()  # to None: gradients kept from the last step would lie in the graphs' memory
        loss = run(tokens).square().mean()
        loss.backward()
        return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]

    for seed in range(5):  # warming up, recording, replaying
        torch.manual_seed(seed)
        tokens = torch.randint(0, 100, (4, 256), device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(step(compiled, tokens), step(model, tokens), rtol=1e-4, atol=1e-5)
    assert fusebackend.last_report().counts()["causal_conv1d_backward"] == 1


def test_streams_side_by_side(interpreted):
    """One compiled function, many calls in flight: workspaces belong to the stream of their call."""
    model = Model().cuda().requires_grad_(False)
    compiled = interpreted(model)
    tokens = [torch.randint(0, 100, (8, 256), device="cuda") for _ in range(8)]
    expected = [model(t) for t in tokens]
    compiled(tokens[0])
    streams = [torch.cuda.Stream() for _ in tokens]
    torch.cuda.synchronize()
    found = []
    for _ in range(3):
        for given, stream in zip(tokens, streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000)
                found.append(compiled(given))
    torch.cuda.synchronize()
    for i, result in enumerate(found):
        torch.testing.assert_close(result, expected[i % len(tokens)], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(interpreted):
    model = Model().to("cuda:1").requires_grad_(False)
    tokens = torch.randint(0, 100, (4, 256), device="cuda:1")
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(interpreted(model)(tokens), model(tokens), rtol=1e-4, atol=1e-4)
    assert torch.cuda.current_device() == 0


def transposed_sum():
    x = torch.randn(8192, 4096, device="cuda")
    return lambda: ops.transpose_add(x.t(), x.view(4096, 8192), 1.0, 1, [0, 1])


def sorted_sums():
    """The workspace is what is large: an entry takes 16 bytes of it, and four of the source."""
    index, source = torch.randint(0, 1000, (4_000_000,), device="cuda"), torch.randn(4_000_000, device="cuda")
    target = torch.zeros(1000, device="cuda")

    def call():
        before = target.clone()
        try:
            ops.index_add_(target, 0, index, source, None, None, 1.0, None, 0, False, True)
        except torch.OutOfMemoryError:
            assert torch.equal(target, before)
            raise
        result = target.clone()
        target.zero_()
        return result

    return call


def convolution():
    x, weight = torch.randn(4, 64, 65536, device="cuda"), torch.randn(64, 1, 4096, device="cuda")
    return lambda: ops.causal_conv1d(x, weight, None, 4095, 0, 0.0, False, False)


def convolution_backward():
    x, weight = torch.randn(4, 64, 65536, device="cuda"), torch.randn(64, 1, 4, device="cuda")
    return lambda: ops.causal_conv1d_backward(x, x, weight, None, 3, 0.0, False, False, True, True, False)


def product():
    if torch.cuda.get_device_capability() != (9, 0) or matmul_family.unavailable(torch.device("cuda", 0)):
        pytest.skip("the fp32 matmul needs compute capability 9.0")
    a = torch.randn(256, 100_000, device="cuda")
    return lambda: ops.matmul(a, a.t(), None, 1.0, 0.0, None, -1, None, -1, "wgmma")  # "auto" does with less memory


@pytest.mark.parametrize("make", [transposed_sum, sorted_sums, convolution, convolution_backward, product])
def test_memory_that_runs_out_is_torchs_error_and_leaves_nothing_behind(make, starved):
    call = make()
    expected = call()
    gc.collect()  # of tests before
    allocated = torch.cuda.memory_allocated()
    with starved(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        call()
    assert torch.cuda.memory_allocated() == allocated
    torch.testing.assert_close(call(), expected)
