"""``load_hub_kernel``: an operator from a kernel of the Hugging Face Hub, or from a folder of that form.

The package ``kernels`` (the extra of that name) downloads and imports it, at the first call: a program that never reaches the kernel needs
neither the package nor a network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fusebackend.native import ops
from fusebackend.native.user_kernels import KernelError, check_new_operator, library_of, remember

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}


def load_hub_kernel(
    name: str,
    *,
    kernel: str | Path,
    schema: str,
    call: Callable[..., Any],
    fake: Callable,
    version: int | None = None,
    revision: str | None = None,
    devices: Sequence[str] | str = ("cuda",),
    backward: Callable | None = None,
    setup_context: Callable | None = None,
    trust_remote_code: bool = False,
) -> torch._ops.OpOverload:
    """Defines an operator whose kernel is fetched and imported at its first call.

    Args:
        name: ``"namespace::operator"``.
        kernel: a repository of the Hub, ``"kernels-community/activation"``, or a Path of a folder of that form.
        schema: arguments and results, e.g. ``"(Tensor x, Tensor weight, float eps) -> Tensor"``.
        call: given the imported kernel and the arguments, returns the results: ``lambda kernel, x, w, eps: kernel.rms_norm(x, w, eps)``.
        fake: computes shape, strides and dtype of the results on fake tensors.
        version, revision: of the repository: one of them is required, so that what is measured and verified is what runs tomorrow.
        devices: types of device for which the kernel is built. On others the operator is not used.
        backward, setup_context: as for ``torch.library.register_autograd``, if the operator is differentiable.
        trust_remote_code: as for ``kernels.get_kernel``: whether organisations that the Hub does not vouch for are accepted.

    Returns:
        The operator, ``torch.ops.namespace.operator.default``. Its first call raises KernelError if the kernel can't be had.

    Raises:
        KernelError: a name or schema that is not of the form, a name that is taken, a repository without a version.
    """
    check_new_operator("load_hub_kernel", name, schema, backward, setup_context, fake=fake, call=call)
    devices = (devices,) if isinstance(devices, str) else tuple(devices)
    unknown = [d for d in devices if d not in _KEYS]
    if unknown or not devices:
        raise KernelError(f"load_hub_kernel: devices={devices!r}; some of {', '.join(_KEYS)} are accepted")
    if not isinstance(kernel, (str, Path)):
        raise KernelError(f"load_hub_kernel: kernel={kernel!r}; a repository's name is needed, or a Path of a folder")
    local = isinstance(kernel, Path)
    if local and not kernel.is_dir():  # type: ignore[union-attr]
        raise KernelError(f"load_hub_kernel: kernel={str(kernel)!r}; there is no such folder")
    of_kind = isinstance(version, (int, type(None))) and isinstance(revision, (str, type(None)))
    if not local and ((version is None) == (revision is None) or not of_kind):
        raise KernelError(f"load_hub_kernel: version={version!r}, revision={revision!r}; give one of them for {kernel!r}, e.g. version=1")

    def runner(device: str) -> Callable:
        imported = _Imported(name, kernel, version, revision, trust_remote_code, device)
        return lambda *args: call(imported.module(), *args)

    namespace, _, operator = name.partition("::")
    library = library_of(namespace)
    library.define(f"{operator}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for device in devices:
        library.impl(operator, runner(device), _KEYS[device])
    torch.library.register_fake(name, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=library)
    remember(name, f"{kernel} {version} {revision}")
    ops.defined.append(getattr(getattr(torch.ops, namespace), operator).default)
    return ops.defined[-1]


class _Imported:
    """A kernel that is imported when it is first asked for, by whichever thread."""

    def __init__(self, name: str, kernel: str | Path, version: int | None, revision: str | None, trust: bool, device: str):
        self._name, self._kernel, self._version, self._revision, self._trust = name, kernel, version, revision, trust
        # By default the build for what torch was built for, which may be CUDA on a machine without a GPU.
        self._backend = "cpu" if device == "cpu" else None
        self._lock = threading.Lock()
        self._module: ModuleType | None = None

    def module(self) -> ModuleType:
        with self._lock:
            if self._module is None:
                self._module = self._load()
            return self._module

    def _load(self) -> ModuleType:
        try:
            import kernels
        except ImportError as error:
            raise KernelError(f"{self._name} needs the package 'kernels': pip install 'fusebackend[kernels]'") from error
        try:
            if isinstance(self._kernel, Path):
                return kernels.get_local_kernel(self._kernel, backend=self._backend)
            chosen = {"version": self._version} if self._revision is None else {"revision": self._revision}
            return kernels.get_kernel(self._kernel, backend=self._backend, trust_remote_code=self._trust, **chosen)
        except Exception as error:
            said = next(iter(str(error).strip().splitlines()), "")
            raise KernelError(f"{self._name}: the kernel {str(self._kernel)!r} can't be had: {type(error).__name__}: {said}") from error
