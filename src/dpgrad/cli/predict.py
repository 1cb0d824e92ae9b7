"""`dpgrad predict`: use a released model on rows from a file."""

import argparse
import csv
import io
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad import _files
from dpgrad.cli import _options, _rows
from dpgrad.errors import DataError, OptionError, ReportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpgrad.cli._options import Commands
    from dpgrad.cli._rows import Array
    from dpgrad.reports.report import Report
    from dpgrad.training.blueprints import Blueprint

    Names = dict[str, list[Any]]  # what identifies rows: ids, files or numbers

__all__ = ["add"]

_ROW = "row"  # as in `dpgrad.data`
_BLOCK = 1024  # rows
_WRITTEN = (".csv", ".json", ".jsonl")
_PIXELS = "the pixel range 0.."  # begins the entry of a report that names the public range of pixels


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "predict",
        "use a released model",
        "Applies the released model of a run to the rows of a file. A model that was trained on a file of yours takes "
        "files of the same columns, through the same schema. Prepare the rows of any other model as in training; the "
        "report says how. By default pixels are divided by the largest value of their public range, so they lie in "
        "0..1. Reads the folder release/ only, runs no code from it, and costs no further privacy.",
        _answer,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="The folder of a finished run, or its folder release/.")
    add(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="For a model of your own: the function that builds it again. Code is never taken from a release folder.",
    )
    add(
        "--input",
        metavar="FILE",
        required=True,
        help="A file of the kind the model was trained on; else prepared rows as .npy, .npz (one array, or x) or .csv.",
    )
    add(
        "--out",
        "--output",
        dest="output",
        metavar="FILE",
        help=f"Write the predictions to this file, {', '.join(_WRITTEN)}, instead of standard output. An existing "
        "file is refused without --overwrite.",
    )
    add("--overwrite", action="store_true", help="Replace the file of --out if it is there already.")
    add("--json", action="store_true", help="Print one JSON object instead of CSV.")
    add = parser.add_argument_group("how a .csv of prepared rows is read").add_argument
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


def _answer(args: argparse.Namespace) -> str:
    from dpgrad.reports import report

    _refuse_output(args)
    found = report.load(Path(args.run))
    if found["model"] is None:
        raise ReportError(
            f"{args.run}: the report does not say what rows the model takes: load weights.pt in the program that "
            "trained it"
        )
    _refuse_outputs(args.run, found)
    with _options.late(f"predicting the rows of {args.input}"):
        source = _blueprint(Path(args.run), found, args.model)
        model = _model(Path(args.run), found, source, args.model is not None)
        with source.told("on the rows of --input", private=True):
            blocks, names = _read(found, source, args)
            outputs = _applied(model, blocks, found, args)
    names = names or {_ROW: list(range(1, len(outputs) + 1))}
    if args.output is None:
        return _json(found, outputs, names) if args.json else _csv(found, outputs, names)
    kind = Path(args.output).suffix.lower()
    text = {".json": _json, ".jsonl": _lines, ".csv": _csv}[kind](found, outputs, names)
    _files.hand_out(Path(args.output), text)
    told, rows = {"rows": len(outputs), "output": args.output}, "row" if len(outputs) == 1 else "rows"
    return json.dumps(told) + "\n" if args.json else f"{len(outputs):,} {rows} predicted, written to {args.output}\n"


def _refuse_output(args: argparse.Namespace) -> None:
    """Refuse, before the work begins, a file that is of no known kind or holds something."""
    if args.output is None:
        if args.overwrite:
            raise OptionError("--overwrite is for the file of --out: name it, or leave this out")
        return
    out = Path(args.output)
    if out.suffix.lower() not in _WRITTEN:
        raise OptionError(f"--out must end in {', '.join(_WRITTEN[:-1])} or {_WRITTEN[-1]}, got {args.output!r:.80}")
    if out.exists() and Path(args.input).exists() and out.samefile(args.input):
        raise OptionError(f"--out {args.output!r} is the file of --input, whose rows would be lost: name another")
    if out.exists() and not args.overwrite:
        raise OptionError(f"--out {args.output!r} exists: name another file, or replace it with --overwrite")


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


