"""A report as one HTML page that needs nothing else: no network, no library, no server.

Jinja escapes every text from the program, and a Content-Security-Policy allows no script but the page's own, so a hostile name
in a graph is only shown. Jinja is always installed: torch depends on it.
"""

from __future__ import annotations

import base64
import collections
import functools
import hashlib
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from fusebackend.report.html.graphs import graph_view
from fusebackend.report.html.tables import Tables, source_view
from fusebackend.report.text import context_lines

if TYPE_CHECKING:
    from fusebackend.report.comparison import Comparison
    from fusebackend.report.model import Report


def page(report: Report, compared: Comparison | None = None) -> str:
    """The page of ``report``, and what changed since an earlier one."""
    tables = Tables(report)
    marks = tables.marks()
    graphs, locations = [], {}
    for number, graph in enumerate(report.graphs):
        view, found = graph_view(number, graph, marks[graph.name], tables.patterns)
        graphs.append(view)
        locations.update(found)
    counts, misses = report.counts(), collections.Counter(r.pattern for r in report.rejections)
    style, script = _asset("page.css"), _asset("page.js")
    template = _environment().get_template("page.html")
    return template.render(
        headline=str(report).split("\n")[0],
        policy=_content_security_policy(script),
        style=style,
        script=script,
        report=report,
        nodes=sum(g.nodes for g in report.graphs),
        patterns=[(name, counts.get(name, 0), misses[name]) for name in tables.patterns],
        substitutions=tables.substitutions(locations),
        near_misses=tables.near_misses(locations),
        verdicts=tables.verdicts(),
        breaks=[(b.reason, source_view(b.source)) for b in report.breaks],
        context=context_lines(report.context),
        coverage=report.coverage(),
        compared=compared,
        graphs=graphs,
    )


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _asset(name: str) -> Markup:
    """A file of the templates' folder as it is: it is ours, and neither escaped nor a template."""
    environment = _environment()
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _content_security_policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
