"""The state of a model in shards on the disk of rank 0: sent and read a piece at a time, and never whole in memory.

All tensors of which ranks hold shards go to one file, one whole tensor after another (`dpgrad.runs.values`). The rest
of the state stays as it is, with a mark where each such tensor was, and where one was that all ranks hold alike. Rank 0
alone writes and reads. So the file fits any number of ranks, and a model that is not sharded: every rank is sent what
it holds now.

Guarantee: what is read is what was written, value by value, or all ranks raise.
"""

import hashlib
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad.distributed.ranks import Phase, Ranks
from dpgrad.distributed.rounds import Slices, Spread
from dpgrad.distributed.shards import as_replica, as_shard, local, spread_of
from dpgrad.errors import ResumeError, UnsupportedModelError
from dpgrad.grads import fsdp
from dpgrad.runs.values import Reader, Writer

__all__ = ["Filed", "mapped", "read", "starts_of", "written"]

_PIECE = 1 << 24  # bytes of a file that travel together
_ALIGNED = 64  # bytes: a tensor begins at a multiple of it
_MARK, _ALIKE, _FILE = "dpgrad values", "dpgrad replica", "values"

Held = list[tuple[int, int]]  # the bytes of a file that a rank holds of each tensor: rising, empty where it has none


class Filed(NamedTuple):
    """The shape and the type of a whole tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def starts_of(kinds: Sequence[Filed]) -> list[int]:
    """Where each tensor begins in the file, and at last where the file ends.

    >>> starts_of([Filed(torch.Size([3, 2]), torch.float32), Filed(torch.Size([1]), torch.float64)])
    [0, 64, 128]
    """
    found = [0]
    for kind in kinds:
        found.append(-(-(found[-1] + kind.nbytes) // _ALIGNED) * _ALIGNED)
    return found


def written(state: Any, model: nn.Module, ranks: Ranks, step: int, folder: Path) -> tuple[Any, str]:
    """Write the shards in ``state`` to a new file in ``folder``, of rank 0; all ranks call this with theirs.

    Returns, on rank 0, the state with marks in their place, and the name of the file.
    """
    with ranks.together():
        leaves, form = pytree.tree_flatten(state)
        like, spread = next(model.parameters()), spread_of(model, ranks)
        shards = [leaf for leaf in leaves if _is_shard(leaf, like)]
        own = [local(each).reshape(-1).view(torch.uint8) for each in shards]
        kinds = [Filed(each.shape, each.dtype) for each in shards]
        starts = starts_of(kinds)
        # Replicas of shards hold the same: those of the first row are sent.
        held = [_held(kinds, starts, spread, rank) if rank < spread.shards else [] for rank in range(ranks.size)]
        with Writer(folder) if ranks.first else nullcontext() as writer:
            told = {"shards to store": repr(kinds), "tensors to store": _digest(leaves, like)}
            ranks.refuse_different({"step": str(step), **told}, Phase.SAVED)
            _send(ranks, held, starts[-1], own, writer)
            if writer is None:
                return {}, ""
            described = {"file": writer.name, "digest": writer.finish(), "kinds": [_plain(kind) for kind in kinds]}
    places = iter(range(len(shards)))
    marked = [
        leaf if not _is_distributed(leaf) else {_MARK: next(places)} if _is_shard(leaf, like) else {_ALIKE: local(leaf)}
        for leaf in leaves
    ]
    return {**pytree.tree_unflatten(marked, form), _FILE: described}, writer.name


def _send(ranks: Ranks, held: Sequence[Held], end: int, own: Sequence[Tensor], writer: Writer | None) -> None:
    """Send rank 0 what this rank holds, piece by piece. Where rank 0 cannot write, it raises when all was sent."""
    failed: Exception | None = None
    with ranks.committed():
        for start in range(0, end, _PIECE):
            stop = min(start + _PIECE, end)
            parts = [list(_within(each, start, stop)) for each in held]
            lengths = [sum(b - a for _, a, b in each) if writer is not None else 0 for each in parts]
            mine = held[ranks.rank]
            few = [own[place][a - mine[place][0] : b - mine[place][0]].cpu() for place, a, b in parts[ranks.rank]]
            sent = _joined(few)
            received = torch.empty(sum(lengths), dtype=torch.uint8)
            ranks.exchange(received, sent, lengths, [len(sent), *[0] * (ranks.size - 1)])
            if writer is None or failed is not None:
                continue
            piece = torch.zeros(stop - start, dtype=torch.uint8)
            for each, values in zip(parts, torch.split(received, lengths), strict=True):
                for (_, a, b), part in zip(each, torch.split(values, [b - a for _, a, b in each]), strict=True):
                    piece[a - start : b - start] = part
            try:
                writer.write(piece.numpy().data)
            except Exception as error:
                failed = error
    if failed is not None:
        raise failed


def read(state: dict[str, Any], model: nn.Module, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The state that `written` returned, with tensors in place of its marks: what this rank holds of ``model``.

    States without marks are returned as they are, and refused where the model is sharded.
    """
    sharded = fsdp.is_sharded(model)
    if (described := state.get(_FILE)) is None:
        if sharded:
            with ranks.agreeing():
                raise ResumeError(
                    "the run in the folder is of a model that fully_shard had not sharded: resume it with the plain "
                    "model on every rank"
                )
        return state
    kinds = [_kind(*each) for each in described["kinds"]]
    starts, spread = starts_of(kinds), spread_of(model, ranks) if sharded else None
    held = [_held(kinds, starts, spread, rank) for rank in range(ranks.size)]
    found = [torch.empty(b - a, dtype=torch.uint8) for a, b in held[ranks.rank]]
    opened: list[Reader] = []
    ranks.from_first(lambda: opened.append(Reader(folder / described["file"], described["digest"])))
    try:
        _receive(ranks, held, starts[-1], found, opened[0] if opened else None)
    finally:
        for reader in opened:
            reader.close()
    like = next(model.parameters())
    tensors = [_tensor(each, kind, like, sharded) for each, kind in zip(found, kinds, strict=True)]
    return _unmarked(state, tensors, lambda values: as_replica(values.to(like.device), like) if sharded else values)


