"""What the bench's tests have in common: a case, quick ways to compile it, and the result of a run."""

import torch

from fusebackend.bench import Case, result_file

CPU = torch.device("cpu")

# Every way without code generation: what is tested is the bench, not Inductor.
QUICK_WAYS = {
    "eager": None,
    "inductor": {"backend": "eager"},
    "fuse": {"backend": "fuse", "options": {"fuse.interpret": True}},
}


def square_inputs(device):
    return torch.randn(33, 70, device=device), torch.randn(70, 33, device=device)


TRANSPOSED = Case("transposed", lambda x, y: x.T + y, square_inputs, floor=lambda x, y: y + y, goal=1e9)


def a_run(ratio=2.0, **environment):
    model = {"model": "gpt2_small", "kind": "training-fp32", "ms": {"inductor": 10.0 * ratio, "fuse": 10.0}, "ratio": ratio, "goal": 1.5}
    row = {"family": "tiny", "case": "c", "goals": {"floor": 1.05}, "ms": {"floor": 1.0, "inductor": ratio, "fuse": 1.0}}
    return {
        "environment": {"device": "a device", "torch": "2.11", **environment},
        "kernels": [{**row, "substitutions": {"fuse": 1}, "error": {}, "failed": {}}],
        "random": [{**row, "substitutions": {"fuse": 1}, "error": {}, "failed": {}}],
        "models": [{**model, "uncertainty": 0.001, "difference": 0.0, "substitutions": {"fp32_matmul": 9}}],
    }


def written(path, run):
    result_file.write(path, run)
    return str(path)
