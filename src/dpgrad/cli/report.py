"""`dpgrad report`: one self-contained page over one or more runs."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dpgrad.cli import _options

if TYPE_CHECKING:
    from dpgrad.cli._options import Commands
    from dpgrad.lab.page import Beside


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "report",
        "one page over one or more runs",
        "Writes one HTML page, without anything from elsewhere, with a table of the runs, their curves and the privacy "
        "report of each. Reads the folders release/ only.",
        _answer,
    )
    add = parser.add_argument
    add("runs", metavar="RUN_DIR", nargs="+", help="Folders of finished runs, or folders that hold such folders.")
    add("--out", metavar="FILE.html", help="Where to write it; without it, report.html in the first folder.")
    add("--json", action="store_true", help="Print one JSON object: where the page is, and the guarantees in it.")


def _answer(args: argparse.Namespace) -> str:
    from dpgrad.lab import report
    from dpgrad.lab.page import page

    folders = {run: None for name in args.runs for run in _finished(Path(name))}
    reports = {name: report.load(folder) for name, folder in _named(list(folders)).items()}
    out = Path(args.out or Path(args.runs[0]) / "report.html")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out must end in .html, got {out.name!r:.80}")
    out.write_text(page(reports, _beside(args.runs)), "utf-8")
    if args.json:
        return json.dumps({"page": str(out), "runs": {n: r["guarantee"] for n, r in reports.items()}}) + "\n"
    return f"{len(reports)} run{'s' if len(reports) > 1 else ''} on {out}\n"


def _finished(folder: Path) -> list[Path]:
    """The run in ``folder``, or the finished runs in the folders of it."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the folder of a finished run")
    found = [run for run in (folder, *sorted(folder.iterdir())) if (run / "release").is_dir()]
    if not found:
        raise ValueError(f"{folder} holds no finished run: finish it with dpgrad train --resume --out {folder}")
    return found


def _named(runs: list[Path]) -> dict[str, Path]:
    """Runs by the name of their folder, or by its path where names are not enough."""
    names = [run.resolve().name for run in runs]
    return {name if names.count(name) == 1 else str(run): run for name, run in zip(names, runs, strict=True)}


def _beside(runs: list[str]) -> "Beside | None":
    """The model without privacy that `dpgrad train` left beside the runs, where there is one of all of them."""
    from dpgrad.lab.page import Beside

    if len(runs) > 1 or not (path := Path(runs[0]) / "non-private.json").is_file():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
        return Beside(str(found["metric"]), float(found["held_out"]))
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: remove it to have the page without it") from None
