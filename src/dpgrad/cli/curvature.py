"""`dpgrad curvature`: minimum, average and expected curvature of a dataset, and what they mean for a private run."""

import argparse
import io
import json
import math
from typing import TYPE_CHECKING, Any

from dpgrad import _validate
from dpgrad.cli import _data, _options
from dpgrad.errors import OptionError
from dpgrad.training.options import Budget

if TYPE_CHECKING:
    from dpgrad.cli._options import Commands
    from dpgrad.convex.curvature import Curved, Description
    from dpgrad.convex.losses import Softmax

__all__ = ["add"]

MOST_ROWS, MOST_NUMBERS = 10_000, 2 * 10**7  # measured: rows, and numbers times classes
OUTSIDE = "outside the guarantee: read from the private rows without noise, not for release"
LOSSES = ("squared", "logistic", "huber", "softmax")


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "curvature",
        "measure the curvature of a dataset's loss, and what it means for steps, learning rate and solver",
        "Measures the minimum, average and expected curvature of a loss on a dataset's training rows (Table 2 and "
        "Figure 1 of Yu et al. 2020) and says what they mean for the number of steps, the learning rate and the "
        "solver. It reads the rows without adding noise: the figures are outside every guarantee.",
        _answer,
    )
    parser.add_argument("dataset", metavar="DATASET", help="The name of a dataset, such as sonar or adult.")
    rows = parser.add_argument_group("the data")
    _data.add(rows)
    rows.add_argument(
        "--preprocessing", metavar="NAME", help="How the columns are prepared; default: yu2020 if the dataset has it."
    )
    rows.add_argument(
        "--rows",
        metavar="N",
        type=_options.count,
        help=f"Measure at most the first N rows; default: {MOST_ROWS:,}, and fewer if rows have many columns and "
        "classes.",
    )
    _problem(parser)
    answer = parser.add_argument_group("the answer")
    answer.add_argument(
        "--plot", metavar="FILE", type=_options.plot_file, help="Plot curvature against noise (Figure 1): .svg or .png."
    )
    answer.add_argument("--json", action="store_true", help="Print one JSON object.")


