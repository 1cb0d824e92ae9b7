"""One self-contained page over one or more reports: a table, plain words, the curves, and all that each report says."""

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgrad import __version__
from dpgrad.accounting.guarantee import up
from dpgrad.errors import OptionError, ReportError
from dpgrad.reports import strict_json
from dpgrad.reports.chart import Chart, ChartLine, tradeoff
from dpgrad.reports.interactive import script
from dpgrad.reports.style import STYLE
from dpgrad.reports.words import facts, shown

__all__ = ["FILE", "NOT_COVERED", "NonPrivate", "Reports", "page"]

Reports = Mapping[str, Mapping[str, Any]]

NOT_COVERED = "not private: computed from the training rows without noise, outside every guarantee and not for release"


@dataclass(frozen=True)
class NonPrivate:
    """The metric of a model that was trained without privacy, for comparison with private runs."""

    metric: str
    held_out: float

    @classmethod
    def read(cls, path: Path) -> "NonPrivate":
        """The metric that `dpgrad train` left in a file."""
        try:
            found = strict_json.read(path)
            return cls(str(found["metric"]), float(found["held_out"]))
        except (ValueError, KeyError, TypeError):
            raise ReportError(f"{path} is damaged: remove it to have the page without it") from None


FILE = "report.html"


def page(runs: Reports, non_private: NonPrivate | None = None, together: str | None = None) -> str:
    """The page; ``runs`` are reports by a short name, ``together`` says what all of them cost."""
    if not runs:
        raise OptionError("a page needs at least one run")
    curves = _curves(runs, non_private)
    plain = "".join(_plain(name, report, alone=len(runs) == 1) for name, report in runs.items())
    sections = "".join(_section(number, *run) for number, run in enumerate(runs.items(), 1))
    embedded = json.dumps(dict(runs), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>dpgrad report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{_hidden(runs)}</style></head><body>\n<h1>{_title(runs)}</h1>\n"
        f"{_contents(runs, bool(curves))}{_warnings(runs)}{_table(runs, non_private)}{_paragraph(together)}\n"
        f"{plain}{curves}{sections}\n"
        f'<p class="note">Written by dpgrad {__version__}.</p>\n'
        f'<script type="application/json" id="reports">{embedded}</script>\n{script(plain + curves)}</body></html>\n'
    )


def _hidden(runs: Reports) -> str:
    """Styles that hide the lines, numbers and report of a run that is not ticked, also where no script runs."""
    rules = (
        f'body:has(#tick-{n}:not(:checked)) :is(.run-{n}, [id^="run-{n}-"]) {{ display: none }}\n'
        for n in range(1, len(runs) + 1)
    )
    return "".join(rules) if len(runs) > 1 else ""


def _contents(runs: Reports, curves: bool) -> str:
    """Links to the parts of the page, in their order."""
    places = {"#curves": "Curves"} if curves else {}
    places |= {f"#report-{n}": f"Privacy report: {name}" for n, name in enumerate(runs, 1)}
    listed = "".join(f'<li><a href="{place}">{html.escape(name)}</a></li>' for place, name in places.items())
    return f'<nav aria-label="Contents"><ul>{listed}</ul></nav>\n'


def _paragraph(said: str | None, kind: str = "note") -> str:
    return "" if said is None else f'<p class="{kind}">{html.escape(said)}</p>'


def _title(runs: Reports) -> str:
    trained = any(report["result"] is not None for report in runs.values())
    return "Training with differential privacy" if trained else "Privacy report"


def _plain(name: str, report: Mapping[str, Any], *, alone: bool) -> str:
    """The promise in plain words, and what it does not mean; nothing for reports of earlier formats."""
    told = report.get("plain")
    if told is None:
        return ""
    listed = "".join(f"<li>{html.escape(entry)}</li>" for entry in told["does_not_mean"])
    return (
        f"<h2>In plain words{'' if alone else ': ' + html.escape(name)}</h2>\n"
        f'<p class="plain">{html.escape(told["promise"])}</p>\n'
        f"{_paragraph(told.get('attack'), kind='plain')}{_tradeoff(report['guarantee'].get('attacks'))}"
        f"<h3>What it does not mean</h3>\n<ul>{listed}</ul>\n"
    )


def _tradeoff(found: Mapping[str, Any] | None) -> str:
    """The trade-off between an attacker's errors: a picture, and its points in a table."""
    if found is None:
        return ""
    heads = ("false positives", "true positives, at most", "positive answer right, at most")
    rows = [f"<tr>{_figures(*heads, tag='th')}</tr>"]
    for one in found["power"]:
        least, *most = (100 * one[name] for name in ("false_positives", "power", "precision"))
        rows.append(f"<tr>{_figures(f'{least:g} %', *(f'{up(share)} %' for share in most))}</tr>")
    sure = ", ".join(f"{up(100 * one['belief'])} % (chance {one['chance']:g})" for one in found["belief"])
    return (
        "<h3>What an attack can reach</h3>\n"
        f'<div class="reach"><figure>{tradeoff(found)}<figcaption class="note">No attack has errors below the line; '
        "the dashed one is guessing without looking.</figcaption></figure>\n<div>"
        f'<table class="attacks"><caption>Largest share of members that a test finds</caption>{"".join(rows)}</table>\n'
        f'<p class="note">Membership advantage, true positives minus false positives: at most '
        f"{up(found['membership_advantage'])}. Belief in the truth from even odds, exceeded with a small chance only: "
        f"{sure}.</p></div></div>\n"
    )


