"""`dpgrad report`: one self-contained page on one or more runs."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dpgrad import _files
from dpgrad.cli import _options
from dpgrad.errors import OptionError, ReportError

if TYPE_CHECKING:
    from dpgrad.cli._options import Commands
    from dpgrad.reports.page import NonPrivate
    from dpgrad.reports.report import Report

__all__ = ["add"]


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "report",
        "one page on one or more runs",
        "Writes one self-contained HTML page with a table of the runs, their curves and the privacy report of each. "
        "Reads the folders release/ only.",
        _answer,
    )
    add = parser.add_argument
    add("runs", metavar="RUN_DIR", nargs="+", help="Folders of finished runs, or folders that hold such folders.")
    add("--out", metavar="FILE.html", help="The page to write; without it, report.html in the first folder.")
    add("--json", action="store_true", help="Print one JSON object: where the page is, and the guarantees in it.")


def _answer(args: argparse.Namespace) -> str:
    from dpgrad.reports import report
    from dpgrad.reports.page import page

    folders = {run: None for name in args.runs for run in _finished(Path(name))}
    reports = {name: report.load(folder) for name, folder in _named(list(folders)).items()}
    out = Path(args.out or Path(args.runs[0]) / "report.html")
    if out.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"--out must end in .html, got {out.name!r:.80}")
    together = _together(list(reports.values()))
    _files.hand_out(out, page(reports, _non_private(args.runs), together))
    if args.json:
        runs = {name: report["guarantee"] for name, report in reports.items()}
        return json.dumps({"page": str(out), "runs": runs, "together": together}) + "\n"
    said = f"{together}\n" if together else ""
    return f"{len(reports)} run{'s' if len(reports) > 1 else ''} on {out}\n{said}"


def _together(reports: "list[Report]") -> str | None:
    """The cost of all runs together if they used the same rows, which reports do not say."""
    if len(reports) < 2:
        return None
    promises = [report["guarantee"] for report in reports]
    start = "Each guarantee is for one run alone. If the runs used the same rows, together they"
    if len({promise["relation"] for promise in promises}) > 1:
        return f"{start} cost more; how much is not known, since their neighbouring relations differ"
    if len({promise["privacy_unit"] for promise in promises}) > 1:
        return f"{start} cost more; how much is not known, since they protect different units"
    if any(report["event"] is None for report in reports):  # a schedule of many noises, which a report leaves out
        return f"{start} cost more; the ledger of the runs says how much"
    from dataclasses import replace

    from dpgrad.accounting import account
    from dpgrad.accounting.events import Compose, Relation, from_dict
    from dpgrad.accounting.guarantee import Guarantee

    event = Compose(tuple(from_dict(report["event"]) for report in reports))
    profile = account(event, Relation(promises[0]["relation"]), "pld")
    found = Guarantee.of(profile, max(promise["delta"] for promise in promises))
    return f"{start} have {replace(found, unit=promises[0]['privacy_unit'].removeprefix('one '))}"


def _finished(folder: Path) -> list[Path]:
    """The run in ``folder``, or the finished runs below it; an unfinished run is refused, since it has spent too."""
    from dpgrad.reports.report import FILE

    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder: give the folder of a finished run")
    if (folder / FILE).is_file():
        return [folder]  # what was shared of a run
    found = sorted(path.parent for path in folder.rglob("release") if path.is_dir())
    spent = sorted({path.parent for path in folder.rglob("ledger.jsonl")} - set(found))
    if not found:
        raise ReportError(
            f"{folder} holds no finished run: finish it with dpgrad train --resume --out {folder}, or with dpgrad.fit "
            "and RunFolder(path, resume=True)"
        )
    if spent:
        named = ", ".join(str(run) for run in spent[:3]) + (f" and {len(spent) - 3} more" if len(spent) > 3 else "")
        raise ReportError(
            f"{folder} holds unfinished runs, which have spent budget: {named}; finish them, or name the finished "
            "ones one by one"
        )
    return found


def _named(runs: list[Path]) -> dict[str, Path]:
    """Runs by the name of their folder, or by its path if two have the same name."""
    names = [run.resolve().name for run in runs]
    return {name if names.count(name) == 1 else str(run): run for name, run in zip(names, runs, strict=True)}


def _non_private(runs: list[str]) -> "NonPrivate | None":
    """The result without privacy that `dpgrad train` wrote next to the runs, if it is for all of them."""
    from dpgrad.reports.page import NonPrivate

    if len(runs) > 1 or not (path := Path(runs[0]) / "non-private.json").is_file():
        return None
    return NonPrivate.read(path)
