"""Whatever stands where a report, a verdict or decisions were kept: the compile goes on, one warning names it, and it is replaced."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import fusebackend
from fusebackend.native import cache, kept_files
from fusebackend.profitability import measurement_store
from fusebackend.profitability.decision_record import DecisionRecord
from fusebackend.profitability.measurement_store import Measurement
from fusebackend.report import store
from fusebackend.report.model import Report

DEEP, LONG = "[" * 100_000, "1" + "0" * 400
KEY = "0123abc-def"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("FUSEBACKEND_CACHE_DIR", str(tmp_path / "cache"))


class Reports:
    """A kind of kept file: how one is kept and read, and where it is."""

    def __init__(self):
        ungated = torch.compile(lambda x, y: x.t() + y, backend="fuse", options={"fuse.gate": "off"})
        self.kept = fusebackend.explain(ungated, torch.randn(8, 6), torch.randn(6, 8))
        self.path = store.path(KEY)

    def keep(self):
        store.save(self.kept, KEY)

    def read(self):
        found = store.load(KEY)
        return None if found is None else found.substitutions

    wrong = ['{"substitutions": 3}', '{"graphs": [{"name": 1}]}']
    numbers = '"seconds": '


class Measurements:
    def __init__(self):
        self.path = measurement_store.folder() / f"{KEY}.json"

    def keep(self):
        measurement_store.save(KEY, Measurement(True, 1.0, 2.0, "region"))

    def read(self):
        return measurement_store.load(KEY)

    wrong = [
        '{"kept": true}',
        '{"kept": 1, "replaced_ms": 1, "inductor_ms": 1, "how": "region"}',
        '{"kept": true, "replaced_ms": 0, "inductor_ms": 1, "how": "region"}',
        '{"kept": true, "replaced_ms": 1, "inductor_ms": 1, "how": ["region"]}',
        '{"kept": true, "replaced_ms": true, "inductor_ms": 1, "how": "region"}',
        '{"kept": true, "replaced_ms": 1, "inductor_ms": 1, "how": "region", "more": 1}',
    ]
    numbers = '"replaced_ms": '


class Decisions:
    def __init__(self):
        self.path = store.path(KEY).with_suffix(".gate.json")

    def keep(self):
        record = DecisionRecord(self.path)
        record.add("abc-1", True, True, False)
        record.save()

    def read(self):
        return DecisionRecord(self.path)._decisions or None

    wrong = [
        '{"token": "", "decisions": {"abc": {"applied": 1, "unmeasured": true, "measured": true}}, "unmeasured_sites": []}',
        '{"token": "", "decisions": {"../../abc": {"applied": true, "unmeasured": true, "measured": true}}, "unmeasured_sites": []}',
        '{"token": "", "decisions": {}, "unmeasured_sites": 3}',
    ]
    numbers = None


def damages(kind):
    yield from (b"", b"{", b"[]", b"null", b"3", b"{}", b"\xff\xfe", DEEP.encode(), ('{"a":' * 50_000).encode(), LONG.encode(), b"NaN")
    yield from (text.encode() for text in kind.wrong)


@pytest.mark.parametrize("kind", [Reports, Measurements, Decisions])
def test_whatever_stands_in_a_kept_files_place_counts_as_none_is_named_and_replaced(kind, caplog, monkeypatch):
    monkeypatch.setattr("fusebackend.log._warned", set())
    kind = kind()
    kind.keep()
    whole, expected = kind.path.read_bytes(), kind.read()
    assert expected
    contents = [*damages(kind), whole[: len(whole) // 2]]
    if kind.numbers:
        head, tail = whole.decode().split(kind.numbers)
        rest = tail[tail.index(",") if "," in tail else tail.index("}") :]
        contents += [f"{head}{kind.numbers}{number}{rest}".encode() for number in (LONG, "NaN", "Infinity", "1e999", "[1]", "true")]
    for content in contents:
        caplog.clear()
        kind.path.write_bytes(content)
        assert kind.read() is None and kind.read() is None, content[:100]
        kind.keep()
        assert kind.read() == expected
    for name in ("directory", "pipe", "huge", "loop"):
        caplog.clear()
        monkeypatch.setattr("fusebackend.log._warned", set())
        kind.path.unlink()
        if name == "directory":
            (kind.path / "inside").mkdir(parents=True)
        elif name == "pipe":
            os.mkfifo(kind.path)
        elif name == "huge":
            with open(kind.path, "wb") as file:
                file.truncate(1 << 40)
        else:
            kind.path.symlink_to(kind.path)
        assert kind.read() is None and kind.read() is None
        warnings = [r.getMessage() for r in caplog.records if r.name == "fusebackend" and r.levelname == "WARNING"]
        assert len(warnings) == 1 and warnings[0].startswith(f"fusebackend: {kind.path} is not what was kept there"), warnings
        kind.keep()
        assert kind.read() == expected


def test_what_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    for path, data in [(tmp_path / "file" / "below", {}), (tmp_path / "nan", float("nan")), (tmp_path / "big", "x" * (65 << 20))]:
        kept_files.write(path, data)
        assert kept_files.read(path, dict) is None
    assert os.listdir(tmp_path) == ["file"]


def test_forgetting_verdicts_survives_what_is_none():
    measurement_store.save(KEY, Measurement(True, 1.0, 2.0, "region"))
    (measurement_store.folder() / "damaged.json").write_text(DEEP)
    (measurement_store.folder() / "folder.json").mkdir()
    (measurement_store.folder() / "gone.json").symlink_to("nowhere")
    assert [key for key, _ in measurement_store.stored()] == [KEY]
    assert measurement_store.clear() == 4 and not os.listdir(measurement_store.folder())


def test_a_report_of_wrong_types_is_none():
    report = fusebackend.explain(lambda x, y: torch.relu(x.t() + y) @ x, torch.randn(8, 6), torch.randn(6, 8)).to_dict()
    leaves = []

    def walk(value, path):
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            leaves.append((*path, key))
            walk(inner, (*path, key))

    walk(json.loads(json.dumps(report)), ())
    assert len(leaves) > 100
    new = [path for path in leaves if path[0] in ("schema", "coverage", "context", "breaks")]
    for path in (*random.Random(0).sample(leaves, 100), *new):
        data = json.loads(json.dumps(report))
        *above, last = path
        place = data
        for key in above:
            place = place[key]
        place[last] = {"of another": ["type"]}
        with pytest.raises((TypeError, ValueError, KeyError)):
            Report.from_dict(data)


WRITER = """
import sys, pathlib
from fusebackend.native import cache
path, n = pathlib.Path(sys.argv[1]), 0
while True:
    n += 1
    cache.write_atomically(path, b"%d" % (n % 10) * 300_000)
    print(n, flush=True)
"""


def test_a_writer_that_is_killed_leaves_the_old_or_the_new(tmp_path):
    path = tmp_path / "kept"
    for seed in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        writer.stdout.readline()
        end = time.monotonic() + 0.05 * (1 + seed)
        while time.monotonic() < end:
            content = path.read_bytes()
            assert len(content) == 300_000 and len(set(content)) == 1
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        content = path.read_bytes()
        assert len(content) == 300_000 and len(set(content)) == 1
    assert not [name for name in os.listdir(tmp_path) if name != "kept" and not name.startswith(".kept.")], "what is left is hidden"


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError("No space left on device")

    (tmp_path / "kept").write_bytes(b"old")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "replace", full)
        cache.write_atomically(tmp_path / "kept", b"new")
    assert os.listdir(tmp_path) == ["kept"] and (tmp_path / "kept").read_bytes() == b"old"
