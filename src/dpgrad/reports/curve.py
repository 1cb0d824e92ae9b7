"""Bounds on every attack as a file: δ(ε) and the trade-off curve, as numbers or as a picture."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpgrad.accounting.curves import Tradeoff
from dpgrad.errors import OptionError
from dpgrad.reports import chart, plot

__all__ = ["rows", "write"]


def rows(curve: Tradeoff, attacks: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(curve, x, y) of every point: ``delta`` over epsilon, then ``false_negatives`` over false positives."""
    found = [("delta", x, y) for x, y in zip(curve.epsilons, curve.deltas, strict=True)]
    points = [("false_negatives", one["false_positives"], one["false_negatives"]) for one in attacks["tradeoff"]]
    return found + points


def write(path: str, curve: Tradeoff, attacks: Mapping[str, Any]) -> None:
    """Write the curves to a .csv file, or draw them to .svg or .png; the same curves give the same bytes."""
    if Path(path).suffix.lower() != ".csv":
        _draw(path, curve, attacks)
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("curve", "x", "y"))
    writer.writerows((name, repr(x), repr(y)) for name, x, y in rows(curve, attacks))
    try:
        Path(path).write_text(text.getvalue(), "utf-8")
    except OSError as error:
        raise OptionError(f"--curve cannot write {path}: {error.strerror}") from None


def _draw(path: str, curve: Tradeoff, attacks: Mapping[str, Any]) -> None:
    from matplotlib.figure import Figure

    with chart.file_style():
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        chart.draw_tradeoff(left, attacks)
        left.set_ylabel("false negatives, at least")
        shown = [(x, y) for x, y in zip(curve.epsilons, curve.deltas, strict=True) if y > 0]
        right.plot([x for x, _ in shown], [y for _, y in shown], color="#0072B2", linewidth=1.8)
        right.set_yscale("log")
        right.set_xlabel("ε")
        right.set_ylabel("δ, at most")
        for axes, title in ((left, "errors of any attack"), (right, "δ(ε)")):
            chart.finish(axes, title)
        plot.write(figure, path, "--curve")
