"""Pieces of a file that ranks with any shards hold, and files of values that are written and read by pieces."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dpgrad.distributed import stored
from dpgrad.distributed.rounds import Spread
from dpgrad.distributed.stored import Filed
from dpgrad.errors import ResumeError
from dpgrad.runs.values import Reader, Writer, discard_others

KINDS = [
    Filed(torch.Size(shape), dtype)
    for shape, dtype in (((5, 3), torch.float32), ((2,), torch.bfloat16), ((1, 7), torch.float64), ((9,), torch.int64))
]


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("piece", [1, 24, 64, 1000])
def test_all_ranks_hold_every_byte_of_every_tensor_once(shards: int, piece: int) -> None:
    starts = stored.starts_of(KINDS)
    held = [stored._held(KINDS, starts, Spread(shards, shards), rank) for rank in range(shards)]
    found = [
        byte
        for start in range(0, starts[-1], piece)
        for each in held
        for _, first, last in stored._within(each, start, min(start + piece, starts[-1]))
        for byte in range(first, last)
    ]
    wanted = [
        start + byte for kind, (start, _) in zip(KINDS, pairwise(starts), strict=True) for byte in range(kind.nbytes)
    ]
    assert sorted(found) == wanted
    assert stored._held(KINDS, starts, None, 0) == stored._held(KINDS, starts, Spread(1, 1), 0)


def test_a_file_of_values_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        for piece in (b"some", b"", b"values"):
            writer.write(piece)
        digest = writer.finish()
    path = tmp_path / writer.name
    reader = Reader(path, digest)
    assert reader.read(2, 5) == b"meval"
    reader.close()
    path.write_bytes(b"somevalueS")
    with pytest.raises(ResumeError, match="checksum"):
        Reader(path, digest)
    with Writer(tmp_path) as unfinished:
        unfinished.write(b"some")
    discard_others(tmp_path, writer.name)
    assert [each.name for each in tmp_path.iterdir()] == [writer.name]
    discard_others(tmp_path, "")
    assert not list(tmp_path.iterdir())
