"""What NVRTC compiled is kept for later processes. No GPU is needed."""

import os
import subprocess
import sys

import pytest
import torch

from fusebackend.native import kept_code, loader
from fusebackend.patterns.computed_sums import ops

pytestmark = pytest.mark.usefixtures("library")

TEXT = "t0=mul(i0,i1);t1=tanh(t0);out(t1)"


@pytest.fixture
def folder(tmp_path):
    """Where code is kept from now on."""
    kept_code.keep_in(loader.load().library, tmp_path)
    return tmp_path


def compiled(text=TEXT, architecture="sm_90"):
    facts = ops.compile_kernel(text, [torch.float32, torch.bfloat16], "rc", 1, architecture)
    if isinstance(facts, str) and facts.startswith("NVRTC is not found"):
        pytest.skip(facts)
    assert not isinstance(facts, str), facts
    return dict(facts)


def in_another_process(folder, text=TEXT):
    """The facts of the kernel there, and how often NVRTC ran."""
    code = (
        "import sys, torch\nfrom pathlib import Path\nfrom fusebackend.native import kept_code, loader\n"
        "from fusebackend.patterns.computed_sums import ops\n"
        "kept_code.keep_in(loader.load().library, Path(sys.argv[1]))\n"
        "print(dict(ops.compile_kernel(sys.argv[2], [torch.float32, torch.bfloat16], 'rc', 1, 'sm_90')), ops.compilations())"
    )
    found = subprocess.run([sys.executable, "-c", code, str(folder), text], capture_output=True, text=True, check=True)
    facts, _, count = found.stdout.strip().rpartition(" ")
    return facts, int(count)


def test_a_process_finds_what_another_compiled(folder):
    facts = compiled()
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_size > facts["code_bytes"]
    assert in_another_process(folder) == (str(facts), 0)
    assert in_another_process(folder, TEXT.replace("tanh", "exp"))[1] == 1, "another program is another kernel"
    assert len(list(folder.iterdir())) == 2


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def change(file):
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def open_to_others(file):
    file.chmod(0o666)


def make_a_folder(file):
    file.unlink()
    file.mkdir()


def link(file):
    target = file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(target)


@pytest.mark.parametrize(
    ("spoil", "function"), [(cut, "sin"), (change, "exp2"), (open_to_others, "log1p"), (make_a_folder, "expm1"), (link, "erf")]
)
def test_what_is_not_what_was_kept_is_compiled_again(folder, spoil, function):
    """A process compiles no program twice, so each has its own."""
    text = f"t0=mul(i0,i1);t1={function}(t0);out(t1)"
    facts = compiled(text)
    (file,) = folder.iterdir()
    spoil(file)
    assert in_another_process(folder, text) == (str(facts), 1)
    if spoil is not make_a_folder:
        assert in_another_process(folder, text) == (str(facts), 0), "the file was replaced"


def test_a_file_of_another_name_is_not_taken(folder):
    """Files are named by a hash: two programs may share one."""
    compiled("t0=mul(i0,i1);t1=cos(t0);out(t1)")
    (one,) = folder.iterdir()
    compiled("t0=mul(i0,i1);t1=log(t0);out(t1)")
    (other,) = set(folder.iterdir()) - {one}
    one.write_bytes(other.read_bytes())
    assert in_another_process(folder, "t0=mul(i0,i1);t1=cos(t0);out(t1)")[1] == 1


def test_where_nothing_can_be_written_code_is_compiled(folder):
    for nowhere in (None, folder / "nowhere"):
        kept_code.keep_in(loader.load().library, nowhere)
        before = ops.compilations()
        compiled(f"t0=mul(i0,i1);t1={'sqrt' if nowhere else 'rsqrt'}(t0);out(t1)")
        assert ops.compilations() == before + 1
    assert not list(folder.iterdir())


def test_the_library_keeps_code_in_the_cache(tmp_path):
    code = (
        "import torch\nfrom fusebackend.native import loader\nfrom fusebackend.patterns.computed_sums import ops\nloader.load()\n"
        "print(ops.compile_kernel('out(i0)', [torch.float32], 'r', 1, 'sm_90'))"
    )
    environment = {**os.environ, "FUSEBACKEND_CACHE_DIR": str(tmp_path), "FUSEBACKEND_LIBRARY": str(loader.load().path.parent)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if "NVRTC is not found" in found.stdout:
        pytest.skip(found.stdout)
    (_,) = (tmp_path / "code").glob("*/*")
