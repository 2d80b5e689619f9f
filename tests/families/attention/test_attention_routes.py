"""Which kernels compute attention of long sequences on a GPU of compute capability 9.0, and that each is right at its edges."""

import dataclasses

import pytest
import torch
from test_attention_kernels import arguments, by_kernels, check
from torch.profiler import ProfilerActivity, profile

from fusebackend.patterns.attention import work
from fusebackend.rewriting import device_facts

PIPELINED, ANY = "attention_pipelined_forward", "attention_flash_forward"
STORED = {"attention_pipelined_backward_keys", "attention_stored_backward"}
QUERIES, KEYS, BIAS = ("attention_flash_backward_queries", "attention_flash_backward_keys", "attention_flash_backward_bias")


def whole(batch, heads, queries, keys=None):
    return torch.randn(batch, heads, queries, keys or queries).bfloat16()


#: q's shape, biases, which of them have a gradient, further arguments; the forward's kernel and the backward's.
ROUTES = {
    "one bias": ((3, 2, 200, 64), [whole(1, 2, 200)], [True], {}, PIPELINED, STORED),
    "narrow heads": ((9, 2, 136, 32), [whole(1, 2, 136)], [True], {}, PIPELINED, STORED),
    "unaligned": ((2, 2, 197, 64), [whole(1, 2, 197)], [True], {}, PIPELINED, STORED),
    "bias and mask": ((3, 2, 264, 64), [whole(1, 2, 264), whole(3, 1, 1, 264)], [True, False], {}, PIPELINED, STORED),
    "wide mask": ((3, 2, 264, 48), [whole(3, 1, 1, 264).float(), whole(1, 2, 264)], [False, True], {}, PIPELINED, STORED),
    "unaligned mask": ((3, 2, 131, 64), [whole(3, 1, 1, 131).float(), whole(1, 2, 131)], [False, True], {}, PIPELINED, STORED),
    "gradient of a mask": ((3, 2, 136, 64), [whole(3, 1, 1, 136)], [True], {}, PIPELINED, STORED),
    "bias of every head": ((2, 2, 136, 64), [whole(2, 2, 136)], [True], {}, PIPELINED, STORED),
    "one head": ((1, 1, 70, 64), [whole(1, 1, 70)], [True], {}, PIPELINED, STORED),
    "causal": ((9, 2, 328, 64), [whole(1, 2, 328)], [True], {"causal": True}, PIPELINED, STORED),
    "causal, more keys": ((3, 2, 100, 64), [whole(1, 2, 100, 328)], [True], {"causal": True, "keys": 328}, PIPELINED, STORED),
    "causal, more queries": ((3, 2, 328, 32), [whole(1, 2, 328, 104)], [True], {"causal": True, "keys": 104}, PIPELINED, STORED),
    "two gradients": ((3, 2, 136, 64), [whole(1, 2, 136), whole(3, 1, 1, 136)], [True, True], {}, PIPELINED, STORED | {BIAS}),
    "no gradient of a bias": ((3, 2, 200, 64), [whole(1, 2, 200)], [False], {}, PIPELINED, {"attention_pipelined_backward_keys", QUERIES}),
    "no bias": ((3, 2, 200, 32), [], [], {}, PIPELINED, {"attention_pipelined_backward_keys", QUERIES}),
    "two masks": ((3, 2, 136, 64), [whole(3, 1, 1, 136), whole(1, 1, 1, 136), whole(1, 2, 136)], [False, False, True], {}, ANY, STORED),
    "two biases": ((3, 2, 136, 64), [whole(1, 2, 136), whole(3, 1, 136)], [True, False], {}, ANY, {KEYS, QUERIES}),
    "wide bias": ((3, 2, 264, 64), [whole(1, 2, 264).float()], [True], {}, ANY, {KEYS, QUERIES, BIAS}),
    "wide heads": ((2, 2, 136, 128), [whole(1, 2, 136)], [True], {}, ANY, {KEYS, QUERIES, BIAS}),
}


def launched(run):
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        found = run()
        torch.cuda.synchronize()
    return found, " ".join(event.key for event in trace.key_averages())


def attended(q, keys, biases, wanted, causal=False):
    *batch, heads, queries, dim = q
    facts = [
        work.BiasFacts((b.shape[0], 1, *b.shape[1:]), b.element_size(), b.shape[-1] % 8 == 0, w * b.element_size())
        for b, w in zip(biases, wanted)
    ]
    return work.Attended((*batch, 1, heads, queries, keys, dim, dim), facts, causal, torch.device("cuda", 0))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROUTES)
def test_each_route_is_taken_and_right(name, dtype, library):
    shape, biases, wanted, options, forward, backward = ROUTES[name]
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these are the routes of compute capability 9.0")
    causal = options.get("causal", False)
    q, k, v, grad = arguments("cuda", dtype, shape, options.get("keys"))
    biases = [b.cuda() if b.dtype == torch.float32 else b.to("cuda", dtype) for b in biases]
    results, kernels = launched(lambda: by_kernels(q, k, v, biases, shape[-1] ** -0.5, causal, grad, wanted))
    for kernel in (PIPELINED, ANY, KEYS, QUERIES, BIAS, *STORED):
        assert (kernel in kernels) == (kernel == forward or kernel in backward), kernel
    found = check(q, k, v, biases, grad, causal=causal, wanted=wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, results))


