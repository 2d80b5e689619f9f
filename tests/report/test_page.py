"""The page of a report: content, links, hostile strings, large graphs, and a real browser."""

import collections
import dataclasses
import html.parser
import json
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import time
import zlib

import pytest
import torch
from stand_in_calibrations import FASTER_US
from torch import nn

import fusebackend
from fusebackend.__main__ import main
from fusebackend.report.model import Report
from fusebackend.rewriting.outcome import GraphBreak, GraphCode, GraphNode, Rejection, Source, Substitution, Verdict

VOID = {"meta", "br", "img", "input", "link", "hr", "rect", "path"}
OURS = {"input"} | set(
    "html head meta title style body h1 h2 h3 div b small ul li nav button span table thead tbody tr th td a code pre details summary "
    "p section header svg g path rect text script main label".split()
)


class Page(html.parser.HTMLParser):
    """Parses a page; fails if it is not well formed, or an identifier is used twice."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.attributes = [], collections.Counter(), {}, [], []
        self.texts = collections.defaultdict(list)
        self.feed(text)
        self.close()
        assert not self.open
        self.text = "\n".join(t for tag, texts in self.texts.items() if tag not in ("script", "style") for t in texts)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert len(attributes) == len(attrs)
        self.tags[tag] += 1
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        if "id" in attributes:
            assert attributes["id"] not in self.ids, "an identifier is used twice"
            self.ids[attributes["id"]] = (tag, attributes.get("class", ""))
        if tag == "a":
            self.links.append(attributes["href"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts[self.open[-1] if self.open else ""].append(data)

    def check(self):
        assert set(self.tags) <= OURS
        for _, name, value in self.attributes:
            assert name not in ("src", "srcset", "action", "data", "background") and not name.startswith("on")
            if name == "href":
                assert value.startswith("#") and value[1:] in self.ids, f"{value} has no target"
        assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp", "".join(self.texts["style"] + self.texts["script"]))
        return self


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)

    def forward(self, x, y):
        x = x.transpose(0, 1) + y
        return torch.relu(self.a(x).t() + self.b(x).t()).t() + 1


UNGATED = {"backend": "fuse", "options": {"fuse.gate": "off"}}


def tiny():
    return torch.compile(Model(), **UNGATED), (torch.randn(24, 16, requires_grad=True), torch.randn(16, 24))


def tiny_fused():
    return torch.compile(Model(), backend="fuse"), tiny()[1]


def keywords():
    return lambda x, *, index: x.index_add(0, index, x), (torch.randn(800, 6),), {"index": torch.arange(800)}


def wrong():
    return Model()


def wrong_args():
    return Model(), torch.randn(2)


@pytest.fixture
def report():
    model, args = tiny()
    return fusebackend.explain(model, *args)


def read(report, path):
    assert report.save(path) == path
    return Page(path.read_text()).check()


def chain(length, marked, pattern="p", graph="forward", reason=None):
    """A report on a chain of ``length`` nodes, each of them reading the one before; a near miss if there is a reason."""
    nodes = [GraphNode("n0", "placeholder", (), "f32[8]")]
    nodes += [GraphNode(f"n{i}", f"aten.op{i % 7}.default", (f"n{i - 1}",), "f32[8]") for i in range(1, length)]
    code = "\n".join(f'    {n.name}: "f32[8]" = torch.ops.{n.target}({", ".join(n.inputs)})' for n in nodes)
    found = Report()
    if reason is None:
        after = [GraphNode("new" + n.name, "ours.op", n.inputs, n.spec) if n.name in marked else n for n in nodes]
        after = [GraphNode(n.name, n.target, tuple("new" + i if i in marked else i for i in n.inputs), n.spec) for n in after]
        for name in marked:
            names = {"node": name, "replaced_nodes": (name,), "new_nodes": ("new" + name,)}
            found.substitutions.append(
                Substitution(pattern, graph, Source(), ("aten.op",), ("ours.op",), ("f32[8]",), ("f32[8]",), **names)
            )
        found.graphs.append(GraphCode(graph, code, code.replace("n", "newn"), length, tuple(nodes), tuple(after)))
    else:
        found.rejections += [Rejection(pattern, graph, Source(), reason, name) for name in marked]
        found.graphs.append(GraphCode(graph, code, code, length, tuple(nodes), tuple(nodes)))
    return found


def test_a_report_holds_the_nodes_of_its_graphs_and_of_its_substitutions(report):
    (substitution,) = report.substitutions
    forward = next(c for c in report.graphs if c.name == "forward")
    before, after = ({n.name: n for n in nodes} for nodes in (forward.nodes_before, forward.nodes_after))
    assert set(substitution.replaced_nodes) <= set(before) and not set(substitution.replaced_nodes) & set(after)
    assert set(substitution.new_nodes) <= set(after) and not set(substitution.new_nodes) & set(before)
    replaced = before[substitution.node]
    assert (replaced.target, replaced.spec, replaced.source) == ("aten.add.Tensor", "f32[16, 24]", substitution.source)
    for nodes in (forward.nodes_before, forward.nodes_after):
        seen = set()
        for node in nodes:
            assert set(node.inputs) <= seen, "not in topological order"
            seen.add(node.name)
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == Report.from_dict(report.to_dict()) == report


def test_the_code_of_a_graph_with_nothing_found_is_kept_by_explain_only(interpreted):
    found = fusebackend.explain(lambda x: x.sin(), torch.randn(3))
    assert all(c.nodes_before and "aten.sin" in c.before for c in found.graphs)
    interpreted(lambda x: x.sin())(torch.randn(3))
    assert all(not c.nodes_before and not c.before for c in fusebackend.last_report().graphs)


def test_the_page_links_rows_drawings_and_code(report, tmp_path):
    page = read(report, tmp_path / "x.html")
    assert page.tags["svg"] >= 2
    gone = [i for i, (tag, style) in page.ids.items() if tag == "g" and style == "n gone"]
    new = [i for i, (tag, style) in page.ids.items() if tag == "g" and style == "n sub"]
    missed = [i for i, (tag, style) in page.ids.items() if tag == "g" and style == "n miss"]
    assert len(gone) == len(new) == 1 and missed
    assert page.ids["s0"][0] == page.ids["m0"][0] == "tr"
    for place in (*gone, *missed[:1]):
        assert f"#{place}" in page.links, "no row links to the drawing"
        assert f"#{place}c" in page.links, "the drawing does not link to the code"
    assert page.ids[f"{gone[0]}c"] == ("div", "gone") and page.ids[f"{new[0]}c"] == ("div", "sub")
    assert page.links.count("#s0") >= 2, "drawing and code link to the row"
    assert "x.transpose(0, 1) + y" in page.text and "test_page.py:" in page.text
    assert all(r.reason in page.text for r in report.rejections)


def test_names_from_the_program_stay_text(tmp_path):
    nasty = [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</style></title>&amp;",
        "' onmouseover='x",
        "http://evil/]]>\u2028",
    ]
    for evil in nasty:
        nodes = (GraphNode(evil, evil, (), evil, Source(evil, 1, evil, evil)), GraphNode("b" + evil, evil, (evil,), evil))
        found = Report(
            [Substitution(evil, evil, Source(evil, 3, evil, evil), (evil,), (evil,), (evil,), (evil,), evil, evil, (evil,), (evil,))],
            [Rejection(evil, evil, Source(evil, 3, evil, evil), evil, "b" + evil)],
            [GraphCode(evil, f"# {evil}\nreturn {evil}", evil, 2, nodes, nodes)],
            notes=[evil],
        )
        page = read(found, tmp_path / "x.html")
        assert page.tags["script"] == 1 and "img" not in page.tags and evil in page.text


def test_of_a_large_graph_only_the_neighbourhoods_are_drawn(tmp_path):
    found = chain(5000, ["n1000", "n1002", "n4000"])
    began = time.perf_counter()
    page = read(found, tmp_path / "x.html")
    assert time.perf_counter() - began < 5
    assert (tmp_path / "x.html").stat().st_size < 100_000
    assert "… 997 nodes …" in page.text and "… 2,993 nodes …" in page.text and "… 997 nodes …" in page.text
    drawn = [i for i, (tag, _) in page.ids.items() if tag == "g" and "b" in i]
    assert len(drawn) == 7 + 5
    assert "The drawings show the nodes within 2 steps" in page.text and re.search(r"… [\d,]+ lines …", page.text)


def test_sites_that_look_alike_are_drawn_once(tmp_path):
    page = read(chain(3000, [f"n{i}" for i in range(700, 2100, 70)], reason="no <kernel>"), tmp_path / "x.html")
    assert page.tags["svg"] == 1 and "19 more that look the same" in page.text and "alike ×19" in page.text
    page = read(chain(3000, [f"n{i}" for i in range(60, 2960)], reason="all"), tmp_path / "x.html")
    assert page.tags["svg"] <= 41


def test_a_whole_small_graph_is_drawn(tmp_path):
    page = read(chain(20, ["n9"]), tmp_path / "x.html")
    assert "The drawings show the nodes" not in page.text and len([i for i, (tag, _) in page.ids.items() if tag == "g"]) == 40


def test_an_empty_report_has_a_page(tmp_path):
    page = read(Report(notes=["nothing was compiled"]), tmp_path / "x.html")
    assert "nothing was compiled" in page.text and not page.tags["table"]


def test_save_takes_html_and_json(report, tmp_path):
    report.save(tmp_path / "x.json")
    assert Report.from_dict(json.loads((tmp_path / "x.json").read_text())) == report
    with pytest.raises(ValueError, match=r"saved as \.html or \.json, got '.*x\.pdf'"):
        report.save(tmp_path / "x.pdf")


def test_a_drawing_names_parameters_and_breaks_no_shape(tmp_path):
    shapes = ["f32[4, 128, 128]", "f32[128, 1, 128]", "f32[7]"]
    weight = GraphNode("primals_3", "placeholder", (), ", ".join(shapes), label="model.layers.3.mixer.conv1d_with_a_long_name.weight")
    nodes = (weight, GraphNode("n1", "aten.relu.default", ("primals_3",), "f32[" + "12345, " * 9 + "8]"))
    found = Report(rejections=[Rejection("p", "forward", Source(), "no", "n1")], graphs=[GraphCode("forward", "", "", 2, nodes, nodes)])
    drawn = read(found, tmp_path / "x.html").texts["text"]
    assert "…ixer.conv1d_with_a_long_name.weight"[-33:] in drawn[0] and drawn[0].startswith("…")
    assert drawn[1] == "f32[4, 128, 128], … 2 more" and drawn[3] == nodes[1].spec


def test_the_command_line_writes_json_and_compares_with_it(tmp_path, capsys):
    old, target = tmp_path / "old.json", tmp_path / "new.html"
    assert main(["explain", f"{__name__}:tiny", "--json", str(old)]) == 0
    assert main(["explain", f"{__name__}:tiny_fused", "--compare", str(old), "--html", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "no longer substituted: transpose_add in forward" in printed and "options: fuse.gate='off' -> defaults" in printed
    page = Page(target.read_text()).check()
    assert page.ids["changes"][0] == "table" and "no longer substituted" in page.text
    old.write_text("[]")
    assert main(["explain", f"{__name__}:tiny", "--compare", str(old)]) == 2
    assert "--compare takes a report that --json wrote" in capsys.readouterr().err


def test_the_command_line_explains_and_writes_the_page(tmp_path, capsys, calibrated):
    calibrated(FASTER_US)
    target = tmp_path / "out.html"
    assert main(["explain", f"{__name__}:tiny", "--html", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "1 substitution in 2 graphs" in printed and str(target) in printed
    Page(target.read_text()).check()
    assert main(["explain", f"{__name__}:keywords", "--dynamic"]) == 0
    assert "s" in re.search(r"f32\[(\w+), ", capsys.readouterr().out)[1], "sizes are symbols"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([__name__], "takes package.module:function, got"),
        (["no_such_module:f"], "no module 'no_such_module'"),
        ([f"{__name__}:nobody"], "has no 'nobody'; its own callables: .*tiny"),
        ([f"{__name__}:VOID"], "must be a function, got set"),
        ([f"{__name__}:wrong"], r"must return \(model_or_function, args\).*, got Model"),
        ([f"{__name__}:wrong_args"], "args a tuple and kwargs a dict; got Tensor and dict"),
        ([f"{__name__}:tiny", "--json", "x.txt"], "FILE.json is accepted, got 'x.txt'"),
        ([f"{__name__}:tiny", "--compare", "none.json"], "--compare takes a report that --json wrote, got 'none.json': No such file"),
        ([f"{__name__}:tiny", "--html", "x.pdf"], "FILE.html is accepted, got 'x.pdf'"),
    ],
)
def test_the_command_line_says_what_it_takes(arguments, said, capsys):
    assert main(["explain", *arguments]) == 2
    assert re.search(said, capsys.readouterr().err)


TRACED = textwrap.dedent(
    """
    import torch
    def fn(x, y, z):
        return ((x.t() + y) @ x).sum() + (x.t() + z.half()).sum()
    x, y, z = torch.randn(8, 6, requires_grad=True), torch.randn(6, 8), torch.randn(6, 8)
    torch.compile(fn, backend="fuse", options={"fuse.interpret": True, "fuse.gate": "off"})(x, y, z).backward()
    """
)


@pytest.mark.parametrize("level", ["+", ""])
def test_torch_logs_and_trace_show_what_happened(level, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", f"{level}fusebackend")
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(TRACED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "transpose_add" in line]
    assert any("transpose_add in forward at script.py:" in line for line in said)
    assert any("left to Inductor at script.py:" in line for line in said) == (level == "+")

    lines = "".join(p.read_text() for p in tmp_path.glob("*.log")).splitlines()
    at = [i for i, line in enumerate(lines) if '"artifact": {"name": "fusebackend_report"' in line]
    assert at, "no artifact"
    payload = []
    for line in lines[at[-1] + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line.strip())
    found = Report.from_dict(json.loads("\n".join(payload)))
    assert found.counts() == {"transpose_add": 1} and {c.name for c in found.graphs} == {"forward", "backward"}
    assert any('"name": "fusebackend_report_text"' in line for line in lines)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def colours(path):
    """The number of pixels of each colour in a PNG of 8-bit RGB or RGBA."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, form = struct.unpack(">IIBB", body[:10])
        packed += body if kind == b"IDAT" else b""
        at += length + 12
    assert depth == 8 and form in (2, 6)
    step = 3 if form == 2 else 4
    raw, row, rows = zlib.decompress(packed), bytearray(width * step), collections.Counter()
    for y in range(height):
        start = y * (width * step + 1)
        mode, line = raw[start], bytearray(raw[start + 1 : start + 1 + width * step])
        for i in range(len(line)) if mode else ():
            left, up, corner = (line[i - step], row[i], row[i - step]) if i >= step else (0, row[i], 0)
            if mode == 4:
                guess = left + up - corner
                add = min((left, up, corner), key=lambda v: abs(guess - v))
            else:
                add = (0, left, up, (left + up) // 2)[mode]
            line[i] = (line[i] + add) & 255
        row = line
        rows.update(zip(*(line[k::step] for k in range(3))))
    return rows


needs_browser = pytest.mark.skipif(not BROWSER, reason="needs chromium or google-chrome on the PATH (Debian: apt-get install chromium)")


@pytest.fixture
def browser(tmp_path):
    """Runs a headless browser on a page, with more arguments."""
    quiet = "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
    start = [BROWSER, "--headless", *(f"--{flag}" for flag in quiet.split()), "--hide-scrollbars", "--force-device-scale-factor=1"]

    def run(page, *more):
        folder = f"--user-data-dir={tmp_path / 'profile'}"
        return subprocess.run([*start, folder, *more, page.as_uri()], capture_output=True, text=True, timeout=120)

    return run


@needs_browser
def test_a_browser_runs_the_script_and_draws_the_graph(report, tmp_path, browser):
    page = tmp_path / "report.html"
    report.save(page)
    dom = browser(page, "--dump-dom")
    drawn = re.search(r'<html[^>]* data-ready="(\d+)"', dom.stdout)
    assert drawn, f"the script did not run to its end: {dom.stderr[-2000:]}"
    assert int(drawn[1]) == page.read_text().count('<g class="n ')


# The fills of a replaced node, a new node and a near miss, and the page behind them (page.css).
LIGHT = [(0xFD, 0xE8, 0xE2), (0xDC, 0xF5, 0xEA), (0xFD, 0xF1, 0xD3), (0xFB, 0xFB, 0xFA)]
DARK = [(0x46, 0x23, 0x1B), (0x14, 0x3B, 0x2D), (0x3F, 0x32, 0x14), (0x15, 0x17, 0x1A)]


@needs_browser
@pytest.mark.parametrize(("arguments", "fills"), [([], LIGHT), (["--force-dark-mode"], DARK)])
def test_the_screenshot_has_the_colours_of_the_scheme(arguments, fills, report, tmp_path, browser):
    page, shot = tmp_path / "report.html", tmp_path / "shot.png"
    report.save(page)
    done = browser(page, "--window-size=1280,2000", f"--screenshot={shot}", *arguments)
    assert shot.exists(), done.stderr[-2000:]
    seen = colours(shot)
    for fill in fills:
        assert seen[fill] > 500, f"{fill} is not on the page"


def wide():
    """A report with long names in every column."""
    name, line = "a_pattern_with_quite_a_long_name", "x = self.something_long(self.with_more(x.transpose(1, 2), some_argument=3))" * 2
    source = Source("/a/long/folder/modeling_something.py", 1234, "forward_with_a_long_name", line)
    specs = tuple(f"bf16[{i}, 4096, 11008, 128]" for i in range(4))
    module = "model.language_model.layers.3.mixer.conv1d_of_a_long_name"
    found = Report(context={"options": "x" * 300}, breaks=[GraphBreak("reason " * 40 + "y" * 200, source)])
    for i in range(12):
        names = {"node": f"n{i}", "replaced_nodes": (f"n{i}",), "new_nodes": (f"newn{i}",), "module": module.replace("3", str(i))}
        operators = ("aten._unsafe_masked_index_put_accumulate.default",) * 5
        found.substitutions.append(Substitution(name, "forward", source, operators, operators, specs, specs, **names))
        found.rejections.append(Rejection(name, "forward", source, "reason " * 30, f"n{i + 12}", module=module))
        found.verdicts.append(Verdict(name, "forward", source, True, 1.0, 1.5, "measured", module.replace("3", str(i))))
    nodes = chain(40, [f"n{i}" for i in range(12)]).graphs[0]
    return dataclasses.replace(found, graphs=[nodes])


MEASURE = """{
const cut = [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.ariaLabel);
const split = [...document.querySelectorAll(".shape")].filter((e) => e.getClientRects().length > 1).length;
const page = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const key = (key, target) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const visible = () => [...document.querySelectorAll("#subs tbody tr, #misses tbody tr")].filter((e) => !e.hidden).length;
key("/", document.body);
const search = document.activeElement;
const before = visible();
search.value = "LAYERS.7.mixer";
search.dispatchEvent(new Event("input"));
const found = visible();
search.value = "no such word";
search.dispatchEvent(new Event("input"));
const none = visible();
key("Escape", search);
const y = scrollY;
search.blur();
key("n", document.body);
const dead = [...document.querySelectorAll(".scroll, .side")].filter((e) => e.tabIndex !== 0).length;
document.body.dataset.measured = JSON.stringify({
  cut, split, page, focused: search.id, before, found, none, after: visible(), scrolled: scrollY > y, dead
});
}"""


@needs_browser
def test_nothing_is_cut_at_1280_pixels_and_keys_and_search_work(tmp_path, browser):
    path = tmp_path / "report.html"
    wide().save(path)
    Page(path.read_text()).check()
    # The page's policy forbids other scripts than its own: in this copy it is taken out.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text())
    path.write_text(text.replace("</body>", f"<script>{MEASURE}</script></body>"))
    dom = browser(path, "--window-size=1280,900", "--dump-dom")
    found = re.search(r'data-measured="([^"]*)"', dom.stdout)
    assert found, dom.stderr[-2000:]
    assert json.loads(found[1].replace("&quot;", '"')) == {
        **{"cut": [], "split": 0, "page": 0, "focused": "search", "dead": 0, "scrolled": True},
        **{"before": 2, "found": 1, "none": 0, "after": 2},
    }
