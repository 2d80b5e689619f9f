"""From the work of both forms to whether a match pays."""

import dataclasses
import threading

import pytest
import torch
from torch import fx

from fusebackend.profitability import estimating
from fusebackend.profitability.calibration import Calibration
from fusebackend.profitability.estimating import Estimator
from fusebackend.profitability.time_model import TimeModel
from fusebackend.profitability.unfit import Unfit
from fusebackend.rewriting.pattern import Generated, Match, Work, Workload

KNOWN = Calibration("a device", "2.13", "2026-01-01", 9, {"k": TimeModel(0.0, {"us": 1.0}, 1.0, noise=0.1)}, {}, call=0.0)


@pytest.fixture(autouse=True)
def questions_cost_nothing(monkeypatch):
    """So that small numbers of microseconds are worth a question."""
    monkeypatch.setattr(estimating, "_QUESTION_SECONDS", 0.0)


def taking(us, share=1.0):
    return Work("k", {"us": us}, share=share)


def estimate(*workloads, calibration=KNOWN):
    return Estimator(calibration).estimate(workloads, "post_grad", [computed()])


def computed(*inputs):
    """A node of a graph with these inputs."""
    graph = fx.Graph()
    return graph.call_function(torch.ops.aten.add.Tensor, tuple(graph.placeholder(name) for name in inputs))


@pytest.mark.parametrize(
    ("ours", "inductor", "pays", "code"),
    [(8.0, 10.0, True, None), (9.0, 10.0, None, "unmeasured"), (10.0, 9.0, None, "unmeasured"), (10.0, 8.0, False, "estimated_slower")],
)
def test_it_pays_where_the_intervals_are_apart(ours, inductor, pays, code):
    found = estimate(Workload((taking(ours),), (taking(inductor),)))
    assert found.pays is pays and found.ours.expected == ours and found.inductor.expected == inductor
    if code:
        assert found.code == code and f"{inductor:.3g} us" in found.reason and f"{ours:.3g} us" in found.reason


def test_the_errors_of_several_kernels_are_independent():
    one = estimating.total(KNOWN, [[taking(10.0)]])
    two = estimating.total(KNOWN, [[taking(5.0)], [taking(5.0)]])
    assert one.expected == two.expected == 10.0
    assert two.half_width == pytest.approx(one.half_width / 2**0.5)


def test_a_generated_sum_takes_as_long_as_the_memory_for_what_it_reads():
    """By trees that were fitted to other sums it may be expected to take less. A bus of 6000 bits at 4 GHz moves 6 MB a microsecond."""
    models = {"triton reduction": TimeModel(0.0, {"us": 1.0, "bytes": 1e12, "moved": 1e12}, 1.0, noise=0.2)}
    known = Calibration(**{**vars(KNOWN), "models": models, "properties": {"bandwidth": 6000 * 4e6}})

    def summing(us, byte_count, moved):
        return Work("triton reduction", {"us": us, "bytes": byte_count, "moved": moved})

    assert known.memory_us(6e6) == pytest.approx(1.0) and KNOWN.memory_us(6e6) == 0
    fast = estimating.total(known, [[summing(10.0, 240e6, 300e6)]])
    assert fast.expected == pytest.approx(40.0) and fast.half_width == pytest.approx(0.2)
    assert estimating.total(known, [[summing(10.0, 240e6, 6e6)]]).expected == pytest.approx(10.0, rel=1e-3), "a part of a tensor is read"
    assert estimating.total(known, [[summing(100.0, 240e6, 300e6)]]).expected == pytest.approx(100.0, rel=1e-3)
    ways = [summing(10.0, 240e6, 300e6), summing(20.0, 120e6, 120e6)]
    assert estimating.total(known, [ways]).expected == pytest.approx(20.0, rel=1e-3), "what the least way reads"


def test_what_stands_around_a_replacement_is_a_part_of_its_time(monkeypatch):
    """A neighbour's kernel, and what Inductor generates for what is left of a pass."""
    monkeypatch.setattr(estimating, "works_of", lambda work: [[taking(3.0)], [taking(2.0)]])
    node = computed("x")
    found = estimate(Workload((taking(10.0), dataclasses.replace(taking(4.0), around=True), Generated((node,))), (taking(30.0),)))
    assert found.pays is True and found.ours.expected == pytest.approx(19.0) and found.around.expected == pytest.approx(9.0)
    assert estimate(Workload((taking(10.0),), (taking(30.0),))).around is None