@pytest.mark.cuda
@pytest.mark.parametrize("repeated", range(4), ids=("q", "k", "v", "grad"))
def test_tokens_that_are_one_row_are_read_by_other_kernels(repeated, library):
    """The tensor memory accelerator can not repeat a row."""
    rows = list(arguments("cuda", torch.bfloat16, (2, 2, 136, 64)))
    rows[repeated] = rows[repeated][..., :1, :].expand(rows[repeated].shape)
    *qkv, grad = rows
    bias = whole(1, 2, 136).cuda()
    results, kernels = launched(lambda: by_kernels(*qkv, [bias], 0.125, False, grad, [True]))
    assert (PIPELINED in kernels) == (repeated == 3) and not any(kernel in kernels for kernel in STORED)
    copied = by_kernels(*(x.contiguous() for x in qkv), [bias], 0.125, False, grad.contiguous(), [True])
    # Where keys or values are one row, some gradients are sums that cancel: what is left of them is relative to what others are.
    wide = [x.norm() for x in by_kernels(*arguments("cuda", torch.bfloat16, (2, 2, 136, 64))[:3], [bias], 0.125, False, grad, [True])]
    for ours, other, norm in zip(results, copied, wide, strict=True):
        assert (ours.double() - other.double()).norm() <= 2**-7 * max(norm, other.norm())
    if repeated in (0, 3):
        check(*qkv, [bias], grad)


@pytest.mark.cuda
def test_heads_that_share_their_keys_are_read_where_they_lie(library):
    q, k, v, grad = arguments("cuda", torch.bfloat16, (2, 4, 136, 64))
    k, v = (x[:, :1].expand(x.shape) for x in (k, v))
    check(q, k, v, [whole(1, 4, 136).cuda()], grad)


@pytest.mark.cuda
def test_gradients_of_scores_are_stored_of_some_heads_at_a_time(library):
    q, k, v, grad = arguments("cuda", torch.bfloat16, (18, 9, 1024, 32))
    bias = whole(1, 9, 1024).cuda()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = by_kernels(q, k, v, [bias], 0.2, False, grad, [True])
    results = sum(x.nbytes for x in first)
    partial_sums = 4 * 2 * bias.numel()
    assert torch.cuda.max_memory_allocated() - before < results + partial_sums + (300 << 20)  # 324 MiB if all were stored
    assert all(torch.equal(a, b) for a, b in zip(first, by_kernels(q, k, v, [bias], 0.2, False, grad, [True])))
    check(q, k, v, [bias], grad)


@pytest.mark.cuda
def test_sequences_for_which_no_gradients_are_stored(library):
    q, k, v, grad = arguments("cuda", torch.bfloat16, (4, 1, 6200, 64))
    bias = whole(1, 1, 6200).cuda()
    _, kernels = launched(lambda: by_kernels(q, k, v, [bias], 0.125, False, grad, [True]))
    assert "attention_stored_backward" not in kernels and BIAS in kernels
    check(q, k, v, [bias], grad)


@pytest.mark.parametrize("name", ROUTES)
def test_the_work_is_that_of_the_route(name, monkeypatch, library):
    shape, biases, wanted, options, _, backward = ROUTES[name]
    monkeypatch.setattr(work, "device_facts", lambda device: device_facts.IMAGINED)
    site = attended(shape, options.get("keys") or shape[-2], biases, wanted, options.get("causal", False))
    facts = work.kernel_facts(site, True)
    assert facts["stored"] == (backward >= STORED)
    assert facts["kernels"] >= len(backward) + 1  # sums of rows


def test_what_is_stored_is_bounded(monkeypatch, library):
    monkeypatch.setattr(work, "device_facts", lambda device: device_facts.IMAGINED)
    for batch, heads, length, stored in (
        (8, 12, 1024, 1),
        (64, 12, 1024, 0),
        (8, 1, 5760, 1),
        (8, 1, 5824, 0),
        (1, 8, 5824, 1),
        (1, 1, 12_000, 0),
    ):
        site = work.Attended(
            (batch, 1, heads, length, length, 64, 64),
            [work.BiasFacts((1, 1, heads, length, length), 2, True, 2)],
            False,
            torch.device("cuda", 0),
        )
        assert work.kernel_facts(site, True)["stored"] == stored


def test_other_gpus_store_no_gradients(monkeypatch, library):
    biases = [work.BiasFacts((1, 1, 12, 1024, 1024), 2, True, 2)]
    site = work.Attended((8, 1, 12, 1024, 1024, 64, 64), biases, False, torch.device("cuda", 0))
    found = []
    for capability in ((9, 0), (8, 0)):
        facts = dataclasses.replace(device_facts.IMAGINED, capability=capability)
        monkeypatch.setattr(work, "device_facts", lambda device, facts=facts: facts)
        found.append(work.kernel_facts(site, True))
    stored, elsewhere = found
    assert stored["stored"] == 1 and elsewhere["stored"] == 0
    assert stored["flops"] < elsewhere["flops"]