def _blueprint(run: Path, report: "Report", given: str | None) -> "Blueprint":
    """How the released model is built: by its name, or by the function or folder that is ``given``."""
    from dpgrad.reports.report import released
    from dpgrad.training.blueprints import NamedModel, blueprint
    from dpgrad.training.hugging_face import PREFIX, Checkpoint
    from dpgrad.training.models import OWN_MODEL
    from dpgrad.training.own_model import OwnModel

    named = report["model"]
    if named["name"] == Checkpoint.name and (given is None or given.startswith(PREFIX)):
        return Checkpoint.released(released(run), named["source"], given)
    if named["name"] != OWN_MODEL:
        if given is not None:
            raise OptionError(f"--model is for models of your own, and {run} holds {named['name']}: leave it out")
        return NamedModel(named["name"])
    if given is None:
        known = "FILE.py:FUNCTION" if named["source"] is None else named["source"]["file"]
        raise OptionError(
            f"{run} holds a model of your own: name the function that builds it with --model {known}; code is never "
            "taken from a run"
        )
    source = blueprint(given)
    trained = named["source"] and named["source"]["digest"]
    if trained and isinstance(source, OwnModel) and trained != source.digest:
        file = given.rpartition(":")[0]
        print(f"dpgrad: warning: {file} has changed since the model was trained", file=sys.stderr, flush=True)
    return source


def _model(run: Path, report: "Report", source: "Blueprint", own: bool) -> Any:
    """The released model with its weights."""
    import torch

    from dpgrad.reports.report import released
    from dpgrad.training.blueprints import built
    from dpgrad.training.fit import WEIGHTS

    named, path = report["model"], released(run) / WEIGHTS
    if not path.is_file():
        raise ReportError(f"{path} is missing: predictions need the weights that were released with the report")
    make = partial(source.build, named["shape"], named["outputs"])
    if not own and _bytes_of(make) > path.stat().st_size:
        raise ReportError(f"{path} does not hold the weights of this model: it has fewer bytes than they need")
    model = built(source, named["shape"], named["outputs"], _dtype(report)) if own else make()
    try:
        model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # torch raises many kinds for a file that is not what it was
        why = " ".join(str(error).split())[:300] if own else type(error).__name__
        raise ReportError(f"{path} does not hold the weights of this model: {why}") from None
    return model.eval()


def _dtype(report: "Report") -> Any:
    """The type of the numbers that the model takes."""
    import torch

    known = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float64, torch.int64)}
    named = report["model"]["dtype"]
    if named not in known:
        raise ReportError(f"the model takes rows of {named!r:.40}: load weights.pt in the program that trained it")
    return known[named]


def _read(report: "Report", source: "Blueprint", args: argparse.Namespace) -> "tuple[Iterator[Array], Names]":
    """The rows of the input, block by block, through the schema of the training data or as they are; and their names.

    Without a schema rows have no names but their numbers.
    """
    shape, schema = tuple(report["model"]["shape"]), report.get("schema")
    if schema is None:
        return _rows.blocks(Path(args.input), shape, args.header, args.separator), {}
    from dpgrad import data
    from dpgrad.training.hugging_face import Checkpoint

    if (args.header, args.separator) != ("auto", "auto"):
        raise OptionError("--header and --separator are for prepared rows: the schema says how this file is read")
    tokens = source.tokens(shape[0]) if isinstance(source, Checkpoint) and source.kind == "text" else None
    found, names = data.identified(args.input, schema, tokens)
    if not len(found):
        raise DataError(f"--input {args.input} holds no rows that the schema keeps")
    if found.shape[1:] != shape:
        raise ReportError(f"{args.run}: its schema makes rows of shape {found.shape[1:]}, and its model takes {shape}")
    return iter([found[start : start + _BLOCK] for start in range(0, len(found), _BLOCK)]), names


def _bytes_of(built: "Callable[[], Any]") -> float:
    """How many bytes the weights of a model take, without allocating them."""
    import torch

    try:
        with torch.device("meta"):
            return float(sum(value.nbytes for value in built().state_dict().values()))
    except (RuntimeError, OverflowError, TypeError):  # sizes that torch cannot count
        return math.inf


