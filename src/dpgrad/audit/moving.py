"""Steps whose clip bounds follow noisy counts (`adaptive_clip`), read as steps with the bounds of the first one.

A step with clip bound C_t releases a noisy sum for each group and, by the bound of the next step, a noisy count. Known
bounds turn them into, and back from,

    (noisy sum)·C₀/C_t     and     c̃ = B·(γ − ½ − ln(C_{t+1}/C_t)/η).

Under the claim the first is a sum of contributions of at most C₀ with noise in proportion, and the second a count that
one row moves by at most ½, with noise of its own. So a group's count is one more coordinate of the release.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from dpgrad.audit.exact import Array
from dpgrad.errors import AuditError, OptionError
from dpgrad.mechanism.adaptive import FAR
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["CLIP", "MOVED", "bounds_of", "counts", "drifting", "limit", "most_rows", "refuse_learning_rate"]

CLIP = ".clip"  # no parameter's name begins with a dot
MOVED = 0.5  # by which a row moves a count
_SURE = 8.0  # standard deviations of the noise within which bounds are taken to stay
_ROOM = math.log(FAR) - 0.1  # how far the logarithm of a bound may move
_LEAST, _LEAST_OF_BATCH = 1e-6, 1e-11  # learning rates at which rounding of a bound hides nothing of a noisy count


def refuse_learning_rate(mechanism: Mechanism) -> None:
    """Refuse an adaptive clip whose bounds tell no counts: they move by hardly more than rounding, or too far.

    A bound is rounded at 2^-53, a few times, and so the count that it tells at a few times B·2^-53/η.

    >>> from dpgrad import sampling
    >>> from dpgrad.mechanism.adaptive import AdaptiveClip
    >>> rule = AdaptiveClip(learning_rate=1e-9)
    >>> refuse_learning_rate(Mechanism(sampling.FullBatch(), 2, 1.0, batch_size=10.0, adaptive_clip=rule))
    Traceback (most recent call last):
    dpgrad.errors.OptionError: learning_rate of adaptive_clip must be at least 1e-06 for an audit of steps, got ...
    """
    rule = mechanism.adaptive_clip
    if rule is None:
        return
    least = max(_LEAST, _LEAST_OF_BATCH * mechanism.divisor)
    if rule.learning_rate < least:
        raise OptionError(
            f"learning_rate of adaptive_clip must be at least {least:g} for an audit of steps, got "
            f"{rule.learning_rate:g}: rounding of the bounds hides the noisy counts; audit whole runs with audit.game"
        )
    limit(mechanism, rows=8)


def bounds_of(found: Sequence[Mapping[str, Tensor]], mechanism: Mechanism) -> Array:
    """The clip bounds that steps had, and those they left to the next one: (steps, 2, groups)."""
    shape = 2, max(1, len(mechanism.groups))
    if any(CLIP not in each or tuple(each[CLIP].shape) != shape for each in found):
        raise AuditError(
            f"run left no clip bounds: with adaptive_clip every step returns {CLIP!r} too, those of this step and of "
            f"the next by group, of shape {shape}"
        )
    bounds: Array = np.stack([each[CLIP].detach().cpu().double().numpy() for each in found])
    if (bounds[1:, 0] != bounds[:-1, 1]).any():
        raise AuditError("run used other clip bounds than the previous step returned")
    return bounds


def counts(bounds: Array, mechanism: Mechanism) -> Array:
    """The noisy count of each step and group, as the bounds tell it: (steps, groups).

    >>> from dpgrad import sampling
    >>> from dpgrad.mechanism.adaptive import AdaptiveClip
    >>> run = Mechanism(sampling.FullBatch(), 2, 1.0, batch_size=10.0, adaptive_clip=AdaptiveClip(0.3))
    >>> following = run.adaptive_clip.following(1.0, noisy_count=2.5, batch_size=10.0)
    >>> counts(np.array([[[1.0], [following]]]), run).round(9).tolist()
    [[2.5]]
    """
    rule = mechanism.adaptive_clip
    assert rule is not None
    starts = np.array([mechanism.clip_at(0, group) for group in mechanism.groups or (None,)])
    if (np.abs(np.log(bounds / starts)) > math.log(FAR) - 1e-9).any():
        raise AuditError(
            "a clip bound reached the end of its range, where it no longer shows the count: audit fewer steps"
        )
    found: Array = mechanism.divisor * (rule.quantile - 0.5 - np.log(bounds[:, 1] / bounds[:, 0]) / rule.learning_rate)
    return found


def limit(mechanism: Mechanism, rows: float) -> int:
    """How many steps a bound stays within its range, if batches have up to so many rows."""
    rule = mechanism.adaptive_clip
    assert rule is not None
    share = 0.5 + np.array([-1, 1]) * rows / (2 * mechanism.divisor)
    drift, spread = rule.learning_rate * float(np.abs(share - rule.quantile).max()), _spread(mechanism)
    # drift·n + spread·√n = room
    root = (math.sqrt(spread**2 + 4 * drift * _ROOM) - spread) / (2 * drift) if drift else _ROOM / spread
    if root**2 < 2:
        raise OptionError(
            f"learning_rate {rule.learning_rate:g} of adaptive_clip moves the clip bound to the end of its range "
            "within two steps: no audit of steps can follow it; audit whole runs with audit.game"
        )
    return int(root**2)


def most_rows(mechanism: Mechanism) -> int:
    """How many rows a batch may have for a bound to stay within its range for one step."""
    rule = mechanism.adaptive_clip
    assert rule is not None
    share = (_ROOM - _spread(mechanism)) / rule.learning_rate - abs(0.5 - rule.quantile)
    return int(2 * mechanism.divisor * share)


def _spread(mechanism: Mechanism) -> float:
    """How far noise moves the logarithm of a bound in a step, at most."""
    rule = mechanism.adaptive_clip
    assert rule is not None
    return _SURE * rule.learning_rate * float(mechanism.count_stds(range(1))[0]) / mechanism.divisor


def drifting(mechanism: Mechanism, *, up: bool) -> Mechanism:
    """The mechanism with a quantile for which bounds rise, or fall; its event is the same.

    Noise that stays behind a bound that rises is too small, and a contribution too large that does so where it falls.
    """
    rule = mechanism.adaptive_clip
    return mechanism if rule is None else replace(mechanism, adaptive_clip=replace(rule, quantile=1.0 if up else 0.0))
