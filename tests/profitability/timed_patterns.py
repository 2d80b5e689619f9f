"""Patterns whose estimates do not tell, or do not tell enough, so that the default gate times what they offer."""

import time

import torch
from slow_product import Replace

from fusebackend.rewriting.pattern import Estimate, Interval, Match

aten = torch.ops.aten
library = torch.library.Library("default_timing", "FRAGMENT")
library.define("sin(Tensor x, float seconds) -> Tensor")
torch.library.register_fake("default_timing::sin", lambda x, seconds: torch.empty_like(x), lib=library)


@torch.library.impl(library, "sin", "CompositeExplicitAutograd")
def _sin(x, seconds):
    time.sleep(seconds)
    return x.sin()


class Open(Replace):
    """Replaces a sine, for which Inductor generates code, by a call. The estimate does not tell which is faster."""

    def __init__(self, seconds, ours, inductor, around=None):
        super().__init__("test_open", aten.sin.default, None)
        self.seconds, self.ours, self.inductor = seconds, Interval(*ours), Interval(*inductor)
        self.around = around and Interval(*around)

    def match(self, node):
        return Match((node,), lambda e: e.call(torch.ops.default_timing.sin.default, node.args[0], self.seconds))

    def estimate(self, match):
        return Estimate(None, "too close", "unmeasured", ours=self.ours, inductor=self.inductor, around=self.around)

    def fingerprint(self):
        return self.name


class OpenProduct(Open):
    """Replaces the sine of a product, which is a library call and code. Of the times nothing is known, or ours and that of the code."""

    def __init__(self, seconds, generated=None):
        super().__init__(seconds, (1, 1, 1), (1, 1, 1))
        self.generated = generated

    def match(self, node):
        (product,) = node.args
        operator = torch.ops.default_timing.sin.default
        return Match((node,), lambda e: e.call(operator, e.call(aten.mm.default, *product.args), self.seconds), interior=(product,))

    def estimate(self, match):
        ours = None if self.generated is None else self.ours
        return Estimate(None, "not calibrated", "unmeasured", ours=ours, generated=self.generated)


class Exchanged(Replace):
    """Exchanges products of libraries, and says whether that pays."""

    def __init__(self, old, new, pays):
        super().__init__("test_exchanged", old, new)
        self.pays = pays

    def estimate(self, match):
        return Estimate(self.pays, "?", "unmeasured")

    def fingerprint(self):
        return f"{self.anchors} {self.pays}"


class Alternatives(Open):
    """Replaces the sine by the call, or by a sum with nothing, which is estimated to take 30 ms, and Inductor's form 40. Of the call's time
    nothing is known."""

    def __init__(self, seconds):
        super().__init__(seconds, (30e3, 29e3, 31e3), (40e3, 39e3, 41e3))

    def estimate(self, match):
        def emit(emitter):
            return emitter.call(aten.sin.default, emitter.call(aten.add.Scalar, match.outputs[0].args[0], 0))

        other = Match(match.outputs, emit, note="otherwise")
        rival = Estimate(True, ours=self.ours, inductor=self.inductor, instead=other)
        return Estimate(None, "not calibrated", "unmeasured", inductor=self.inductor, rival=rival)
