"""What the keys of all caches are made of.

Callers pass values in; what a key contains is decided and read here alone.

===================  ==========================================  ===========================================================
key                  names                                       made of
===================  ==========================================  ===========================================================
``compiled_code``    Inductor's compiled graphs                  version, Python sources, options, native library, patterns
                     (``uuid`` of our passes)                    numeric settings (:func:`magnitudes` and :func:`decisions`
                                                                 are appended)
``report``           a compile's report and decisions            ``compiled_code``, graph, inputs, what is changed of Inductor's
                                                                 configuration
``graph``            what was done to one graph                  Inductor's key of its code
``site``             kept measurements of one match              :func:`measuring`, matched operators, the match's note
``region``           one kept measurement                        ``site``, the region in both forms, builds of its operators
``memory_order``     one kept measurement of the order in which  :func:`measuring`, the calls of the library
                     a graph's convolutions run
``question``         what Inductor answered for some nodes       :func:`measuring`, Python sources, Triton, :func:`graph_text`
``race``             one kept measurement of a whole graph       :func:`measuring`, the graph, how it is compiled
``native_library``   a built library                             sources, architectures, flags, compilers, torch
``native_objects``   the folder of its object files              source folder, torch
``run_time_code``    the folder of what a library compiles at    library, torch and its CUDA
                     run time
``kernel_sources``   a folder of a user's kernel sources         names and contents of the files
===================  ==========================================  ===========================================================

A pattern is identified by its ``fingerprint()``: :func:`pattern` by default, :func:`traced_pattern` where it is given as PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch.utils._triton import has_triton_package

from fusebackend import fx_utils as g
from fusebackend.identity import UnidentifiableError, check_readable, identify, module_source

NATIVE_HEADERS = (".cuh", ".h", ".hpp")
NATIVE_SOURCES = (".cu", ".cpp", *NATIVE_HEADERS)

# The options that change the compiled code, and ``strict``, since what raises under it is not asked where code was kept. ``interpret``
# compiles nothing.
_OPTIONS_OF_CODE = ("patterns", "channels_last", "fuel", "check", "gate", "gate_seconds", "strict")


def _digest(*parts: str, length: int = 64) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:length]


# ---- compiled code, its report and its decisions ----


def compiled_code(version: str, options: Mapping[str, Any], library: Sequence[str], fingerprints: Iterable[str]) -> str:
    """Everything of ours that compiled code depends on.

    Args:
        options: the parsed options, of which those that change the code are taken.
        library: the native library's key, its architectures, why there is none, and the calibrations of the devices that it is for.
        fingerprints: of the patterns that are on, by descending priority.
    """
    # Inductor's own key has the settings of CUDA, and not those of CPUs; nor whether a backward may overwrite what was saved for it, of
    # which more is ours to overwrite.
    settings = (*_numeric_settings(), functorch_config.donated_buffer)
    chosen = repr([*(options[name] for name in _OPTIONS_OF_CODE), *settings])
    return "fusebackend-" + _digest(version, python_sources(), chosen, *library, *fingerprints)


@functools.lru_cache
def python_sources() -> str:
    """Hash of this package's Python files and calibrations and of its families': a match depends on more files than the one that defines
    its pattern."""
    families = importlib.import_module("fusebackend.patterns")
    return "".join(content_hash(root, (".py", ".json")) for root in (Path(__file__).parent, *map(Path, families.__path__)))


def magnitudes(gm: fx.GraphModule) -> str:
    """The symbolic sizes that this compile sees, each to a factor of 16.

    Estimates read the hints of symbolic sizes, and the guards of Inductor's cache do not: without this, code that was compiled for a
    few rows would serve a million.
    """
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    sizes = (s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,)) if isinstance(s, torch.SymInt))
    return "".join(f"-{round(math.log2(max(1, hint)) / 4)}" for s in sizes if (hint := g.hint(s)) is not None)


def report(gm: fx.GraphModule, example_inputs: Iterable[Any], code: str, changed: Mapping[str, Any]) -> str:
    """One compile, by what the backend was given.

    Args:
        code: :func:`compiled_code` with :func:`magnitudes`.
        changed: what mode and options change of Inductor's configuration: Inductor's own key does not know by which words.
    """
    digest = hashlib.sha256(f"{code}\0{sorted(changed.items())!r}".encode())
    settings = (torch.__version__, torch.is_grad_enabled(), *_numeric_settings())
    digest.update(repr(settings).encode())
    # The placeholders' fake values have symbolic sizes where the compile is dynamic; the inputs themselves may not.
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    for fake, given in zip(values, example_inputs):
        value = given if fake is None else fake
        strides = tuple(value.stride()) if isinstance(value, torch.Tensor) else ""
        digest.update(f"{g.spec(value)}{strides}{getattr(value, 'requires_grad', None)}{getattr(value, 'device', None)}".encode())
    for module in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        digest.update(module.graph.python_code("self").src.encode())
    return digest.hexdigest()[:32]


def graph(inductors: str) -> str:
    """What was done to one graph.

    Args:
        inductors: Inductor's key of the graph's code.
    """
    return f"graph-{inductors}"


def decisions(before: str, now: Mapping[str, bool | None], measured_since: Iterable[str]) -> str:
    """Appended to the key of compiled code once a kept measurement contradicts what the code was compiled with.

    Args:
        before: what was appended until now.
        now: for each region that was decided on, what would be decided today; None where it would be measured.
        measured_since: the sites that were refused unmeasured and have a kept measurement now.
    """
    return _digest(before, repr(sorted(now.items())), repr(sorted(measured_since)), length=16)


def _numeric_settings() -> tuple[bool | str, ...]:
    """What matches read, and results and the choice of cuDNN's kernels depend on.

    The precisions a backend: ``torch.get_float32_matmul_precision()`` raises where one of them was set by itself.
    """
    backends: Any = torch.backends
    precisions = (backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision)
    cudnn = (backends.cudnn.conv.fp32_precision, backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic)
    return torch.are_deterministic_algorithms_enabled(), *precisions, *cudnn


# ---- patterns ----


def pattern(instance: Any) -> str:
    """A pattern, by its sources and the instance's attributes, its priority among them.

    For a family that ships here they are those of its whole package: an estimate stands in a file beside the match. Otherwise they are the
    file that defines the pattern, and whatever its methods read (:mod:`fusebackend.identity`): the functions and constants of other files.

    Raises:
        UnidentifiableError: its source can't be read, or it reads what can't be told apart across processes.
    """
    kind = type(instance)
    if re.match(r"fusebackend\.patterns\.\w+", kind.__module__):
        attributes = sorted(vars(instance).items(), key=lambda item: item[0])
        return _digest(instance.name, str(instance.priority), _family_sources(kind.__module__), repr(attributes))
    for method in ("match", "estimate"):
        check_readable(getattr(kind, method), f"{kind.__qualname__}.{method}")
    package = kind.__module__.partition(".")[0]
    return _digest(instance.name, str(instance.priority), module_source(kind.__module__), identify(instance, "it", package))


@functools.lru_cache
def _family_sources(module: str) -> str:
    """Hash of the Python files beside that module: read once a process, which runs what it has imported."""
    return content_hash(Path(inspect.getfile(sys.modules[module])).parent, (".py",))


def traced_pattern(name: str, level: str, priority: int, check: str, variants: Iterable[Iterable[str]]) -> str:
    """A pattern that is given as PyTorch.

    Args:
        check: :func:`function` of its own check.
        variants: for each example the traces of search function and replacement as code, the stand-ins of number arguments, what the
            inputs and outputs are, and the builds behind the replacement's operators. The traces hold what the functions and their
            closures came to, so the functions themselves do not enter.
    """
    return _digest(name, level, str(priority), check, *(part for parts in variants for part in parts))


def function(value: Any, where: str) -> str:
    """A text that identifies a function in every process, with all that it closes over and the globals that it reads.

    Args:
        where: names ``value`` in an error.

    Raises:
        UnidentifiableError: it reads a value of a type that cannot be told apart across processes.
    """
    return identify(value, where, (getattr(value, "__module__", None) or "").partition(".")[0])


# ---- kept measurements ----


def measuring(machine: str, library: str, inductor_settings: Mapping[str, Any], fingerprints: Sequence[str]) -> str:
    """What a measurement depends on besides what is measured.

    Args:
        machine: :func:`machine` of the device.
        library: the native library's key.
        inductor_settings: Inductor's configuration; plain values are taken.
        fingerprints: of the patterns whose replacements are measured.
    """
    plain = (bool, int, float, str, type(None))
    settings = sorted((k, v) for k, v in inductor_settings.items() if isinstance(v, plain))
    return _digest(repr((machine, torch.__version__, library, *_numeric_settings(), settings, list(fingerprints))))


def site(measured_with: str, matched: str, note: str) -> str:
    """The measurements of one match, whatever stands around it and whatever it would be replaced by.

    Args:
        measured_with: :func:`measuring`.
        matched: :func:`graph_text` of the matched nodes.
        note: the match's note.
    """
    return _digest(measured_with, note, matched, length=16)


def region(site: str, measured_with: str, both_forms: str, visible: Sequence[bool], builds: Sequence[str]) -> str:
    """One measurement of a match with its neighbours: :func:`site_of` gives the first argument back.

    Args:
        both_forms: :func:`graph_text` of the region's nodes and of their replacement.
        visible: which of the region's outputs the whole graph returns.
        builds: the builds behind the replacement's operators, for those of users.
    """
    return f"{site}-{_digest(measured_with, repr(list(visible)), repr(list(builds)), both_forms, length=32)}"


def site_of(region: str) -> str:
    """The site that is a part of :func:`region`'s key."""
    return region.partition("-")[0]


