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
for a CUDA device. Who waits in one looks for signs of life of the others (`dpgrad.distributed.pulse`), so that a slow
rank is waited for and a silent one is not.

>>> ranks = Ranks.of()
>>> ranks.alone, ranks.rank, ranks.size, ranks.from_first(lambda: "told")
(True, 0, 1, 'told')
"""

import ctypes
import hashlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpgrad import _processes, _validate
from dpgrad._processes import RANK_TIMEOUT
from dpgrad.distributed.pulse import Pulse
from dpgrad.errors import OptionError, RanksError, UnsupportedSystemError
from dpgrad.grads.fsdp import is_shard

__all__ = ["Phase", "Ranks", "weights_digest", "weights_sum"]

T = TypeVar("T")
_WORDS = 7  # of a meeting
_POLL = 1.0  # seconds between two looks at the signs of life
_AGAIN = "Steps that were charged stay spent; start all ranks again, and a run with a folder resumes from it"
_SLOW = (
    "another rank was not heard of for as long as the process group waits: its machine or network is gone, it was "
    f"stopped, or it is that slow. {_AGAIN}. A longer wait is given by init_process_group(timeout=...)"
)
_SILENT = (
    "{who} gave no sign of life for {limit:g} s: its machine or network is gone, or its process was stopped. "
    f"{_AGAIN}. A longer wait is given by rank_timeout"
)
_GONE = f"another rank is gone: its process ended or its connection broke, and its own output says why. {_AGAIN}"
_PLACES: WeakKeyDictionary[Any, "_Place"] = WeakKeyDictionary()  # where the ranks of the user's group meet


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
    given ``stop``. ``timeout`` is for how many seconds a rank may give no sign of life while this one waits for it.

    Guarantee: a meeting returns on a rank only if every rank came to the same phase and step of the same run and none
    had failed until then.
    """

    def __init__(self, group: Any, alone: bool, timeout: float = RANK_TIMEOUT) -> None:
        self.group, self.alone, self.timeout = group, alone, timeout
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        self.asked: Callable[[], bool] = lambda: False
        self.stopping = False
        self._run = 0
        self._depth = 0  # of blocks of `together`
        self._over = False  # whether the others know that this rank fails
        self._place = None if alone else _Place.of(group)
        self._sent, self._words = (torch.zeros(self.size, _WORDS, dtype=torch.int64) for _ in range(2))
        self._lines = self._sent.numpy()  # the same memory, written at less cost

    @classmethod
    def of(cls, group: Any = None, timeout: float = RANK_TIMEOUT) -> "Ranks":
        """Those of ``group``, of torch's default group where there is one, or this process alone.

        A default group of one rank is this process alone; a group that is given is used, whatever its size.
        """
        if isinstance(group, Ranks):
            return group
        _validate.positive(rank_timeout=timeout)
        _processes.refuse_unconnected()
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise OptionError("group must be a process group: call torch.distributed.init_process_group() first")
            return cls(None, True, timeout)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise OptionError(f"group must be a torch.distributed process group, got {_validate.shown(group)}")
        if group is not None and dist.get_rank(group) < 0:
            raise OptionError("group must hold this rank: call this on ranks of the group only")
        given = group is not None
        group = group if given else dist.group.WORLD
        return cls(group, not given and dist.get_world_size(group) == 1, timeout)

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
        if self.alone:
            yield
            return
        try:
            yield
        except BaseException as error:
            self._over = True
            self.leave()
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError | RanksError):
                raise RanksError(_SLOW if "imed out" in str(error) else _GONE) from error
            raise

    def leave(self) -> None:
        """Close the connections of the meetings: the others' next one raises at once."""
        place, self._place = self._place, None
        if place is not None:
            place.close()

    @property
    def control(self) -> Any:
        """The gloo group of the meetings."""
        if self._place is None:
            raise RuntimeError("the connections are closed")
        return self._place.control

    def exchange(
        self,
        received: Tensor,
        sent: Tensor,
        lengths: Sequence[int] | None = None,
        given: Sequence[int] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send every rank its part of ``sent``, on the CPU, and receive one of each, within `committed`.

        The parts are even, or of ``given`` and ``lengths`` values. ``meanwhile`` is called while they travel.
        """
        received_in, sent_in = (None if each is None else list(each) for each in (lengths, given))
        if self._place is not None:
            self._place.pending = True  # from here on, whatever interrupts ``meanwhile``
        work = dist.all_to_all_single(received, sent, received_in, sent_in, group=self.control, async_op=True)
        if meanwhile is not None:
            meanwhile()
        self._wait(work)

    def _wait(self, work: Any) -> None:
        """Wait until an exchange is complete; raise where a rank is gone, or gives no sign of life."""
        assert self._place is not None
        pulse, began, since = self._place.pulse, time.monotonic(), time.monotonic()
        poll = min(_POLL, self.timeout / 4)
        self._place.pending = True
        while True:
            try:
                work.wait(timedelta(seconds=poll))
                break
            except RuntimeError:
                if work.is_completed():  # it failed, or has come just now
                    self._place.pending = False
                    work.wait()
                    break
            now = time.monotonic()
            if now - began > poll + _POLL:  # this process itself was stopped
                since = now
            began = now
            if who := pulse.silent(since, self.timeout):
                raise RanksError(_SILENT.format(who=who, limit=self.timeout))
        self._place.pending = False
        pulse.rest()

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
            failed = [rank for rank, each in enumerate(words) if each[3]]
            if failed:
                self._over = True
                raise RanksError(
                    f"rank {failed[0]} failed: all ranks stop, and its own output says why. Steps that were charged "
                    "stay spent"
                )
            if any(each[:3] != [self._run, phase, step] for each in words):
                self._over = True
                raise RanksError(f"ranks are not at the same place ({_places(words)}): every rank must take every step")
            if any(each[5] != weights for each in words):
                self._over = True
                raise RanksError(
                    "ranks do not have the same weights: give every rank the same optimizer, learning rate and changes "
                    "of the model"
                )
            self.stopping = self.stopping or any(each[4] for each in words)
            return [each[6] for each in words]

    def _gathered(
        self, phase: Phase, step: int, *, failed: bool, stop: bool, weights: int = 0, wish: int = 0
    ) -> list[list[int]]:
        """The words of all ranks."""
        self._lines[:] = [self._run, phase, step, failed, stop, weights, wish]
        with self.committed():
            # Every rank hears from every other itself: none waits for one that waits for a third that is gone.
            self.exchange(self._words, self._sent)
        words: list[list[int]] = self._words.tolist()
        return words

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` returns on rank 0, on every rank; where it fails, every rank raises."""
        if self.alone:
            return make()
        with self.together():
            value = make() if self.first else None
            told = _pickled(value) if self.first else b""
            lengths = self.meet(Phase.TOLD, wish=len(told))
            found: list[T] = [pickle.loads(each) for each in self._objects(told, lengths) if each]
        return value if self.first else found[0]  # type: ignore[return-value]

    def every(self, value: T, phase: Phase = Phase.TOLD, step: int = 0) -> list[T]:
        """The values of all ranks, in their order."""
        if self.alone:
            return [value]
        with self.together():
            told = _pickled(value)
            lengths = self.meet(phase, step, wish=len(told))
            return [pickle.loads(each) for each in self._objects(told, lengths)]

    def _objects(self, told: bytes, lengths: Sequence[int]) -> list[bytes]:
        """What each rank tells all, of these lengths in bytes."""
        sent = torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else torch.empty(0, dtype=torch.uint8)
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        with self.committed():
            self.exchange(received, sent.repeat(self.size), lengths, [len(told)] * self.size)
        return [each.numpy().tobytes() for each in torch.split(received, list(lengths))]

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
                    self._wait(dist.broadcast(sent, group=self.control, group_src=0, async_op=True))
                    if not self.first:
                        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))


