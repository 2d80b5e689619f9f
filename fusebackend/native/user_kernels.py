"""``load_kernel``: an operator from a user's C++ and CUDA sources, built into the same cache as the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusebackend import cache_keys
from fusebackend.log import log, warn_once
from fusebackend.native import build, cache, cuda_wheels, dynamic_library, manifest, ops, trust
from fusebackend.native.architectures import device_architectures
from fusebackend.native.flags import is_for_cuda
from fusebackend.progress import progress_line

_keys: dict[str, str] = {}
_libraries: dict[str, torch.library.Library] = {}


class KernelError(ValueError):
    """A kernel can't be registered; the message says what was given and what is accepted."""


def load_kernel(
    name: str,
    *,
    sources: Sequence[str | Path] | Mapping[str, str],
    schema: str,
    fake: Callable,
    reference: Callable,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
) -> torch._ops.OpOverload:
    """Builds C++ and CUDA sources with ninja and registers them as an operator.

    The reference takes the place of what can't be built, with a warning: of all where there is no C++ compiler, of CUDA sources where
    there is a GPU and no nvcc.

    Args:
        name: ``"namespace::operator"``.
        sources: paths of ``.cpp`` and ``.cu`` files, or a mapping from file names to their text. They register
            their kernels themselves, ``STABLE_TORCH_LIBRARY_IMPL(namespace, CPU, m)``; ``#include "common/binding.h"``
            gives what a binding needs on torch's stable ABI. ``.cu`` files, and ``.cpp`` files whose name ends in
            ``_cuda``, are compiled only where there is a GPU and nvcc; ``_sm90.cu`` for sm_90a only.
        schema: arguments and results, e.g. ``"(Tensor x, Tensor weight, float eps) -> Tensor"``.
        fake: computes shape, strides and dtype of the results on fake tensors.
        reference: the same in PyTorch; it runs on devices for which there is no kernel.
        backward, setup_context: as for ``torch.library.register_autograd``, if the operator is differentiable.

    Returns:
        The operator, ``torch.ops.namespace.operator.default``.

    Raises:
        KernelError: a name or schema that is not of the form, a name that is taken, a source that is not there, no function.
        fusebackend.native.build.BuildError: the sources do not compile; the message ends with the compiler's output.
    """
    check_new_operator("load_kernel", name, schema, backward, setup_context, fake=fake, reference=reference)
    namespace, _, operator = name.partition("::")

    # Built before anything is registered: after an error, or Ctrl-C, the name is free for another try.
    plan = _plan(_collect(sources))
    folder = None
    if plan is not None:
        with progress_line(f"building {name}") as progress:
            folder = build.build(plan, progress=progress)
    library = library_of(namespace)
    library.define(f"{operator}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(operator, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=library)
    if folder is not None:
        try:
            with manifest.opened(folder) as found:
                dynamic_library.load(found.descriptor, found.path)
        except (OSError, manifest.DamagedError, trust.UntrustedError) as error:
            raise build.BuildError(f"load_kernel: {error}") from error
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("CPU", "CUDA")):
            form = f'STABLE_TORCH_LIBRARY_IMPL({namespace}, CPU, m) {{ m.impl("{operator}", ...); }}'
            log.warning("load_kernel: the sources register no kernel of %s; the reference is used. It is registered by %s", name, form)
    remember(name, plan.key if plan else "reference")
    ops.defined.append(getattr(getattr(torch.ops, namespace), operator).default)
    return ops.defined[-1]