def _problem(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the problem")
    group.add_argument(
        "--loss",
        choices=LOSSES,
        help="Default: squared for numbers and the datasets of Table 2; otherwise logistic for two classes and softmax "
        "for more.",
    )
    for option, settings in _options.declared(Budget, "epsilon"):
        group.add_argument(option, default=1.0, **settings)
    group.add_argument("--clip", metavar="C", type=_options.positive, default=1.0, help="The clip bound; default: 1.")
    group.add_argument(
        "--l2",
        metavar="L",
        type=_options.option(_options.real, _validate.non_negative),
        help="The weight of half the squared norm of the coefficients; default: 0 for the squared loss, else 1e-4.",
    )


def _answer(args: argparse.Namespace) -> str:
    import numpy as np

    with _options.patience("measuring curvatures"), np.errstate(over="raise", invalid="raise", divide="raise"):
        try:
            return _found(args)
        except ArithmeticError:
            raise OptionError(
                f"--epsilon {args.epsilon:g}, --clip {args.clip:g} and --l2 give figures beyond what a float holds: "
                "choose them nearer to 1"
            ) from None


def _found(args: argparse.Namespace) -> str:
    """The whole of what goes to standard output; a plot is written on the way."""
    from dpgrad import data
    from dpgrad.convex import curvature

    recipes = data.preprocessings(args.dataset)
    recipe = args.preprocessing or ("yu2020" if "yu2020" in recipes else "default")
    dataset = _data.load(args.dataset, args, recipe)
    classes = 0 if dataset.classes is None else len(dataset.classes)
    name = args.loss or _usual(args.dataset, classes)
    l2 = args.l2 if args.l2 is not None else (0.0 if name == "squared" else 1e-4)
    loss = _loss(name, classes)
    rows = args.rows or _most(dataset.flat().x_train, loss.outputs)
    found = curvature.describe(dataset, loss, epsilon=args.epsilon, clip=args.clip, l2=l2, most_rows=rows)
    if args.plot is not None:
        draw(args.plot, found)
    if args.json:
        return json.dumps(_fields(args, found, recipe, name, l2), allow_nan=False) + "\n"
    return _page(args, found, recipe, name, l2)


def _most(rows: Any, outputs: int) -> int:
    """How many rows are measured: a public rule of shapes; sparse rows are cheap."""
    import numpy as np

    return min(MOST_ROWS, MOST_NUMBERS // (rows.shape[1] * outputs)) if isinstance(rows, np.ndarray) else MOST_ROWS


def _usual(dataset: str, classes: int) -> str:
    from dpgrad.convex.curvature import TABLE_2

    if not classes or dataset in TABLE_2:
        return "squared"
    return "logistic" if classes == 2 else "softmax"


def _loss(name: str, classes: int) -> "Curved | Softmax":
    from dpgrad.convex import losses

    if name == "squared":
        if classes > 2:
            raise OptionError(f"--loss squared needs numbers or two classes, got {classes} classes: use softmax")
        return losses.Squared(math.inf)
    if classes < 2:
        raise OptionError(f"--loss {name} needs classes, but the targets are numbers: use squared")
    if name == "softmax":
        return losses.Softmax(classes)
    if classes > 2:
        raise OptionError(f"--loss {name} needs two classes, got {classes}: use softmax")
    return losses.Logistic() if name == "logistic" else losses.HuberSvm()


def _fields(args: argparse.Namespace, found: "Description", recipe: str, loss: str, l2: float) -> dict[str, Any]:
    from dpgrad.convex.curvature import TABLE_2

    fields: dict[str, Any] = {
        "dataset": found.name,
        "preprocessing": recipe,
        "loss": loss,
        "l2": l2,
        "rows": found.examples,
        "rows_measured": found.measured,
        "dimension": found.dimension,
        "minimum": found.minimum,
        "average": found.average,
        "largest": found.smoothness,
        "expected": [{"noise": noise, "curvature": value} for noise, value in found.curve],
        "plans": [plan._asdict() for plan in found.plans],
        "epsilon": found.epsilon,
        "delta": found.delta,
        "relation": "replace-one",
        "guarantee": False,
        "outside_guarantee": OUTSIDE,
        "words": list(found.words()),
    }
    if recipe.startswith("yu2020") and loss == "squared" and args.dataset in TABLE_2:
        fields["paper"] = TABLE_2[args.dataset]._asdict()
    if args.plot is not None:
        fields["plot"] = args.plot
    return fields


def _page(args: argparse.Namespace, found: "Description", recipe: str, loss: str, l2: float) -> str:
    from rich.console import Console
    from rich.table import Table

    fields = _fields(args, found, recipe, loss, l2)
    table = Table()
    for column in ("curvature", "here", "Table 2"):
        table.add_column(column, justify="left" if column == "curvature" else "right")
    paper = fields.get("paper", {})
    for name in ("minimum", "average"):
        table.add_row(name, f"{fields[name]:.3g}", f"{paper[name]:.3g}" if paper else "–")
    for noise, value in found.curve[::4]:
        table.add_row(f"expected, noise {noise:.3g}", f"{value:.3g}", "")
    table.add_row("largest", f"{found.smoothness:.3g}", "")
    _, width = _options.screen()
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=False)
    console.print(f"{found.name}, {loss} loss, l2 = {l2:g}, {recipe} preprocessing", highlight=False)
    console.print(table)
    for line in found.words():
        console.print(line, highlight=False)
    if paper:
        printed = f"Table 2 prints {paper['minimum']:g} and {paper['average']:g}."
        console.print(f"{printed} {paper['difference']}", highlight=False)
    if args.plot is not None:
        console.print(f"Curvature against noise is drawn in {args.plot}.", highlight=False)
    return text.getvalue()


def draw(path: str, found: "Description") -> None:
    """Write Figure 1: the expected curvature at x = 0 against the noise, between the minimum and the average."""
    from matplotlib.figure import Figure as Canvas

    from dpgrad.reports import chart, plot

    with chart.file_style():
        figure = Canvas(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(*zip(*found.curve, strict=True), color="#000000", linewidth=2, label="expected ν (Eq. 5, x = 0)")
        axes.axhline(found.average, color="#0072B2", linestyle="--", label=f"average {found.average:.3g}")
        if found.minimum > 0:
            axes.axhline(found.minimum, color="#D55E00", linestyle=":", label=f"minimum {found.minimum:.3g}")
        axes.set(xscale="log", yscale="log", xlabel="noise on each coordinate", ylabel="curvature")
        chart.finish(axes, f"{found.name} (not private: for the owner of the rows)")
        axes.legend(frameon=False)
        plot.write(figure, path)
