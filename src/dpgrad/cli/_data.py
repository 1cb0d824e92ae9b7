"""The dataset of a command: its options, and the message if its files are missing."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad.cli import _options
from dpgrad.errors import MissingFileError, OptionError

if TYPE_CHECKING:
    from dpgrad.data import Dataset


def add(parser: Any) -> None:
    """Add the options that say where the files of a dataset are."""
    add_folder(parser)
    parser.add_argument(
        "--download", action="store_true", default=None, help="Fetch missing files to that folder, if they are online."
    )


def add_folder(parser: Any) -> None:
    """Add the folder of the data files."""
    parser.add_argument(
        "--data-dir", metavar="DIR", help="The folder of the data files; without it, the one DPGRAD_DATA names."
    )


def add_own(parser: Any) -> None:
    """Add the options for a user's own file or folder."""
    parser.add_argument("--target", metavar="NAME", help="The column to predict, if the schema does not name it.")
    parser.add_argument(
        "--schema",
        metavar="FILE.toml",
        help=_options.First(
            "What is publicly known about the columns of a file of your own; `dpgrad data describe` proposes one."
        ),
    )
    parser.add_argument(
        "--classes", metavar="K", type=_options.count, help="How many classes the labels of an .npz or .npy have."
    )


def load(name: str, args: argparse.Namespace, preprocessing: str | None, tokens: Any = None) -> "Dataset":
    """Load the dataset, or read a user's own file or folder by its schema; missing files are named."""
    from dpgrad import data

    own = {"target": None, "schema": None, "classes": None} | vars(args)
    if data.is_file(name):
        if preprocessing is not None:
            raise OptionError("--preprocessing is for datasets by name: the schema says how a file is prepared")
        return data.read(name, own["target"], own["schema"], tokens, classes=own["classes"])
    for option in ("target", "schema", "classes"):
        if own[option] is not None:
            raise OptionError(f"--{option} is for files of your own, and {name!r:.80} is the name of a dataset")
    try:
        return data.load(name, args.data_dir, preprocessing, download=bool(args.download))
    except MissingFileError:
        raise MissingFileError(_missing(name, args.data_dir)) from None


def _missing(name: str, given: str | None) -> str:
    from dpgrad import data

    folder = data.data_folder(None if given is None else Path(given))
    files = [source for source in data.sources(name) if folder is None or not (folder / source.place).exists()]
    named = "; ".join(f"{source.file} ({source.published})" for source in files)
    place = f"{'DIR' if folder is None else folder}/{files[0].folder}"
    fetch = f"fetch them with --download{' --data-dir DIR' if folder is None else ''}"
    by_hand = f"put {named} into {place}" + (", where --data-dir or DPGRAD_DATA names DIR" if folder is None else "")
    remedy = f"{fetch}, or {by_hand}" if all(source.url for source in files) else by_hand
    return f"{name} needs files that are missing: {remedy}"
