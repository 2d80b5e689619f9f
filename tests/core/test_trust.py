"""A library is loaded only if nobody else could have written it, or put another in its place."""

import ctypes
import grp
import json
import os
import pwd
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fusebackend.native import build, cache, dynamic_library, loader, manifest, trust

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture(autouse=True)
def shared_groups(monkeypatch):
    """No group is private to a user, whatever this machine's groups are."""
    monkeypatch.setattr(trust, "is_private_group", lambda group: False)


@pytest.fixture
def file(tmp_path):
    """A file in a folder in a folder, all of them this user's alone."""
    (tmp_path / "above" / "folder").mkdir(parents=True)
    path = tmp_path / "above" / "folder" / "file"
    path.write_text("content")
    for each in (path.parent.parent, path.parent, path):
        each.chmod(0o755)
    return path


def content(path):
    with trust.opened(path) as descriptor:
        return os.read(descriptor, 100).decode()


def refusal(path):
    with pytest.raises(trust.UntrustedError) as error:
        content(path)
    return str(error.value)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o722])
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_what_others_can_write_is_refused_until_the_command_in_the_reason_was_run(file, mode, levels):
    wrong = [file, *file.parents][levels]
    wrong.chmod(mode)
    reason = refusal(file)
    assert reason.startswith(f"{wrong} is writable by others")
    if levels:
        with pytest.raises(trust.UntrustedError):
            trust.check_folder(file.parent)
    subprocess.run(shlex.split(reason.partition("): ")[2]), check=True)
    assert content(file) == "content"


def test_in_a_sticky_folder_above_others_may_create_files(file):
    file.parents[1].chmod(0o1777)
    assert content(file) == "content"
    file.parents[1].chmod(0o755)
    file.parent.chmod(0o1777)  # where others could be the first to create one
    assert "is writable by others" in refusal(file)


@only_root
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_what_belongs_to_somebody_else_is_refused(file, levels):
    os.chown([file, *file.parents][levels], 12345, -1)
    assert "belongs to user id 12345, not to you" in refusal(file)


@only_root
def test_what_belongs_to_root_is_trusted_by_everybody(file, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert content(file) == "content"


def test_what_stands_above_the_home_folder_is_not_judged(file, monkeypatch):
    class Account:
        pw_dir = str(file.parent)

    file.parents[1].chmod(0o777)
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda user: Account)
    assert content(file) == "content"
    (file.parents[1] / "link").symlink_to(file)  # others can write this link
    assert "is writable by others" in refusal(file.parents[1] / "link")
    file.parent.chmod(0o777)  # the home folder itself is judged
    assert "is writable by others" in refusal(file)


@pytest.mark.parametrize("target", ["{}/above/folder/file", "../above/folder/file", "../above/folder/../folder/file", "../to_folder/file"])
def test_links_are_followed(file, tmp_path, target):
    (tmp_path / "links").mkdir()
    (tmp_path / "to_folder").symlink_to(file.parent)
    (tmp_path / "links" / "link").symlink_to(target.format(tmp_path))
    assert content(tmp_path / "links" / "link") == "content"
    (tmp_path / "links").chmod(0o777)
    assert f"{tmp_path}/links is writable by others" in refusal(tmp_path / "links" / "link")
    (tmp_path / "links").chmod(0o755)
    file.parent.chmod(0o777)
    assert f"{file.parent} is writable by others" in refusal(tmp_path / "links" / "link")


@only_root
def test_a_link_of_somebody_else_is_refused(file, tmp_path):
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    (tmp_path / "sticky" / "link").symlink_to(file.parent)
    assert content(tmp_path / "sticky" / "link" / "file") == "content"
    os.lchown(tmp_path / "sticky" / "link", 12345, -1)
    assert "sticky/link belongs to user id 12345" in refusal(tmp_path / "sticky" / "link" / "file")


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "too many symbolic links" in refusal(tmp_path / "a")


def test_what_is_no_file_is_refused(file):
    os.mkfifo(file.with_name("pipe"))
    (file.parent / "folder").mkdir()
    for name in ("pipe", "folder"):
        assert "is no regular file" in refusal(file.with_name(name))
    with pytest.raises(FileNotFoundError):
        content(file.with_name("nothing"))


def test_relative_paths_are_those_of_the_current_folder(file, monkeypatch):
    monkeypatch.chdir(file.parents[1])
    assert content(Path("folder/file")) == content(Path("folder/../folder/./file")) == "content"