def test_what_is_around_a_replacement_and_not_known_leaves_it_open(monkeypatch):
    def unfit(work):
        raise Unfit("a loop of two dimensions")

    monkeypatch.setattr(estimating, "works_of", unfit)
    found = estimate(Workload((taking(10.0), Generated((computed("x"),))), (taking(30.0),)))
    assert found.pays is None and found.ours is None and "two dimensions" in found.reason


def test_a_part_of_a_shared_kernel_is_counted():
    assert estimating.total(KNOWN, [[taking(9.0, share=1 / 3)]]).expected == pytest.approx(3.0)


def test_a_kind_that_was_not_calibrated_may_be_described_as_another():
    unknown = Work("sort", {"us": 1.0}, otherwise=taking(30.0))
    found = estimate(Workload((taking(10.0),), (unknown, taking(5.0))))
    assert found.pays is True and found.inductor.expected == 35.0
    with estimating.recording() as recorded:
        estimate(Workload((taking(10.0),), (unknown,)))
    assert recorded[0].inductor == [[unknown]], "a calibration is to know it"


def test_what_other_threads_estimate_is_recorded():
    """As on GPUs, where autograd compiles backward graphs in a thread of its own."""
    with estimating.recording() as recorded:
        thread = threading.Thread(target=lambda: estimate(Workload((taking(10.0),), (taking(30.0),))))
        thread.start()
        thread.join()
    assert recorded[0].ours == [[taking(10.0)]] and recorded[0].inductor == [[taking(30.0)]]


def test_what_inductor_takes_is_told_where_ours_is_not_known():
    found = estimate(Workload((Work("sort", {"us": 1.0}),), (taking(30.0),)))
    assert found.pays is None and found.code == "unmeasured" and found.ours is None and found.inductor.expected == 30.0


def test_a_call_costs_the_host():
    calibration = Calibration(**{**vars(KNOWN), "call": 2.5})
    assert estimate(Workload((taking(8.0),), (taking(10.0),)), calibration=calibration).pays is None


def test_of_several_workloads_the_one_that_gains_most_is_taken():
    less = Match((), lambda e: None)
    whole, part = Workload((taking(8.0),), (taking(10.0),)), Workload((taking(5.0),), (taking(10.0),), match=less)
    assert estimate(whole, part).instead is less
    assert estimate(part, whole).instead is less
    assert estimate(Workload((taking(9.9),), (taking(10.0),)), Workload((taking(20.0),), (taking(10.0),), match=less)).instead is None


UNKNOWN = Work("sort", {"us": 1.0})


@pytest.mark.parametrize(("other", "offered"), [(5.0, True), (9.9, True), (20.0, False)])
def test_what_was_not_calibrated_is_offered_beside_an_alternative_that_was(other, offered):
    """Unless that does not pay: then it has no rival."""
    otherwise = Match((), lambda e: None)
    unknown = Workload((UNKNOWN,), (taking(10.0),))
    found = estimate(unknown, Workload((taking(other),), (taking(10.0),), match=otherwise, is_alternative=True))
    assert found.pays is None and found.instead is None and found.ours is None
    assert (found.rival is not None) is offered
    if offered:
        assert found.rival.instead is otherwise and found.rival.ours.expected == other


def test_less_of_a_site_is_no_rival_of_the_whole():
    less = Match((), lambda e: None)
    found = estimate(Workload((UNKNOWN,), (taking(10.0),)), Workload((taking(5.0),), (taking(10.0),), match=less))
    assert found.pays is True and found.instead is less and found.rival is None


def test_of_alternatives_that_are_known_the_faster_is_taken():
    otherwise = Match((), lambda e: None)
    for whole, other in ((8.0, 5.0), (5.0, 8.0)):
        found = estimate(
            Workload((taking(whole),), (taking(10.0),)), Workload((taking(other),), (taking(10.0),), match=otherwise, is_alternative=True)
        )
        assert found.pays is True and found.ours.expected == 5.0 and found.rival is None


def test_where_timing_would_not_tell_the_alternative_is_taken():
    otherwise = Match((), lambda e: None)
    unknown = Workload((UNKNOWN,), (taking(10.0),), untimed="an operand is computed")
    found = estimate(unknown, Workload((taking(5.0),), (taking(10.0),), match=otherwise, is_alternative=True))
    assert found.pays is True and found.instead is otherwise and found.rival is None


def test_each_alternative_is_recorded_in_turn():
    less, otherwise = Match((), lambda e: None), Match((), lambda e: None)
    workloads = (
        Workload((taking(1.0),), (taking(10.0),)),
        Workload((taking(2.0),), (taking(10.0),), match=less),
        Workload((taking(3.0),), (taking(10.0),), match=otherwise, is_alternative=True),
    )
    for number, (us, match) in enumerate(((1.0, None), (3.0, otherwise), (1.0, None))):
        with estimating.recording(number) as recorded:
            assert estimate(*workloads).instead is match
        assert recorded[0].ours == [[taking(us)]]


