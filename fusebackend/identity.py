"""What Python objects are, as text that is the same in every process: for the keys of caches.

A function is its bytecode, its constants and defaults, what it closes over, and the globals that it reads, each in turn; a class its bases
and attributes; a module of the user's its file and those of its attributes that are read. This ends at PyTorch, Python's own library, this
package and other installed packages, which are named with their version. What can't be told apart across processes is an error: whatever
depends on it is not to be cached.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import hashlib
import inspect
import io
import linecache
import pickle
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_MAX_VALUES = 20_000  # more than any helper needs; whoever reads a data set must not spend minutes on it at every compile

_PLAIN = (bool, int, float, complex, str, bytes, range, slice, type(None), type(...), type(NotImplemented))
_OF_TORCH = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.Tag,
    torch.finfo,
    torch.iinfo,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
)
_STATELESS = (type(threading.Lock()), type(threading.RLock()))
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_PYTHONS_OWN = sys.stdlib_module_names | {"builtins"}

#: Attributes of classes that say nothing about what they do, or say again what others say.
_NO_MATTER = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __firstlineno__ __static_attributes__ __annotations__ __annotate__"
    " __annotate_func__ __annotations_cache__ __abstractmethods__ _abc_impl __dataclass_fields__ __dataclass_params__ __match_args__"
    " __parameters__ __orig_bases__ __type_params__ __slotnames__".split()
)


class UnidentifiableError(ValueError):
    """Nothing can be said about a value that would be the same in every process; the message says which value and why."""


def identify(value: Any, where: str, package: str = "") -> str:
    """A text that identifies ``value`` in every process.

    Args:
        where: names ``value`` in an error.
        package: the top-level package whose code is followed though it is installed: that of a pattern.

    Raises:
        UnidentifiableError: it holds or reads a value that can't be told apart across processes.
    """
    try:
        return hashlib.sha256(_Identity(package).of(value, where).encode(errors="surrogatepass")).hexdigest()
    except RecursionError:
        raise UnidentifiableError(f"{where}: what it reads is nested too deeply") from None


def check_readable(function: Any, what: str) -> None:
    """Raises UnidentifiableError if the source of ``function`` can't be read: it was typed in, or made from a string."""
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        return
    # Some versions of Python know one text each for these two names, which any number of sources have.
    if code.co_filename in ("<string>", "<stdin>") or not linecache.getlines(code.co_filename, getattr(function, "__globals__", None)):
        raise UnidentifiableError(f"the source of {what} can't be read ({code.co_filename})")


