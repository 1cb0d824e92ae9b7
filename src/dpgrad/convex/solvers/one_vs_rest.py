"""One-vs-rest: K classes by K binary models on the same rows, for solvers that know one score only.

Model c is fitted to +1 for class c and −1 for every other; a row belongs to the class with the largest score. The K
fits are K releases from the same rows, so the budget is split, and every calibration takes ``models=K`` to do it:

* `output`: Gaussian releases, μ²/K each, exactly as private together as one (√K times the noise);
* `objective.calibrated`: the profile of all K together, by `accounting.exact`: close to √K times the noise, and a K-th
  of the shift each;
* `amp`, `objective.approximate`, `objective.pure`: ε/K and δ/K each, by adding up.

>>> import numpy as np
>>> from functools import partial
>>> from dpgrad.convex import objective
>>> from dpgrad.convex.design import Design
>>> from dpgrad.convex.losses import Logistic
>>> from dpgrad.accounting.events import Relation
>>> design = Design(np.eye(3)[np.arange(3000) % 3], radius=1.0)
>>> plan = objective.calibrated(3000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-8, relation=Relation.REPLACE_ONE,
...     models=3)
>>> binary = partial(objective.solve, loss=Logistic(), plan=plan)
>>> coefficients, event = solve(design, np.arange(3000) % 3, 3, binary, key=7)
>>> design.scores(coefficients)[:3].argmax(axis=1).tolist(), event.count
([0, 1, 2], 3)
"""

from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from dpgrad import _validate
from dpgrad.accounting.events import Compose, Event, Repeat
from dpgrad.convex import chunked
from dpgrad.convex.design import Rows
from dpgrad.convex.losses import Array, Softmax, Targets
from dpgrad.convex.solvers.solved import Solved
from dpgrad.mechanism.keys import AnyKey, Key

__all__ = ["Binary", "solve"]


class Binary(Protocol):
    """A binary solver with all but its data and its key filled in."""

    def __call__(self, design: Rows, targets: ArrayLike, *, key: AnyKey) -> tuple[Array, Event]: ...


def solve(
    design: Rows, targets: ArrayLike, classes: int, binary: Binary, *, key: AnyKey | None = None
) -> tuple[Array, Event]:
    """The coefficients (features, classes) of K binary fits, and the event of having made all of them.

    Targets are class indices 0, …, classes−1; how many classes there are is public. ``key`` is fresh unless given.

    Guarantee: the event holds every fit. Each has a key of its own, derived from ``key``: two fits with the same noise
    would reveal the difference of their targets.
    """
    checked = chunked.checked(Softmax(classes), targets, design.rows)
    secret = Key.fresh() if key is None else Key.of(key)
    columns, events, last = [], [], None
    for each in range(classes):
        own = secret.child("one versus rest", str(each))
        last = binary(design, chunked.applied(partial(_against, each=each), checked), key=own)
        column, event = last
        _validate.whole(most=1, **{"scores of a binary model": column.shape[1]})
        columns.append(column)
        events.append(event)
    same = all(event == events[0] for event in events)
    whole, found = Repeat(events[0], classes) if same else Compose(tuple(events)), np.hstack(columns)
    if not isinstance(last, Solved):  # a solver of the caller's own, which does not say its relation
        return found, whole
    releases = tuple(replace(release, count=classes * release.count) for release in last.releases)
    return Solved(found, whole, last.relation, f"{last.title}, one against the rest", secret.reproducible, releases)


def _against(targets: Targets, each: int) -> Array:
    """+1 for one class and −1 for the rest."""
    return np.where(targets == each, 1.0, -1.0)