def _forward(model: Any, block: "Array", report: "Report") -> Any:
    import torch

    try:
        return model(torch.from_numpy(block).to(_dtype(report)))
    except (RuntimeError, IndexError, ValueError) as error:  # rows of a shape that the layers cannot take
        named = report["model"]
        why = " ".join(str(error).split())
        raise DataError(f"model {named['name']} cannot take rows of shape {named['shape']}: {why:.200}") from None


def _in_bounds(outputs: Any, report: "Report") -> Any:
    """Predictions of a real target in its own units; a model trained through a schema gives shares of its bounds."""
    if report.get("schema") is None:
        return outputs
    from dpgrad import data

    target = data.schema_of(report["schema"]).target
    if target is None or target.bounds is None:
        return outputs
    low, high = target.bounds
    return low + (high - low) * outputs.clamp(0, 1)


def _applied(model: Any, blocks: "Iterator[Array]", report: "Report", args: argparse.Namespace) -> "Array":
    """The model's output for each row: class probabilities, or a real value."""
    import numpy as np
    import torch

    outputs = report["model"]["outputs"]
    most, rows, made = -math.inf, 0, [np.zeros((0, outputs), np.float32)]
    with torch.no_grad():
        for block in blocks:
            found = _forward(model, block, report).reshape(len(block), outputs).float()
            made.append((_in_bounds(found, report) if _classes(report) is None else found.softmax(1)).numpy())
            if not np.isfinite(made[-1]).all():
                number = rows + int(np.argmin(np.isfinite(made[-1]).all(1))) + 1
                raise DataError(
                    f"{args.run}: its model gives no finite output for row {number:,} of {args.input}: its weights are "
                    "not finite, or the values of the row are far too large"
                )
            most, rows = max(most, float(block.max())), rows + len(block)
    _refuse_units(args.input, report, most)
    return np.concatenate(made)


def _distinct(names: "Names", taken: list[str]) -> "Names":
    """The names under headings that no prediction has.

    >>> _distinct({"label": ["a"]}, ["label"])
    {'label of the row': ['a']}
    >>> list(_distinct({"label": ["a"], "label of the row": ["b"]}, ["label"]))
    ['label of the row of the row', 'label of the row']
    """
    found, used = {}, {*names, *taken}
    for name, cells in names.items():
        heading = name
        while heading in taken or (heading != name and heading in used):
            heading += " of the row"
        used.add(heading)
        found[heading] = cells
    return found


def _json(report: "Report", outputs: "Array", names: "Names") -> str:
    """All predictions as one object, with the guarantee of the model; ``rows`` tell which is which."""
    classes = _classes(report)
    found: dict[str, Any] = {"predictions": outputs[:, 0].tolist()}
    if classes is not None:
        labels = [classes[index] for index in outputs.argmax(1)]
        found = {"labels": labels, "classes": classes, "probabilities": outputs.tolist()}
    return json.dumps({"rows": names, **found, "guarantee": report["guarantee"]}) + "\n"


def _lines(report: "Report", outputs: "Array", names: "Names") -> str:
    """One object a row."""
    classes, found = _classes(report), []
    for row in outputs.tolist():
        if classes is None:
            found.append({"prediction": row[0]})
        else:
            shares = dict(zip(classes, row, strict=True))
            found.append({"label": max(shares, key=lambda name: shares[name]), "probabilities": shares})
    told = _distinct(names, ["prediction", "label", "probabilities"])
    rows = [{**{name: cells[at] for name, cells in told.items()}, **row} for at, row in enumerate(found)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(report: "Report", outputs: "Array", names: "Names") -> str:
    classes = _classes(report)
    if classes is None:
        head, rows = ["prediction"], [[f"{value:.6g}"] for value in outputs[:, 0].tolist()]
    else:
        labels = [classes[index] for index in outputs.argmax(1)]
        shares = [[f"{share:.6f}" for share in row] for row in outputs.tolist()]
        head = ["label", *(f"probability of {name}" for name in classes)]
        rows = [[label, *row] for label, row in zip(labels, shares, strict=True)]
    told = _distinct(names, head)
    return _table([*told, *head], [[*(cells[at] for cells in told.values()), *row] for at, row in enumerate(rows)])


def _table(head: list[str], rows: list[list[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([head, *rows])
    return buffer.getvalue()
