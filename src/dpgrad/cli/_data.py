"""The dataset of a command: its options, and what is said where its files are missing."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad.errors import MissingFileError

if TYPE_CHECKING:
    from dpgrad.data import Dataset


def add(parser: Any) -> None:
    """Add the options that say where the files of a dataset are."""
    parser.add_argument(
        "--data-dir", metavar="DIR", help="The folder of the data files; without it, the one DPGRAD_DATA names."
    )
    parser.add_argument(
        "--download", action="store_true", default=None, help="Fetch missing files to that folder, if they are online."
    )


def load(name: str, args: argparse.Namespace, preprocessing: str | None) -> "Dataset":
    """Load the dataset; where files are missing, say how to get them in the words of the command line."""
    from dpgrad import data

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