def test_where_a_neighbour_decides_it_is_named():
    graph = fx.Graph()
    x = graph.placeholder("x")
    neighbour = graph.call_function(torch.ops.aten.relu.default, (x,))
    found = estimate(Workload((taking(10.0),), (taking(5.0),), neighbour=neighbour))
    assert found.pays is False and found.code == "fused_neighbour" and found.node is neighbour and "aten.relu" in found.reason


def test_without_a_calibration_nothing_is_known():
    found = estimate(Workload((taking(1.0),), (taking(10.0),)), calibration=None)
    assert found.pays is None and found.code == "unmeasured" and "calibrate" in found.reason


def test_work_that_was_not_calibrated_is_not_known():
    found = estimate(Workload((Work("sort", {}),), (taking(10.0),)))
    assert found.pays is None and "'sort' takes was not calibrated" in found.reason


def test_what_timing_would_not_tell_is_left_unless_a_calibration_tells():
    def untimed(ours, calibration=KNOWN):
        return estimate(Workload((taking(ours),), (taking(10.0),), untimed="another order"), calibration=calibration)

    assert untimed(5.0).pays is True and untimed(20.0).pays is False
    for found in (untimed(9.0), untimed(5.0, None)):
        assert found.pays is False and found.code == "unmeasured" and found.reason.endswith("; another order")
    assert untimed(5.0).untimed == "another order", "nor is a yes timed"


def test_what_inductor_can_not_be_asked_is_not_known_and_asked_once(monkeypatch):
    asked = []

    def works_of(work):
        asked.append(work)
        raise estimating.Unfit("no code for it")

    monkeypatch.setattr(estimating, "works_of", works_of)
    monkeypatch.setattr(estimating, "_key", lambda nodes: "a site")
    estimator = Estimator(KNOWN)
    for _ in range(2):
        found = estimator.estimate([Workload((taking(1.0),), (Generated((computed(),)),))], "post_grad", [computed()])
        assert found.pays is None and found.reason == "no code for it"
    assert len(asked) == 1


def test_alike_layers_ask_alike_whatever_their_names():
    """What is wanted of them, and how their inputs will lie, is a part of the question."""
    graph = fx.Graph()

    def node(target, *args):
        made = graph.placeholder(target) if isinstance(target, str) else graph.call_function(target, args)
        made.meta["val"] = torch.empty(4, 6)
        return made

    def layer(name):
        x = node(name)
        scaled = node(torch.ops.aten.mul.Tensor, x, 2.0)
        return x, scaled, node(torch.ops.aten.exp.default, scaled)

    layers = [layer(name) for name in ("first", "second", "third")]
    graph.output((*(done for _, _, done in layers), layers[2][1]))

    def key(i, order=None, outputs=()):
        x, *nodes = layers[i]
        return estimating._key(Generated(tuple(nodes), outputs, orders={x: order} if order else {}))

    assert key(0) == key(1) and key(0, (1, 0)) == key(1, (1, 0))
    assert key(0) != key(0, (1, 0)) != key(0, (0, 1))
    assert key(0) != key(2), "of the third layer two tensors are read"
    assert key(0, outputs=(layers[0][2],)) == key(2, outputs=(layers[2][2],)) != key(0, outputs=layers[0][1:])
    assert key(0) != key(0, outputs=(layers[0][2],)), "what is named is understood as sums"


def test_a_constant_is_asked_for_otherwise_than_an_input():
    """It can't be cut off."""
    graph, constant = fx.Graph(), torch.ones(4, 6)
    graph.owning_module = torch.nn.Module()
    x, c = graph.placeholder("x"), graph.create_node("get_attr", "c")
    found = [graph.call_function(torch.ops.aten.exp.default, (n,)) for n in (x, c)]
    graph.output(tuple(found))
    for node in (x, c, *found):
        node.meta["val"] = constant
    first, second = (estimating._key(Generated((n,))) for n in found)
    assert first != second and second.startswith("not asked: get_attr c")


def test_what_inductor_generates_is_estimated_beside_library_calls_that_can_not_be(monkeypatch):
    monkeypatch.setattr(estimating, "works_of", lambda work: [[Work("triton reduction", {"us": 20.0})]])
    monkeypatch.setattr(estimating, "_key", lambda nodes: "a site")
    found = estimate(Workload((taking(1.0),), (Work("a library's", {"us": 7.0}), Generated((computed(),)))), calibration=ASKED)
    assert found.pays is None and found.inductor is None and "a library's" in found.reason
    assert found.generated.expected == 20.0
    together = estimating.with_library_calls(found.generated, 0.01, 0.05)
    assert together.expected == pytest.approx(30.0) and 0 < together.half_width < found.generated.half_width
    assert estimate(Workload((taking(1.0),), (Work("a library's", {"us": 7.0}),)), calibration=ASKED).generated is None


