"""Which calibration is used for a device, and what becomes of those of others."""

import json

import pytest
import torch

import fusebackend
from fusebackend.native.loader import Native
from fusebackend.profitability import calibration
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Work

CPU = torch.device("cpu")
MINOR = ".".join(torch.__version__.split(".")[:2])


def content(**changes):
    model = {"start": 1.0, "rates": {"bytes": 10.0}, "power": 1.0, "noise": 0.1}
    data = {"format": 1, "type": "cpu", "device": calibration.device_name(CPU), "torch_version": torch.__version__, "date": "2026-01-01"}
    return data | {"sites": 5, "properties": {"threads": torch.get_num_threads()}, "call": 0.5, "models": {"copy": model}} | changes


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """Own and shipped calibrations: two empty folders."""
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    own.mkdir()
    shipped.mkdir()
    monkeypatch.setattr(calibration, "_own_folder", lambda: own)
    monkeypatch.setattr(calibration, "FOLDER", shipped)
    calibration.forget()
    yield own, shipped
    calibration.forget()


def write(folder, name="c.json", **changes):
    (folder / name).write_text(json.dumps(content(**changes)))
    calibration.forget()


def test_nothing_is_known_without_files(folders):
    assert calibration.of_device(CPU) is None and calibration.digest(CPU) == ""


def test_one_of_this_device_and_torch_is_taken_as_it_is(folders):
    write(folders[1])
    found = calibration.of_device(CPU)
    assert (found.widened, found.scale, found.call, found.is_prior) == (1.0, 1.0, 0.5, False)
    time = found.time([Work("copy", {"bytes": 40.0}, share=0.5)])
    assert time.expected == pytest.approx(2.5) and time.half_width == pytest.approx(0.1)


def test_the_users_own_goes_first(folders):
    write(folders[1], sites=7)
    write(folders[0], sites=8)
    assert calibration.of_device(CPU).sites == 8


def test_of_several_ways_the_physically_fastest_counts(folders):
    write(folders[1])
    ways = [Work("copy", {"bytes": 90.0}), Work("copy", {"bytes": 20.0})]
    assert calibration.of_device(CPU).time(ways).expected == pytest.approx(3.0)


def test_what_was_not_calibrated_is_refused(folders):
    write(folders[1])
    with pytest.raises(Unfit, match="'sort' takes was not calibrated"):
        calibration.of_device(CPU).time([Work("sort", {})])


def test_another_torch_widens_intervals(folders):
    write(folders[1], torch_version="2.0.1")
    found = calibration.of_device(CPU)
    assert found.widened > 1 and not found.is_prior
    assert found.time([Work("copy", {})]).half_width == pytest.approx(0.1 * found.widened)
    write(folders[1], "d.json", sites=9)
    assert calibration.of_device(CPU).sites == 9 and calibration.of_device(CPU).widened == 1.0


def test_another_device_is_a_scaled_guess_with_wide_intervals(folders):
    write(folders[1], device="another", properties={"threads": 4.0 * torch.get_num_threads()})
    write(folders[1], "far.json", device="farther", sites=1, properties={"threads": 400.0 * torch.get_num_threads()})
    found = calibration.of_device(CPU)
    assert found.device == "another" and found.is_prior and found.scale == pytest.approx(4.0)
    assert found.time([Work("copy", {})]).expected == pytest.approx(4.0)
    assert "guess" in str(found) and "another" in str(found)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 9.0, and a way to say for which architectures the library was built."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(calibration, "device_properties", lambda device: {"bandwidth": 100.0})

    def built(*architectures):
        monkeypatch.setattr(calibration.loader, "load", lambda: Native(architectures=architectures))
        calibration.forget()

    return built


ON_GPU = {"type": "cuda", "device": "a GPU", "properties": {"bandwidth": 200.0}, "architecture": "90a"}


