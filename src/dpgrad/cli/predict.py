"""`dpgrad predict`: use a released model on rows from a file."""

import argparse
import csv
import io
import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad.cli import _options, _rows
from dpgrad.errors import DataError, OptionError, ReportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpgrad.cli._options import Commands
    from dpgrad.cli._rows import Array
    from dpgrad.reports.report import Report

_PIXELS = "the pixel range 0.."  # begins the entry of a report that names the public range of pixels


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "predict",
        "use a released model",
        "Applies the released model of a run to the rows of a file. Prepare the rows as in training; the report says "
        "how. By default pixels are divided by the largest value of their public range, so they lie in 0..1. Nothing "
        "is scaled here. Reads the folder release/ only, and costs no further privacy.",
        _answer,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="The folder of a finished run, or its folder release/.")
    add(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="For a model of your own: the function, without arguments, that builds it again.",
    )
    add("--input", metavar="FILE", required=True, help="Prepared rows as .npy, .npz (one array, or x) or .csv.")
    add(
        "--header",
        choices=_rows.HEADERS,
        default="auto",
        help="Whether the first line of a .csv names its columns. auto, the default: yes if every cell begins with a "
        "letter, no if none does; anything in between is refused.",
    )
    add(
        "--separator",
        metavar="NAME",
        type=_options.option(_rows.separator, lambda value: None),
        default="auto",
        help=f"The separator of a .csv: {', '.join(_rows.SEPARATORS)}. auto, the default, takes the first that "
        "splits the first line into as many cells as a row has numbers.",
    )
    add("--output", metavar="FILE", help="Write the answer to this file instead of standard output.")
    add("--json", action="store_true", help="Print one JSON object instead of CSV.")


def _answer(args: argparse.Namespace) -> str:
    from dpgrad.reports import report

    found = report.load(Path(args.run))
    if found["model"] is None:
        raise ReportError(
            f"{args.run}: the report does not say what rows the model takes: load weights.pt in the program that "
            "trained it"
        )
    _refuse_outputs(args.run, found)
    model = _model(Path(args.run), found, args.model)
    shape = tuple(found["model"]["shape"])
    rows, outputs = _applied(model, _rows.blocks(Path(args.input), shape, args.header, args.separator), found, args)
    text = _written(found, outputs, args.json)
    if args.output is None:
        return text
    Path(args.output).write_text(text, "utf-8")
    told = {"rows": rows, "output": args.output}
    return json.dumps(told) + "\n" if args.json else f"{rows:,} rows predicted, written to {args.output}\n"


def _classes(report: "Report") -> list[str] | None:
    """The names of the classes, numbers for data of your own; None if the target is a real value."""
    if report["data"] is None:
        counted = range(report["model"]["outputs"] if report["result"]["metric"] == "accuracy" else 0)
        return [str(number) for number in counted] or None
    found: list[str] | None = report["data"]["classes"]
    return found


def _refuse_outputs(name: str, report: "Report") -> None:
    """Refuse a report that does not name each output of its model."""
    classes, outputs = _classes(report), report["model"]["outputs"]
    if outputs != (1 if classes is None else len(classes)):
        named = "no" if classes is None else f"{len(classes):,}"
        raise ReportError(f"{name}: its report has {named} class names for {outputs:,} outputs of its model")


def _refuse_units(name: str, report: "Report", most: float) -> None:
    """Refuse pixels in other units than in training, if the report says which they were."""
    ranges = [entry.rpartition("..")[2] for entry in report["public"] if entry.startswith(_PIXELS)]
    if report["data"] is None or not ranges:
        return
    prepared = report["data"]["preprocessing"]
    if prepared == "default" and most > 1:
        raise DataError(
            f"--input {name} holds values above 1, and the model was trained on pixels in 0..1: divide those of "
            f"{_PIXELS}{ranges[0]} by {ranges[0]}"
        )
    if prepared == "raw" and 0 < most <= 1:
        raise DataError(
            f"--input {name} holds no value above 1, and the model was trained on raw pixels in 0..{ranges[0]}: do not "
            "divide them"
        )