def test_inductor_is_not_asked_for_what_can_not_matter(monkeypatch):
    """Where its kernels as described are faster by far, and for what stands around a replacement that is slower already."""
    asked = []
    monkeypatch.setattr(estimating, "works_of", lambda work: asked.append(work) or [[taking(10.0)]])
    monkeypatch.setattr(estimating, "_key", lambda nodes: repr(nodes))
    original, around = Generated((computed(),), otherwise=taking(10.0)), Generated((computed(),))
    found = estimate(Workload((taking(20.0), around), (original,)), calibration=ASKED)
    assert found.pays is False and not asked and "10 us" in found.reason and "at least 20 us" in found.reason
    found = estimate(Workload((taking(13.0), around), (original,)), calibration=ASKED)
    assert found.pays is False and asked == [original], "the description alone does not tell"
    found = estimate(Workload((taking(10.5), around), (original,)), calibration=ASKED)
    assert found.pays is False and asked == [original] * 2, "nor would its time by itself tell that it pays"
    found = estimate(Workload((taking(5.0), around), (original,)), calibration=ASKED)
    assert found.pays is False and found.ours.expected == 15.0 and asked == [original] * 3 + [around]


def test_where_there_are_no_new_questions_answers_and_descriptions_decide(monkeypatch):
    asked = []
    monkeypatch.setattr(estimating, "works_of", lambda work: asked.append(work) or [[taking(10.0)]])
    monkeypatch.setattr(estimating, "_key", lambda work: str(id(work)))
    answered, described, unknown = Generated((computed(),)), Generated((computed(),), otherwise=taking(20.0)), Generated((computed(),))
    estimator = Estimator(ASKED)

    def found(original, why_not=""):
        return estimator.estimate([Workload((taking(5.0),), (original,))], "post_grad", [computed()], why_not_asked=why_not)

    assert found(answered).pays is True and estimator.questions == 1
    assert found(answered, "in vain").inductor.expected == 10.0
    assert found(described, "in vain").inductor.expected == 20.0
    assert found(unknown, "in vain").pays is None and found(unknown, "in vain").reason == "in vain"
    assert asked == [answered] and estimator.questions == 1
    assert found(unknown).pays is True and estimator.questions == 2


def test_where_nothing_is_known_of_the_original_what_is_around_is_not_asked_for(monkeypatch):
    asked = []

    def works_of(work):
        asked.append(work)
        raise Unfit("no code for it")

    monkeypatch.setattr(estimating, "works_of", works_of)
    monkeypatch.setattr(estimating, "_key", lambda nodes: repr(nodes))
    original, around = Generated((computed(),)), Generated((computed(),))
    found = estimate(Workload((taking(1.0), around), (original,)), calibration=ASKED)
    assert found.pays is None and found.reason == "no code for it" and asked == [original]


def test_beside_a_library_call_that_was_not_calibrated_the_rest_is_asked_for(monkeypatch):
    """The default gate times the call, and adds the rest."""
    monkeypatch.setattr(estimating, "works_of", lambda work: [[Work("triton reduction", {"us": 20.0})]])
    monkeypatch.setattr(estimating, "_key", lambda nodes: repr(nodes))
    rest, around = Generated((computed(),)), Generated((computed(),))
    found = estimate(Workload((taking(1.0), around), (Work("a library's", {"us": 7.0}), rest)), calibration=ASKED)
    assert found.pays is None and found.generated.expected == 20.0 and found.around.expected == 20.0 and found.ours.expected == 21.0


@pytest.mark.parametrize(("alike", "asks"), [(1, False), (5, True)])
def test_inductor_is_asked_where_what_may_be_gained_at_alike_sites_pays_for_it(monkeypatch, alike, asks):
    """Up to 12 us a site here, 10,000 times: a question of half a second is worth it at five of them."""
    asked = []
    monkeypatch.setattr(estimating, "_QUESTION_SECONDS", 0.5)
    monkeypatch.setattr(estimating, "works_of", lambda work: asked.append(work) or [[taking(40.0)]])
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.ops.aten.add.Tensor, (x, i)) for i in range(alike)]
    for node in (x, *nodes):
        node.meta["val"] = torch.empty(4, 6)
    other = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    other.meta["val"] = torch.empty(4, 7)
    graph.output((*nodes, other))
    found = estimate(Workload((taking(35.0),), (Generated((nodes[0],), otherwise=taking(40.0)),)), calibration=ASKED)
    assert (len(asked) > 0) is asks
    assert found.pays is (None if asks else False), "the description is too close to tell, and so is what would be measured"
    assert asks or "not worth asking" in found.reason
    clear = estimate(Workload((taking(20.0),), (Generated((nodes[0],), otherwise=taking(30.0)),)), calibration=ASKED)
    assert clear.pays is True, "a description decides where it does tell"


