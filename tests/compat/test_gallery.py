"""The template of a package of patterns in CONTRIBUTING: built, installed, and found without being imported."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCKS = re.findall(r"```\w+\n# (pyproject\.toml|norm_kernels\.py)\n(.*?)```", CONTRIBUTING.read_text(), re.S)


def run(*arguments, path):
    environment = {**os.environ, "PYTHONPATH": str(path), "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run([sys.executable, "-W", "ignore", "-m", *arguments], capture_output=True, text=True, env=environment, cwd=path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name, text in BLOCKS:
        (source / name).write_text(text)
    if not all(map(importlib.util.find_spec, ("pip", "setuptools"))):  # not imported here: pip brings another distutils along
        pytest.skip("needs pip and setuptools")
    offline = ("--no-deps", "--no-build-isolation", "--quiet")
    done = run("pip", "wheel", *offline, "--wheel-dir", str(source / "dist"), str(source), path=target)
    assert done.returncode == 0, done.stderr
    (wheel,) = (source / "dist").glob("norm_kernels-1.2-*.whl")
    done = run("pip", "install", "--no-deps", "--quiet", "--target", str(target), str(wheel), path=target)
    assert done.returncode == 0, done.stderr
    return target


def test_the_template_has_both_files():
    assert [name for name, _ in BLOCKS] == ["pyproject.toml", "norm_kernels.py"]


def test_an_installed_package_is_listed_with_its_version(installed):
    done = run("fusebackend", "patterns", path=installed)
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"^norm_kernels\.rms_norm \(joint, at .*\), norm-kernels 1\.2\n +RMS norm by one pass over the rows\.$", done.stdout, re.M
    )
    assert found, done.stdout
    assert re.search(r"^permute \(.*\), fusebackend \d", done.stdout, re.M)


def test_its_pattern_is_found_in_a_model_that_does_not_import_it(installed):
    (installed / "model.py").write_text(
        "import torch, fusebackend\n"
        "with torch.no_grad():\n"
        "    print(fusebackend.explain(torch.nn.RMSNorm(16), torch.randn(4, 16)).counts())\n"
    )
    done = run("model", path=installed)
    assert done.stdout.strip() == "{'norm_kernels.rms_norm': 1}", done.stderr


def test_a_package_that_fails_is_named(installed):
    module = installed / "norm_kernels.py"
    text = module.read_text()
    module.write_text("raise OSError('no such driver')\n")
    try:
        done = run("fusebackend", "patterns", path=installed)
    finally:
        module.write_text(text)
    assert done.returncode == 1 and "permute" in done.stdout
    assert "norm-kernels 1.2, entry point 'norms' could not be loaded: OSError: no such driver" in done.stderr