def _model(run: Path, report: "Report", own: str | None) -> Any:
    """The released model, built by its name or by the function ``own``."""
    import torch

    from dpgrad.reports.report import released
    from dpgrad.training.fit import WEIGHTS
    from dpgrad.training.models import OWN_MODEL, build

    named, path = report["model"], released(run) / WEIGHTS
    if not path.is_file():
        raise ReportError(f"{path} is missing: predictions need the weights that were released with the report")
    if (named["name"] == OWN_MODEL) != (own is not None):
        raise OptionError(
            f"{run} holds a model of your own: name the function that builds it with --model FILE.py:FUNCTION"
            if own is None
            else f"--model is for models of your own, and {run} holds {named['name']}: leave it out"
        )
    built = partial(build, named["name"], named["shape"], named["outputs"]) if own is None else _function(own)
    if own is None and _bytes_of(built) > path.stat().st_size:
        raise ReportError(f"{path} does not hold the weights of this model: it has fewer bytes than they need")
    model = built()
    try:
        model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # torch raises many kinds for a file that is not what it was
        why = type(error).__name__ if own is None else " ".join(str(error).split())[:300]
        raise ReportError(f"{path} does not hold the weights of this model: {why}") from None
    return model.eval()


def _bytes_of(built: "Callable[[], Any]") -> float:
    """How many bytes the weights of a model take, without allocating them."""
    import torch

    try:
        with torch.device("meta"):
            return float(sum(value.nbytes for value in built().state_dict().values()))
    except (RuntimeError, OverflowError, TypeError):  # sizes that torch cannot count
        return math.inf


def _function(text: str) -> "Callable[[], Any]":
    """The function that FILE.py:FUNCTION names."""
    import runpy

    from torch import nn

    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise OptionError(f"--model must be FILE.py:FUNCTION with a file that exists, got {text!r:.80}")
    found = runpy.run_path(file).get(name)
    if not callable(found):
        raise OptionError(f"--model {text}: {file} has no function {name!r:.40}")

    def made() -> Any:
        try:
            model: object = found()
        except Exception as error:
            raise OptionError(f"--model {text} raised {type(error).__name__}: {error!s:.200}") from None
        if not isinstance(model, nn.Module):
            raise OptionError(f"--model {text} must return a torch.nn.Module, it returned a {type(model).__name__}")
        return model

    return made


def _forward(model: Any, block: "Array", report: "Report") -> Any:
    import torch

    try:
        return model(torch.from_numpy(block))
    except (RuntimeError, IndexError, ValueError) as error:  # rows of a shape that the layers cannot take
        named = report["model"]
        why = " ".join(str(error).split())
        raise DataError(f"model {named['name']} cannot take rows of shape {named['shape']}: {why:.200}") from None


def _applied(model: Any, blocks: "Iterator[Array]", report: "Report", args: argparse.Namespace) -> tuple[int, "Array"]:
    """The number of rows, and the model's output for each: class probabilities, or a real value."""
    import numpy as np
    import torch

    most, rows, made = -math.inf, 0, [np.zeros((0, report["model"]["outputs"]), np.float32)]
    with torch.no_grad():
        for block in blocks:
            found = _forward(model, block, report)
            made.append((found if _classes(report) is None else found.softmax(1)).numpy())
            if not np.isfinite(made[-1]).all():
                number = rows + int(np.argmin(np.isfinite(made[-1]).all(1))) + 1
                raise DataError(
                    f"{args.run}: its model gives no finite output for row {number:,} of {args.input}: its weights are "
                    "not finite, or the row is out of all proportion"
                )
            most, rows = max(most, float(block.max())), rows + len(block)
    _refuse_units(args.input, report, most)
    return rows, np.concatenate(made)


def _written(report: "Report", outputs: "Array", as_json: bool) -> str:
    classes = _classes(report)
    if classes is None:
        values = outputs[:, 0].tolist()
        if as_json:
            return json.dumps({"predictions": values, "guarantee": report["guarantee"]}) + "\n"
        return _table(["prediction"], [[f"{value:.6g}"] for value in values])
    labels = [classes[index] for index in outputs.argmax(1)]
    if as_json:
        found = {"labels": labels, "classes": classes, "probabilities": outputs.tolist()}
        return json.dumps({**found, "guarantee": report["guarantee"]}) + "\n"
    shares = [[f"{share:.6f}" for share in row] for row in outputs.tolist()]
    head = ["label", *(f"probability of {name}" for name in classes)]
    return _table(head, [[label, *row] for label, row in zip(labels, shares, strict=True)])


def _table(head: list[str], rows: list[list[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([head, *rows])
    return buffer.getvalue()
