"""`dpgrad data describe`: propose a schema for a user's own file."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from dpgrad.cli import _options, _rows
from dpgrad.errors import OptionError

if TYPE_CHECKING:
    from dpgrad.cli._options import Commands

__all__ = ["add"]

_ACTIONS = ("describe",)


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "data",
        "describe a file of your own",
        "`dpgrad data describe FILE > schema.toml` proposes a schema: the kind of each column, its bounds, categories "
        "and markers of missing values, the target and the split. Proposing reads the data and is outside every "
        "guarantee. Correct each entry from public knowledge and confirm it with public = true; dpgrad train refuses "
        "the file until then.",
        _answer,
    )
    add = parser.add_argument
    add("action", metavar="describe", type=_options.option(_action, lambda value: None), help="What to do.")
    add("file", metavar="FILE", help="CSV, Parquet, .npz, .npy, .jsonl, a folder of images by class, or hf:FOLDER.")
    add("--target", metavar="NAME", help="The column to predict; without it, one is guessed.")
    add("--header", choices=_rows.HEADERS, default="auto", help="Whether the first line of a CSV names its columns.")
    add(
        "--separator", metavar="SIGN", help="The separator of a CSV: one character, or tab; without it, it is detected."
    )
    add("--encoding", metavar="NAME", default="utf-8", help="The encoding of a CSV or of JSON lines.")
    add("--json", action="store_true", help="Print one JSON object instead of TOML.")


def _action(text: str) -> str:
    if text not in _ACTIONS:
        raise OptionError(f"describe, as in `dpgrad data describe FILE`, got {text!r:.40}")
    return text


def _answer(args: argparse.Namespace) -> str:
    from dpgrad import data

    facts: dict[str, Any] = {"encoding": args.encoding}
    if args.separator is not None:
        facts["separator"] = {**data.SEPARATORS, "\\t": "\t"}.get(args.separator, args.separator)
    if args.header != "auto":
        facts["header"] = args.header == "yes"
    with _options.patience(f"reading {args.file}"):
        schema, notes = data.describe(args.file, args.target, data.FileFormat(**facts))
    print(f"dpgrad: outside the guarantee: {data.NOTICE}", file=sys.stderr, flush=True)
    if args.json:
        return json.dumps({"schema": schema.to_dict(), "notice": data.NOTICE, "guarantee": False}) + "\n"
    return data.written(schema, notes)
