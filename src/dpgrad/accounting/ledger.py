"""A ledger of all releases from one dataset.

>>> from dpgrad.accounting.events import Gaussian
>>> ledger = Ledger()
>>> ledger.add(Gaussian(4.0), Relation.ADD_REMOVE, "a first model")
>>> ledger.add(Gaussian(4.0), Relation.ADD_REMOVE, "a second model")
>>> print(ledger.guarantee(1e-5, "exact"))
ε = 1.3565 at δ = 1e-05 for datasets that differ by the presence of one row (full batch, exact accountant)
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Any

from dpgrad import _files, _processes
from dpgrad.accounting import account
from dpgrad.accounting.events import NOTHING, Compose, Event, Relation, from_dict, to_dict, together
from dpgrad.accounting.guarantee import UNIT, Guarantee
from dpgrad.errors import AccountingError, LedgerError

__all__ = ["FORMAT", "Entry", "Ledger"]

FORMAT = "dpgrad ledger 1"
_TRIED = ("rdp", "exact", "pld")  # between them they price whatever any accountant does; the quick ones first


@dataclass(frozen=True)
class Entry:
    """One entry of a ledger: a release or a whole run, with its event, relation and label.

    >>> from dpgrad.accounting.events import Gaussian
    >>> Entry(Gaussian(4.0), Relation.ADD_REMOVE, "a first model").run is None
    True
    """

    event: Event
    relation: Relation
    label: str
    run: str | None = None
    unit: str = UNIT


class _Lines(_files.Lines):
    refused = LedgerError


@dataclass(frozen=True)
class _Head:
    """How many entries a ledger had, and the checksum of the last one, which covers those before it."""

    count: int = 0
    check: str = ""


class Ledger:
    """All releases from one dataset, added up. With ``path``, an append-only file.

    Several threads may share a ledger and, with a file, several processes, through any path or symbolic link to it.
    Files need a POSIX system, which can lock them. They record what was released and nothing about the data.

    A ledger is two files: one line per entry, each with a checksum over all lines before it; and ``<name>.head``, which
    holds the number of entries and the last checksum. Keep, move and copy them together.

    Guarantee: `guarantee` covers every release whose `add` returned, unless someone rewrites both files. A ledger with
    a changed, missing, inserted or truncated line is refused, and so is a head without its ledger. An open `Ledger`
    also notices if both files were deleted or restored to an earlier state since it last read them. Not detected: both
    files deleted or restored while no `Ledger` was open, and forgery, because checksums are not signatures.

    A crash loses no entry and leaves no lock behind. The line is on disk before the head, and the head before `add`
    returns. After a crash the file may be one entry ahead of its head; that entry counts. An incomplete line beyond the
    head paid for nothing and is dropped.

    >>> Ledger().event()
    Compose(events=())
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        self._held: list[Entry] = []
        self._thread = RLock()
        self._memory = _processes.Turns("entries would be lost with it; give the ledger a file, Ledger(path)")
        self._seen = _Head()  # what this object has read: no later reading may have less
        self._path: Path | None = None
        if path is not None:
            _files.refuse_other_systems()
            self._path = Path(os.path.realpath(path))  # one lock and one head, whatever link leads here
            self.entries()  # a file that cannot be relied on is refused at once

    @classmethod
    def adopt(cls, path: str | PathLike[str]) -> "Ledger":
        """Open a ledger without a head, as dpgrad 0.1.0 wrote it, and write its head. Check the ledger first.

        dpgrad cannot tell whether entries were cut from such a file: compare `entries` with the runs you know of.
        """
        _files.refuse_other_systems()
        place = Path(os.path.realpath(path))
        with _alone(place):
            if _head(place) is not None:
                raise LedgerError(f"{place} has a head already: open it with Ledger(path)")
            lines = _Lines.found(place)
            if lines is None:
                raise LedgerError(f"{place} is missing: there is no ledger to adopt; Ledger(path) begins one")
            _entries(lines)
            _write_head(place, _reached(lines))
        return cls(place)

    def __repr__(self) -> str:
        return f"Ledger({'in memory' if self._path is None else self._path}, {len(self.entries())} entries)"

    def __deepcopy__(self, memo: object) -> "Ledger":
        """The ledger itself: charges to a copy would be lost. Whatever is cloned keeps charging this ledger."""
        return self

    def __reduce__(self) -> tuple[type["Ledger"], tuple[Path]]:
        """The same file, opened by the process that unpickles it."""
        if self._path is None:
            raise LedgerError(
                "a ledger in memory cannot be sent to another process or saved: what is charged there would be lost; "
                "give it a file, Ledger(path)"
            )
        return Ledger, (self._path,)

    def add(self, event: Event, relation: Relation, label: str = "", run: str | None = None, unit: str = UNIT) -> None:
        """Charge ``event``. Call this before anything that it pays for is computed.

        ``run`` identifies a run that reports more than once, such as its plan at the start and its cost at the end; the
        last report counts. Without ``run``, every call is a separate release. An event without a price under
        ``relation`` is refused, because it would leave the whole ledger without one. ``unit`` is what the event
        protects; what protects a row and what protects a person do not add up.
        """
        entry = Entry(event, Relation(relation), str(label), run, str(unit))
        record = _record(entry)
        with self._thread:
            if self._path is None:
                with self._memory:
                    _refuse_mixed(self._held, entry)
                    _refuse_unpriced(self._held, entry)
                    self._held.append(entry)
                return
            with _alone(self._path):
                known, lines = self._read()
                _refuse_mixed(known, entry)
                _refuse_unpriced(known, entry)
                if lines is None:
                    _write_head(self._path, _Head())  # first: a file without a head would be refused
                    lines = _Lines.create(self._path, [{"format": FORMAT}, record])
                else:
                    if lines.torn:
                        lines.replace_torn({"torn": True})  # replaces the torn line of an `add` that did not return
                    _write_head(self._path, _reached(lines))  # never more than one entry behind
                    lines.append(record)
                self._seen = _reached(lines)
                _write_head(self._path, self._seen)

    def entries(self) -> tuple[Entry, ...]:
        """Return the entries that count, in order; for a run that reported more than once, its last report.

        >>> from dpgrad.accounting.events import Gaussian
        >>> ledger = Ledger()
        >>> ledger.add(Gaussian(1.0), Relation.ADD_REMOVE, "planned", run="r")
        >>> ledger.add(Gaussian(2.0), Relation.ADD_REMOVE, "spent", run="r")
        >>> [entry.label for entry in ledger.entries()]
        ['spent']
        """
        with self._thread:
            return _counted(self._held if self._path is None else self._read()[0])

    def event(self) -> Event:
        """Return the composition of everything that was charged."""
        return together(*(entry.event for entry in self.entries()))

    @property
    def relation(self) -> Relation | None:
        """The neighbouring relation of all entries; None for an empty ledger."""
        found = self.entries()
        return found[0].relation if found else None

    def guarantee(self, delta: float, accountant: str = "pld") -> Guarantee:
        """Return the (ε, δ) of all entries together."""
        relation = self.relation
        if relation is None:
            return Guarantee(0.0, delta, Relation.ADD_REMOVE, accountant, NOTHING)
        found = Guarantee.of(account(self.event(), relation, accountant), delta)
        return replace(found, unit=self.entries()[0].unit)

    def _read(self) -> tuple[list[Entry], _Lines | None]:
        """The entries of the file, and its lines where it is there; refused where the head disagrees."""
        assert self._path is not None
        while True:
            head, lines = _head(self._path), _Lines.found(self._path)
            if _head(self._path) == head:  # else another process completed an entry between the two
                break
        if head is None and lines is not None:
            _entries(lines)
            raise LedgerError(
                f"{self._path} has no head, {_head_of(self._path).name}: entries could be missing unnoticed. Put the "
                "head back; or, if dpgrad 0.1.0 wrote the ledger or you know that it is complete, accept it once, in "
                f"Python: dpgrad.Ledger.adopt({str(self._path)!r})"
            )
        for known in (head or _Head(), self._seen):
            _refuse_shortened(self._path, lines, known)
        if lines is None:
            return [], None
        _refuse_old_head(lines, head or _Head())
        found = _entries(lines)
        self._seen = _reached(lines)
        return found, lines


