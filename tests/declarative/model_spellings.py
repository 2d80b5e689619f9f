"""How the sources of transformers spell RMSNorm, LayerNorm, SwiGLU and RoPE, and the one pattern a kind that is looked for.

``python tests/declarative/model_spellings.py [kind ...]`` prints, for each spelling, the models that have it and whether it is found.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import fusebackend
from fusebackend.testing import PatternAssertion, assert_pattern

FLOATS = (torch.float32, torch.bfloat16)
ROUNDINGS = dict(rtol=5e-2, atol=5e-2)  # of bfloat16: whether it is the right computation is told by these, how exact by other tests


def rms_norm(x, w, eps):
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def rms_norm_replacement(x, w, eps):
    h = x if x.dtype == torch.float64 else x.float()
    h = torch.rsqrt((h * h).mean(-1, keepdim=True) + eps) * h
    return (h if w is None else h * w).to(x.dtype)


def layer_norm(x, w, b, eps):
    return F.layer_norm(x, (x.shape[-1],), w, b, eps)


def layer_norm_replacement(x, w, b, eps):
    h = x if x.dtype == torch.float64 else x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + eps)
    h = h if w is None else h * w
    return (h if b is None else h + b).to(x.dtype)


def swiglu(gate, up):
    return F.silu(gate) * up


def rope(x, cos, sin, pairs, tables):
    """``pairs``: of neighbours, or of the first half with the second. ``tables``: of all columns, or of one for each pair."""
    h, cos, sin = x.float(), cos.float(), sin.float()
    half = x.shape[-1] // 2
    if tables == "half":
        a, b = (h[..., 0::2], h[..., 1::2]) if pairs == "neighbours" else (h[..., :half], h[..., half:])
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    if pairs == "neighbours":
        turned = torch.stack((-h[..., 1::2], h[..., 0::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-h[..., half:], h[..., :half]), -1)
    return (h * cos + turned * sin).to(x.dtype)


def rope_replacement(x, cos, sin, pairs, tables):
    return rope(x, cos, sin, pairs, tables).clone()  # stands for a kernel


def wants_grad(*shape):
    return torch.randn(shape).requires_grad_()


#: The one registration of each kind: search function, replacement, examples, settings.
PATTERNS = {
    "rms_norm": (rms_norm, rms_norm_replacement, [(wants_grad(2, 3, 8), wants_grad(8), 1e-6)], dict(ranks="any", optional=("w",))),
    "layer_norm": (
        layer_norm,
        layer_norm_replacement,
        [(wants_grad(2, 3, 8), wants_grad(8), wants_grad(8), 1e-5)],
        dict(ranks="any", optional=("w", "b")),
    ),
    "swiglu": (swiglu, lambda gate, up: up * F.silu(gate), [(wants_grad(2, 3, 8), wants_grad(2, 3, 8))], dict(ranks="any")),
    "rope": (
        rope,
        rope_replacement,
        [
            (torch.randn(2, 3, 5, 8), torch.randn(table), torch.randn(table), pairs, tables)
            for pairs in ("halves", "neighbours")
            for tables, table in (("full", (2, 1, 5, 8)), ("full", (2, 3, 1, 8)), ("full", (5, 8)), ("half", (2, 1, 5, 4)))
        ],
        dict(ranks="any"),
    ),
}
#: Which of the COLUMNS below each kind is looked for in.
LOOKED_FOR = {"rope": ("inference", "bf16")}


@contextlib.contextmanager
def registered(kind: str) -> Iterator[str]:
    search, replacement, examples, settings = PATTERNS[kind]
    name = f"one_{kind}"
    fusebackend.register_replacement(search, replacement, examples, name=name, dtypes=FLOATS, verify=False, **settings)
    try:
        yield name
    finally:
        fusebackend.unregister(name)


@dataclasses.dataclass
class Spelling:
    """One spelling: the name of its class or function, the models whose sources have it, and a call of it."""

    name: str
    models: list[str]
    text: str

    def load(self):
        model = self.models[0]
        return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), self.name)


def spellings(kind: str) -> list[Spelling]:
    """The distinct spellings of a kind in the installed transformers, most frequent first."""
    found: dict[str, Spelling] = {}
    for path in sorted(_models().glob("*/modeling_*.py")):
        model = path.parent.name
        if path.stem != f"modeling_{model}":
            continue
        source = path.read_text()
        for name, text in _definitions(kind, source):
            key = text.replace(name, "X")
            found.setdefault(key, Spelling(name, [], text)).models.append(model)
    return sorted(found.values(), key=lambda s: -len(s.models))


def _models() -> Path:
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent / "models"


def _definitions(kind: str, source: str) -> Iterator[tuple[str, str]]:
    top = {m[2]: m[0] for m in re.finditer(r"^(class|def) (\w+)\b.*?(?=^[^\s)#]|\Z)", source, re.MULTILINE | re.DOTALL)}
    for name, block in top.items():
        if kind == "rope" and block.startswith("def") and re.match(r"apply_\w*rot\w*emb", name):
            called = [_plain(top[h]) for h in re.findall(r"\b(\w+)\(", block) if h in top and h != name]
            yield name, "\n".join([_plain(block), *called])
        elif (
            kind in ("rms_norm", "layer_norm")
            and block.startswith("class")
            and re.search(r"(?<!Group)(?<!Stable)Norm(1P|2d)?$|(?<!Stable)LayerNorm(1P|2d)?$", name)
        ):
            forward = "".join(re.findall(r"    def (?!__init__).*?(?=^    (?:def|@)|\Z)", block, re.MULTILINE | re.DOTALL))
            centred = re.search(r"layer_norm\(|LayerNorm\.forward|super\(\)\.forward\(|- (u|mean|\w+\.mean)\b|self\.ln\(", forward)
            squared = re.search(r"pow\(2\)|square\(|rms_norm\(|\w+ \* \w+\)\.mean", forward)
            if (
                "layer_norm" if centred else "rms_norm" if squared and "mean" in forward + "mean" * ("rms_norm(" in forward) else ""
            ) == kind:
                yield name, _plain(block)
        elif kind == "swiglu" and block.startswith("class") and re.search(r"MLP$", name) and "gate" in block and "act_fn(" in block:
            yield name, _plain(block)


def _plain(block: str) -> str:
    """A definition without comments, documentation and annotations."""
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            documented = node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            node.body = node.body[1:] or [ast.Pass()] if documented else node.body
            node.decorator_list = []
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(tree)


def call_of(kind: str, spelling: Spelling) -> tuple[Callable, list[torch.Tensor]] | str:
    """A function and its arguments; or why none was made."""
    try:
        held = spelling.load()
        makers = {"rope": _rotary_call, "swiglu": _mlp_call}
        return makers.get(kind, _norm_call)(held)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"


def _norm_call(kind: type) -> tuple[Callable, list[torch.Tensor]]:
    for arguments in (
        (16,),
        (16, 1e-5),
        (1e-5,),
        ((16,),),
        (types.SimpleNamespace(hidden_size=16, layer_norm_eps=1e-5, rms_norm_eps=1e-5),),
        (),
    ):
        with contextlib.suppress(Exception):
            norm = kind(*arguments)
            with torch.no_grad():
                for p in norm.parameters():
                    p.add_(torch.rand_like(p) * 0.5)
            for shape in ((2, 5, 16), (2, 16, 3, 5), (2, 16, 5)):
                with contextlib.suppress(Exception):
                    norm(torch.randn(shape))
                    return norm, [torch.randn(shape)]
    raise TypeError("it takes other arguments than a size and an epsilon")


class _Config:
    """What a model's configuration may hold, by what its settings are called."""

    def __init__(self, **known):
        vars(self).update(known)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if "eps" in name:
            return 1e-6
        return 1.0 if "limit" in name else 8 if "size" in name or "num" in name else 0.0 if "dropout" in name or "rate" in name else False