def check_new_operator(
    caller: str, name: str, schema: str, backward: Callable | None, setup_context: Callable | None, **functions: Any
) -> None:
    """Raises KernelError, naming ``caller``, if no operator of that name and schema can be defined, or one of the functions is none."""
    namespace, separator, operator = name.partition("::") if isinstance(name, str) else ("", "", "")
    if not (separator and namespace.isidentifier() and operator.isidentifier()):
        raise KernelError(f"{caller}: name={name!r}; give 'namespace::operator'")
    wanted = f"{caller}: schema={schema!r}; give arguments and results, e.g. '(Tensor x, float eps) -> Tensor'"
    if not isinstance(schema, str) or not schema.lstrip().startswith("(") or "->" not in schema:
        raise KernelError(wanted)
    try:
        torch._C.parse_schema(name + schema)
    except RuntimeError as error:
        raise KernelError(f"{wanted}: {' '.join(str(error).split())}") from None
    if name in _keys or hasattr(getattr(torch.ops, namespace), operator):
        raise KernelError(f"{caller}: the operator {name!r} is there already; choose another name")
    if backward is None and setup_context is not None:
        raise KernelError(f"{caller}: setup_context={setup_context!r} without a backward; give both, or backward alone")
    given = {"backward": backward, "setup_context": setup_context}
    for argument, value in {**functions, **{n: f for n, f in given.items() if f is not None}}.items():
        if not callable(value):
            raise KernelError(f"{caller}: {argument}={value!r}; a function is needed")


def library_of(namespace: str) -> torch.library.Library:
    """The fragment in which the operators of users are defined; it lives as long as the process."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


def remember(name: str, key: str) -> None:
    """Keeps what identifies the build behind an operator, for :func:`library_key`."""
    _keys[name] = key


def library_key(op: torch._ops.OpOverload) -> str:
    """Identifies the build behind an operator made by :func:`load_kernel` and its like; empty for others."""
    return _keys.get(op._schema.name, "")


def _collect(sources: Sequence[str | Path] | Mapping[str, str]) -> Path:
    """The sources, and the headers beside them, in a folder of their own named by their content."""
    texts: dict[str, bytes] = {}
    if not _are_sources(sources):
        needed = "a list of paths, or a mapping from file names to their text, is needed"
        raise KernelError(f"load_kernel: sources={sources!r}; {needed}")
    if isinstance(sources, Mapping):
        texts = {file: text.encode() for file, text in sources.items()}
    else:
        for source in map(Path, sources):
            if not source.is_file():
                raise KernelError(f"load_kernel: no such source file: {source}")
            headers = [p for p in source.parent.iterdir() if p.suffix in cache_keys.NATIVE_HEADERS]
            for found in (source, *headers):
                text = found.read_bytes()
                if texts.setdefault(found.name, text) != text:
                    raise KernelError(f"load_kernel: sources={sources!r}; two different files are called {found.name!r}")
    wrong = [file for file in texts if Path(file).name != file or Path(file).suffix not in cache_keys.NATIVE_SOURCES]
    if wrong or not texts:
        raise KernelError(f"load_kernel: sources={wrong or sources!r}; .cpp and .cu files are accepted")
    folder = cache.directory("kernels", cache_keys.kernel_sources(texts))
    with cache.lock("kernels"):
        for path in folder.iterdir():  # everything in it is compiled, or may be included
            if path.suffix in cache_keys.NATIVE_SOURCES and path.name not in texts:
                warn_once(f"{path} is not a source of this kernel; it is removed")
                path.unlink()
        for file, text in texts.items():
            if not _holds(folder / file, text):
                cache.write_atomically(folder / file, text)
    return folder


def _are_sources(given: Any) -> bool:
    if isinstance(given, Mapping):
        return all(isinstance(s, str) for s in (*given.keys(), *given.values()))
    return isinstance(given, (tuple, list)) and all(isinstance(s, (str, Path)) for s in given)


def _holds(path: Path, text: bytes) -> bool:
    try:
        with trust.opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            found = file.read(len(text) + 1)
    except FileNotFoundError:
        return False
    except (OSError, trust.UntrustedError) as error:
        warn_once(f"{error}; it is ignored, and written again")
        return False
    if found != text:
        warn_once(f"{path} is damaged: it is ignored, and written again")
    return found == text


def _plan(root: Path) -> build.Plan | None:
    try:
        found = build.plan()
    except build.BuildError as error:
        log.warning("%s; the reference implementation is used instead of the kernel", error)
        return None
    if not found.cuda and device_architectures() and any(map(is_for_cuda, root.iterdir())):
        log.warning("no nvcc found: %s; on GPUs the reference is used instead of the kernel", cuda_wheels.how_to_get_nvcc())
    return build.Plan(found.toolchain, found.architectures, root)
