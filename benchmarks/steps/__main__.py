"""`python -m benchmarks.steps`: time and memory of a private step beside peers, and how they grow."""

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.steps.engines import Engine
    from benchmarks.steps.race import Row, Settings
    from benchmarks.steps.workloads import Workload

_RACES = 16  # engines times points that one curve may have
PEERS = "benchmarks.peers"  # of the source tree
Part = tuple[str, list[dict[str, Any]], list[list[list[str]]]]  # its name in the JSON, its rows, its tables
Each = Callable[[Callable[[Any], Any], Sequence[Any], str], Iterator[Any]]  # the work, its items, what it is called
SCALES = ("batch", "width", "length", "depth", "groups", "history")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table or one JSON object; the exit status is 2 where the input was refused."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        sys.stdout.write(_answer(args))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps",
        allow_abbrev=False,
        description="Measures one step of training, private and not, by every engine there is: on a CPU side by side, "
        "so that ratios hold on a busy machine while threads have a core each, on CUDA each engine in its own process. "
        "With --scale, --costs or --poisson it measures how cost grows, what each choice adds, or Poisson batches.",
    )
    parser.add_argument("--workloads", metavar="NAME", nargs="+", help="Default: those that suit the device.")
    parser.add_argument("--engines", metavar="NAME", nargs="+", help="Only these, by the names in the table.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="Default: cuda where there is one.")
    parser.add_argument("--batch-size", metavar="B", type=_count, help="Instead of each workload's own.")
    parser.add_argument("--repeat", metavar="R", type=_count, default=15, help="Timed rounds; default: 15.")
    parser.add_argument("--threads", metavar="N", type=_count, help="Of the CPU; default: one for each core.")
    parser.add_argument(
        "--limit", metavar="S", type=_positive, default=60.0,
        help="Cut an engine whose timed steps on one workload take more seconds; default: 60.",
    )  # fmt: skip
    parser.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=True,
        help="Let all engines round the factors of products to TF32 on CUDA; default: yes.",
    )  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="Leave out the peak memory of a CPU, which is slow.")
    parser.add_argument(
        "--peers", metavar="MODULE",
        help=f"A module with further ENGINES; default: {PEERS} where it can be imported; 'none' for none.",
    )  # fmt: skip
    parser.add_argument("--scale", nargs="+", choices=SCALES, metavar="|".join(SCALES), help="How cost grows.")
    parser.add_argument("--points", metavar="X", nargs="+", type=_not_negative,
                        help="The points of the one --scale, instead of its own.")  # fmt: skip
    parser.add_argument("--costs", action="store_true", help="The cost of rules, of history and of diagnostics.")
    parser.add_argument("--poisson", action="store_true", help="Poisson batches beside fixed ones.")
    parser.add_argument("--lots", metavar="L", type=_count, default=100,
                        help="Poisson batches are drawn from L times as many rows; default: 100.")  # fmt: skip
    parser.add_argument("--out", metavar="FILE.json", type=_json_file, help="Write the results, and FILE.md with them.")
    parser.add_argument("--plot-from", metavar="FILE.json", type=_json_file,
                        help="Only draw the curves that FILE.json holds, to FILE.svg.")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
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


def _answer(args: argparse.Namespace) -> str:
    if args.plot_from is not None:
        return _plot(args.plot_from, args.json)
    settings = _settings(args)
    known = _engines(args, settings.device)  # refused before the work
    workloads = _workloads(args, settings.device)
    if args.points is not None and len(args.scale or ()) != 1:
        raise ValueError("--points are those of one --scale: name one")
    from benchmarks.steps.where import environment, markdown

    left_out: list[str] = []
    each = partial(_each, settings, left_out)
    special = _scales(args, settings, each)
    special += _costs(args, settings, workloads, each) + _poisson(args, settings, workloads, each)
    found = special or [_side_by_side(args, settings, workloads, known)]
    parts = {name: rows for name, rows, _ in found}
    left_out += _reasons(parts)
    where = environment(shlex.join(["python", "-m", "benchmarks.steps", *sys.argv[1:]]))
    report: dict[str, Any] = {"environment": {**where, **_gpu(settings.device)}, "settings": asdict(settings), **parts}
    report["left_out"] = left_out
    text = "\n\n".join(markdown(table) for _, _, tables in found for table in tables)
    if left_out:
        text += "\n\nLeft out or cut short:\n\n" + "\n".join(f"- {line}" for line in left_out)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", "utf-8")
        args.out.with_suffix(".md").write_text(f"{_heading(report)}\n\n{text}\n", "utf-8")
    return json.dumps(report, allow_nan=False) + "\n" if args.json else f"{text}\n"


def _settings(args: argparse.Namespace) -> "Settings":
    import torch

    from benchmarks.steps.race import Settings

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device, and torch finds none: leave it out, or use cpu")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Settings(device, args.repeat, args.threads or os.cpu_count() or 1, args.tf32, args.limit)


def _chosen(given: Sequence[str] | None, known: Sequence[str], usual: Sequence[str], what: str) -> list[str]:
    for name in given or ():
        if name not in known:
            raise ValueError(f"unknown {what} {name!r:.40}: there are {', '.join(known)}")
    return list(given or usual)