ASKED = Calibration(**{**vars(KNOWN), "models": {**KNOWN.models, "triton reduction": TimeModel(0.0, {"us": 1.0}, 1.0, noise=0.1)}})


def test_inductor_is_not_asked_where_the_fastest_way_pays_by_descriptions_beyond_doubt(monkeypatch):
    asked = []
    monkeypatch.setattr(estimating, "works_of", lambda work: asked.append(work) or [[Work("triton reduction", {"us": 20.0})]])
    monkeypatch.setattr(estimating, "_key", lambda nodes: repr(nodes))
    original = Generated((computed(),), otherwise=taking(10.0))
    other = Match((), lambda e: None)
    first, second = Workload((taking(9.0),), (original,)), Workload((taking(5.0),), (original,), match=other, is_alternative=True)
    found = estimate(first, second, calibration=ASKED)
    assert found.pays is True and found.instead is other and found.inductor.expected == 10.0 and not asked
    assert estimate(first, calibration=ASKED).inductor.expected == 20.0 and asked == [original], "too close to tell"
    for workloads in (
        (Workload((taking(1.0), original), (original,)),),  # around it code is generated, too
        (dataclasses.replace(second, spared=(taking(10.0),)),),  # Inductor is spared that at most
        (first, dataclasses.replace(second, is_alternative=False)),  # less of the site
        (Workload((Work("unknown", {"us": 1.0}),), (original,)), second),  # one way is to be timed
    ):
        assert estimate(*workloads, calibration=ASKED).inductor.expected == 20.0


def test_an_older_calibration_knows_descriptions_alone(monkeypatch):
    monkeypatch.setattr(estimating, "works_of", lambda work: [[Work("triton reduction", {"us": 20.0})]])
    monkeypatch.setattr(estimating, "_key", lambda nodes: "a site")
    workload = Workload((taking(9.0),), (Generated((computed(),), otherwise=taking(10.0)),))
    assert estimate(workload).inductor.expected == 10.0
    assert estimate(workload, calibration=ASKED).inductor.expected == 20.0
    with estimating.recording() as found:
        estimate(workload)
    assert found[0].inductor == [[Work("triton reduction", {"us": 20.0})]]


@pytest.mark.parametrize("error", [estimating.Unfit("no code for it"), AttributeError("of another version")])
def test_where_inductor_can_not_be_asked_a_description_may_stand(monkeypatch, error):
    def works_of(work):
        raise error

    monkeypatch.setattr(estimating, "works_of", works_of)
    monkeypatch.setattr(estimating, "_key", lambda nodes: "a site")
    asked = Generated((computed(),), otherwise=taking(10.0))
    assert estimate(Workload((taking(1.0),), (asked,)), calibration=ASKED).inductor.expected == 10.0


def test_recording_says_yes_and_keeps_the_work():
    workload = Workload((taking(10.0),), (taking(1.0),))
    with estimating.recording() as found:
        assert estimate(workload).pays
    assert found == [estimating.Recorded([[taking(10.0)]], [[taking(1.0)]], frozenset({"forward"}))]
    assert estimate(workload).pays is False


def test_recording_tells_which_graphs_of_a_step_a_match_is_computed_in():
    forward, backward = computed("primals_1", "primals_2"), computed("primals_1", "tangents_1")
    joint = fx.Graph()
    x, grad = joint.placeholder("primals_1"), joint.placeholder("tangents_1")
    of_x, of_grad = (joint.call_function(torch.ops.aten.neg.default, (i,)) for i in (x, grad))
    later = joint.call_function(torch.ops.aten.neg.default, (of_grad,))
    with estimating.recording() as found:
        for level, outputs in (
            ("post_grad", [forward]),
            ("post_grad", [backward]),
            ("joint", [of_x]),
            ("joint", [later]),
            ("joint", [of_x, later]),
        ):
            Estimator(KNOWN).estimate([Workload((taking(1.0),), (taking(1.0),))], level, outputs)
    assert [set(f.graphs) for f in found] == [{"forward"}, {"backward"}, {"forward"}, {"backward"}, {"forward", "backward"}]