def _mlp_call(kind: type) -> tuple[Callable, list[torch.Tensor]]:
    activations = dict.fromkeys(("hidden_act", "hidden_activation", "activation", "act"), "silu")
    config = _Config(hidden_size=8, intermediate_size=12, mlp_multipliers=(1.0, 1.0), mlp_ratio=2, **activations)
    failure: Exception = TypeError("no arguments were found for it")
    for arguments in ((config,), (config, 0), (config, 12), (8, 12, "silu"), (8, 12, 8, "silu"), (8, 12, "silu", 8)):
        try:
            mlp, x = kind(*arguments), torch.randn(2, 5, 8)
            mlp(x)
            return mlp, [x]
        except Exception as error:
            failure = failure if failure.args[0] != "no arguments were found for it" else error
    raise failure


def _rotary_call(function: Callable) -> tuple[Callable, list[torch.Tensor]]:
    wanted = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    rotated, tables = (("q", (2, 4, 6, 8)), ("k", (2, 2, 6, 8))), (2, 6, 8)
    tries = [(rotated, t) for t in (tables, (2, 6, 4), (6, 8), (4, 8), (2, 1, 6, 8))]
    tries += [((("q", (6, 4, 8)), ("k", (6, 4, 8))), t) for t in ((6, 8), (6, 4))] + [
        ((("q", (2, 6, 4, 8)), ("k", (2, 6, 2, 8))), t) for t in ((2, 6, 4), (6, 8))
    ]
    failure: Exception = TypeError("no arguments were found for it")
    for (queries, keys), table in tries:
        arguments = []
        for p in wanted:
            if "cos" in p.name or "sin" in p.name:
                arguments.append(torch.randn(table))
            elif "freqs" in p.name:
                arguments.append(torch.polar(torch.ones(table[:-1] + (4,)), torch.randn(table[:-1] + (4,))))
            else:
                arguments.append(torch.randn((keys if "k" in p.name else queries)[1]))
        try:
            function(*arguments)
            return lambda *a: function(*a), arguments
        except Exception as error:
            failure = error
    raise failure


