"""Compiles a graph of its own with Inductor in the midst of another compile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.triton_bundler import TritonBundler
from torch._inductor.utils import BoxedBool


def compile_apart(
    module: fx.GraphModule, fakes: list[Any], patches: dict[str, Any], *, output_strides: list[Any] | None = None, is_backward: bool = False
) -> Callable[[list[Any]], Any]:
    """Compiles ``module`` under the Inductor configuration ``patches``, without caches, CUDA graphs or a C++ wrapper.

    Args:
        output_strides: an empty list, which is filled with the strides that Inductor chose for the results; None for those it did not.
        is_backward: whether it is compiled as the backward of a training step.

    Returns:
        A function of a list of inputs, which it may empty.
    """
    settings = {**patches, "fx_graph_cache": False, "fx_graph_remote_cache": False, "triton.cudagraphs": False, "cpp_wrapper": False}
    mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None)
    context = TracingContext(mode)
    context.output_strides = output_strides
    with (
        _bundler_set_aside(),
        tracing(context),
        inductor_config.patch(settings),
        functorch_config.patch(bundled_autograd_cache=False),
    ):
        return inductor.compile_fx_inner(module, fakes, cudagraphs=BoxedBool(False), is_backward=is_backward)


@contextlib.contextmanager
def _bundler_set_aside() -> Iterator[None]:
    """Inductor collects the Triton kernels of one compile in class attributes: the other compile's are put back afterwards."""
    names = [n for n in ("_entries", "_static_autotuners", "_winners") if hasattr(TritonBundler, n)]
    kept = {n: getattr(TritonBundler, n) for n in names}
    for n in names:
        setattr(TritonBundler, n, None)
    try:
        yield
    finally:
        for n, value in kept.items():
            setattr(TritonBundler, n, value)