class _Place:
    """Where the ranks of a group meet: a gloo group, and their signs of life; made once for a group of the user's."""

    def __init__(self, group: Any) -> None:
        if not dist.is_gloo_available():
            raise UnsupportedSystemError(
                "several ranks need the gloo backend besides their own, and this build of torch has none: install one "
                "that has, or run in one process"
            )
        self._group = ref(group)
        self.pulse = Pulse(group)
        ranks = dist.get_process_group_ranks(group)
        self.control: Any = dist.new_group(ranks, _patience(group), "gloo", use_local_synchronization=True)
        self.pending = False  # whether an exchange was begun and not ended

    @classmethod
    def of(cls, group: Any) -> "_Place":
        """That of a group."""
        if group not in _PLACES:
            _PLACES[group] = cls(group)
        return _PLACES[group]

    def close(self) -> None:
        """Close the connections; nothing is told to the other ranks."""
        group, control = self._group(), self.control
        if group is not None and _PLACES.get(group) is self:
            del _PLACES[group]
        self.pulse.stop()
        if self.pending:
            # gloo ends an exchange only with its process or after its own time, and would wait for it when the group
            # goes: so it never goes.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(control))
        with suppress(Exception):
            dist.destroy_process_group(control)


def _patience(group: Any) -> timedelta:
    """How long the user's group waits for a rank; a group that is made from it would wait 30 minutes."""
    device = torch.device("cuda" if "nccl" in str(dist.get_backend(group)) else "cpu")
    found: timedelta = group._get_backend(device).options._timeout
    return found


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _places(lines: Sequence[Sequence[int]]) -> str:
    """Where each rank is, in words."""
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


def weights_digest(model: nn.Module, shards: bool = False) -> str:
    """A digest of all parameters and buffers of a model, by which replicas are compared; ``shards`` of this rank too.

    >>> weights_digest(nn.Linear(1, 1)) == weights_digest(nn.Linear(1, 1))
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in _tensors(model).items():
        if is_shard(tensor):
            if not shards:
                continue
            tensor = tensor.to_local()  # type: ignore[attr-defined]
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