COLUMNS = {"inference": (torch.float32, False), "training": (torch.float32, True), "bf16": (torch.bfloat16, False)}


def found(name: str, function: Callable, arguments: list[torch.Tensor], dtype: torch.dtype, training: bool) -> str:
    """``"found"``, or what ``explain`` says of it."""
    torch._dynamo.reset()
    given = [a.to(dtype) if a.is_floating_point() else a for a in arguments]
    function = function.to(dtype) if isinstance(function, nn.Module) else function
    if training:
        given = [a.requires_grad_(i < 1 or not isinstance(function, nn.Module) and i < len(given) - 2) for i, a in enumerate(given)]
    try:
        function(*given)
    except Exception as error:
        return f"eager refuses: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    try:
        with contextlib.nullcontext() if training else torch.no_grad():
            assert_pattern(function, *given, pattern=name, training=training, **ROUNDINGS)
        return "found"
    except PatternAssertion as error:
        return "no: " + str(error).strip().splitlines()[-1].strip()[:160]
    except Exception as error:
        return f"no: {type(error).__name__}: {str(error).splitlines()[0][:120]}"


def survey(kind: str, columns=None) -> Iterator[tuple[Spelling, dict[str, str]]]:
    columns = columns or LOOKED_FOR.get(kind, tuple(COLUMNS))
    with registered(kind) as name:
        for spelling in spellings(kind):
            made = call_of(kind, spelling)
            if isinstance(made, str):
                yield spelling, {"skipped": made}
            else:
                yield spelling, {c: found(name, *made, *COLUMNS[c]) for c in columns}


if __name__ == "__main__":
    logging.getLogger("fusebackend").setLevel(logging.ERROR)
    for kind in sys.argv[1:] or PATTERNS:
        counted = collections.Counter()
        for spelling, results in survey(kind):
            judged = [r for r in results.values() if not r.startswith("eager refuses")]
            state = "skipped" if "skipped" in results else "found" if set(judged) == {"found"} else "missed"
            counted[state, "spellings"] += 1
            counted[state, "models"] += len(spelling.models)
            print(f"{kind} | {spelling.name} | {len(spelling.models)} {', '.join(spelling.models[:3])} | {results}", flush=True)
        print(f"TOTAL {kind}: {dict(counted)}", flush=True)
