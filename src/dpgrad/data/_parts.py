"""The training rows and those held out, collected chunk by chunk in arrays that grow."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._encode import Encoder, shares
from dpgrad.data._opened import Chunk
from dpgrad.data._schema import Schema
from dpgrad.errors import DataError


class Grown:
    """Rows added block by block, in one array that grows in place."""

    def __init__(self) -> None:
        self._array: NDArray[Any] | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: NDArray[Any]) -> None:
        """Append the rows of a block."""
        if self._array is None:
            self._array = np.empty((max(64, len(block)), *block.shape[1:]), block.dtype)
        if block.shape[1:] != self._array.shape[1:]:
            raise DataError(
                f"tokens must return texts of one length, got {self._array.shape[1]} and then {block.shape[1]}: pad to "
                "a fixed length, not to the longest text of a call"
            )
        if self._count + len(block) > len(self._array):
            size = max(2 * len(self._array), self._count + len(block))
            self._array.resize((size, *self._array.shape[1:]), refcheck=False)
        self._array[self._count : self._count + len(block)] = block
        self._count += len(block)

    def done(self) -> NDArray[Any]:
        """All rows; none may follow."""
        assert self._array is not None
        self._array.resize((self._count, *self._array.shape[1:]), refcheck=False)
        return self._array


@dataclass
class SplitPart:
    """Rows, targets and ids of the training rows, or of those held out."""

    x: Grown = field(default_factory=Grown)
    y: Grown = field(default_factory=Grown)
    ids: Grown = field(default_factory=Grown)
    whole: NDArray[Any] | None = None  # rows that stay a memory map

    def rows(self) -> NDArray[Any]:
        """The encoded rows."""
        return self.x.done() if self.whole is None else self.whole


@dataclass
class Parts:
    """Both parts of a split."""

    train: SplitPart = field(default_factory=SplitPart)
    test: SplitPart = field(default_factory=SplitPart)
    by_position: bool = False
    count: int = 0  # rows read, dropped ones with them
    dropped: list[int] = field(default_factory=list)  # their places

    def cut(self, share: float) -> int:
        """How many of the kept rows come before the last share of all that were read, by places and not by values."""
        start = self.count - int(self.count * share)
        return start - sum(place < start for place in self.dropped)


def collect(encoder: Encoder, schema: Schema, parts: Parts, held_out: bool | None) -> None:
    """Encode every chunk and put its rows into their part; all of them held out, where that is said."""
    mapped = _as_it_is(encoder, schema)
    if mapped is not None:
        (parts.test if held_out else parts.train).whole = mapped
    parts.by_position |= schema.split.rule == "last"
    for chunk in encoder.table.chunks:
        if mapped is None:
            x, keep = encoder.rows(chunk)
        else:
            _refuse_wild(encoder, schema, chunk)
            x, keep = np.empty((len(chunk), 0)), np.ones(len(chunk), bool)
        y, kept = encoder.target(chunk)
        keep &= kept
        held = np.full(len(chunk), True) if held_out else _held(encoder, schema, chunk, parts.count)
        parts.by_position |= schema.split.rule == "fraction" and schema.unit is None and chunk.keys is None
        ids = None if schema.unit is None else encoder.ids(chunk, schema.unit)
        for part, rows in ((parts.train, keep & ~held), (parts.test, keep & held)):
            if mapped is None:
                part.x.add(x[rows])
            part.y.add(y[rows])
            if ids is not None:
                part.ids.add(ids[rows])
        parts.dropped.extend((parts.count + np.flatnonzero(~keep)).tolist())
        parts.count += len(chunk)


def _held(encoder: Encoder, schema: Schema, chunk: Chunk, before: int) -> NDArray[np.bool_]:
    """Which rows of a chunk are held out, by each row alone."""
    split = schema.split
    if split.rule == "column":
        assert split.column is not None
        return np.isin(encoder.texts(chunk, split.column), split.values)
    if split.rule != "fraction":
        return np.zeros(len(chunk), bool)
    if schema.unit is not None:
        keys: Sequence[str] = encoder.texts(chunk, schema.unit)
    else:
        keys = chunk.keys or [str(before + place) for place in range(len(chunk))]
    held: NDArray[np.bool_] = shares(keys, split.key) < split.held_out
    return held


def _as_it_is(encoder: Encoder, schema: Schema) -> NDArray[Any] | None:
    """The memory map of an .npy file whose numbers are used as they are, in rows that stay in their order."""
    column = schema.features[0]
    plain = len(schema.features) == 1 and column.kind == "number" and column.bounds is None and not column.missing
    kept = schema.split.rule in ("none", "last", "file") and schema.target is not None
    kept = kept and schema.target.unknown == "refuse" and not schema.target.missing  # type: ignore[union-attr]
    array = (encoder.table.whole or {}).get(column.name)
    if not plain or not kept or not isinstance(array, np.memmap) or array.dtype != np.float32:
        return None
    return array if array.shape[1:] == schema.shape else None


def _refuse_wild(encoder: Encoder, schema: Schema, chunk: Chunk) -> None:
    column = schema.features[0]
    good = np.isfinite(chunk.columns[column.name]).reshape(len(chunk), -1).all(1)
    if not good.all():
        raise encoder.table.fault(chunk, int(np.argmin(good)), column.name, "is not finite: correct or remove that row")