def module_source(module: str) -> str:
    """Hash of a module's file; empty if it has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file:
        return ""
    try:
        status = Path(file).stat()
        return _file_hash(file, status.st_mtime_ns, status.st_size)
    except OSError:
        return ""


@functools.lru_cache(maxsize=1024)
def _file_hash(file: str, modified: int, size: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


class _Identity:
    """Follows values to other values, each once: cycles end, and what is reached in several ways is described once."""

    def __init__(self, package: str):
        self._package = package
        self._met: dict[int, tuple[int, Any]] = {}  # by id, with the value, so that no id is used again
        self._count = 0

    def of(self, value: Any, where: str) -> str:
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, _OF_TORCH):
            return f"{type(value).__name__} {value}"
        # Equal tuples of constants are one object or several, depending on whether Python compiled the file or loaded it.
        if not isinstance(value, (tuple, frozenset)):
            if id(value) in self._met:
                return f"#{self._met[id(value)][0]}"
            self._met[id(value)] = len(self._met), value
        self._count += 1
        if self._count > _MAX_VALUES:
            raise UnidentifiableError(f"{where}: more than {_MAX_VALUES} values are read")
        return f"{type(value).__name__} {self._described(value, where)}"

    def _described(self, value: Any, where: str) -> str:
        for kinds, describe in (
            (enum.Enum, lambda: f"{self.of(type(value), where)} {value.name}"),
            ((tuple, list, collections.deque), lambda: self._all(value, where)),
            ((set, frozenset), lambda: repr(sorted(_Identity(self._package).of(v, where) for v in value))),
            ((dict, types.MappingProxyType), lambda: self._mapping(value, where)),
            (types.SimpleNamespace, lambda: self._mapping(vars(value), where)),
            (types.ModuleType, lambda: self._module_name(value)),
            (type, lambda: self._class(value, where)),
            (types.FunctionType, lambda: self._function(value, where)),
            (types.MethodType, lambda: self._all((value.__func__, value.__self__), where)),
            ((staticmethod, classmethod), lambda: self.of(value.__func__, where)),
            (property, lambda: self._all((value.fget, value.fset, value.fdel), where)),
            (functools.partial, lambda: self._all((value.func, value.args, value.keywords), where)),
            (functools.cached_property, lambda: self.of(value.func, where)),
            (functools._lru_cache_wrapper, lambda: self.of(value.__wrapped__, where)),
            # Compiled code calls an operator by its name, and relies on what its fake says.
            (torch._library.custom_ops.CustomOpDef, lambda: self._all((value._qualname, value._abstract_fn), where)),
            (_BUILTIN, lambda: _name(value)),
            (_STATELESS, lambda: ""),
        ):
            if isinstance(value, kinds):
                return describe()
        return self._instance(value, where)

    def _all(self, values: Iterable[Any], where: str) -> str:
        return f"({', '.join([self.of(v, where) for v in values])})"

    def _mapping(self, value: Any, where: str) -> str:
        factory = self.of(getattr(value, "default_factory", None), where)
        return f"{factory} {', '.join([f'{self.of(k, where)}: {self.of(v, where)}' for k, v in value.items()])}"

    def _module_name(self, module: types.ModuleType) -> str:
        return (
            f"{module.__name__} {self._version(module.__name__) if self._is_foreign(module.__name__) else module_source(module.__name__)}"
        )

    def _function(self, value: types.FunctionType, where: str) -> str:
        if self._is_foreign_object(value):
            return f"{_name(value)} {self._version(value.__module__)}"
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())
        parts = [self.of(_content(cell), f"{where} closes over {name!r}") for name, cell in cells]
        parts += [self._all((value.__defaults__, value.__kwdefaults__), where)]
        defined_in = str(value.__globals__.get("__name__"))
        if self._is_foreign(defined_in) and vars(sys.modules.get(defined_in, types)) is value.__globals__:  # a decorator of theirs
            return "; ".join([f"{defined_in} {value.__code__.co_name} {self._version(defined_in)}", *parts])
        for code in _codes(value.__code__):
            constants = [c for c in code.co_consts if not inspect.iscode(c)]
            parts += [repr((code.co_code, code.co_names, code.co_varnames, code.co_flags, getattr(code, "co_exceptiontable", b"")))]
            parts += [self.of(c, where) for c in constants]
            parts += self._read(value.__globals__, code.co_names, where)
        return "; ".join(parts)

    def _read(self, namespace: dict[str, Any], names: Iterable[str], where: str) -> Iterable[str]:
        """The globals among ``names``; of modules of the user's, the attributes among them too: ``helpers.LIMIT``."""
        names = [*names]
        for name in sorted({n for n in names if n in namespace}):
            value = namespace[name]
            yield f"{name}={self.of(value, f'{where} reads the global {name!r}')}"
            if isinstance(value, types.ModuleType) and not self._is_foreign(value.__name__) and vars(value) is not namespace:
                yield from self._read(vars(value), [n for n in names if n != name], f"{where} reads {name!r}, which")

    def _class(self, value: type, where: str) -> str:
        if self._is_foreign_object(value):
            return f"{_name(value)} {self._version(value.__module__)}"
        if issubclass(value, enum.Enum):
            return f"{_name(value)} {[(m.name, self.of(m.value, where)) for m in value]}"
        attributes = sorted((n, v) for n, v in vars(value).items() if n not in _NO_MATTER)
        described = [f"{n}={self.of(v, f'{where}, {value.__name__}.{n}')}" for n, v in attributes]
        return f"{_name(value)} {self._all(value.__bases__, where)} {'; '.join(described)}"

    def _instance(self, value: Any, where: str) -> str:
        kind = type(value)
        if not self._is_foreign_object(kind):
            slots = {n: getattr(value, n) for k in kind.__mro__ for n in _slots(k) if hasattr(value, n)}
            state = {**slots, **getattr(value, "__dict__", {})}
            return f"{self.of(kind, where)} {self._mapping(dict(sorted(state.items())), where)}"
        if not kind.__module__.startswith("torch"):
            with contextlib.suppress(Exception):
                return self._pickled(value, where)
        raise UnidentifiableError(
            f"{where}, a {kind.__name__}: compiled graphs are cached by what a pattern does, and this can't be told across "
            "processes; numbers, strings, dtypes, containers of them, functions, classes and modules are accepted"
        )

    def _pickled(self, value: Any, where: str) -> str:
        """The state of an object of Python's or of an installed package: a regular expression, a path, a logger."""
        identity, data = self, io.BytesIO()

        class Pickler(pickle.Pickler):
            def persistent_id(self, part: Any) -> str | None:  # what pickle would only name
                return identity.of(part, where) if isinstance(part, (types.FunctionType, type, types.ModuleType)) else None

        Pickler(data, protocol=4).dump(value)
        return data.getvalue().hex()

    def _is_foreign_object(self, value: Any) -> bool:
        """Whether a function or class is what its name says, in a module that is not followed."""
        if not self._is_foreign(value.__module__):
            return False
        if isinstance(value, type) and not value.__flags__ & _HEAP_TYPE:  # written in C, even where no module holds it
            return True
        found: Any = sys.modules.get(value.__module__ or "builtins")
        for name in value.__qualname__.split("."):
            found = getattr(found, name, None)
        return found is value

    def _is_foreign(self, module: str | None) -> bool:
        """Whether a module is identified by its version, and not followed."""
        top = (module or "builtins").partition(".")[0]
        if top in _PYTHONS_OWN and top != "__main__":
            return True
        return top in ("torch", "fusebackend") or (top != self._package and _is_installed(top))

    def _version(self, module: str | None) -> str:
        top = (module or "").partition(".")[0]
        version = getattr(sys.modules.get(top), "__version__", "")
        # Python and PyTorch are a part of Inductor's own keys, this package's files of ours.
        return str(version) if version else "" if top in _PYTHONS_OWN else module_source(module or "")


@functools.lru_cache(maxsize=1024)
def _is_installed(package: str) -> bool:
    """Whether a top-level module lies where packages are installed, and not where somebody works on it."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if not file:
        return False
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return any(Path(file).is_relative_to(folder) for folder in folders if folder) or "site-packages" in Path(file).parts


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [s for s in slots if s not in ("__dict__", "__weakref__")]


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """A function's code and that of the functions inside it."""
    return [code, *(inner for constant in code.co_consts if inspect.iscode(constant) for inner in _codes(constant))]
