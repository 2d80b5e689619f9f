"""A matrix product that is slow on purpose, by orders of magnitude, and a pattern that exchanges it and PyTorch's."""

import time

import torch

import fusebackend
from fusebackend.rewriting.pattern import Match, Pattern

library = torch.library.Library("slow_product", "FRAGMENT")
library.define("slow_mm(Tensor x, Tensor y) -> Tensor")
torch.library.register_fake("slow_product::slow_mm", lambda x, y: x.new_empty(x.shape[0], y.shape[1]), lib=library)


@torch.library.impl(library, "slow_mm", "CompositeExplicitAutograd")
def _slow_mm(x, y):
    if x.is_cuda:
        torch.cuda._sleep(20_000_000)
    else:
        time.sleep(0.02)
    return x @ y


torch.library.register_autograd(
    "slow_product::slow_mm",
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=library,
)
mm, slow_mm = torch.ops.aten.mm.default, torch.ops.slow_product.slow_mm.default


class Replace(Pattern):
    """Replaces one matrix product by the other. Inductor calls a library for both, so no test here waits for a compiler."""

    def __init__(self, name, old, new, unproven=""):
        self.name, self.anchors, self.new, self.unproven = name, (old,), new, unproven

    def match(self, node):
        return Match((node,), lambda e: e.call(self.new, *node.args), unproven=self.unproven)


def compiled(fn, gate_mode, patterns, **options):
    options = {"fuse.gate": gate_mode, "fuse.patterns": patterns, "fuse.strict": True, **options}
    return torch.compile(fn, backend="fuse", options=options)


def are_from_cache(fn, *inputs, times=2):
    """Whether Inductor's code came from its cache, of as many compiles one after the other."""
    found = []
    for _ in range(times):
        torch._dynamo.reset()
        fn(*inputs)
        found.append(fusebackend.last_report().from_cache)
    return found


def square(n=16):
    return torch.randn(n, n), torch.randn(n, n)