@pytest.mark.parametrize("swapped_for", ["link", "writable file"])
def test_what_is_swapped_after_the_first_look_is_refused(file, monkeypatch, swapped_for):
    real = os.open

    def swap(name, flags, mode=0o777, *, dir_fd=None):
        if name == file.name:
            file.unlink()
            if swapped_for == "link":
                file.symlink_to("/etc/passwd")
            else:
                file.touch()
                file.chmod(0o666)
        return real(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises((OSError, trust.UntrustedError)):
        content(file)


def test_beside_our_code_the_group_that_writes_it_may_write_the_library(tmp_path):
    (tmp_path / "lib").mkdir(mode=0o755)
    code, library = tmp_path / "native.py", tmp_path / "lib" / manifest.LIBRARY
    for path in (code, library):
        path.touch()
        path.chmod(0o664)
    library.parent.chmod(0o775)
    with trust.opened_beside(library, code):
        pass
    for mode in (0o644, 0o640):
        code.chmod(mode)
        with pytest.raises(trust.UntrustedError, match="writable by others"), trust.opened_beside(library, code):
            pass


@only_root
def test_a_library_may_belong_to_the_owner_of_our_code_only(tmp_path):
    code, library = tmp_path / "native.py", tmp_path / "lib" / manifest.LIBRARY
    library.parent.mkdir(mode=0o755)
    for path in (code, library):
        path.touch(mode=0o644)
    os.chown(library, 12345, -1)
    with pytest.raises(trust.UntrustedError, match="belongs to user id 12345"), trust.opened_beside(library, code):
        pass
    os.chown(code, 12345, -1)
    with trust.opened_beside(library, code):
        pass


def account(name, user, group):
    return pwd.struct_passwd((name, "x", user, group, "", "/", ""))


@pytest.mark.parametrize(
    ("group", "members", "others", "private"),
    [
        ("me", [], [], True),
        ("me", ["me"], [], True),
        ("me", ["me", "you"], [], False),
        ("me", [], [account("you", 2001, 1000)], False),  # it is somebody else's first group
        ("users", [], [], False),  # nobody is listed, but not everybody has to be
    ],
)
def test_the_group_of_one_user_may_write(monkeypatch, group, members, others, private):
    monkeypatch.undo()
    me = account("me", 2000, 1000)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: me)
    monkeypatch.setattr(pwd, "getpwall", lambda: [account("root", 0, 0), me, *others])
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group((group, "x", 1000, members)))
    assert trust._is_private.__wrapped__(1000, 2000) is private


@pytest.mark.parametrize(("mapping", "trusted"), [("0 0 4294967295", False), ("1000 1000 1", True), ("0 1000 1\n1 100000 65536", True)])
def test_in_a_container_that_does_not_know_root_its_folders_seem_to_be_nobodys(monkeypatch, mapping, trusted):
    texts = {"/proc/self/uid_map": mapping, "/proc/sys/kernel/overflowuid": "65534"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[str(path)])
    assert trust._owners_of_unmapped_files.__wrapped__() == (frozenset({65534}) if trusted else frozenset())


# ---- libraries ----


@pytest.fixture
def loads(monkeypatch):
    """The paths that are loaded, in order."""
    paths = []
    monkeypatch.setattr(dynamic_library, "load", lambda descriptor, path: paths.append(path))
    return paths


@pytest.fixture(params=[False, True], ids=["named", "packaged"])
def ahead(request, plan, cache_dir, tmp_path, monkeypatch):
    """The folder of a library that was built ahead."""
    folder = build.build(plan, tmp_path / "above" / "ahead")
    monkeypatch.setattr(loader, "prebuilt_folders", lambda: [folder])
    if request.param:
        monkeypatch.setattr(loader, "PACKAGED", folder)
    return folder


@pytest.mark.parametrize("name", ["", manifest.LIBRARY, manifest.MANIFEST])
def test_what_the_world_can_write_is_never_loaded(ahead, loads, caplog, name):
    (ahead / name).chmod(0o777)
    loader._find_and_load()
    assert ahead / manifest.LIBRARY not in loads and f"{ahead / name} is writable by others" in caplog.text
    (ahead / name).chmod(0o755)
    loader._find_and_load()
    assert loads[-1] == ahead / manifest.LIBRARY


