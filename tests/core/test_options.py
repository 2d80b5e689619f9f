import pytest
import torch

import fusebackend
from fusebackend import options as options_module
from fusebackend.rewriting.registry import known_names
from fusebackend.rewriting.switches import select
from fusebackend.session import inductor_patches


def parse(mode=None, options=None):
    return options_module.parse(mode, options, known_patterns=known_names())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fuse.patern": "all"}, ["'fuse.patern'", "did you mean 'fuse.patterns'", "fuse.strict"]),
        ({"max_autotun": True}, ["'max_autotun'", "did you mean 'max_autotune'"]),
        ({"fuse.patterns": ["transpose_ad"]}, ["'transpose_ad'", "did you mean 'transpose_add'"]),
        ({"fuse.patterns": 3}, ["'fuse.patterns'", "got 3", "list of pattern names"]),
        ({"fuse.strict": "yes"}, ["'fuse.strict'", "got 'yes'", "bool"]),
        ({"fuse.fuel": -1}, ["'fuse.fuel'", "got -1", "int >= 0"]),
        ({"mode": "fastest"}, ["unknown mode 'fastest'. Accepted: ", "max-autotune"]),
        ({"mode": 3}, ["unknown mode '3'. Accepted: ", "max-autotune"]),
        ({3: "off"}, ["names of options are strings, got 3"]),
        (["fuse.gate"], ["options=['fuse.gate']", "a dict is accepted"]),
        ({"fuse.gate_seconds": 10**400}, ["'fuse.gate_seconds'", "number >= 0"]),
        ({"fuse.gate": ["off", "auto"]}, ["'fuse.gate'", "got ['off', 'auto']", "measure"]),
        ({"fuse.patterns": "zzz"}, ["unknown pattern in option 'fuse.patterns' 'zzz'. Accepted: "]),
    ],
)
def test_a_wrong_option_is_an_error_that_names_what_is_accepted(options, words):
    with pytest.raises(ValueError) as error:
        parse(options=options)
    for word in words:
        assert word in str(error.value)


def test_a_wrong_option_reaches_the_user_of_torch_compile():
    with pytest.raises(Exception, match="did you mean 'fuse.strict'"):
        torch.compile(lambda x: x + 1, backend="fuse", options={"fuse.strct": True})(torch.ones(2))


def test_a_value_that_inductor_does_not_take_is_named_and_is_no_defect(caplog):
    with pytest.raises(Exception, match="max_autotune, got str should be bool"):
        torch.compile(lambda x: x + 1, backend="fuse", options={"max_autotune": "yes"})(torch.ones(2))
    assert "all is left to Inductor" not in caplog.text and fusebackend.last_report() is None


def test_a_mode_given_twice_must_agree():
    assert parse("max-autotune", {"mode": "max-autotune"}).mode == "max-autotune"
    with pytest.raises(ValueError, match="given twice"):
        parse("max-autotune", {"mode": "reduce-overhead"})


@pytest.mark.parametrize("mode", list(torch._inductor.list_mode_options()))
def test_every_mode_gives_inductors_settings(mode):
    expected = torch._inductor.list_mode_options(mode)
    assert inductor_patches(parse(mode)) == expected
    assert inductor_patches(parse(None, {"mode": mode})) == expected


def test_other_options_go_to_inductor():
    chosen = parse(options={"max-autotune": True, "fuse.strict": True})
    assert inductor_patches(chosen) == {"max_autotune": True}


def test_a_list_that_only_leaves_out_starts_from_all():
    assert "transpose_add" in {p.name for p in select(("all",))}
    assert "transpose_add" not in {p.name for p in select(("-transpose_add",))}
    assert {p.name for p in select(("transpose_add",))} == {"transpose_add"}
    assert {p.name for p in select(("-transpose_add",))} == set(known_names()) - {"transpose_add"}
    assert select(("-all",)) == select(("all", "-all")) == select(()) == []
    assert {p.name for p in select(("-all", "transpose_add"))} == {"transpose_add"}
