"""`dpgrad reproduce`: the tables and figures of the papers, run here and compared with the printed values."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad import _interrupt
from dpgrad.cli import _data, _options, _progress
from dpgrad.errors import MissingFileError, OptionError

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    from dpgrad.cli._options import Commands
    from dpgrad.papers.experiment import Experiment, Place, Size
    from dpgrad.papers.running import Done

__all__ = ["add"]


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "reproduce",
        "run a table or figure of the papers, and compare it with what was printed",
        "Runs every arm of an experiment with several seeds, and writes the table (Markdown, CSV, LaTeX), the figure "
        "(SVG, PNG), every trial (JSON lines) and one self-contained HTML page to a folder. Prints the paper's value "
        "next to ours with its standard error, and says for every claim whether it held. A stopped run "
        "continues with the trials that are missing. Every trial has a known seed: do not release these models.",
        _answer,
    )
    add = parser.add_argument
    add("names", metavar="NAME", nargs="*", help="Experiments by name, the beginning of their names, or all.")
    what = parser.add_argument_group("what to run")
    what.add_argument("--list", action="store_true", help="List the experiments and run none.")
    what.add_argument("--quick", action="store_true", help="A small version: about a minute on a CPU.")
    what.add_argument(
        "--finished", action="store_true", help="Write tables and figures of the finished trials, and run none."
    )
    what.add_argument(
        "--seeds", metavar="K", type=_options.count, help="Trials of each arm; default: 5, or as many as the paper has."
    )
    where = parser.add_argument_group("where")
    where.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="Where the trials run; default: cpu.")
    where.add_argument(
        "--processes", metavar="K", type=_options.count, default=1, help="How many trials run at a time; default: 1."
    )
    _data.add_folder(where)
    where.add_argument("--out", metavar="DIR", default="results", help="The folder of the results; default: results.")
    add("--json", action="store_true", help="Print one JSON object.")


def _answer(args: argparse.Namespace) -> str:
    from dpgrad.papers import running, summary
    from dpgrad.papers.experiment import Place

    if args.list:
        return _listed(args)
    if not args.names:
        raise OptionError("name an experiment, or all of them with all: dpgrad reproduce --list names them")
    data = None if args.data_dir is None else Path(args.data_dir)
    chosen, skipped = _finished(args) if args.finished else _chosen(args.names, data)
    _refuse_device(args.device)
    for name, why in skipped.items():
        print(f"dpgrad: skipped {name}: missing {why}", file=sys.stderr, flush=True)
    _interrupt.orderly()
    place = Place(args.device, data, "quick" if args.quick else "full")
    try:
        with running.processes(args.processes) as pool:
            answers = [_run(one, place, args, pool) for one in chosen]
        written = _page([done for _, _, done in answers], place, Path(args.out))
        if place.size == "full":
            summary.write(Path(args.out))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("finished trials are kept; the same command continues") from None
    if args.json:
        told = {"experiments": [one for _, one, _ in answers], "skipped": skipped, "page": str(written)}
        return json.dumps(told, allow_nan=False) + "\n"
    said = [text for text, _, _ in answers] + [f"skipped {name}: missing data" for name in skipped]
    return "\n\n".join([*said, f"page: {written}"]) + "\n"


def _page(found: "list[Done]", place: "Place", out: Path) -> Path:
    """Write the page of all that was named, after one experiment by its name."""
    from dpgrad.papers import page, running

    if len(found) > 1:
        return page.write(found, out / page.SEVERAL)
    stem = running.stem(found[0].experiment, place.size, out)
    return page.write(found, stem.with_name(f"{stem.name}.html"))


def _finished(args: argparse.Namespace) -> "tuple[list[Experiment], dict[str, str]]":
    """The named experiments that have trials in the folder; their data need not be there."""
    from dpgrad.papers import catalogue, running

    size: Size = "quick" if args.quick else "full"
    named = {one.name: one for word in args.names for one in catalogue.named(word)[0]}
    chosen = [one for one in named.values() if running.has_trials(one, size, Path(args.out))]
    if not chosen:
        raise OptionError(f"--finished: {args.out} has no trials of {', '.join(named)}: run them first")
    return chosen, {}


def _chosen(words: list[str], data: Path | None) -> "tuple[list[Experiment], dict[str, str]]":
    """The experiments to run, and those of a group whose data are missing; one that is named itself is refused."""
    from dpgrad.papers import catalogue, running

    chosen: dict[str, Experiment] = {}
    skipped: dict[str, str] = {}
    for word in words:
        found, alone = catalogue.named(word)
        for one in found:
            if not (absent := running.missing(one, data)):
                chosen[one.name] = one
            elif alone:
                raise MissingFileError(f"{one.name} needs a dataset that is missing: {absent}")
            else:
                skipped[one.name] = absent
    if not chosen:
        raise MissingFileError(f"nothing to run: {'; '.join(f'{name} needs {why}' for name, why in skipped.items())}")
    return list(chosen.values()), skipped


def _refuse_device(device: str) -> None:
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise OptionError(
            f"--device {device}: torch finds no CUDA device here: leave it out, and add --quick for a small version"
        )


def _run(
    experiment: "Experiment", place: "Place", args: argparse.Namespace, pool: "ProcessPoolExecutor | None"
) -> "tuple[str, dict[str, Any], Done]":
    """Run one experiment and write its files; the text and the JSON of the answer, and the trials."""
    from dpgrad.papers import figures, running, tables

    out = Path(args.out)
    with _progress.counting(experiment.name, experiment.figure) as show:
        done = running.reproduce(experiment, place, out, seeds=args.seeds, pool=pool, show=show, run=not args.finished)
    stem = running.stem(experiment, place.size, out)
    drawn = figures.write(experiment, done.outcomes, stem)
    files = [*tables.write(done, stem, bool(drawn)), *drawn]
    note = "" if drawn else "\nno figure: install matplotlib and run the command again with --finished"
    text = f"{tables.summary(done)}\n\nwritten: {', '.join(map(str, files))}{note}"
    return text, _fields(done, [str(path) for path in files]), done


def _fields(done: "Done", files: list[str]) -> dict[str, Any]:
    from dpgrad.papers import tables

    experiment, outcomes = done.experiment, done.outcomes
    rows = [
        {
            "arm": arm.name, "paper": experiment.printed.get(arm.name), "trials": len(outcomes.of(arm.name)),
            **{
                name: {"mean": _known(outcomes.mean(arm.name, name)), "error": _known(outcomes.error(arm.name, name))}
                for name in (experiment.figure, *experiment.also)
            },
        }
        for arm in done.arms
    ]  # fmt: skip
    found = zip(experiment.claims, tables.claims(done), strict=True)
    claims = [{"claim": text, "held": held, "kind": claim.kind} for claim, (text, held) in found]
    return {
        "name": experiment.name, "paper": experiment.paper, "item": experiment.item, "size": done.place.size,
        "rows": rows, "claims": claims, "complete": done.complete, "files": files,
    }  # fmt: skip


def _known(value: float) -> float | None:
    return value if value == value else None


def _listed(args: argparse.Namespace) -> str:
    """The list, or the part of it that is named."""
    from dpgrad.papers import catalogue, running
    from dpgrad.reports import markdown

    data = None if args.data_dir is None else Path(args.data_dir)
    shown = {one.name: one for word in args.names or ["all"] for one in catalogue.named(word)[0]}
    absent = {name: [each for each in one.needs if running.lacks(each, data)] for name, one in shown.items()}
    if args.json:
        records = [
            {
                "name": one.name, "paper": one.paper, "item": one.item, "about": one.about, "needs": list(one.needs),
                "missing": absent[one.name], "arms": [arm.name for arm in one.arms("full")], "seeds": one.seeds,
            }
            for one in shown.values()
        ]  # fmt: skip
        return json.dumps({"experiments": records}) + "\n"
    lines = [["name", "paper", "what", "arms × seeds", "data"]]
    for one in shown.values():
        data_said = ", ".join(f"{each} (missing)" if each in absent[one.name] else each for each in one.needs)
        lines.append([one.name, one.paper, one.item, f"{len(one.arms('full'))} × {one.seeds}", data_said or "–"])
    together = [
        f"{name}: drawn by {', '.join(parts)}" for name, parts in catalogue.aliases().items() if {*parts} <= {*shown}
    ]
    return "\n".join([markdown.table(lines), *together]) + "\n"