@pytest.mark.parametrize(
    ("built", "here", "elsewhere"),
    [(("90a",), 1.0, 2.0), (("80", "90a"), 1.0, 2.0), (("80",), 4.0, 4.0), ((), 1.0, 4.0)],
    ids=str,
)
def test_times_of_other_kernels_say_less(folders, gpu, built, here, elsewhere):
    """Those for compute capability 8.0 run on 9.0 too, at another speed."""
    write(folders[1], **ON_GPU)
    gpu(*built)
    known, guess = (calibration.for_device("cuda", name) for name in ("a GPU", "another GPU"))
    assert (known.widened, known.is_prior, known.scale) == (here, False, 1.0)
    assert (guess.widened, guess.is_prior, guess.scale) == (elsewhere, True, pytest.approx(2.0))


def test_of_other_devices_that_with_the_same_kernels_is_the_guess(folders, gpu):
    write(folders[1], **ON_GPU)
    write(folders[1], "d.json", **{**ON_GPU, "device": "an older GPU", "properties": {"bandwidth": 100.0}, "architecture": "80"})
    gpu("80", "90a")
    assert calibration.for_device("cuda", "another GPU").device == "a GPU"


def test_other_types_of_devices_say_nothing(folders):
    write(folders[1], type="cuda")
    assert calibration.of_device(CPU) is None


WRONG = [
    {"models": {"copy": {"x": 1}}},
    {"models": {"copy": {"start": "1", "rates": {}, "power": 1.0}}},
    {"models": {"copy": {"start": 1.0, "rates": {}, "power": 1.0, "basis": {"start": None, "rates": {}, "power": 1.0}}}},
    {"date": "yesterday"},
    {"torch_version": None},
    {"properties": []},
    {"properties": {"threads": 0}},
    {"call": "0.5"},
    {"call": float("nan")},
]


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{}", "[1]", '{"format": 1}', *(json.dumps(content() | w) for w in WRONG)])
def test_a_damaged_file_is_ignored_with_one_warning(folders, caplog, text):
    (folders[1] / "c.json").write_text(text)
    calibration.forget()
    assert calibration.of_device(CPU) is None
    assert [r.message for r in caplog.records if "c.json is not used" in r.message]


def test_files_of_another_format_are_left_alone(folders, caplog):
    write(folders[1], format=99)
    assert calibration.of_device(CPU) is None and not caplog.records


def test_the_digest_follows_the_content(folders):
    write(folders[1])
    before = calibration.digest(CPU)
    write(folders[1], call=0.75)
    assert calibration.digest(CPU) != before


def test_compiled_code_is_keyed_by_the_calibration_in_use(folders):
    from fusebackend.native import loader
    from fusebackend.options import Options
    from fusebackend.session import code_identity

    def key(gate):
        return code_identity(Options(gate=gate), loader.load())

    without = {gate: key(gate) for gate in ("auto", "off")}
    write(folders[0])
    assert key("auto") != without["auto"]
    assert key("off") == without["off"]  # nothing is estimated


def test_those_that_ship_are_read():
    files = sorted(calibration.FOLDER.glob("*.json"))
    assert files and all(calibration._read(path) is not None for path in files)
    assert fusebackend.__version__


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_a_softmax_that_divides_for_each_element_takes_no_milliseconds(device):
    """Over the windows of SAM's image encoder: 150,528 rows of 196 scores, whose biases stand at quotients and remainders of the position.
    It took 0.13 to 0.21 ms on an H200. By what divisions had seemed to take, it would be 28 ms."""
    quantities = {"read": 5.1e8, "written": 1.2e8, "lines": 1.1e7, "sectors": 2.5e7, "pages": 8.3e5, "moved": 9.4e8, "operations": 3.2e9}
    quantities |= {"divisions": 6.9e8, "functions": 7.7e7, "operations a row": 1.2e8, "blocks": 75264.0, "padded terms": 1.2e8}
    quantities |= {"steps in waves": 53.5, "elements in waves": 427.6, "launches": 1.0}
    shape = {"log2 rows": 1.0, "log2 columns": 8.0, "dimensions": 1.0, "log2 steps": 1.58, "log2 elements a thread": 3.0, "warps": 2.0}
    shape |= {"log2 blocks": 16.0, "log2 outputs": 17.2, "log2 terms": 7.61, "edge": 1.97, "excess read": -0.88, "itemsize": 2.0}
    known = calibration.for_device("cuda", device)
    assert known is not None and known.device == device
    assert known.models["triton normalization"].time(Work("triton normalization", quantities, shape)).expected < 1000
