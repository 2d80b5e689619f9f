"""A model with its inputs on a device, and a step of it with a backend: what ``models``, ``compile`` and ``losses`` run.

A training step is forward, loss and backward; training in bf16 runs under autocast. The loss is the model's own, if what it
returns has a ``loss``, else the mean square of what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fusebackend import backend
from fusebackend.bench.model_zoo import MODELS
from fusebackend.tools.object_reference import UsageError, call_factory

#: What a model is run at: name -> (training, dtype).
KINDS: dict[str, tuple[bool, torch.dtype]] = {
    "training-fp32": (True, torch.float32),
    "inference-bf16": (False, torch.bfloat16),
    "training-bf16": (True, torch.bfloat16),
    "inference-fp32": (False, torch.float32),
}


class Workload:
    """A model in one of ``KINDS``.

    Args:
        name: a key of :data:`fusebackend.bench.model_zoo.MODELS`, or ``package.module:factory``, which returns (model, args[, kwargs]).

    Raises:
        UsageError: the factory returns something else.
    """

    def __init__(self, name: str, kind: str, device: torch.device):
        self.device = device
        self.training, self.dtype = KINDS[kind]
        torch.manual_seed(0)
        kwargs: dict[str, Any] = {}
        model: Any
        if name in MODELS:
            with device:  # random weights are drawn on the device
                model, args = MODELS[name](device)
        else:
            model, args, kwargs = call_factory(name, "--model")
        if not isinstance(model, nn.Module):
            raise UsageError(f"{name} must give a torch.nn.Module, got {type(model).__name__}")
        self.model = model.to(device).train(self.training)
        if not self.training:
            self.model.to(self.dtype)
        self.args, self.kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, self._on_device, (args, kwargs))

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        converted = not self.training and tensor.is_floating_point()
        return tensor.detach().to(self.device, self.dtype if converted else None)

    def step(self, way: str, options: Mapping[str, Any] | None = None) -> Callable[[], Any]:
        """A step of the model compiled with the backend ``way``. It returns the loss in training, the output in inference."""
        compiled = torch.compile(self.model, backend=way, options=dict(options) if options else None)
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.training and self.dtype != torch.float32)

        def step() -> Any:
            if not self.training:
                with torch.no_grad():
                    return compiled(*self.args, **self.kwargs)
            self.model.zero_grad()
            with autocast:
                out = compiled(*self.args, **self.kwargs)
            loss = loss_of(out)
            loss.backward()
            return loss.detach()

        return step


def loss_of(out: Any) -> torch.Tensor:
    """The loss of what a model returned."""
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss
    return torch.stack([t.float() if t.dim() == 0 else t.float().square().mean() for t in floating_point(out)]).sum()


def floating_point(out: Any) -> list[torch.Tensor]:
    """The floating-point tensors of what a model returned."""
    leaves = torch.utils._pytree.tree_leaves(out)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def substitution_counts() -> dict[str, int]:
    """Pattern -> substitutions, of all compiles since ``torch._dynamo.reset()``."""
    counts: dict[str, int] = {}
    for report in backend.reports():
        for pattern, count in report.counts().items():
            counts[pattern] = counts.get(pattern, 0) + count
    return counts


def near_misses() -> list[str]:
    """What of all compiles since ``torch._dynamo.reset()`` was left to Inductor, and why: a sentence each, once."""
    found = (f"{r.pattern} in {r.graph}, {r.module or r.source}: {r.reason}" for report in backend.reports() for r in report.rejections)
    return list(dict.fromkeys(found))
