"""The options of `dpgrad train`, in their groups, and those that other commands share with it.

Most are fields of records and declared there.
"""

import argparse
from typing import TYPE_CHECKING

from dpgrad.cli import _data, _options
from dpgrad.training.options import Budget, Computing, HeldOut, Privacy, RunFolder
from dpgrad.training.recipes import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpgrad.cli._options import Parser


def add(parser: "Parser") -> None:
    """Add all of them."""
    _job(parser)
    _budget(parser)
    _constants(parser)
    _running(parser)


def _job(parser: "Parser") -> None:
    group = parser.add_argument_group("what is trained")
    add = group.add_argument
    add_data(group)
    add(
        "--model",
        metavar="NAME|FILE|FOLDER",
        help=_options.First(
            "A name: linear, mlp, cnn, oriented-gradients, words, yu2018-softmax, yu2018-cnn, yu2018-covertype, "
            "huang2024-cnn or resnet9. Or FILE.py:FUNCTION, your own function of the shape of one row and the number "
            "of outputs. Or hf:FOLDER, a classifier of transformers in a local folder. The default depends on the data."
        ),
    )
    add(
        "--lora",
        metavar="R",
        type=_options.count,
        help="With hf:FOLDER: train adapters of rank R and the head, and freeze the other weights.",
    )
    add(
        "--method",
        metavar="NAME",
        nargs="+",
        help=_options.First("One or more methods, such as dpsgd or psasc; default: auto, or four methods for digits."),
    )
    add(
        "--baseline",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Also train the same model without privacy, for comparison; that figure is outside every guarantee. "
        "Default: yes for a dataset by name, no for a file of your own.",
    )


def _budget(parser: "Parser") -> None:
    group = parser.add_argument_group("the budget")
    for option, settings in (*_options.declared(Budget), *_options.declared(Privacy)):
        group.add_argument(option, **settings)


def _constants(parser: "Parser") -> None:
    group = parser.add_argument_group("constants of the method, in place of its own")
    for option, settings in _options.declared(Recipe):
        group.add_argument(option, **settings)
    add = group.add_argument
    add(
        "--augment",
        metavar="K",
        type=_options.count,
        help="Shift each image K ways and clip the mean gradient.",
    )
    add(
        "--group",
        metavar="PATTERN[:CLIP[:NOISE]]",
        action="append",
        help="Clip the parameters that match a pattern separately, e.g. 'conv*:0.5'; may be repeated.",
    )


def _running(parser: "Parser") -> None:
    add = parser.add_argument_group("the run").add_argument
    add("--config", metavar="FILE.toml", help="Options by name in a file; the command line takes precedence.")
    add(
        "--plan",
        action="store_true",
        default=None,
        help=_options.First("Print the plan and its cost without training."),
    )
    add("--out", metavar="DIR", help=_options.First("The run folder; without it, a new one under dpgrad-runs/."))
    for option, settings in _options.declared(RunFolder):
        add(option, **settings)
    add_records(add)
    for option, settings in _options.declared(HeldOut):
        add(option, **settings)
    add(
        "--diagnostics",
        metavar="EPOCHS",
        type=_options.positive,
        help="Record gradient statistics over the last epochs in private/; they are outside the guarantee.",
    )
    add_device(add)
    for option, settings in _options.declared(Computing):
        add(option, **settings)
    add(
        "--json",
        action="store_true",
        default=None,
        help=_options.First("Print one JSON object; progress stays on standard error."),
    )


def add_data(group: "argparse._ArgumentGroup") -> None:
    """Add the options that say which rows are trained on."""
    group.add_argument(
        "--data",
        metavar="NAME|FILE|FOLDER",
        help=_options.First("A dataset by name, or a file or folder of your own; default: digits."),
    )
    _data.add_own(group)
    _data.add(group)
    group.add_argument(
        "--preprocessing", metavar="NAME", help="How the data are prepared; the default reads nothing private."
    )


def add_records(add: "Callable[..., object]") -> None:
    """Add the ledger and the seed."""
    add("--ledger", metavar="FILE", help="A file that adds up the cost of all runs on the same data.")
    add(
        "--seed",
        metavar="N",
        type=_options.option(_options.whole, _seed),
        help="Makes the run repeatable, and unfit for release.",
    )


def add_device(add: "Callable[..., object]") -> None:
    """Add the device."""
    add("--device", metavar="NAME", help="cpu or cuda; default: cuda if there is a CUDA device.")


def _seed(value: int) -> None:
    from dpgrad import _validate

    _validate.whole(value=value)