@pytest.mark.parametrize("ahead", [False], indirect=True)
def test_a_library_below_a_folder_that_the_world_can_write_is_never_loaded(ahead, loads, caplog):
    ahead.parent.chmod(0o777)
    loader._find_and_load()
    assert ahead / manifest.LIBRARY not in loads and f"{ahead.parent} is writable by others" in caplog.text


@pytest.mark.parametrize(("logs", "start"), [({}, "fusebackend: "), ({"TORCH_LOGS": "+fusebackend"}, "W")])
def test_warnings_say_who_speaks_whatever_handler_prints_them(tmp_path, logs, start):
    program = "from fusebackend.native import loader; loader._prebuilt()"
    variables = {**os.environ, **logs, "FUSEBACKEND_LIBRARY": str(tmp_path / "nowhere")}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stderr.splitlines() if "nowhere" in line)
    assert f"fusebackend: the library in {tmp_path}/nowhere is not used: there is no {tmp_path}/nowhere" in line
    assert line.startswith(start) and "python -m fusebackend build --output FOLDER" in line


def test_a_library_without_a_hash_is_never_loaded(ahead, loads, caplog):
    contents = manifest.read(ahead)
    (ahead / manifest.MANIFEST).write_text(json.dumps({k: v for k, v in contents.items() if k != "sha256"}))
    loader._find_and_load()
    assert ahead / manifest.LIBRARY not in loads and "no valid sha256" in caplog.text


def test_a_cache_below_a_folder_that_the_world_can_write_is_refused(plan, cache_dir, loads):
    build.build(plan)
    cache_dir.parent.chmod(0o777)
    assert "is writable by others" in loader._find_and_load().reason and not loads


@pytest.mark.parametrize("name", [manifest.LIBRARY, manifest.MANIFEST])
def test_what_the_world_can_write_in_the_cache_is_built_again(plan, cache_dir, loads, caplog, name):
    path = build.build(plan) / name
    path.chmod(0o722)
    before = path.stat().st_ino
    assert loader._find_and_load().path == path.parent / manifest.LIBRARY
    assert path.stat().st_ino != before and f"{path} is writable by others" in caplog.text


def test_folders_that_are_made_are_private_whatever_the_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        path = cache.directory("c", "d")
    finally:
        os.umask(before)
    made = [path, *path.parents]
    assert {p.stat().st_mode & 0o777 for p in made[: made.index(tmp_path)]} == {0o700}


@pytest.mark.parametrize("ahead", [False], indirect=True)
def test_what_was_checked_is_what_is_loaded(ahead, plan, tmp_path, monkeypatch):
    """Another library stands in its place before it is loaded."""
    (plan.root / "bind_cpu.cpp").write_text((plan.root / "bind_cpu.cpp").read_text().replace("42", "13"))
    other = build.build(plan, tmp_path / "other") / manifest.LIBRARY
    real, handles = dynamic_library.load, []

    def swap_first(descriptor, path):
        os.replace(other, path)
        handles.append(real(descriptor, path))

    monkeypatch.setattr(dynamic_library, "load", swap_first)
    assert loader._find_and_load().path == ahead / manifest.LIBRARY
    assert handles[0].answer() == 42
    assert ctypes.CDLL(str(ahead / manifest.LIBRARY)).answer() == 13


REUSED = """
import os, sys
from fusebackend.native import dynamic_library
from pathlib import Path

answers = []
for path in map(Path, sys.argv[1:]):
    descriptor = os.open(path, os.O_RDONLY)
    answers.append(dynamic_library.load(descriptor, path).answer())
    os.closerange(3, 256)  # as a program does that becomes a daemon
print(*answers)
"""


def test_libraries_are_told_apart_although_descriptors_are_used_again(plan, cache_dir, tmp_path):
    first = build.build(plan, tmp_path / "first") / manifest.LIBRARY
    (plan.root / "bind_cpu.cpp").write_text((plan.root / "bind_cpu.cpp").read_text().replace("42", "13"))
    second = build.build(plan, tmp_path / "second") / manifest.LIBRARY
    done = subprocess.run([sys.executable, "-c", REUSED, first, second], capture_output=True, text=True)
    assert done.stdout == "42 13\n", done.stderr


def test_a_library_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "no.so").write_text("no library")
    with open(tmp_path / "no.so") as file, pytest.raises(OSError, match="no.so can't be loaded: no.so: file too short|invalid ELF header"):
        dynamic_library.load(file.fileno(), tmp_path / "no.so")
