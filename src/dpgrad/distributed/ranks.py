"""The ranks of a run: how several processes stay together, and end together.

Every exchange between ranks begins with a *meeting*: each sends every other its words (run, phase, step, failed,
stop, weights, wish). So all ranks see the same words and decide alike. They go on only if all are at the same place
of the same run, with the same weights, and none has failed. A rank that fails anywhere joins the meeting that the
others come to next, flagged, and all of them raise. A rank whose process is gone closes its connections, which ends
the meeting on the others.

Seams for what is built on this: `Ranks.meet` before any collective of your own, `Ranks.committed` around it,
`Ranks.from_first` and `Ranks.every` for objects, `Ranks.together` around code that may fail on one rank alone, and
`dpgrad.distributed.exchange.Exchange` for sums and their noise.

Meetings go over a gloo group of their own, on the CPU, whatever the backend of the user's group: nothing in them waits
for a CUDA device.

>>> ranks = Ranks.of()
>>> ranks.alone, ranks.rank, ranks.size, ranks.from_first(lambda: "told")
(True, 0, 1, 'told')
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpgrad import _processes, _validate
from dpgrad.errors import OptionError, RanksError, UnsupportedSystemError
from dpgrad.grads.fsdp import is_shard

__all__ = ["Phase", "Ranks", "weights_digest", "weights_sum"]

T = TypeVar("T")
_SILENT = (
    "another rank was not heard of for as long as the process group waits: its machine or network is gone, it was "
    "stopped, or it is that slow. Steps that were charged stay spent; start all ranks again, and a run with a folder "
    "resumes from it. A longer wait is given by init_process_group(timeout=...)"
)
_CONTROL: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the group of the meetings, by the user's group
_GONE = (
    "another rank is gone: its process ended or its connection broke, and its own output says why. Steps that were "
    "charged stay spent; start all ranks again, and a run with a folder resumes from it"
)


class Phase(IntEnum):
    """What a meeting is about: ranks that come to different ones are refused.

    >>> Phase.CHARGED < Phase.SUMMED
    True
    """

    FAILED = 0
    OPENED = 1
    COMPARED = 2
    TOLD = 3
    PREPARED = 4
    CHARGED = 5
    SUMMED = 6
    SHOWN = 7
    SAVED = 8
    COUNTED = 9
    GATHERED = 10


class Ranks:
    """The processes of one run; ``rank`` is this one of ``size``, and ``alone`` says that there is nothing to exchange.

    ``stopping`` becomes true on all ranks at the same meeting, once ``asked`` was true on one of them or a meeting was
    given ``stop``.

    Guarantee: a meeting returns on a rank only if every rank came to the same phase and step of the same run and none
    had failed until then.
    """

    def __init__(self, group: Any, alone: bool) -> None:
        self.group, self.alone = group, alone
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        self.asked: Callable[[], bool] = lambda: False
        self.stopping = False
        self._run = 0
        self._depth = 0  # of blocks of `together`
        self._over = False  # whether the others know that this rank fails
        self.control = None if alone else _control(group)

    @classmethod
    def of(cls, group: Any = None) -> "Ranks":
        """Those of ``group``, of torch's default group where there is one, or this process alone.

        A default group of one rank is this process alone; a group that is given is used, whatever its size.
        """
        if isinstance(group, Ranks):
            return group
        _processes.refuse_unconnected()
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise OptionError("group must be a process group: call torch.distributed.init_process_group() first")
            return cls(None, True)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise OptionError(f"group must be a torch.distributed process group, got {_validate.shown(group)}")
        if group is not None and dist.get_rank(group) < 0:
            raise OptionError("group must hold this rank: call this on the ranks of the group alone")
        given = group is not None
        group = group if given else dist.group.WORLD
        return cls(group, not given and dist.get_world_size(group) == 1)

    @property
    def first(self) -> bool:
        """Whether this rank is the one that holds folder, ledger and progress."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        """What the ranks exchange sums by, as torch names it."""
        return "" if self.alone else str(dist.get_backend(self.group))

    @contextmanager
    def together(self) -> Iterator[None]:
        """If this rank fails within the block, the others learn of it in their next meeting, and raise too."""
        if self.alone:
            yield
            return
        self._depth += 1
        try:
            yield
        except Exception:
            if not self._over:
                self._over = True
                with suppress(RanksError):
                    self._gathered(Phase.FAILED, 0, failed=True, stop=False)
            raise
        except BaseException:  # it is not waited for anyone
            self.leave()
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._over = False

    @contextmanager
    def committed(self) -> Iterator[None]:
        """A collective after its meeting: if it fails, no rank can be informed, and the connections are closed."""
        try:
            yield
        except BaseException as error:
            self._over = True
            self.leave()
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise RanksError(_SILENT if "imed out" in str(error) else _GONE) from error
            raise

    def leave(self) -> None:
        """Close the connections of the meetings: the others' next one raises at once."""
        control, self.control = self.control, None
        if control is not None:
            _CONTROL.pop(self.group, None)
            with suppress(Exception):
                dist.destroy_process_group(control)

    def named(self, run: int) -> None:
        """From here on meetings are those of this run."""
        self._run = run

    def meet(self, phase: Phase, step: int = 0, *, stop: bool = False, weights: int = 0, wish: int = 0) -> list[int]:
        """Wait for all ranks; raise on every rank where one failed, or where they are at different places.

        ``weights`` is a number that all ranks must have alike, such as `weights_sum`. Returns the ``wish`` of each.
        """
        if self.alone:
            self.stopping = self.stopping or stop or self.asked()
            return [wish]
        with self.together():
            words = self._gathered(phase, step, failed=False, stop=stop or self.asked(), weights=weights, wish=wish)
            failed = words[:, 3].nonzero()[:, 0].tolist()
            here = torch.tensor([self._run, phase, step])
            if failed:
                self._over = True
                raise RanksError(
                    f"rank {failed[0]} failed: all ranks stop, and its own output says why. Steps that were charged "
                    "stay spent"
                )
            if bool((words[:, :3] != here).any()):
                self._over = True
                raise RanksError(f"ranks are not at the same place ({_places(words)}): every rank must take every step")
            if bool((words[:, 5] != weights).any()):
                self._over = True
                raise RanksError(
                    "ranks do not have the same weights: give every rank the same optimizer, learning rate and changes "
                    "of the model"
                )
            self.stopping = self.stopping or bool(words[:, 4].any())
            wishes: list[int] = words[:, 6].tolist()
            return wishes

    def _gathered(
        self, phase: Phase, step: int, *, failed: bool, stop: bool, weights: int = 0, wish: int = 0
    ) -> Tensor:
        """The words of all ranks, (ranks, words)."""
        mine = torch.tensor([self._run, phase, step, failed, stop, weights, wish]).repeat(self.size, 1)
        words = torch.empty_like(mine)
        with self.committed():
            if self.control is None:
                raise RuntimeError("the connections are closed")
            # Every rank hears from every other itself: none waits for one that waits for a third that is gone.
            dist.all_to_all_single(words, mine, group=self.control)
        return words

    def from_first(self, make: Callable[[], T], phase: Phase = Phase.TOLD) -> T:
        """What ``make`` returns on rank 0, on every rank; where it fails, every rank raises."""
        if self.alone:
            return make()
        with self.together():
            told: list[Any] = [make() if self.first else None]
            self.meet(phase)
            with self.committed():
                dist.broadcast_object_list(told, group=self.control, group_src=0)
        found: T = told[0]
        return found

    def every(self, value: T, phase: Phase = Phase.TOLD, step: int = 0) -> list[T]:
        """The values of all ranks, in their order."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        with self.together():
            self.meet(phase, step)
            with self.committed():
                dist.all_gather_object(found, value, group=self.control)
        return found

    def total(self, counts: Tensor, step: int) -> Tensor:
        """The sum over all ranks of a few numbers of a step, the same bits on every rank."""
        if self.alone:
            return counts
        every = self.every(counts.tolist(), Phase.COUNTED, step)
        return torch.tensor(every, dtype=torch.float64).sum(0).to(counts.device)

    def refuse_different(self, settings: Mapping[str, str], phase: Phase = Phase.COMPARED) -> None:
        """Raise on every rank where settings, compared by their digests, are not the same on all."""
        if self.alone:
            return
        mine = {name: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for name, text in settings.items()}
        first, *others = self.every(mine, phase)
        for rank, other in enumerate(others, 1):
            differing = sorted(name for name in {*first, *other} if other.get(name) != first.get(name))
            if differing:
                with self.agreeing():
                    raise RanksError(
                        f"ranks 0 and {rank} do not have the same {', '.join(differing)}: start every rank with the "
                        "same code, data and settings"
                    )

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """A refusal that every rank comes to by itself: none has to be told."""
        try:
            yield
        except Exception:
            self._over = self._depth > 0
            raise

    def share_model(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0, after their names, shapes and types were compared.

        Shards of parameters stay as they are: all ranks together have one model.
        """
        if self.alone:
            return
        tensors = _tensors(model)
        told = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors.items()]
        self.refuse_different({"model": repr(told)})
        self.meet(Phase.TOLD)
        with self.together(), self.committed(), torch.no_grad():
            for tensor in (each for each in tensors.values() if not is_shard(each)):
                sent = _bytes(tensor).clone()
                if sent.numel():
                    dist.broadcast(sent, group=self.control, group_src=0)
                    if not self.first:
                        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))


