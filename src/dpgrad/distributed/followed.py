"""The run folder of several ranks: rank 0 opens it, writes it and pays, and the others follow what it says.

What a run compares before it uses a key again (`dpgrad.runs.replay.Identity`) is asked of every rank, under the key in
question: a run resumes with its key only if no rank's data, code, device or settings have changed, on as many ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpgrad.accounting.events import Event
from dpgrad.distributed.ranks import Ranks
from dpgrad.errors import RanksError
from dpgrad.mechanism.keys import Key
from dpgrad.runs.checkpoint import Run
from dpgrad.runs.replay import Identity

__all__ = ["Followed", "identity_of_all", "opened", "options_of_all"]

IdentityOf = Callable[[Key], Identity]
_OWN = {"loss", "model", "collate"}  # may hold the device of a rank; neither noise nor charge depends on them
_TOLD = (
    "key", "identifier", "attempt", "began", "last", "state", "start", "replayed", "reason", "before", "due",
    "reproducible", "folder",
)  # fmt: skip


class Followed:
    """The run of a rank other than 0: it knows what rank 0's run knows, and writes nothing.

    Guarantee: `charge` pays nothing, and is followed by a meeting that rank 0 comes to when it has paid.
    """

    def __init__(self, told: Mapping[str, Any], save_every: int) -> None:
        self.key: Key = told["key"]
        self.identifier: str = told["identifier"]
        self.attempt: int = told["attempt"]
        self.began: int = told["began"]
        self.last: int = told["last"]
        self.state: dict[str, Any] | None = told["state"]
        self.start: int = told["start"]
        self.replayed: bool = told["replayed"]
        self.reason: str = told["reason"]
        self.before: Event = told["before"]
        self.due: int = told["due"]
        self.reproducible: bool = told["reproducible"]
        self.folder: Path = told["folder"]
        self._save_every = save_every

    def charge(self, step: int) -> None:
        """Rank 0 pays."""

    def save(
        self, step: int, state: dict[str, Any], options: Mapping[str, Any] | None = None, values: str = ""
    ) -> None:
        """Rank 0 writes; here it is known when the next checkpoint is due."""
        self.due = step + self._save_every


def opened(
    ranks: Ranks,
    open_run: Callable[[IdentityOf], Run],
    identity_of: IdentityOf,
    parts: bool,
    save_every: int,
    stack: ExitStack,
) -> "Run | Followed":
    """The run that ``open_run`` opens on rank 0, on every rank; ``stack`` closes it.

    ``identity_of(key)`` is that of this rank; ``parts`` says that each holds rows of its own.
    """
    if ranks.alone:
        return stack.enter_context(open_run(identity_of))
    if ranks.first:
        run = stack.enter_context(open_run(lambda key: _asked(ranks, identity_of, parts, key)))
        ranks.from_first(lambda: (None, {name: getattr(run, name) for name in _TOLD}))
        return run
    while True:
        told: tuple[Key | None, dict[str, Any]] = ranks.from_first(_nothing)
        key, known = told
        if key is None:
            return Followed(known, save_every)
        _agreed(ranks, identity_of(key), parts)


def _nothing() -> tuple[Key | None, dict[str, Any]]:
    """What rank 0 tells: a key whose identity is asked for, or at last the run."""
    return None, {}


def _asked(ranks: Ranks, identity_of: IdentityOf, parts: bool, key: Key) -> Identity:
    """On rank 0: the identity of all ranks under a key."""
    ranks.from_first(lambda: (key, {}))
    return _agreed(ranks, identity_of(key), parts)


def _agreed(ranks: Ranks, own: Identity, parts: bool) -> Identity:
    every = [Identity.from_json(each) for each in ranks.every(own.to_json())]
    with ranks.agreeing():
        return identity_of_all(every, parts, ranks.backend)


def identity_of_all(every: list[Identity], parts: bool, backend: str = "") -> Identity:
    """One identity of all ranks; refused where they do not have the same settings, or the same data.

    >>> one = Identity({}, "rows", "code", "cpu", 1, None, {"rule": "hard"})
    >>> identity_of_all([one, one], parts=False, backend="gloo").device
    'cpu | cpu | gloo'
    >>> identity_of_all([one, replace(one, code="other")], parts=False)
    Traceback (most recent call last):
    dpgrad.errors.RanksError: ranks 0 and 1 do not have the same code: start every rank with the same code, data and ...
    """
    first = every[0]
    own = {"device", "data", *_OWN} if parts else {"device", *_OWN}
    for rank, other in enumerate(every[1:], 1):
        differing = set(first.differences(other)) - own - (first.incomparable() & other.incomparable())
        if differing:
            raise RanksError(
                f"ranks 0 and {rank} do not have the same {', '.join(sorted(differing))}: start every rank with the "
                "same code, data and settings"
            )
    devices = [*(each.device for each in every), *([backend] if backend else [])]
    words = dict.fromkeys(each.data for each in every) if not parts else [each.data for each in every]
    options = options_of_all([each.options for each in every])
    return replace(first, ranks=len(every), device=" | ".join(devices), data=" | ".join(words), options=options)


def options_of_all(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of a run with those of every rank, where they are not the same: a change on any of them is seen.

    >>> options_of_all([{"loss": "a", "rule": "hard"}, {"loss": "b", "rule": "hard"}])
    {'loss': 'a | b', 'rule': 'hard'}
    """
    found = dict(every[0])
    for name in found:
        words = [each.get(name) for each in every]
        if any(word != words[0] for word in words):
            found[name] = " | ".join(map(str, words))
    return found
