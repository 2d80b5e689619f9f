"""Small files that one process keeps for the next: reports, measurements, decisions.

Whatever stands in such a file's place (half a file, another program's, a directory, a gigabyte) counts as none, is named in one warning,
and is replaced when something is kept under that name again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import stat
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from fusebackend.log import log, warn_once
from fusebackend.native import cache

T = TypeVar("T")

_MAX_BYTES = 64 << 20  # the report of a graph of 100,000 nodes
_MAX_INT = 1 << 63


def read(path: Path, parse: Callable[[Any], T]) -> T | None:
    """What is kept in a file; None where there is none, or it is not what it should be.

    Args:
        parse: makes it of JSON's lists, dicts, strings and numbers; any exception means that it is something else.
    """
    try:
        return parse(json.loads(_content(path), parse_constant=_no_constant))
    except FileNotFoundError:
        return None
    except Exception as error:  # RecursionError, OverflowError, MemoryError and whatever else a stranger's file brings about
        lines = str(error).strip().splitlines() or [""]
        warn_once(f"{path} is not what was kept there ({type(error).__name__}: {lines[0][:200]}): ignored, and replaced by the next")
        return None


def write(path: Path, data: Any) -> None:
    """Keeps ``data``, which JSON can hold. Where that can't be done, nothing is kept."""
    try:
        encoded = json.dumps(data, allow_nan=False).encode()
        if len(encoded) > _MAX_BYTES:
            raise ValueError(f"{len(encoded) >> 20} MiB")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            cache.write_atomically(path, encoded)
        except IsADirectoryError:
            _put_aside(path)
            cache.write_atomically(path, encoded)
    except (OSError, ValueError) as error:
        log.debug("%s not kept: %s", path, error)


def remove(path: Path) -> bool:
    """Removes a file, or an empty directory in its place. Whether it is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
    return not path.exists()


def _put_aside(folder: Path) -> None:
    number = next(n for n in range(1000) if not os.path.lexists(f"{folder}.{n}"))
    os.rename(folder, f"{folder}.{number}")


def _content(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a file")
        if status.st_size > _MAX_BYTES:
            raise ValueError(f"{status.st_size >> 20} MiB")
        with open(handle, "rb", closefd=False) as file:
            return file.read(_MAX_BYTES)
    finally:
        os.close(handle)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def decoded(kind: Any, data: Any) -> Any:
    """A value of type ``kind`` made of JSON's types: a dataclass of a dict, a tuple of a list, with everything inside.

    Raises:
        TypeError, ValueError, OverflowError: the data are of another type, or a number is out of range.
    """
    return _decoder(kind)(data)


@functools.cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (tuple, list, Sequence):
        item, made = _decoder(arguments[0]), tuple if origin is Sequence else origin
        return lambda data: made(map(item, _checked(list, data)))
    if origin in (dict, Mapping):
        key, item = map(_decoder, arguments)
        return lambda data: {key(k): item(v) for k, v in _checked(dict, data).items()}
    if origin in (types.UnionType, typing.Union):  # of a type and None
        (other,) = (a for a in arguments if a is not type(None))
        return lambda data: None if data is None else _decoder(other)(data)  # which may be what holds it
    if kind is float:
        return _float
    if kind is int:
        return _int
    return functools.partial(_checked, kind)


def _dataclass_decoder(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    decoders: Mapping[str, Callable] = {f.name: _decoder(hints[f.name]) for f in dataclasses.fields(kind)}
    return lambda data: kind(**{name: decoders[name](value) for name, value in _checked(dict, data).items()})


def _checked(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise TypeError(f"a {type(data).__name__} where a {kind.__name__} is expected")
    return data


def _float(data: Any) -> float:
    if type(data) not in (int, float) or not math.isfinite(data):
        raise TypeError(f"a {type(data).__name__} where a finite number is expected")
    return float(data)


def _int(data: Any) -> int:
    if type(data) is not int or not -_MAX_INT <= data < _MAX_INT:
        raise TypeError(f"a {type(data).__name__} where an integer of 64 bits is expected")
    return data