def _curves(runs: Reports, non_private: NonPrivate | None) -> str:
    charts = "".join(
        f"<figure>{chart.html()}<details><summary>The numbers of this chart</summary>{chart.table()}</details></figure>"
        for chart in _charts(runs, non_private)
    )
    if not charts:
        return ""
    return (
        '<h2 id="curves">Curves</h2>\n<p class="note">ε at a step is the cost of a run that was planned to end there. '
        f'The metric is on held-out rows, which are not protected.</p>\n<div class="charts">{charts}</div>\n'
    )


def _warnings(runs: Reports) -> str:
    return "".join(
        f'<p class="warning"><b>{html.escape(name)} is not for release</b>: {html.escape(report["release"]["reason"])}.'
        "</p>\n"
        for name, report in runs.items()
        if report["release"]["allowed"] is False
    )


def _table(runs: Reports, non_private: NonPrivate | None) -> str:
    results = [report["result"] for report in runs.values() if report["result"] is not None]
    metrics = list(dict.fromkeys(result["metric"] for result in results))
    trained = ["held-out " + ", ".join(metrics), "steps", "seconds"] if results else []
    heading = f"<tr><th>{'run' if results else 'name'}</th><th>method</th>{_figures('ε', 'δ', *trained, tag='th')}"
    rows = [f"{heading}<th>neighbours, accountant</th></tr>"]
    for number, (name, report) in enumerate(runs.items(), 1):
        promise = report["guarantee"]
        epsilon = "∞" if promise["epsilon"] is None else up(promise["epsilon"])
        outcome = _outcome(report["result"]) if results else []
        rows.append(
            f"<tr><td>{_tick(number, name) if len(runs) > 1 else html.escape(name)}</td>"
            f"<td>{html.escape(report['method']['title'])}</td>"
            + _figures(epsilon, f"{promise['delta']:g}", *outcome)
            + f"<td>{html.escape(promise['relation'])}, {html.escape(promise['accountant'])}</td></tr>"
        )
    if non_private is not None:
        figures = _figures("∞", "–", shown(non_private.held_out, non_private.metric), "–", "–")
        rows.append(f"<tr><td>non-private</td><td>the same model</td>{figures}<td>{NOT_COVERED}</td></tr>")
    return f'<table class="runs">{"".join(rows)}</table>\n'


def _tick(number: int, name: str) -> str:
    """What shows a run or hides it, to compare the others."""
    return f'<label><input type="checkbox" id="tick-{number}" checked> {html.escape(name)}</label>'


def _outcome(result: Mapping[str, Any] | None) -> list[str]:
    """What came out of a run; dashes for anything else."""
    if result is None:
        return ["–"] * 3
    return [shown(result["held_out"], result["metric"]), f"{result['steps']:,}", f"{result['seconds']:.1f}"]


def _figures(*values: str, tag: str = "td") -> str:
    return "".join(f'<{tag} class="figure">{html.escape(value)}</{tag}>' for value in values)


def _charts(runs: Reports, non_private: NonPrivate | None) -> list[Chart]:
    metric = next((report["result"]["metric"] for report in runs.values() if report["result"] is not None), "metric")
    level = None if non_private is None else ("non-private", non_private.held_out)
    numbers = {name: number for number, name in enumerate(runs, 1)} if len(runs) > 1 else {}
    title = f"{metric} on held-out rows"
    found = [
        Chart(title, _lines(runs, "held_out"), level, numbers=numbers),
        Chart(f"{title}, by ε", _lines(runs, "held_out", "epsilon"), level, "ε", numbers),
        Chart("ε", _lines(runs, "epsilon"), numbers=numbers),
        Chart("clip bound", _lines(runs, "clip"), numbers=numbers),
        Chart("learning rate", _lines(runs, "learning_rate"), numbers=numbers),
    ]
    return [chart for chart in found if chart.lines]


def _lines(runs: Reports, field: str, across: str = "step") -> dict[str, ChartLine]:
    found: dict[str, ChartLine] = {}
    for name, report in runs.items():
        points = [point for point in report["curves"] if None not in (point[field], point[across])]
        if points:
            found[name] = [point[across] for point in points], [point[field] for point in points]
    return found


def _section(number: int, name: str, report: Mapping[str, Any]) -> str:
    rows, before = [], ""
    for label, fact in facts(report):
        rows.append(f"<tr><td>{'' if label == before else html.escape(label)}</td><td>{html.escape(fact)}</td></tr>")
        before = label
    head = f'<h2 id="report-{number}">Privacy report: {html.escape(name)}</h2>'
    return f'<section class="run-{number}">{head}\n<table class="facts">{"".join(rows)}</table></section>\n'
