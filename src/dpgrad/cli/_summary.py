"""What `dpgrad train` prints at the end: a table of methods, the privacy report, and where everything is."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad.accounting.guarantee import Guarantee, up
from dpgrad.cli import _options

if TYPE_CHECKING:
    from dpgrad.reports.page import NonPrivate
    from dpgrad.reports.report import Report

_SHOWN = ("privacy", "privacy unit", "chosen", "values", "release", "note")  # of a report, on the screen
TOGETHER = "The guarantees above are for each run alone. All runs in the ledger together have"


@dataclass(frozen=True)
class Summary:
    """What a call of the command produced; ``together`` is the guarantee of everything in the ledger."""

    reports: "Mapping[str, Report]"
    folders: Mapping[str, Path]
    non_private: "NonPrivate | None"
    together: Guarantee | None
    page: Path
    warned: Sequence[str] = ()

    def plain(self) -> dict[str, Any]:
        """The summary as plain values, for JSON; the first method's guarantee is at the top."""
        first = next(iter(self.reports.values()))
        promise, both = first["guarantee"], self.together
        shared = ("epsilon", "epsilon_lower", "delta", "relation", "sampling", "accountant")
        methods = {name: {"folder": str(self.folders[name]), "report": one} for name, one in self.reports.items()}
        return {
            **{name: promise[name] for name in shared},
            "metric": first["result"]["metric"],
            "held_out": first["result"]["held_out"],
            "methods": methods,
            "non_private": None
            if self.non_private is None
            else {"held_out": self.non_private.held_out, "guarantee": False},
            "together": None if both is None else {"statement": str(both), "epsilon": both.epsilon},
            "page": str(self.page),
            "warnings": list(self.warned),
        }

    def words(self) -> str:
        """The summary for people: the table, what matters most of the first report, and where everything is."""
        first, (_, width) = next(iter(self.reports)), _options.screen()
        parts = [self._table(), _short(self.reports[first], width)]
        if self.together is not None:
            parts.append(textwrap.fill(f"{TOGETHER} {self.together}", width) + "\n\n")
        parts += [textwrap.fill(f"warning: {line}", width) + "\n\n" for line in self.warned]
        for name, folder in self.folders.items():
            note = "share release/ only" if self.reports[name]["release"]["allowed"] else "not for release"
            parts.append(f"run folder    {folder}  ({note})\n")
        told = self.folders[first] / "release" / "report.txt"
        parts.append(f"full report   {told}, and as report.json\npage          {self.page}\n")
        return "".join(parts)

    def _table(self) -> str:
        """One line for each method, and one for the model without privacy."""
        from rich import box
        from rich.console import Console
        from rich.measure import Measurement
        from rich.table import Table

        from dpgrad.reports.report import shown

        metric = next(iter(self.reports.values()))["result"]["metric"]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("method", no_wrap=True)
        for name in ("ε", "δ", f"held-out {metric}", "steps", "seconds"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("note")
        for name, report in self.reports.items():
            promise, result = report["guarantee"], report["result"]
            table.add_row(
                name, "∞" if promise["epsilon"] is None else up(promise["epsilon"]), f"{promise['delta']:g}",
                shown(result["held_out"], metric), f"{result['steps']:,}", f"{result['seconds']:.1f}",
                "" if report["release"]["allowed"] else "not for release",
            )  # fmt: skip
        if self.non_private is not None:
            figure = shown(self.non_private.held_out, self.non_private.metric)
            table.add_row("non-private", "∞", "–", figure, "–", "–", "outside every guarantee", style="dim")
        terminal, width = _options.screen()
        buffer = io.StringIO()
        console = Console(
            file=buffer, force_terminal=terminal or None, width=width, highlight=False, markup=False, emoji=False
        )
        # A narrow terminal may break lines, but no figure is left out for want of room.
        console.width = max(width, Measurement.get(console, console.options.update(max_width=1000), table).minimum)
        console.print(table)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n\n"


def _short(report: "Report", width: int) -> str:
    """What matters most of a report, in less than a screen."""
    from dpgrad.reports.report import facts

    found = [(name, fact) for name, fact in facts(report) if name in _SHOWN]
    if report["plain"]:
        found.insert(1, ("plain words", report["plain"]["promise"]))
    found.append(("not covered", f"{len(report['outside']):,} points, which the full report lists"))
    lines = [textwrap.fill(f"{name:<14}{fact}", width, subsequent_indent=" " * 14) for name, fact in found]
    return "\n".join(lines) + "\n\n"