def _receive(ranks: Ranks, held: Sequence[Held], end: int, found: Sequence[Tensor], reader: Reader | None) -> None:
    """Fill ``found`` with the bytes that this rank holds of each tensor, which rank 0 reads and sends."""
    mine = held[ranks.rank]
    with ranks.together(), ranks.committed():
        for start in range(0, end, _PIECE):
            stop = min(start + _PIECE, end)
            parts = [list(_within(each, start, stop)) for each in held]
            own = parts[ranks.rank]
            received = torch.empty(sum(b - a for _, a, b in own), dtype=torch.uint8)
            sent, given = _joined([]), [0] * ranks.size
            if reader is not None:
                piece = torch.frombuffer(bytearray(reader.read(start, stop - start)), dtype=torch.uint8)
                sent = _joined([piece[a - start : b - start] for each in parts for _, a, b in each])
                given = [sum(b - a for _, a, b in each) for each in parts]
            if ranks.alone:
                received = sent
            else:
                ranks.exchange(received, sent, [len(received), *[0] * (ranks.size - 1)], given)
            for (place, a, b), part in zip(own, torch.split(received, [b - a for _, a, b in own]), strict=True):
                found[place][a - mine[place][0] : b - mine[place][0]] = part


def mapped(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The state that `written` returned, with whole tensors that lie in the file: they take memory only while read."""
    described = state[_FILE]
    kinds = [_kind(*each) for each in described["kinds"]]
    with (folder / described["file"]).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    make = partial(torch.frombuffer, memory)
    tensors = [
        make(dtype=kind.dtype, count=kind.shape.numel(), offset=start).view(kind.shape)
        for kind, (start, _) in zip(kinds, pairwise(starts_of(kinds)), strict=True)
    ]
    return _unmarked(state, tensors, lambda values: values)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.uint8)


def _unmarked(state: dict[str, Any], tensors: Sequence[Tensor], alike: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The state with tensors in place of its marks; ``alike`` makes those that all ranks hold."""

    def found(leaf: Any) -> Any:
        return leaf if not _marked(leaf) else tensors[leaf[_MARK]] if _MARK in leaf else alike(leaf[_ALIKE])

    rest = {name: value for name, value in state.items() if name != _FILE}
    made: dict[str, Any] = pytree.tree_map(found, rest, is_leaf=_marked)
    return made


def _is_distributed(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and fsdp.is_shard(leaf)


def _is_shard(leaf: Any, like: Any) -> bool:
    """Whether ranks hold shards of a leaf as of ``like``, and not all of it; what they hold otherwise is refused."""
    if not _is_distributed(leaf):
        return False
    if leaf.placements == like.placements and leaf.device_mesh == like.device_mesh:
        return True
    if not all(each.is_replicate() for each in leaf.placements):
        raise UnsupportedModelError(
            f"the state holds a tensor of shape {tuple(leaf.shape)} placed by {leaf.placements}, which a run folder "
            f"does not store: let the optimizer keep tensors placed as the parameters, by {like.placements}, or whole "
            "on every rank, or train without folder"
        )
    return False


def _digest(leaves: Sequence[Any], like: Tensor) -> str:
    """A digest of the tensors of which rank 0's are stored: all ranks must hold the same."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not _is_shard(leaf, like):
            digest.update(repr((leaf.dtype, leaf.shape)).encode())
            digest.update(local(leaf).cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _marked(leaf: object) -> bool:
    return isinstance(leaf, dict) and set(leaf) in ({_MARK}, {_ALIKE})


def _plain(kind: Filed) -> list[Any]:
    return [list(kind.shape), str(kind.dtype).removeprefix("torch.")]


def _kind(shape: Sequence[int], dtype: str) -> Filed:
    return Filed(torch.Size(shape), getattr(torch, dtype))


def _held(kinds: Sequence[Filed], starts: Sequence[int], spread: Spread | None, rank: int) -> Held:
    """The bytes that a rank holds: of its shards, or all."""
    found = []
    for kind, start in zip(kinds, starts, strict=False):
        cuts: tuple[int, ...] = (0, kind.shape.numel())
        if spread is not None:
            shard = spread.shard(rank)
            cuts = Slices.of(kind.shape, spread.shards).cuts[shard : shard + 2]
        found.append((start + cuts[0] * kind.dtype.itemsize, start + cuts[1] * kind.dtype.itemsize))
    return found


def _within(held: Held, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """What is held between ``start`` and ``stop``: the place of each tensor, and from where to where in the file.

    >>> list(_within([(0, 10), (64, 70), (128, 128), (192, 200)], 4, 194))
    [(0, 4, 10), (1, 64, 70), (3, 192, 194)]
    """
    first = bisect_right(held, start, key=lambda ends: ends[1])
    for place in range(first, len(held)):
        a, b = max(held[place][0], start), min(held[place][1], stop)
        if held[place][0] >= stop:
            return
        if a < b:
            yield place, a, b


def _tensor(values: Tensor, kind: Filed, like: Tensor, sharded: bool) -> Tensor:
    """A tensor of these bytes, on the device of ``like``, in shards where it is."""
    flat = values.view(kind.dtype).to(like.device)
    if not sharded:
        return flat.view(kind.shape)
    return as_shard(flat.view(-1, *kind.shape[1:]), like, kind.shape)
