"""One self-contained page over experiments: each table with the paper's value next to ours, its figure and its claims.

Figures are those of `figures`. They are interactive (`reports.interactive`), and the numbers stand under each.
"""

import html
import math
import re
from collections.abc import Sequence
from pathlib import Path

from dpgrad import __version__, _files
from dpgrad.errors import OptionError
from dpgrad.papers import figures, tables
from dpgrad.papers.experiment import Outcomes
from dpgrad.papers.running import Done
from dpgrad.reports.chart import inlined, page_colours
from dpgrad.reports.interactive import plots, script
from dpgrad.reports.style import STYLE

__all__ = ["SEVERAL", "page", "write"]

SEVERAL = "reproduce.html"  # the page of a command that names several experiments
_LONGEST = 100  # points of a curve that a table lists; every trial is whole in its file
_SMALLER = 0.68  # than the figure of a file: its text can be read on a phone
_MARKS = {True: "held", False: "failed", None: "open"}


def page(found: Sequence[Done]) -> str:
    """The page of one or more experiments, in their order."""
    if not found:
        raise OptionError("a page needs at least one experiment")
    alone = len(found) == 1
    title, top = (_title(found[0]), found[0].experiment.paper) if alone else ("Papers and ours",) * 2
    sections = "".join(_section(done, done.experiment.item if alone else _title(done)) for done in found)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>\n<h1>{html.escape(top)}</h1>\n{_contents(found)}"
        f"{sections}"
        '<p class="note">The trials come from fixed seeds: none of these models is for release. '
        f"Written by dpgrad {__version__}.</p>\n{script(sections)}</body></html>\n"
    )


def _title(done: Done) -> str:
    return f"{done.experiment.paper}, {done.experiment.item}"


def _contents(found: Sequence[Done]) -> str:
    if len(found) == 1:
        return ""
    listed = "".join(
        f'<li><a href="#{html.escape(done.experiment.name)}">{html.escape(_title(done))}</a></li>' for done in found
    )
    return f'<nav aria-label="Contents"><ul>{listed}</ul></nav>\n'


def _section(done: Done, head: str) -> str:
    experiment = done.experiment
    size = {"quick": "Quick size: not the paper's settings.", "tiny": "Tiny size: a test."}.get(done.place.size, "")
    partial = "" if done.complete else f"Partial: {len(done.lines)} of {len(done.arms) * done.seeds} trials."
    warning = " ".join(filter(None, (size, partial)))
    return (
        f'<section id="{html.escape(experiment.name)}"><h2>{html.escape(head)}</h2>\n'
        f"<p>{html.escape(experiment.about)}</p>\n"
        + (f'<p class="warning">{warning}</p>\n' if warning else "")
        + f"{_claims(done)}{_drawn(done)}{_arms(tables.rows(done))}"
        '<p class="note">Mean ± standard error over trials with different seeds.</p>\n'
        f"{_curves(done.outcomes)}{_settings(done)}"
        f'<p class="note"><code>{html.escape(tables.command(done))}</code><br>{_coded(tables.made(done))}</p>'
        "</section>\n"
    )


def _coded(markdown: str) -> str:
    return re.sub("`(.+?)`", r"<code>\1</code>", html.escape(markdown))


def _claims(done: Done) -> str:
    parts = []
    for kind, heading in tables.HEADINGS.items():
        if told := tables.claims(done, kind):
            listed = "".join(
                f'<li class="{_MARKS[held]}"><b>{tables.verdict(done, held)}</b>: {html.escape(text)}</li>'
                for text, held in told
            )
            parts.append(f'<h3>{heading}</h3>\n<ul class="claims">{listed}</ul>\n')
    return "".join(parts)


def _drawn(done: Done) -> str:
    """The figure; nothing where matplotlib is not installed or no trial has run."""
    if not done.lines:
        return ""
    try:
        with page_colours(done.experiment.name):
            figure = figures.drawn(done.experiment, done.outcomes)
            figure.set_size_inches(*(_SMALLER * side for side in figure.get_size_inches()))
            label = f"{_title(done)}: the table below has its numbers"
            made = plots(figure, inlined(figure, label), label)
    except ImportError:
        return '<p class="note">No figure: install matplotlib and run the command again with --finished.</p>\n'
    return f'<figure class="paper">{made}</figure>\n'


def _arms(rows: Sequence[Sequence[str]]) -> str:
    """The table of the arms; each cell names its column for screens that are too narrow for columns."""
    heads = [html.escape(cell) for cell in rows[0]]
    lines = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in heads)}</tr>"]
    for row in rows[1:]:
        cells = [f'<td data-head="{head}">{html.escape(cell)}</td>' for head, cell in zip(heads, row, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="arms">{"".join(lines)}</table>\n'


def _curves(outcomes: Outcomes) -> str:
    """The curves of the trials as tables, each behind its name."""
    found = []
    for arm in outcomes.arms:
        names = [name for name, value in outcomes.of(arm)[0].items() if _numbers(value)]
        curves = {name: outcomes.curve(arm, name) for name in names}
        for length in sorted({len(curve) for curve in curves.values()} - {0, 1}):
            alike = {name: curve for name, curve in curves.items() if len(curve) == length}
            every = -(-length // _LONGEST)
            thinned = f", every {every}th" if every > 1 else ""
            body = "".join(
                f"<tr>{''.join(f'<td>{_cell(curve[place])}</td>' for curve in alike.values())}</tr>"
                for place in range(0, length, every)
            )
            heads = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in alike)
            found.append(
                f"<details><summary>{html.escape(arm)}: {length} points{thinned}</summary>"
                f'<table class="data"><tr>{heads}</tr>{body}</table></details>\n'
            )
    return "".join(found)


def _cell(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.5g}"


def _numbers(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, int | float | None) for one in value)


def _settings(done: Done) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(arm.name)}</td><td>{html.escape(tables.setting(arm.setting))}</td>"
        f"<td>{html.escape(arm.choice)}</td></tr>"
        for arm in done.arms
    )
    head = "<tr><th></th><th>setting</th><th>how it was chosen</th></tr>"
    return f'<details><summary>Settings</summary><table class="settings">{head}{rows}</table></details>\n'


def write(found: Sequence[Done], path: Path) -> Path:
    """Write the page; the file is replaced as a whole."""
    _files.replace(path, page(found).encode())
    return path