def _head_of(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def _head(path: Path) -> _Head | None:
    """The head of the ledger in ``path``; None where there is none."""
    place = _head_of(path)
    lines = _Lines.found(place)
    if lines is None:
        return None
    match lines.records:
        case [{"count": int(count), "check": str(check)}] if not lines.torn:
            return _Head(count, check)
    raise LedgerError(f"{place} is not the head of a ledger: put back the file that dpgrad wrote")


def _reached(lines: _Lines) -> _Head:
    return _Head(len(lines.records) - 1, lines.checks[-1])


def _write_head(path: Path, head: _Head) -> None:
    """Make ``head`` that of the ledger in ``path``, where it is not already."""
    if _head(path) != head:
        _Lines.create(_head_of(path), [{"count": head.count, "check": head.check}])


def _refuse_shortened(path: Path, lines: _Lines | None, known: _Head) -> None:
    """Refuse a ledger that does not begin with the entries that were known."""
    if not known.count:
        return
    remedy = "put it back, or count all runs on these data that you know of as spent and begin another ledger"
    if lines is None:
        raise LedgerError(f"{path} was deleted or moved, and it held {known.count:,} entries: {remedy}")
    if known.check not in lines.checks:  # which covers all lines before it, and so their number
        held = max(len(lines.records) - 1, 0)
        raise LedgerError(
            f"{path} was shortened or put back to an earlier state: it has {held:,} entries, and had {known.count:,}, "
            f"or other ones; {remedy}"
        )


def _refuse_old_head(lines: _Lines, head: _Head) -> None:
    """Refuse a head that is further behind than a crash leaves it."""
    if (held := len(lines.records) - 1) > head.count + 1:
        raise LedgerError(
            f"{_head_of(lines.path)} counts {head.count:,} entries of {held:,}: it is an older head, or dpgrad 0.1.0 "
            "added entries. Put the right one back, or delete it and accept the ledger once, in Python: "
            f"dpgrad.Ledger.adopt({str(lines.path)!r})"
        )


def _entries(lines: _Lines) -> list[Entry]:
    """The entries of a ledger. Refuse other files, and one with a second name, which its head would not notice."""
    if (lines.records or [{}])[0] != {"format": FORMAT}:
        raise LedgerError(f"{lines.path} is not a ledger of dpgrad: choose another file")
    with _files.told(lines.path, "read"):
        names = os.stat(lines.path).st_nlink
    if names > 1:
        raise LedgerError(
            f"{lines.path} has {names} names (hard links), and entries added through another would bypass its lock and "
            "head: delete the others, or copy the file"
        )
    return [_entry(lines.path, record) for record in lines.records[1:] if "torn" not in record]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Within the block no other process or thread adds an entry."""
    if not path.parent.is_dir():
        raise LedgerError(f"{path} cannot be made: its folder is missing; make it first")
    held = _files.lock(path.with_name(path.name + ".lock"), wait=True)
    try:
        yield
    finally:
        _files.unlock(held)


def _counted(known: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries that count: of each run that reports more than once, the last report."""
    last = {entry.run: number for number, entry in enumerate(known)}
    return tuple(e for number, e in enumerate(known) if e.run is None or last[e.run] == number)


def _refuse_mixed(known: list[Entry], entry: Entry) -> None:
    if known and known[0].relation != entry.relation:
        raise LedgerError(
            f"the ledger holds releases for {known[0].relation} neighbours, got one for {entry.relation}: they do not "
            "add up; use one relation for all, or another ledger and give both guarantees"
        )
    if known and known[0].unit != entry.unit:
        raise LedgerError(
            f"the ledger holds releases that protect one {known[0].unit}, got one that protects one {entry.unit}: they "
            "do not add up; use one unit for all, or another ledger and give both guarantees"
        )


def _refuse_unpriced(known: Sequence[Entry], entry: Entry) -> None:
    """Refuse what no accountant prices, alone or with the entries before it: all of them would have no price."""
    if why := _unpriced(entry.event, entry.relation):
        raise AccountingError(f"no accountant prices this release: {why}")
    together = tuple(one.event for one in _counted([*known, entry]))
    if len(together) > 1 and (why := _unpriced(Compose(together), entry.relation)):
        raise AccountingError(
            f"no accountant prices this release together with those in the ledger: {why}; use another ledger and give "
            "both guarantees"
        )


def _unpriced(event: Event, relation: Relation) -> str:
    """Why no accountant gives ``event`` an ε; empty where one does."""
    why = ""
    for accountant in _TRIED:
        try:
            if not math.isnan(account(event, relation, accountant).epsilon(1e-5)):
                return ""
        except (ArithmeticError, ValueError) as error:
            why = str(error)
    return why or "its ε is not a number"


def _record(entry: Entry) -> dict[str, Any]:
    named = {} if entry.run is None else {"run": entry.run}
    named |= {} if entry.unit == UNIT else {"unit": entry.unit}
    try:
        event = to_dict(entry.event)
    except RecursionError:
        raise LedgerError("event is nested too deeply to be stored: compose it with fewer levels") from None
    return {"event": event, "relation": entry.relation.value, "label": entry.label, **named}


def _entry(path: Path, record: dict[str, Any]) -> Entry:
    try:
        event, relation = from_dict(record["event"]), Relation(record["relation"])
        return Entry(event, relation, record["label"], record.get("run"), record.get("unit", UNIT))
    except (KeyError, ValueError) as error:
        raise LedgerError(f"{path} holds a line that is not a ledger entry: {error}") from None
