"""Every accountant prices one leaf and lets `events.fold` count; new accountants are found without being listed."""

import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import pytest

from dpgrad import accounting
from dpgrad.accounting import ACCOUNTANTS, account, events
from dpgrad.accounting.events import (
    Approximate,
    Compose,
    DiscreteGaussian,
    Event,
    Exponential,
    FixedSize,
    Gaussian,
    Inexact,
    Laplace,
    Leaf,
    Pinned,
    Poisson,
    RandomizedResponse,
    Relation,
    Repeat,
    Selection,
    Shifted,
    Shuffle,
    TruncatedPoisson,
)
from dpgrad.accounting.trials import PoissonTrials

DELTA = 1e-5
TIMES = 6
Accountant = Callable[[Event, Relation], Any]


def near(kind: str, relation: Relation, nudge: float = 0.0) -> Leaf:
    """A leaf of each kind; with a nudge, a distinct leaf that costs the same to several digits."""
    noise = Gaussian(4.0 * (1 + nudge))
    made: dict[str, Callable[[], Leaf]] = {
        "Gaussian": lambda: noise,
        "Poisson": lambda: Poisson(0.3, noise),
        "FixedSize": lambda: FixedSize(100, 30, noise),
        "Shuffle": lambda: Shuffle(10, noise),
        "Pinned": lambda: Pinned(noise, relation),
        "Shifted": lambda: Shifted(0.1, noise),
        "Approximate": lambda: Approximate(0.1 * (1 + nudge), 0.0, relation),
        "Selection": lambda: Selection((noise,), PoissonTrials(3.0)),
        "Laplace": lambda: Laplace(4.0 * (1 + nudge)),
        "DiscreteGaussian": lambda: DiscreteGaussian(4.0 * (1 + nudge)),
        "RandomizedResponse": lambda: RandomizedResponse(0.9 * (1 + nudge), 3),
        "Exponential": lambda: Exponential(0.1 * (1 + nudge), relation),
        "TruncatedPoisson": lambda: TruncatedPoisson(0.3, 100, 80, noise),
        "Inexact": lambda: Inexact(noise, 1e-12),
    }
    return made[kind]()


def priced(accountant: Accountant, event: Event, relation: Relation) -> float | None:
    """The ε of an event; None where the accountant refuses it."""
    try:
        return float(accountant(event, relation).epsilon(DELTA))
    except ValueError:
        return None


@contextmanager
def counting_double() -> Iterator[None]:
    """Within the block `fold` counts everything twice, for whoever imported it."""
    plain = events.fold

    def double(event: Event, *how: Any) -> Any:
        return plain(Repeat(event, 2), *how)

    loaded = [module for name, module in sys.modules.items() if name.split(".")[0] == "dpgrad"]
    with pytest.MonkeyPatch.context() as patch:
        for module in loaded:
            for name, value in list(vars(module).items()):
                if value is plain:
                    patch.setattr(module, name, double)
        yield


def assert_counted(accountant: Accountant) -> None:
    """Each kind of leaf that has a price is counted, and counted by `fold`, in every relation."""
    seen = set()
    for relation in Relation:
        for kind in (leaf.__name__ for leaf in get_args(Leaf)):
            one = near(kind, relation)
            once = priced(accountant, one, relation)
            if once is None:
                continue
            seen.add(kind)
            repeated = priced(accountant, Repeat(one, TIMES), relation)
            distinct = Compose(tuple(near(kind, relation, nudge=k * 1e-9) for k in range(TIMES)))
            if repeated is None:  # a closed form of one release
                assert accountant(one, relation).accountant == "exact"
                assert priced(accountant, distinct, relation) is None
                continue
            assert repeated == pytest.approx(priced(accountant, distinct, relation), rel=1e-4), f"{kind}: adding up"
            assert repeated is not None
            assert repeated > 1.5 * once > 0, f"{kind}: the count is ignored"
            nested = Repeat(Compose((Repeat(one, TIMES // 2), NEVER)), 2)
            assert priced(accountant, nested, relation) == pytest.approx(repeated, rel=1e-12), f"{kind}: nested"
            if kind in ("Selection", "Inexact"):
                continue  # what they hold is counted by fold as well, and would be doubled inside them
            twice = priced(accountant, Repeat(one, 2), relation)
            with counting_double():
                assert priced(accountant, one, relation) == pytest.approx(twice, rel=1e-12), f"{kind}: not by fold"
    assert seen


NEVER = Repeat(Compose((Gaussian(1.0), Shuffle(3, Gaussian(1.0)), Approximate(9.0, 0.5, Relation.ZERO_OUT))), 0)


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_fold_counts_for_every_accountant(name: str) -> None:
    assert_counted(lambda event, relation: account(event, relation, name))


def test_every_accountant_is_listed() -> None:
    """What takes an event and a relation and returns a profile, anywhere under `dpgrad.accounting`."""
    found = set()
    for module in pkgutil.iter_modules(accounting.__path__):
        loaded = importlib.import_module(f"dpgrad.accounting.{module.name}")
        for name, function in inspect.getmembers(loaded, inspect.isfunction):
            if name.startswith("_") or function.__module__ != loaded.__name__:
                continue
            first, second, *others = [*inspect.signature(function).parameters.values(), None, None]
            needed = [one for one in others if one is not None and one.default is inspect.Parameter.empty]
            if [one and one.name for one in (first, second)] == ["event", "relation"] and not needed:
                try:
                    made = function(Poisson(0.1, Gaussian(4.0)), Relation.ZERO_OUT)
                except ValueError:
                    made = function(Gaussian(4.0), Relation.ZERO_OUT)
                if callable(getattr(made, "epsilon", None)):
                    found.add((module.name, name))
    assert found == set(ACCOUNTANTS.values())


def summed(leaf: Callable[[Leaf], float], count: Callable[[Event], int], event: Event, relation: Relation) -> Any:
    """The profile of an accountant that finds its leaf in its own way and counts in its own way."""
    first = next(iter(events.leaves(event)))
    square = leaf(first) * count(event)

    class Made:
        def epsilon(self, delta: float) -> float:
            return math.sqrt(square)

    return Made()


def by_hand(event: Event) -> int:
    """Counts well, but not by fold."""
    match event:
        case Repeat(inner, count):
            return count * by_hand(inner)
        case Compose(parts):
            return sum(by_hand(part) for part in parts)
        case _:
            return 1


@pytest.mark.parametrize(
    ("count", "fault"),
    [
        (by_hand, "not by fold"),
        (lambda event: 1, "adding up|ignored"),
        (lambda event: len(events.leaves(event)), "adding up|ignored"),
        (lambda event: event.count if isinstance(event, Repeat) else events.leaves(event).total(), "nested"),
    ],
)
def test_what_counts_otherwise_is_caught(count: Callable[[Event], int], fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        assert_counted(partial(summed, lambda leaf: 1.0, count))
    assert_counted(partial(summed, lambda leaf: 1.0, lambda event: events.leaves(event).total()))
