"""`python -m benchmarks.steps`: time, memory and set-up of a private step beside peers, and how they grow."""

import argparse
import contextlib
import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.steps.engines import Engine
    from benchmarks.steps.race import Settings
    from benchmarks.steps.results import Report
    from benchmarks.steps.workloads import Workload

PEERS = "benchmarks.peers"
MODULE = "benchmarks.steps"
SCALES = ("batch", "width", "length", "depth", "groups", "history")
CURVE_SECONDS = 480.0  # after which a curve is cut on CUDA


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table or one JSON object; the exit status is 2 where the input was refused."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        sys.stdout.write(_answer(args, sys.argv[1:] if argv is None else argv))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        allow_abbrev=False,
        description="Measures one step of training, private and not, by every engine there is: on a CPU side by side, "
        "on CUDA each engine in its own process. Every row is printed and written as soon as it is measured. "
        "With --scale it measures how the cost of a step grows.",
    )
    add = parser.add_argument
    add("--only", metavar="NAME", nargs="+", help="These rows of the table; default: all that suit the device.")
    add("--list", action="store_true", help="Only print the names of rows and engines.")
    add("--engines", metavar="NAME", nargs="+", help="Only these, by the names in the table.")
    add("--device", choices=("cpu", "cuda"), help="Default: cuda where there is one.")
    add("--batch-size", metavar="B", type=_count, help="Instead of each row's own.")
    add("--repeat", metavar="R", type=_count, default=15, help="Most rounds; default: 15.")
    add("--seconds", metavar="S", type=_positive, default=3.0,
        help="Rounds of an engine end after so many seconds of timed steps; at least three; default: 3.")  # fmt: skip
    add("--threads", metavar="N", type=_count, default=1,
        help="Of the CPU; default: 1, which on a CPU is timed by the process's own seconds.")  # fmt: skip
    add("--limit", metavar="S", type=_positive, default=60.0,
        help="On CUDA cut an engine that takes more seconds for a row, everything included; default: 60.")  # fmt: skip
    add("--tf32", action=argparse.BooleanOptionalAction, default=True,
        help="Let all engines round the factors of products to TF32 on CUDA; default: yes.")  # fmt: skip
    add("--memory", action="store_true", help="On a CPU also measure peak memory, which is slow.")
    add("--peers", metavar="MODULE", default=PEERS,
        help=f"A module with further ENGINES; default: {PEERS}; 'none' for none.")  # fmt: skip
    add("--scale", nargs="+", choices=SCALES, metavar="|".join(SCALES), help="How cost grows.")
    add("--points", metavar="X", nargs="+", type=_not_negative, help="The points of the one --scale.")
    add("--write", action="store_true", help="Write to benchmarks/results, into what is there already.")
    add("--out", metavar="FILE.json", type=_json_file, help="The same, to FILE.json and FILE.md.")
    add("--plot-from", metavar="FILE.json", type=_json_file, help="Only draw the curves of FILE.json, to FILE.svg.")
    add("--json", action="store_true", help="Print one JSON object.")
    return parser


def _count(text: str) -> int:
    return _not_negative(text, least=1)


def _not_negative(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of {least} or more, got {text!r:.40}")
    return int(text)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r:.40}")


def _json_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a .json file in a folder that exists, got {text!r:.80}")
    return path


def _answer(args: argparse.Namespace, argv: Sequence[str]) -> str:
    if args.plot_from is not None:
        return _plot(args.plot_from, args.json)
    settings = _settings(args)
    own, peers = _engines(args, settings.device)  # refused before the work
    names = _chosen(args.only, *_rows(settings.device), "row")
    if args.points is not None and len(args.scale or ()) != 1:
        raise ValueError("--points are those of one --scale: name one")
    if args.list:
        return "".join(f"{name}\n" for name in (*names, *own, *peers))
    report = _report(args, settings, argv)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("cut off"))
    try:
        if args.scale:
            _measure_curves(args, settings, report)
        else:
            for name in names:
                _measure(args, settings, report, name, own, peers)
    except KeyboardInterrupt:
        _say("interrupted: what was measured follows")
    finally:
        signal.signal(signal.SIGTERM, before)
    return json.dumps(report.fields(), allow_nan=False) + "\n" if args.json else f"{report.text()}\n"


def _rows(device: str) -> tuple[list[str], list[str]]:
    """All rows, and those that are usual on the device."""
    from benchmarks.steps.cases import CASES, usual

    return list(CASES), usual(device)


