"""Who could have written a file that is about to be run: the file and every folder on the way to it are checked, as OpenSSH checks the way
to a key (``StrictModes``).

The owner must be this user or root, and nobody else may be able to write. Others may create files in a folder above if it is sticky, like
``/tmp``: they can't rename there what is not theirs. What stands above the home folder is its administrator's business.

Every folder is opened relative to the one above, so that what was checked is what is opened. That holds for symbolic links too.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

_MOST_LINKS = 40  # Linux's own limit
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe must not make us wait for its writer.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class UntrustedError(RuntimeError):
    """Somebody else could have written a file; the message names what they could have written, and the command that cures it."""


def check_folder(path: Path) -> None:
    """Refuses a folder that somebody else could write, or replace by another.

    Raises:
        UntrustedError: they could.
        OSError: there is no such folder.
    """
    os.close(_walk(path, _SEARCH))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the regular file ``path``, open for reading, which nobody else could have written or replaced by another.

    Raises:
        UntrustedError: they could; or it is no regular file.
        OSError: there is no such file, or it can't be read.
    """
    descriptor = _walk(path, _READ)
    try:
        _raise_first(_fault_of_file(os.fstat(descriptor), path))  # of what was opened, whatever stood there a moment before
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_beside(path: Path, code: Path) -> Iterator[int]:
    """As :func:`opened`, for a file that was installed together with our own code.

    Whoever owns the code may own the file and its folder, and whichever group may write the code may write them: they could as well
    change the code. What everybody can write is refused all the same. The folders above are the code's own.
    """
    like = code.stat()
    _raise_first(_fault(path.parent.stat(), path.parent, like=like))
    descriptor = os.open(path, _READ & ~os.O_NOFOLLOW)
    try:
        _raise_first(_fault_of_file(os.fstat(descriptor), path, like))
        yield descriptor
    finally:
        os.close(descriptor)


def _walk(path: Path, flags: int) -> int:
    """Opens ``path`` folder by folder with ``flags``, each relative to the one above. Returns the descriptor."""
    wants_folder = bool(flags & os.O_DIRECTORY)
    names = list(reversed(path.absolute().parts[1:]))
    home = _home()
    links = 0
    faults: list[str | None] = []  # of the links that were followed, and of the ways to them
    folder, here = os.open("/", _SEARCH), Path("/")
    fault = _fault(os.fstat(folder), here, is_above=True)  # of the way to `here`
    try:
        while names:
            name = names.pop()
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                links += 1
                if links > _MOST_LINKS:
                    raise UntrustedError(f"{path}: too many symbolic links")
                faults += [fault, _fault_of_owner(info, here / name)]
                target = Path(os.readlink(name, dir_fd=folder))
                if target.is_absolute():
                    below = os.open("/", _SEARCH)
                    os.close(folder)
                    folder, here = below, Path("/")
                    fault = _fault(os.fstat(folder), here, is_above=True)
                names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            elif names or wants_folder:
                below = os.open(name, _SEARCH, dir_fd=folder)
                os.close(folder)
                folder, here = below, here.parent if name == ".." else here / name
                info = os.fstat(folder)
                if home and os.path.samestat(info, home):
                    fault = None
                fault = fault or _fault(info, here, is_above=len(names) > (0 if wants_folder else 1))
            else:
                _raise_first(*faults, fault, _fault_of_file(info, here / name))
                return os.open(name, flags, dir_fd=folder)
        _raise_first(*faults, fault, None if wants_folder else f"{path} is a folder, not a file")
        return os.dup(folder)
    except OSError as error:
        error.filename = str(path)  # not the one name that was looked up
        raise
    finally:
        os.close(folder)


def _raise_first(*faults: str | None) -> None:
    for fault in filter(None, faults):
        raise UntrustedError(fault)


def _fault_of_file(info: os.stat_result, path: Path, like: os.stat_result | None = None) -> str | None:
    if not stat.S_ISREG(info.st_mode):
        return f"{path} is no regular file (mode {stat.filemode(info.st_mode)})"
    return _fault(info, path, like=like)


def _fault(info: os.stat_result, path: Path, is_above: bool = False, like: os.stat_result | None = None) -> str | None:
    """Why a file or folder can't be trusted, and what cures that; None if it can.

    Args:
        is_above: a folder further up, in which others may create files if they can't touch those that are there.
        like: a file of our own code; who may write that may write this.
    """
    fault = _fault_of_owner(info, path, is_above, like)
    if fault:
        return fault
    allowed = 0
    if (like and like.st_mode & stat.S_IWGRP and like.st_gid == info.st_gid) or is_private_group(info.st_gid):
        allowed = stat.S_IWGRP
    if is_above and info.st_mode & stat.S_ISVTX:
        return None
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & ~allowed:
        return f"{path} is writable by others (mode {stat.filemode(info.st_mode)}): chmod go-w {shlex.quote(str(path))}"
    return None


def _fault_of_owner(info: os.stat_result, path: Path, is_above: bool = False, like: os.stat_result | None = None) -> str | None:
    owners = {os.geteuid(), 0}
    if like:
        owners.add(like.st_uid)
    if is_above:
        owners |= _owners_of_unmapped_files()
    if info.st_uid in owners:
        return None
    return f"{path} belongs to user id {info.st_uid}, not to you ({os.geteuid()}) or root: use a folder of yours"


def _home() -> os.stat_result | None:
    """This account's home folder, whatever ``HOME`` says."""
    try:
        return os.stat(pwd.getpwuid(os.geteuid()).pw_dir)
    except (KeyError, OSError):
        return None


def is_private_group(group: int) -> bool:
    """Whether only this user, or only root, is in the group.

    Many Linux distributions give each user a group of the same name, and some let it write by default (umask 002). OpenSSH as Debian
    ships it makes the same exception.
    """
    return any(_is_private(group, user) for user in {os.geteuid(), 0})


@functools.lru_cache
def _is_private(group: int, user: int) -> bool:
    try:
        entry, owner = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    # The name as well: where accounts come from a directory service, neither list below has to be complete.
    return (
        entry.gr_name == owner.pw_name
        and owner.pw_gid == group
        and set(entry.gr_mem) <= {owner.pw_name}
        and all(other.pw_uid == user for other in pwd.getpwall() if other.pw_gid == group)
    )


@functools.lru_cache
def _owners_of_unmapped_files() -> frozenset[int]:
    """The owner that root's folders seem to have in a container that does not know root (a user namespace, as of Apptainer)."""
    try:
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return frozenset()
    # (first id inside, first id outside, count): outside stands for the parent namespace, of which root is 0.
    return frozenset() if any(first_outside == 0 for _, first_outside, _ in ranges) or not ranges else frozenset({overflow})
