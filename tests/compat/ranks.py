"""Trains the demo's language model on several ranks, with a peer and with ``fuse``; test_distributed.py runs it on the CPU.

On GPUs, against Inductor (``--standalone`` gives each kind of parallelism a port of its own, so that all three can run at once):

    torchrun --standalone --nproc-per-node 2 tests/compat/ranks.py ddp
    torchrun --standalone --nproc-per-node 2 tests/compat/ranks.py fsdp2
    torchrun --standalone --nproc-per-node 2 tests/compat/ranks.py tensor_parallel

Every rank must have the peer's loss at every step, and all of them the same substitutions.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fusebackend
from fusebackend.tools.byte_lm import ByteLM


def compiled(module: torch.nn.Module, backend: str, options: dict | None) -> torch.nn.Module:
    if backend == "eager":
        return module
    return torch.compile(module, backend=backend, options=options if backend == "fuse" else None)


def ddp(model: ByteLM, mesh: DeviceMesh, backend: str, options: dict | None) -> torch.nn.Module:
    return compiled(DistributedDataParallel(model), backend, options)


def fsdp2(model: ByteLM, mesh: DeviceMesh, backend: str, options: dict | None) -> torch.nn.Module:
    """Block by block, as its documentation has it: gathering and scattering stay outside the compiled code."""
    for block in model.blocks:
        if backend != "eager":
            block.compile(backend=backend, options=options if backend == "fuse" else None)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: ByteLM, mesh: DeviceMesh, backend: str, options: dict | None) -> torch.nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return compiled(model, backend, options)


KINDS = {f.__name__: f for f in (ddp, fsdp2, tensor_parallel)}


def train(kind: str, backend: str, mesh: DeviceMesh, sizes: tuple[int, int, int, int], steps: int, options: dict | None = None):
    """Losses of each step on this rank, and what was substituted, as a list that ranks can compare."""
    batch, time, channels, blocks = sizes
    device = torch.device(mesh.device_type)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = KINDS[kind](ByteLM(channels, time, blocks).to(device), mesh, backend, options)
    # Under tensor parallelism only some parameters are DTensors, and AdamW for many at once takes no mixture.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    torch.manual_seed(0 if kind == "tensor_parallel" else 1 + dist.get_rank())
    tokens = torch.randint(0, 256, (batch, time + 1)).to(device)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens[:, :-1].contiguous()).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    made = [(s.pattern, s.graph, str(s.source), s.inputs, s.outputs) for r in fusebackend.reports() for s in r.substitutions]
    return losses, made


def compare(kind: str, peer: str, sizes: tuple[int, int, int, int], steps: int, options: dict | None, rtol: float) -> str:
    """Trains with both and compares; returns a line that says what was found. AssertionError where they differ."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda" if cuda else "cpu", (dist.get_world_size(),))
    expected, _ = train(kind, peer, mesh, sizes, steps)
    found, made = train(kind, "fuse", mesh, sizes, steps, options)
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (expected, found, made))
    worst = max(abs(a - b) / abs(a) for losses, ours, _ in everybody for a, b in zip(losses, ours))
    assert worst <= rtol, f"{kind}: losses differ by {worst:.1e}: {everybody}"
    assert found[-1] < found[0], f"{kind}: nothing was learned: {found}"
    assert made and all(theirs == made for _, _, theirs in everybody), f"{kind}: substitutions differ between ranks: {everybody}"
    counts = {name: sum(m[0] == name for m in made) for name in sorted({m[0] for m in made})}
    return (
        f"{kind}: {steps} steps on {len(everybody)} ranks, loss {found[0]:.5f} -> {found[-1]:.5f}, largest relative difference to {peer} "
        f"{worst:.1e}, substitutions alike on every rank: {counts}"
    )


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else None)
    try:
        for kind in sys.argv[1:] or KINDS:
            if cuda:
                line = compare(kind, "inductor", (8, 768, 768, 4), 20, None, rtol=1e-4)
            else:
                line = compare(kind, "eager", (2, 32, 16, 2), 4, {"fuse.interpret": True, "fuse.gate": "off"}, rtol=1e-5)
            if dist.get_rank() == 0:
                print(line, flush=True)
    finally:
        dist.destroy_process_group()


def leave() -> NoReturn:
    """Ends this process without finalizing Python.

    After FSDP2 and tensor parallelism, in eager mode too, torch keeps references to the process group that was destroyed, and so gloo's
    threads go on. A thread that drops the tensors of a finished collective takes the GIL; while Python is finalized that ends the thread
    by an unwinding that C++ turns into "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    leave()
