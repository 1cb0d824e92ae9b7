"""Datasets that Hugging Face's `datasets` saved to a local folder, named hf:FOLDER."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpgrad.data._opened import Chunk, FileTable, guarded
from dpgrad.data._parquet import chunk
from dpgrad.errors import DataError

PREFIX = "hf:"

_ROWS = 2048  # in a chunk


def table(path: Path) -> FileTable:
    """The columns of one saved dataset; class labels are written by their names."""
    named = f"{PREFIX}{path}"
    with guarded(named, "a saved dataset"):
        if not path.is_dir():
            raise DataError(
                f"{named}: there is no such folder: save the dataset with save_to_disk and name that folder"
            )
        if (path / "dataset_dict.json").is_file():
            parts = sorted(inner.name for inner in path.iterdir() if (inner / "dataset_info.json").is_file())
            raise DataError(
                f"{named} holds several parts ({', '.join(parts):.200}): name one, such as {named}/train; "
                'to hold out another, write rule = "file" and file = "NAME" under [split]'
            )
        if not all((path / name).is_file() for name in ("dataset_info.json", "state.json")):
            raise DataError(f"{named} is not a dataset that save_to_disk wrote: name the folder it was saved to")
        import datasets

        saved = datasets.load_from_disk(str(path))
        labels = {
            name: feature.names for name, feature in saved.features.items() if isinstance(feature, datasets.ClassLabel)
        }
        return FileTable(named, tuple(saved.column_names), _chunks(named, saved.with_format("arrow"), labels))


def class_names(path: Path) -> dict[str, tuple[str, ...]]:
    """The names of class labels that the dataset's own description declares."""
    with guarded(f"{PREFIX}{path}", "a saved dataset"):
        import datasets

        features = datasets.load_from_disk(str(path)).features
        return {name: tuple(kind.names) for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}


def _chunks(named: str, saved: Any, labels: dict[str, list[str]]) -> Iterator[Chunk]:
    at = 0
    with guarded(named, "a saved dataset"):
        for batch in saved.iter(batch_size=_ROWS):
            found = chunk(batch, at)
            columns = dict(found.columns)
            for name, names in labels.items():
                codes = [None if code is None else int(code) for code in columns[name]]
                columns[name] = [names[code] if code is not None and 0 <= code < len(names) else None for code in codes]
            yield Chunk(columns, found.lines)
            at += len(found)