def race(measured_with: str, graph: str, compiled_as: tuple) -> str:
    """One measurement of a whole graph.

    Args:
        graph: its :func:`graph_text`.
        compiled_as: whether as a CUDA graph, a backward, for inference; and the option ``fuse.patterns``.
    """
    return _digest("race", measured_with, repr(compiled_as), graph, length=32)


def memory_order(measured_with: str, calls: str) -> str:
    """One measurement of the order in which a graph's convolutions run.

    Args:
        calls: the library's calls, and how often each.
    """
    return _digest("memory order", measured_with, calls, length=32)


def question(measured_with: str, asked: str) -> str:
    """What Inductor generates for some nodes, as it is understood here.

    Args:
        measured_with: :func:`measuring`.
        asked: :func:`graph_text` of the nodes, and whatever else is told to Inductor.
    """
    return _digest("question", measured_with, python_sources(), _triton_version(), asked, length=32)


@functools.lru_cache
def _triton_version() -> str:
    """Inductor chooses tiles by what Triton is."""
    if not has_triton_package():
        return ""
    import triton

    return str(triton.__version__)


def machine(device: torch.device) -> str:
    """The kind of device, in words that people read too."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}"
    return f"{cpu_name()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"


@functools.lru_cache
def cpu_name() -> str:
    """The model of the CPU, where the system says it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"


