"""What `dpgrad train` says at the end: a table of methods, the privacy report, and where everything is."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad.accounting.guarantee import Guarantee, up
from dpgrad.cli import _options

if TYPE_CHECKING:
    from dpgrad.reports.page import Beside
    from dpgrad.reports.report import Report

TOGETHER = "The guarantees above are for each run alone. All runs in the ledger together have"


def plain(
    reports: "Mapping[str, Report]",
    folders: Mapping[str, Path],
    beside: "Beside | None",
    together: Guarantee | None,
    page: Path,
    warned: Sequence[str] = (),
) -> dict[str, Any]:
    """The summary as plain values, for JSON; the first method's guarantee stands at the top."""
    first = next(iter(reports.values()))
    promise = first["guarantee"]
    return {
        **{name: promise[name] for name in ("epsilon", "epsilon_lower", "delta", "relation", "sampling", "accountant")},
        "metric": first["result"]["metric"],
        "held_out": first["result"]["held_out"],
        "methods": {name: {"folder": str(folders[name]), "report": report} for name, report in reports.items()},
        "non_private": None if beside is None else {"held_out": beside.held_out, "guarantee": False},
        "together": None if together is None else {"statement": str(together), "epsilon": together.epsilon},
        "page": str(page),
        "warnings": list(warned),
    }


def words(
    reports: "Mapping[str, Report]",
    folders: Mapping[str, Path],
    beside: "Beside | None",
    together: Guarantee | None,
    page: Path,
    warned: Sequence[str] = (),
) -> str:
    """The summary for people."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    from dpgrad.reports.report import shown, text

    metric = next(iter(reports.values()))["result"]["metric"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("ε", "δ", f"held-out {metric}", "steps", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    for name, report in reports.items():
        promise, result = report["guarantee"], report["result"]
        table.add_row(
            name, "∞" if promise["epsilon"] is None else up(promise["epsilon"]), f"{promise['delta']:g}",
            shown(result["held_out"], metric), f"{result['steps']:,}", f"{result['seconds']:.1f}",
            "" if report["release"]["allowed"] else "not for release",
        )  # fmt: skip
    if beside is not None:
        figure = shown(beside.held_out, beside.metric)
        table.add_row("non-private", "∞", "–", figure, "–", "–", "outside every guarantee", style="dim")
    terminal, width = _options.screen()
    buffer = io.StringIO()
    console = Console(
        file=buffer, force_terminal=terminal or None, width=width, highlight=False, markup=False, emoji=False
    )
    # A narrow terminal may break lines, but no figure is left out for want of room.
    console.width = max(width, Measurement.get(console, console.options.update(max_width=1000), table).minimum)
    console.print(table)
    drawn = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n\n"
    first = next(iter(reports))
    parts = [drawn, f"Privacy report of {first}\n\n{text(reports[first])}\n"]
    if together is not None:
        parts.append(textwrap.fill(f"{TOGETHER} {together}", width) + "\n\n")
    parts += [textwrap.fill(f"warning: {text}", width) + "\n\n" for text in warned]
    for name, folder in folders.items():
        note = "share release/ only" if reports[name]["release"]["allowed"] else "not for release"
        parts.append(f"run folder    {folder}  ({note})\n")
    parts += [f"report        {folders[first] / 'release' / 'report.json'}\n", f"page          {page}\n"]
    return "".join(parts)
