"""`dpgrad predict`: use a released model on rows from a file."""

import argparse
import csv
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad.cli import _options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dpgrad.cli._options import Commands
    from dpgrad.lab.report import Report

    Array = NDArray[np.float32]


_PIXELS = "the pixel range 0.."  # begins the entry of a report that names the public range of pixels


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "predict",
        "use a released model",
        "Applies the released model of a run to the rows of a file. The rows must have been prepared as the training "
        "rows were, which the report names: by default pixels are divided by the largest of their public range, so "
        "that they lie in 0..1; nothing is scaled here. Reads the folder release/ only. What is computed from a "
        "private model costs its training rows nothing more.",
        _answer,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="The folder of a finished run, or the folder release/ that was shared of one.")
    add("--input", metavar="FILE", required=True, help="Prepared rows as .npy, .npz (one array, or x) or .csv.")
    add("--output", metavar="FILE", help="Write there what else would go to standard output.")
    add("--json", action="store_true", help="Print one JSON object instead of CSV.")


def _answer(args: argparse.Namespace) -> str:
    from dpgrad.lab import report

    found = report.load(Path(args.run))
    if found["model"] is None:
        raise ValueError(
            f"{args.run}: its model was brought by a program, which alone can rebuild it: load weights.pt there"
        )
    rows = _rows(Path(args.input), tuple(found["model"]["shape"]))
    _refuse_units(args.input, found, rows)
    text = _written(found, _outputs(Path(args.run), found, rows), args.json)
    if args.output is None:
        return text
    Path(args.output).write_text(text, "utf-8")
    told = {"rows": len(rows), "output": args.output}
    return json.dumps(told) + "\n" if args.json else f"{len(rows):,} rows predicted, written to {args.output}\n"


def _rows(path: Path, shape: tuple[int, ...]) -> "Array":
    """The rows of a file, which must have the shape the model was trained on."""
    import numpy as np

    if path.suffix.lower() not in (".npy", ".npz", ".csv"):
        raise ValueError(f"--input must end in .npy, .npz or .csv, got {path.name!r:.80}")
    try:
        found: Any = _csv(path, shape) if path.suffix.lower() == ".csv" else np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"--input {path}: there is no such file") from None
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"--input {path} cannot be read as {path.suffix}: {error}") from None
    if path.suffix.lower() == ".npz":
        if len(found.files) != 1 and "x" not in found.files:
            raise ValueError(f"--input {path} must hold one array, or one named x, got {', '.join(found.files)}")
        found = found["x" if "x" in found.files else found.files[0]]
    if found.dtype.kind not in "fiub":
        raise ValueError(f"--input {path} must hold numbers, got {found.dtype}")
    if not _fits(found.shape, shape):
        raise ValueError(f"--input {path} must hold rows of shape {shape}, got an array of shape {found.shape}")
    rows: Array = found.reshape(len(found), *shape).astype(np.float32)
    if not np.isfinite(rows).all():
        raise ValueError(f"--input {path} holds values that are not finite: remove those rows")
    return rows


def _fits(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array holds rows of ``shape``: laid out as one line each, or with the same sides of more than 1.

    Other orders of the same sides, such as channels last, are another image.
    """
    if len(given) == 2 and given[1] == math.prod(shape):
        return True
    return len(given) > 1 and [side for side in given[1:] if side != 1] == [side for side in shape if side != 1]


def _refuse_units(name: str, report: "Report", rows: "Array") -> None:
    """Refuse pixels in other units than those of training, where the report tells which they were."""
    ranges = [entry.rpartition("..")[2] for entry in report["public"] if entry.startswith(_PIXELS)]
    if report["data"] is None or not ranges or not rows.size:
        return
    prepared, most = report["data"]["preprocessing"], float(rows.max())
    if prepared == "default" and most > 1:
        raise ValueError(
            f"--input {name} holds values above 1, and the model was trained on pixels in 0..1: divide those of "
            f"{_PIXELS}{ranges[0]} by {ranges[0]}"
        )
    if prepared == "raw" and 0 < most <= 1:
        raise ValueError(
            f"--input {name} holds no value above 1, and the model was trained on raw pixels in 0..{ranges[0]}: do not "
            "divide them"
        )


def _csv(path: Path, shape: tuple[int, ...]) -> Any:
    """Numbers, one row a line, an image laid out as one line; a first line of names is passed over."""
    import numpy as np

    lines = [line for line in csv.reader(path.read_text("utf-8").splitlines()) if line]
    if lines and not _number(lines[0][0]):
        del lines[0]
    width = math.prod(shape)
    if wrong := [number for number, line in enumerate(lines, 1) if len(line) != width]:
        raise ValueError(f"row {wrong[0]} has {len(lines[wrong[0] - 1])} columns, expected {width}")
    return np.array([[float(cell) for cell in line] for line in lines], np.float32).reshape(len(lines), *shape)


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _outputs(run: Path, report: "Report", rows: "Array") -> "Array":
    """What the model says of each row: class probabilities, or a real value."""
    import torch

    from dpgrad.lab.models import build
    from dpgrad.lab.report import released
    from dpgrad.train import WEIGHTS

    named = report["model"]
    model = build(named["name"], named["shape"], named["outputs"])
    path = released(run) / WEIGHTS
    try:
        model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # torch raises many kinds for a file that is not what it was
        raise ValueError(f"{path} does not hold the weights of this model: {type(error).__name__}") from None
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(batch) for batch in torch.split(torch.from_numpy(rows), 1024)] or [torch.zeros(0, 1)])
        classes = report["data"] is not None and report["data"]["classes"] is not None
        made: Array = (found.softmax(1) if classes else found).numpy()
        return made


def _written(report: "Report", outputs: "Array", as_json: bool) -> str:
    classes = None if report["data"] is None else report["data"]["classes"]
    if classes is None:
        values = outputs[:, 0].tolist()
        if as_json:
            return json.dumps({"predictions": values, "guarantee": report["guarantee"]}) + "\n"
        return _table(["prediction"], [[f"{value:.6g}"] for value in values])
    labels = [classes[index] for index in outputs.argmax(1)] if len(outputs) else []
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