def _workloads(args: argparse.Namespace, device: str) -> "list[Workload]":
    from benchmarks.steps.workloads import USUAL, WORKLOADS

    usual = USUAL[device][:3] if args.costs or args.poisson else USUAL[device]
    names = _chosen(args.workloads, list(WORKLOADS), usual, "workload")
    found = [WORKLOADS[name].on(device) for name in names]
    return [workload.of(args.batch_size) for workload in found] if args.batch_size else found


def _engines(args: argparse.Namespace, device: str) -> "dict[str, Engine]":
    """Our own and those of the peers' module, as far as they were asked for."""
    from benchmarks.steps.engines import engines

    known = engines(device)
    if args.peers is not None and args.peers != "none" and not _importable(args.peers):
        raise ValueError(f"--peers must be a module that can be imported, got {args.peers!r:.80}")
    module = args.peers or PEERS
    if module != "none" and _importable(module):
        known |= _peers(module)
    return {name: known[name] for name in _chosen(args.engines, list(known), list(known), "engine")}


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _peers(module: str) -> "dict[str, Engine]":
    """The further engines of a module, which may be anyone's."""
    try:
        found: dict[str, Engine] = import_module(module).ENGINES
    except Exception as error:
        raise ValueError(f"--peers {module} cannot be used: {type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--peers {module} must have ENGINES, a dictionary of engines by their names")
    return found


def _say(text: str) -> None:
    print(f"benchmarks.steps: {text}", file=sys.stderr, flush=True)


def _side_by_side(
    args: argparse.Namespace, settings: "Settings", workloads: "list[Workload]", engines: "dict[str, Engine]"
) -> Part:
    from benchmarks.steps import results
    from benchmarks.steps.engines import OURS, VMAP
    from benchmarks.steps.race import compared, measured

    rows = measured(workloads, engines, settings, memory=not args.no_memory, say=_say)
    for here in results.by_workload(rows):
        compared(here, VMAP, OURS, settings.tolerance)
    return "engines", _fields(rows), [results.engine_table(rows)]


def _scales(args: argparse.Namespace, settings: "Settings", each: Each) -> list[Part]:
    from benchmarks.steps import curves, results

    if not args.scale:
        return []
    found = list(each(partial(curves.curve, settings, args.points), args.scale, "how cost grows with"))
    return [("curves", [asdict(one) for one in found], [results.curve_table(one) for one in found])]


def _costs(args: argparse.Namespace, settings: "Settings", workloads: "list[Workload]", each: Each) -> list[Part]:
    from benchmarks.steps import costs, results

    if not args.costs:
        return []
    parts = []
    form = "captured" if settings.device == "cuda" else "eager"
    for name, work, how in (("rules", costs.rules, form), ("additions", costs.additions, "eager")):
        rows = [row for here in each(partial(work, settings), workloads, f"{name} on") for row in here]
        parts.append((name, _fields(rows), [results.cost_table(rows, how)]))
    return parts


def _poisson(args: argparse.Namespace, settings: "Settings", workloads: "list[Workload]", each: Each) -> list[Part]:
    from benchmarks.steps import costs, results

    if not args.poisson:
        return []
    work = partial(costs.poisson, settings, args.lots)
    rows = [row for here in each(work, workloads, "Poisson batches on") for row in here]
    return [("poisson", _fields(rows), [results.poisson_table(rows)])]


def _each(
    settings: "Settings", left_out: list[str], work: Callable[[Any], Any], items: Sequence[Any], what: str
) -> Iterator[Any]:
    """``work`` of each item: here on a CPU, and on CUDA in a process, which another replaces where it dies.

    An item without a result is added to ``left_out``, with the reason.
    """
    from benchmarks.steps.race import STARTING, Failed, streamed
    from benchmarks.steps.workloads import Workload

    cuda = settings.device == "cuda"
    seconds = STARTING + _RACES * settings.limit
    results = streamed(work, items, seconds) if cuda else map(work, items)
    for item in items:
        named = f"{what} {item.title if isinstance(item, Workload) else item}"
        _say(named)
        result = next(results)
        if isinstance(result, Failed):
            left_out.append(f"{named}: {result.reason}")
            _say(f"left out: {result.reason}")
        else:
            yield result


def _reasons(parts: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Why engines, and points of curves, were left out or cut short."""
    curves = parts.get("curves", [])
    rows = [row for name, rows in parts.items() if name != "curves" for row in rows]
    return [
        *(f"{curve['label']}, {reason}" for curve in curves for reason in curve["reasons"]),
        *(f"{row['workload']}, {row['engine']}: {row['reason']}" for row in rows if row["reason"]),
    ]


def _fields(rows: "Sequence[Row]") -> list[dict[str, Any]]:
    return [row.fields() for row in rows]


def _gpu(device: str) -> dict[str, Any]:
    import torch

    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if device == "cuda" else {}


def _heading(report: dict[str, Any]) -> str:
    where, settings = report["environment"], report["settings"]
    machine = [where.get("gpu"), where["processor"], f"{where['cores']} cores (load {where['load_average'][0]})"]
    versions = ", ".join(f"{library} {number}" for library, number in where["versions"].items())
    how = f"{settings['repeat']} rounds, {settings['threads']} threads, TF32 {'on' if settings['tf32'] else 'off'}"
    return (
        f"# Steps\n\n`{where['command']}`, {where['date']}\n\n"
        f"{', '.join(filter(None, machine))}, {where['system']}, Python {where['python']}, {versions}; {how}"
    )


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
