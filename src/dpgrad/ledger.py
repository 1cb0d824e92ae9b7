"""What all runs on one dataset spent together.

>>> from dpgrad.events import Gaussian
>>> ledger = Ledger()
>>> ledger.add(Gaussian(4.0), Relation.ADD_REMOVE, "a first model")
>>> ledger.add(Gaussian(4.0), Relation.ADD_REMOVE, "a second model")
>>> print(ledger.guarantee(1e-5, "exact"))
ε = 1.3565 at δ = 1e-05 for datasets that differ by the presence of one row (full batch, exact accountant)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Any

from dpgrad import _files
from dpgrad.accounting import account, exact, pairs
from dpgrad.events import NOTHING, Compose, Event, Relation, from_dict, to_dict
from dpgrad.guarantee import Guarantee

FORMAT = "dpgrad ledger 1"


@dataclass(frozen=True)
class Entry:
    """One release, or one run of many: what it cost, and what it was called.

    >>> from dpgrad.events import Gaussian
    >>> Entry(Gaussian(4.0), Relation.ADD_REMOVE, "a first model").run is None
    True
    """

    event: Event
    relation: Relation
    label: str
    run: str | None = None


class Ledger:
    """Releases from one dataset, added up; in a file that is only appended to, where ``path`` is given.

    It may be used by several threads and, with a file, by several processes. Lines carry checksums: a file that was
    edited is refused. The file says what was released, never anything of the data.

    Guarantee: `guarantee` covers every release that was added before anything of it was computed. A line that a crash
    left incomplete is dropped: its `add` had not returned, so what it was to pay for had not begun.

    >>> Ledger().event()
    Compose(events=())
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self._path = None if path is None else Path(path).absolute()
        self._held: list[Entry] = []
        self._thread = RLock()
        if self._path is not None:
            self.entries()  # a file that cannot be relied on is refused at once

    def __repr__(self) -> str:
        return f"Ledger({'in memory' if self._path is None else self._path}, {len(self.entries())} entries)"

    def __deepcopy__(self, memo: object) -> "Ledger":
        """The ledger itself: a copy would be charged in its place, unseen. What is cloned goes on paying here."""
        return self

    def __reduce__(self) -> tuple[type["Ledger"], tuple[Path]]:
        """The same file, opened by the process that unpickles it."""
        if self._path is None:
            raise ValueError(
                "a ledger in memory cannot be sent to another process or saved: what is charged there would be lost; "
                "give it a file, Ledger(path)"
            )
        return Ledger, (self._path,)

    def add(self, event: Event, relation: Relation, label: str = "", run: str | None = None) -> None:
        """Charge ``event``; call it before anything that it pays for is computed.

        ``run`` names a run that reports more than once, its plan before it begins and what it spent when it ends: its
        last report counts. Without it every call is a release of its own, whatever its label. What has no price
        under ``relation`` is refused: it would leave all entries without one.
        """
        entry = Entry(event, Relation(relation), str(label), run)
        _refuse_unpriced(entry)
        with self._thread:
            if self._path is None:
                _refuse_mixed(self._held, entry)
                self._held.append(entry)
                return
            with self._alone(self._path):
                known, lines = self._read()
                _refuse_mixed(known, entry)
                if lines is None:
                    _files.Lines.create(self._path, [{"format": FORMAT}, _record(entry)])
                else:
                    lines.append(_record(entry))

    def entries(self) -> tuple[Entry, ...]:
        """What counts, in the order of adding; of each run that reports more than once, the last report.

        >>> from dpgrad.events import Gaussian
        >>> ledger = Ledger()
        >>> ledger.add(Gaussian(1.0), Relation.ADD_REMOVE, "planned", run="r")
        >>> ledger.add(Gaussian(2.0), Relation.ADD_REMOVE, "spent", run="r")
        >>> [entry.label for entry in ledger.entries()]
        ['spent']
        """
        with self._thread:
            known = self._held if self._path is None else self._read()[0]
            last = {entry.run: number for number, entry in enumerate(known)}
            return tuple(e for number, e in enumerate(known) if e.run is None or last[e.run] == number)

    def event(self) -> Event:
        """Everything that was charged, composed."""
        found = tuple(entry.event for entry in self.entries())
        return found[0] if len(found) == 1 else Compose(found)

    @property
    def relation(self) -> Relation | None:
        """The neighbours for whom all entries hold; None while there are no entries."""
        found = self.entries()
        return found[0].relation if found else None

    def guarantee(self, delta: float, accountant: str = "pld") -> Guarantee:
        """The (ε, δ) of everything together."""
        relation = self.relation
        if relation is None:
            return Guarantee(0.0, delta, Relation.ADD_REMOVE, accountant, NOTHING)
        return Guarantee.of(account(self.event(), relation, accountant), delta)

    def _read(self) -> tuple[list[Entry], _files.Lines | None]:
        """The entries of the file, and its lines where it is there."""
        assert self._path is not None
        if not self._path.exists():
            return [], None
        lines = _files.Lines.read(self._path)
        head, *records = lines.records or [{}]
        if head != {"format": FORMAT}:
            raise ValueError(f"{self._path} is not a ledger of dpgrad: choose another file")
        return [_entry(self._path, record) for record in records if "torn" not in record], lines

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """Within the block no other process appends; an incomplete last line is replaced by a line that says so."""
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be made: its folder is missing; make it first")
        held = _files.lock(path.with_name(path.name + ".lock"), wait=True)
        try:
            if path.exists():
                lines = _files.Lines.read(path)
                if lines.torn:
                    lines.mend({"torn": True})
            yield
        finally:
            _files.unlock(held)


def _refuse_mixed(known: list[Entry], entry: Entry) -> None:
    if known and known[0].relation != entry.relation:
        raise ValueError(
            f"the ledger holds releases for {known[0].relation} neighbours, got one for {entry.relation}: they do not "
            "add up; use one relation for all, or another ledger and give both guarantees"
        )


def _refuse_unpriced(entry: Entry) -> None:
    for leaf in exact.apart(entry.event, entry.relation)[0]:
        pairs.of(leaf, entry.relation, pairs.directions(entry.relation)[0])


def _record(entry: Entry) -> dict[str, Any]:
    named = {} if entry.run is None else {"run": entry.run}
    return {"event": to_dict(entry.event), "relation": entry.relation.value, "label": entry.label, **named}


def _entry(path: Path, record: dict[str, Any]) -> Entry:
    try:
        event, relation = from_dict(record["event"]), Relation(record["relation"])
        return Entry(event, relation, record["label"], record.get("run"))
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} holds what is not an entry of a ledger: {error}") from None
