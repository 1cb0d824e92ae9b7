"""The clip bounds of a run that follow a noisy quantile of the norms (`dpgrad.mechanism.adaptive`).

Guarantee: a bound is a function of public values and of the noisy counts of the steps before, which are part of what
those steps released. The noise of a count has a stream of its own, of a name that no parameter can have.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpgrad.errors import ResumeError
from dpgrad.mechanism import secure
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import noise, secure_noise

__all__ = ["Quantile"]

_NAME = ".clip"  # a parameter's name does not begin with a dot


class Quantile:
    """The clip bound of each group at each step since ``first``, and the one of the next step.

    >>> from dpgrad import sampling
    >>> from dpgrad.mechanism.adaptive import AdaptiveClip
    >>> plan = Mechanism(sampling.FullBatch(), 9, 1.0, batch_size=100, adaptive_clip=AdaptiveClip(noise=1.0))
    >>> bounds = Quantile(plan, Key.from_seed(0))
    >>> bounds.follow(0, torch.tensor([50.0]))  # all of 100 norms were below
    >>> bounds.at(0), 0.89 < bounds.at(1)[0] < 0.92
    ([1.0], True)
    """

    def __init__(self, mechanism: Mechanism, key: Key, first: int = 0) -> None:
        self._mechanism, self._key, self.first = mechanism, key, first
        self._start = [mechanism.clip_at(0, group) for group in mechanism.groups or (None,)]
        self._bounds = [self._start]

    def at(self, step: int) -> list[float]:
        """The clip bound of each group at a step; the last that is known where the step is later.

        So a step that was charged and failed leaves the bounds where they are.
        """
        return self._bounds[max(0, min(step - self.first, len(self._bounds) - 1))]

    def follow(self, step: int, counts: Tensor) -> None:
        """Set the bounds of the next step from Σ(bᵢ − ½) of this one, by group. It reads the counts: private."""
        rule, mechanism = self._mechanism.adaptive_clip, self._mechanism
        assert rule is not None
        clean = torch.zeros(len(self._start), dtype=torch.float64)
        clean[: len(counts)] = counts.to("cpu", torch.float64)
        std = mechanism.count_std_at(step)
        if self._key.secure:
            unit = secure.grid(std, 0.5, 1)  # of each count, which an example moves by a half
            noisy = secure_noise.noisy_means({_NAME: clean}, {_NAME: unit}, self._key, step, 1.0)[_NAME]
        else:
            noisy = clean + noise.gaussian(clean, std, self._key, step, _NAME)
        found = [
            rule.following(bound, count, mechanism.divisor, start)
            for bound, count, start in zip(self.at(step), noisy.tolist(), self._start, strict=True)
        ]
        place = step - self.first
        self._bounds += [self._bounds[-1]] * (place + 1 - len(self._bounds))  # of steps that failed
        self._bounds[place + 1 :] = [found]  # those of a step that is computed anew go

    def _until(self, stop: int) -> list[list[float]]:
        """The bounds of the steps before ``stop``."""
        return [self.at(step) for step in range(self.first, stop)]

    def state(self, step: int) -> tuple[int, Tensor]:
        """The first step, and all bounds up to those of the next step, ``step``: (steps + 1, groups)."""
        return self.first, torch.tensor(self._until(step + 1), dtype=torch.float64)

    def restore(self, state: object, first: int, step: int) -> None:
        """Go on from a `state` at ``step``, whose first bounds are those of step ``first``."""
        if not isinstance(state, Tensor) or state.shape != (step - first + 1, len(self._start)):
            raise ResumeError(
                "the state has no clip bounds for the adaptive_clip of this mechanism: resume with the mechanism it "
                "was taken with"
            )
        self._bounds, self.first = state.tolist(), first

    def used(self, steps: int) -> Sequence[Sequence[float]]:
        """The bounds of the steps before ``steps``."""
        return tuple(map(tuple, self._until(steps)))