def _report(args: argparse.Namespace, settings: "Settings", argv: Sequence[str]) -> "Report":
    from benchmarks import environment
    from benchmarks.steps.results import Report

    file: Path | None = args.out
    if args.write:
        kind = "scale" if args.scale else "engines"
        file = environment.RESULTS / f"{kind}{'' if settings.device == 'cpu' else '_cuda'}.json"
    run = {**environment.describe(MODULE, argv), **_gpu(settings.device)}
    return Report(run, asdict(settings), file)


def _settings(args: argparse.Namespace) -> "Settings":
    import torch

    from benchmarks.steps.race import Settings

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device, and torch finds none: leave it out, or use cpu")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Settings(device, args.repeat, args.threads, args.tf32, args.seconds, args.limit)


def _chosen(given: Sequence[str] | None, known: Sequence[str], usual: Sequence[str], what: str) -> list[str]:
    for name in given or ():
        if name not in known:
            raise ValueError(f"unknown {what} {name!r:.40}: there are {', '.join(known)}")
    return list(given or usual)


def _engines(args: argparse.Namespace, device: str) -> "tuple[dict[str, Engine], dict[str, Engine]]":
    """Our own and those of the peers' module, as far as they were asked for."""
    from benchmarks.steps.engines import engines

    own, peers = engines(device), {} if args.peers == "none" else _peers(args.peers)
    known = [*own, *peers]
    chosen = _chosen(args.engines, known, known, "engine")
    return {name: own[name] for name in own if name in chosen}, {name: peers[name] for name in peers if name in chosen}


def _peers(module: str) -> "dict[str, Engine]":
    """The further engines of a module, which may be anyone's."""
    try:
        there = find_spec(module) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        raise ValueError(f"--peers must be a module that can be imported, got {module!r:.80}")
    try:
        found: dict[str, Engine] = import_module(module).ENGINES
    except Exception as error:
        raise ValueError(f"--peers {module} cannot be used: {type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--peers {module} must have ENGINES, a dictionary of engines by their names")
    return found


def _say(text: str) -> None:
    print(f"{MODULE}: {text}", file=sys.stderr, flush=True)


def _measure(
    args: argparse.Namespace,
    settings: "Settings",
    report: "Report",
    name: str,
    own: "dict[str, Engine]",
    peers: "dict[str, Engine]",
) -> None:
    """One row of the table by every engine; what is known is printed and written at once."""
    from benchmarks.steps.cases import CASES, missing
    from benchmarks.steps.engines import OURS
    from benchmarks.steps.race import Row, measured
    from benchmarks.steps.results import line

    case = CASES[name]
    workload = _sized(args, case.workload.on(settings.device))
    taking_part = own if case.alone else own | peers
    _say(f"{name}: {workload.title}" + (f" ({case.alone}: no peers)" if case.alone and peers else ""))
    if (reason := missing(name)) != "":
        _say(f"  {reason}")
        report.add(Row(name, workload.title, workload.batch_size, OURS, reason=reason))
        return
    for row in measured(name, workload, taking_part, settings, args.memory):
        report.add(row)
        here = [one for one in report.rows if one.name == name]
        _say("  " + " | ".join(line(row, here, settings.device)[1:]))


def _sized(args: argparse.Namespace, workload: "Workload") -> "Workload":
    if not args.batch_size:
        return workload
    few = None if workload.microbatch is None else min(workload.microbatch, args.batch_size)
    return replace(workload.of(args.batch_size), microbatch=few)


def _measure_curves(args: argparse.Namespace, settings: "Settings", report: "Report") -> None:
    from benchmarks.steps.curves import curve
    from benchmarks.steps.processes import Failed, Worker

    for name in args.scale:
        _say(f"how cost grows with {name}")
        work: Callable[[], Any] = partial(curve, settings, args.points, name)
        found = Worker(work).result(CURVE_SECONDS) if settings.device == "cuda" else work()
        if isinstance(found, Failed):
            _say(f"left out: {found.reason}")
        else:
            report.add_curve(found)


def _gpu(device: str) -> dict[str, Any]:
    import torch

    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if device == "cuda" else {}


def _plot(file: Path, as_json: bool) -> str:
    from benchmarks.steps.curves import plotted
    from dpgrad.reports import strict_json

    found = strict_json.read(file)
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no results of this benchmark")
    if not found.get("curves"):
        raise ValueError(f"{file} holds no curves: measure some with --scale")
    try:
        picture = plotted(found["curves"])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError(f"{file}: its curves are not those of this benchmark: it was damaged or edited") from None
    drawn = file.with_suffix(".svg")
    drawn.write_text(picture, "utf-8")
    return json.dumps({"plot": str(drawn)}) + "\n" if as_json else f"The curves are drawn in {drawn}.\n"


if __name__ == "__main__":
    sys.exit(main())