def _control(group: Any) -> Any:
    """A gloo group for the meetings of the ranks of ``group``, made once."""
    if group not in _CONTROL:
        if not dist.is_gloo_available():
            raise UnsupportedSystemError(
                "several ranks need the gloo backend besides their own, and this build of torch has none: install one "
                "that has, or run in one process"
            )
        ranks = dist.get_process_group_ranks(group)
        _CONTROL[group] = dist.new_group(ranks, _patience(group), "gloo", use_local_synchronization=True)
    return _CONTROL[group]


def _patience(group: Any) -> timedelta:
    """How long the user's group waits for a rank; a group that is made from it would wait 30 minutes."""
    device = torch.device("cuda" if "nccl" in str(dist.get_backend(group)) else "cpu")
    found: timedelta = group._get_backend(device).options._timeout
    return found


def _places(words: Tensor) -> str:
    """Where each rank is, in words."""
    lines = words.tolist()
    runs = sorted({line[0] for line in lines})
    of_run = [f" of run {1 + runs.index(line[0])}" if len(runs) > 1 else "" for line in lines]
    return ", ".join(
        f"rank {rank}: {Phase(line[1]).name.lower()}, step {line[2]}{of}"
        for rank, (line, of) in enumerate(zip(lines, of_run, strict=True))
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, also those that no state dict holds."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _bytes(tensor: Tensor) -> Tensor:
    """The values of a tensor as bytes on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def weights_digest(model: nn.Module) -> str:
    """A digest of all parameters and buffers of a model, by which replicas are compared; shards are left out.

    >>> weights_digest(nn.Linear(1, 1)) == weights_digest(nn.Linear(1, 1))
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in _tensors(model).items():
        if is_shard(tensor):
            continue
        digest.update(name.encode())
        digest.update(_bytes(tensor).numpy().tobytes())
    return digest.hexdigest()


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # types by the bytes of a value


def weights_sum(parameters: Iterable[Tensor]) -> int:
    """A number that differs, but for rare chance, where parameters do: quicker than `weights_digest`, one pass each.

    Shards are left out.

    >>> weights_sum([torch.zeros(2)]) == weights_sum([torch.zeros(2)]) != weights_sum([torch.ones(2)])
    True
    """
    flat = [each.detach().reshape(-1) for each in parameters if not is_shard(each)]
    sums = [each.view(_WHOLE[each.element_size()]).sum(dtype=torch.int64) for each in flat]
    found = 0
    for value in torch.stack(sums).tolist() if sums else ():
        found = (31 * found + value) % (1 << 62)
    return found
