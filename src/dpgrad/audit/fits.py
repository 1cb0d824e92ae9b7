"""Audits of convex estimators: how far one row moves a fit under the same seed, and the game over fits."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from dpgrad import _validate
from dpgrad.accounting.events import Relation
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.audit import games
from dpgrad.audit.claims import claimed
from dpgrad.audit.exact import Array
from dpgrad.audit.record import Audit, Check, judged
from dpgrad.errors import AuditError, OptionError

__all__ = ["Read", "estimator"]

Read = Callable[[Any], Any]  # from a fitted estimator to the numbers that it releases
_SLACK = 1e-3
_FITS = 8  # neighbours of the coupled check
_NOT_TRIED = ("other rows, targets and data", "releases that the estimator does not show")


def estimator(
    made: Any,
    X: Any,
    y: Any = None,
    *,
    read: Read,
    row: Any,
    target: Any = None,
    released: str | None = None,
    trials: int = 600,
    delta: float = 1e-5,
    level: float = 1e-3,
    seed: int = 0,
) -> Audit:
    """Audit a fitted class of `dpgrad.convex`: coupled fits that differ in one row, and the two-world game over fits.

    ``made`` is an estimator that is not fitted; it is copied for every fit. ``read`` gives the released numbers of a
    fitted one, such as ``lambda fitted: fitted.coef_``. In the neighbouring data the first row is ``row`` and its
    target ``target``: choose the most extreme row that the estimator's bounds allow. Where the numbers are a release of
    ``privacy_`` by themselves (``released``, its name), fits with the same ``random_state`` differ by no more than its
    declared sensitivity. The claim of the game is ``privacy_.guarantee``.

    >>> from dpgrad.convex import DPStandardScaler
    >>> X = np.random.default_rng(0).uniform(-1, 1, (200, 1))
    >>> made = DPStandardScaler(epsilon=1.0, bounds=(-1.0, 1.0), relation="replace-one")
    >>> found = estimator(made, X, read=lambda fitted: fitted.mean_, row=[1.0], trials=200)
    >>> found.refuted
    False
    """
    _validate.whole(least=40, trials=trials)
    _validate.open_unit(delta=delta, level=level)
    worlds = _Worlds(made, X, y, row, target, read)
    first = worlds.fitted(0, seed)
    promise = first.privacy_.guarantee
    if not isinstance(promise, Guarantee):
        raise OptionError("made must be an estimator of dpgrad.convex, with privacy_ once it is fitted")
    if promise.relation is not Relation.REPLACE_ONE:
        raise OptionError(f"made must have relation='replace-one', got {promise.relation.value}: a row is exchanged")
    checks = [] if released is None else [worlds.coupled(released, seed)]
    inside, outside = (worlds.results(world, trials // 2, seed) for world in (1, 0))
    scores = [_projected(values, inside, outside) for values in (inside, outside)]
    part = games.judgement(scores[0], scores[1], claimed(promise), delta, level, seed, checks)
    left = _NOT_TRIED if released is not None else ("sensitivity of a release (released was not given)", *_NOT_TRIED)
    return Audit(
        "estimator", part.claim, level, judged(list(part.checks), level), left, delta=delta,
        lower_epsilon=part.lower_epsilon, lower_epsilon_in_family=part.lower_epsilon_in_family, seed=seed,
        trials=part.trials, guarantee=promise,
    )  # fmt: skip


def _projected(values: Array, inside: Array, outside: Array) -> Array:
    """Scores along the difference of the means of the first trials, which choose the threshold too."""
    few = max(1, int(0.3 * len(inside)))
    way = inside[:few].mean(0) - outside[:few].mean(0)
    spread = np.concatenate([inside[:few], outside[:few]]).std(0)
    found: Array = values @ (way / np.maximum(spread, 1e-150) ** 2)
    return found


class _Worlds:
    """Fits on the data as given (world 0) and with the first row exchanged (world 1)."""

    def __init__(self, made: Any, X: Any, y: Any, row: Any, target: Any, read: Read) -> None:
        self._made, self._read = made, read
        X = np.asarray(X, float)
        y = None if y is None else np.asarray(y)
        given = np.asarray(row, float).ravel()
        if X.ndim != 2 or given.shape != X.shape[1:]:
            raise OptionError(f"row must have the {X.shape[-1]} columns of X, got {given.shape}")
        other, others = X.copy(), None if y is None else y.copy()
        other[0] = given
        if others is not None and target is not None:
            others[0] = target
        self._data = ((X, y), (other, others))

    def fitted(self, world: int, seed: int) -> Any:
        """A fit on one of the worlds."""
        made = copy.deepcopy(self._made)
        made.random_state = seed
        X, y = self._data[world]
        return made.fit(X) if y is None else made.fit(X, y)

    def values(self, world: int, seed: int) -> Array:
        """What a fit released, as a flat vector."""
        found = np.asarray(self._read(self.fitted(world, seed)), float).ravel()
        if not np.isfinite(found).all():
            raise AuditError("read gave numbers that are not finite: every fit releases finite ones")
        return found

    def results(self, world: int, count: int, seed: int) -> Array:
        """Fits under seeds of their own, (fits, numbers)."""
        return np.stack([self.values(world, 1_000_003 * (seed + 1) + 2 * n + world) for n in range(count)])

    def coupled(self, name: str, seed: int) -> Check:
        """How far the two worlds are apart under the same seed, over the declared sensitivity."""
        told = self.fitted(0, seed).privacy_
        known = {release.name: release for release in told.releases}
        _validate.one_of(list(known), released=name)
        bound = known[name].sensitivity
        largest = 0.0
        for n in range(_FITS):
            one, other = (self.values(world, seed + n) for world in (0, 1))
            largest = max(largest, float(np.linalg.norm(other - one)) / bound)
        says = f"a row moves {name} by {largest:.4f} of the declared sensitivity"
        return Check("sensitivity", None, says, violated=largest > 1 + _SLACK)
