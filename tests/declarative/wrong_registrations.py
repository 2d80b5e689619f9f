"""A wrong registration of each kind. Each is a function that raises."""

import functools
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import nn

import fusebackend
from fusebackend.native.hub_kernels import load_hub_kernel
from fusebackend.native.user_kernels import load_kernel

X, Y = torch.randn(4, 8), torch.randn(4, 8)
XG = X.clone().requires_grad_()
HELD = torch.randn(8)
LIBRARY = torch.library.Library("wrong", "FRAGMENT")


def twice(x):
    return torch.sin(x) * 2


def product(x, y):
    return torch.tanh(x) * y


def operator(name, kernel, fake=torch.empty_like):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, kernel, "CPU")
    if fake is not None:
        torch.library.register_fake(f"wrong::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.wrong, name).default


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x) * 2

    @staticmethod
    def backward(ctx, g):
        return g * torch.cos(ctx.saved_tensors[0])


class WrongShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sin(x) * 2

    @staticmethod
    def backward(ctx, g):
        return g @ g.mT


@torch.library.custom_op("wrong::custom_without_backward", mutates_args=())
def custom_without_backward(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


custom_without_backward.register_fake(torch.empty_like)


def written(x):
    out = torch.sin(x) * 2
    x.zero_()
    return out


def refuses(x):
    raise RuntimeError("only rows of 16")


def refuses_odd_sizes(x):
    torch._check(x.shape[0] % 2 == 0, lambda: "only even sizes")
    return torch.empty_like(x)


def keeps_a_buffer(x, buffers={}):  # noqa: B006
    return torch.mul(torch.sin(x), 2, out=buffers.setdefault(x.shape, torch.empty(x.shape)))


def keeps_two_buffers(x, held=[]):  # noqa: B006
    out = (torch.sin(x) * 2).contiguous()
    for earlier in held:
        earlier.zero_()
    held.append(out)
    return out


CALLS = []


def counts(x):
    CALLS.append(x)
    return (torch.sin(x) * 2 + (len(CALLS) % 2 - 1)).contiguous()


def fresh(x):
    return x.new_empty(x.shape)


OPERATORS = dict(
    no_backward=operator("no_backward", twice),
    no_fake=operator("no_fake", twice, None),
    fake_refuses=operator("fake_refuses", twice, refuses),
    fake_refuses_odd=operator("fake_refuses_odd", twice, refuses_odd_sizes),
    writes=operator("writes", written),
    lies=operator("lies", lambda x: (torch.sin(x) * 2).t().contiguous().t()),
    returns_argument=operator("returns_argument", lambda x: x.contiguous(), fresh),
    buffer=operator("buffer", keeps_a_buffer, fresh),
    two_buffers=operator("two_buffers", keeps_two_buffers, fresh),
    counts=operator("counts", counts, fresh),
)


def call(name):
    op = OPERATORS[name]
    return lambda x: op(x)


def history():
    CALLS[:] = [None]  # as in a new process, also where another test has been here
    register(lambda x: twice(x).contiguous(), call("counts"), X)


def register(search, replace, *example, **settings):
    settings.setdefault("name", "test_wrong")
    fusebackend.register_replacement(search, replace, example, **settings)


def wrong(search, replace, *example, **settings):
    return functools.partial(register, search, replace, *example, **settings)


def kernel(**changed):
    given = dict(sources={"a.cpp": ""}, schema="(Tensor x) -> Tensor", fake=torch.empty_like, reference=twice)
    name = changed.pop("name", "wrong::kernel")
    return lambda: load_kernel(name, **{**given, **changed})


def hub(**changed):
    given = dict(kernel="someone/something", version=1, schema="(Tensor x) -> Tensor", call=lambda k, x: x, fake=torch.empty_like)
    return lambda: load_hub_kernel("wrong::hub", **{**given, **changed})


def first_call_of_hub(name, package):
    def run():
        op = load_hub_kernel(
            f"wrong::{name}",
            kernel="no/such",
            version=1,
            devices="cpu",
            schema="(Tensor x) -> Tensor",
            call=lambda k, x: x,
            fake=torch.empty_like,
        )
        with mock.patch.dict("sys.modules", {"kernels": package}):
            op(X)

    return run


def raises(*_, **__):
    raise FileNotFoundError("no such repository")


def two_of_one_name(folder: Path):
    for sub, text in (("one", "int a;"), ("two", "int b;")):
        (folder / sub).mkdir()
        (folder / sub / "k.cpp").write_text(text)
    kernel(sources=[folder / "one/k.cpp", folder / "two/k.cpp"])()


def no_package():
    kernels = ModuleType("kernels")
    kernels.get_kernel = raises
    return kernels


clone = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731

#: What is wrong, and the call. A function of one argument is given an empty folder.
CASES = {
    "name taken": wrong(product, product, X, Y, name="transpose_add"),
    "level": wrong(twice, twice, X, level="pre_grad"),
    "priority": wrong(twice, twice, X, priority="high"),
    "no name": wrong(twice, twice, X, name=""),
    "name in two lines": wrong(twice, twice, X, name="a\nb"),
    "example without data": wrong(twice, twice, torch.empty(4, device="meta")),
    "name of a decorator": lambda: fusebackend.register_pattern(None, example_inputs=(X,)),
    "search function without a name": lambda: fusebackend.register_replacement(functools.partial(twice), twice, (X,)),
    "no search function": wrong(None, twice, X),
    "no replacement": wrong(twice, None, X),
    "no replacement of a module": wrong(nn.RMSNorm(8, eps=1e-6), None, X),
    "check that is no function": wrong(twice, twice, X, when=True),
    "check without an argument": wrong(twice, twice, X, when=lambda: True),
    "one spelling without a list": wrong(twice, twice, X, spellings=twice),
    "spelling that is no function": wrong(twice, twice, X, spellings=["twice"]),
    "pin that is no name": wrong(twice, twice, X, pin=3),
    "pinned tensor": wrong(twice, twice, X, pin="x"),
    "verify that is no bool": wrong(twice, twice, X, verify="no"),
    "unknown device": wrong(twice, twice, X, devices="gpu"),
    "device with an index": wrong(twice, twice, X, devices=["cuda:0"]),
    "no device": wrong(twice, twice, X, devices=()),
    "examples that are a number": lambda: fusebackend.register_replacement(twice, twice, 3, name="test_wrong"),
    "examples that are a dict": lambda: fusebackend.register_replacement(twice, twice, {"x": X}, name="test_wrong"),
    "both checks": wrong(twice, twice, X, when=lambda c: True, extra_check=lambda c: True),
    "no tensor": wrong(product, product, 1.0, 2.0),
    "too few examples": wrong(product, product, X),
    "dtypes": wrong(twice, twice, X, dtypes="all"),
    "integer dtypes": wrong(twice, twice, X, dtypes=[torch.int64]),
    "ranks": wrong(twice, twice, X, ranks=[0]),
    "pin": wrong(twice, twice, X, pin="z"),
    "optional": wrong(twice, twice, X, optional=["z"]),
    "roundings": wrong(twice, twice, X, roundings="none"),
    "the replacement computes with a number": wrong(lambda x, n: torch.sin(x) * n, lambda x, n: torch.sin(x) / (1 / n), X, 3.0),
    "the replacement makes a tensor of a number": wrong(
        lambda x, n: torch.sin(x) * n, lambda x, n: torch.sin(x) * torch.tensor(3.0), X, 3.0
    ),
    "the search function makes a tensor of a number": wrong(lambda x: torch.sin(x) * torch.tensor(3.0), lambda x: torch.sin(x) * 3, X),
    "the search function returns a size": wrong(lambda x: (torch.sin(x), x.shape[0]), twice, X),
    "arguments without names": wrong(lambda *args: torch.sin(args[0]), twice, X),
    "arguments by name alone": wrong(lambda *, x: torch.sin(x), twice, X),
    "a check that reads a tensor": wrong(twice, twice, X, when=lambda c, held=HELD: True),
    "replace_module of an instance": lambda: fusebackend.replace_module(nn.RMSNorm(8), lambda x: x, example=(nn.RMSNorm(8), X)),
    "replace_module without a layer": lambda: fusebackend.replace_module(nn.RMSNorm, lambda x: x, example=(X,)),
    "replace_module with a misspelt setting": lambda: fusebackend.replace_module(
        nn.RMSNorm, lambda x: x, example=(nn.RMSNorm(8), X), dtype="any"
    ),
    "a module's unknown argument": wrong(nn.RMSNorm(8, eps=1e-6), lambda x, gamma: x, X),
    "undefined name": wrong(lambda x: x * factr, twice, X),  # noqa: F821
    "shape that does not fit": wrong(twice, lambda x: torch.sin(x.view(3, 5, 7)) * 2, X),
    "fake refuses": wrong(twice, call("fake_refuses"), X),
    "print": wrong(lambda x: print("here") or twice(x), twice, X),
    "data-dependent": wrong(lambda x: twice(x) if x.sum() > 0 else x, twice, X),
    "gradient of another shape": wrong(twice, lambda x: WrongShape.apply(x), XG),
    "no fake": wrong(twice, call("no_fake"), X),
    "no backward": wrong(twice, call("no_backward"), XG),
    "no backward of a custom operator": wrong(twice, lambda x: custom_without_backward(x), XG),
    "training after the partitioner": wrong(twice, twice, XG, level="post_grad"),
    "graph break": wrong(lambda x: torch._dynamo.graph_break() or twice(x), twice, X),
    "captured tensor": wrong(lambda x: x * HELD, lambda x: x * HELD, X),
    "no operation": wrong(lambda x: 1.0, lambda x: 1.0, X),
    "search function writes": wrong(lambda x: x.mul_(2), twice, X),
    "replacement writes": wrong(twice, lambda x: x.mul_(2), X),
    "another signature": wrong(twice, lambda y: torch.sin(y) * 2, X),
    "another signature of a spelling": wrong(twice, twice, X, spellings=[lambda y: torch.sin(y) * 2]),
    "unused argument": wrong(lambda x, y: torch.sin(x), lambda x, y: torch.sin(x), X, Y),
    "derived number": wrong(lambda x, n: x * (n + 1), lambda x, n: x * (n + 1), X, 2.0),
    "another number of results": wrong(lambda x: (torch.sin(x), torch.cos(x)), lambda x: torch.sin(x), X),
    "a builtin": wrong(lambda x: torch.sin(x), torch.sin, X),
    "another shape": wrong(product, lambda x, y: (torch.tanh(x) * y).sum(0), X, Y),
    "another dtype": wrong(product, lambda x, y: (torch.tanh(x) * y).double(), X, Y),
    "other strides": wrong(product, lambda x, y: (torch.tanh(x) * y).t().contiguous().t(), X, Y),
    "no gradient": wrong(product, lambda x, y: torch.tanh(x) * y.detach(), XG, Y.clone().requires_grad_()),
    "nothing to replace": wrong(lambda x: x, lambda x: x, X),
    "shared memory": wrong(lambda x: x.clone(), lambda x: x, X),
    "random": wrong(twice, lambda x: twice(x) + 0 * torch.rand_like(x), X),
    "wrong numbers": wrong(twice, lambda x: torch.sin(x) * 2.001, X),
    "results swapped": wrong(lambda x: (torch.sin(x), torch.cos(x)), lambda x: (torch.cos(x), torch.sin(x)), X),
    "wrong gradient": wrong(twice, lambda x: WrongBackward.apply(x), XG),
    "nan becomes zero": wrong(lambda x: x * 2, lambda x: torch.where(x.isnan(), 0.0, x * 2), X),
    "overflow": wrong(lambda x: x * 2, lambda x: (x * 1e37) / 1e37 * 2, X),
    "another shape for a size of 1": wrong(twice, lambda x: twice(x) if x.shape[0] != 1 else twice(x)[:0], X),
    "kernel refuses another dtype": wrong(twice, lambda x: twice(x) if x.dtype == torch.float32 else 1 / 0, X, dtypes=[torch.bfloat16]),
    "strides that are not the fake's": wrong(twice, call("lies"), X),
    "fake refuses odd sizes": wrong(twice, call("fake_refuses_odd"), X),
    "secret mutation": wrong(twice, call("writes"), X),
    "kernel returns its argument": wrong(clone, call("returns_argument"), X.t()),
    "kept buffer": wrong(lambda x: twice(x).contiguous(), call("buffer"), X),
    "kept results": wrong(lambda x: twice(x).contiguous(), call("two_buffers"), X),
    "history": history,
    "kernel's name": kernel(name="wrong"),
    "kernel's schema": kernel(schema="kernel(Tensor x)"),
    "kernel's name is a number": kernel(name=3),
    "type in a kernel's schema": kernel(schema="(Tensr x) -> Tensor"),
    "kernel's backward": kernel(backward=3),
    "kernel's context without a backward": kernel(setup_context=twice),
    "kernel's sources are one path": kernel(sources="k.cpp"),
    "kernel's source is a number": kernel(sources={"a.cpp": 3}),
    "kernel's name taken": kernel(name="wrong::no_fake"),
    "kernel's fake": kernel(fake=None),
    "no such source": kernel(sources=["no/such.cpp"]),
    "two sources of one name": two_of_one_name,
    "source of another kind": kernel(sources={"a.py": ""}),
    "source that does not compile": kernel(sources={"a.cpp": "int main( {"}),
    "hub: device": hub(devices="tpu"),
    "hub: kernel": hub(kernel=3),
    "hub: version that is no number": hub(version="one"),
    "hub: folder": hub(kernel=Path("/no/such/folder")),
    "hub: version": hub(version=None),
    "hub: no package": first_call_of_hub("hub_no_package", None),
    "hub: not to be had": first_call_of_hub("hub_none", no_package()),
}