def graph_text(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], symbols: Mapping[Any, int]) -> str:
    """Part of a graph as text that is the same for parts that differ only in names.

    Args:
        inputs: what the part reads: named by shape, strides, dtype and device type.
        nodes: the part, in order: named by operator and arguments.
        outputs: what is read of it.
        symbols: the symbols in the inputs' sizes, each with its hint.

    Raises:
        UnidentifiableError: a node that is neither a call nor a constant tensor.
    """
    import sympy

    renamed = {s: sympy.Symbol(f"d{i}", integer=True, positive=True) for i, s in enumerate(symbols)}

    def size(value: Any) -> str:
        return str(value.node.expr.xreplace(renamed)) if isinstance(value, torch.SymInt) else str(value)

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{number[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {text(v)}' for k, v in value.items())}}}"
        return value.type if isinstance(value, torch.device) else size(value)

    number: dict[fx.Node, int] = {}
    lines = [f"{size} = {hint}" for size, hint in zip(renamed.values(), symbols.values())]
    for node in inputs:
        value = g.value(node)
        number[node] = len(number)
        if isinstance(value, torch.Tensor):
            shape, strides = (",".join(map(size, s)) for s in (value.shape, value.stride()))
            lines.append(f"{value.dtype} {value.device.type} ({shape}) ({strides})")
        else:
            lines.append(size(value))
    for node in nodes:
        if node.op == "get_attr" and g.is_tensor(node):
            number[node] = len(number)
            lines.append(f"%{number[node]} constant {g.spec(g.value(node))} {g.value(node).stride()}")
            continue
        if node.op != "call_function":
            raise UnidentifiableError(f"it holds {node.op} {node.name}")
        number.setdefault(node, len(number))
        lines.append(f"%{number[node]} {g.describe(node)} {text(node.args)} {text(node.kwargs)}")
    lines.append(text(list(outputs)))
    return "\n".join(lines)


# ---- native libraries ----


def content_hash(root: Path, suffixes: tuple[str, ...] = NATIVE_SOURCES) -> str:
    """Hash of the paths and contents of the files below ``root`` that have one of these suffixes."""
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in suffixes):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def native_library(sources: str, architectures: Sequence[str], flags: Iterable[Sequence[str]], compiler_versions: Iterable[str]) -> str:
    """A built library.

    Args:
        sources: :func:`content_hash` of the sources.
        flags: of each compiler, and of the linker. Folders do not enter: what included ones hold does.
    """
    chosen = [repr([f for f in each if not f.startswith(("-I", "-isystem", "-L"))]) for each in flags]
    return _digest(sources, repr(tuple(architectures)), *chosen, *compiler_versions, torch.__version__, length=24)


def run_time_code(library: str) -> str:
    """Where a library keeps what it compiles by torch's compiler (NVRTC) once it runs.

    Args:
        library: the library's key.
    """
    return _digest(library, torch.__version__, str(torch.version.cuda), length=16)


def native_objects(root: Path) -> str:
    """The folder of object files, which libraries of one source folder share."""
    return _digest(repr((root, torch.__version__)), length=12)


def kernel_sources(files: Mapping[str, bytes]) -> str:
    """A user's kernel sources."""
    return _digest(repr(sorted(files.items())), length=24)
