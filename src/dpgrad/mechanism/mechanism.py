"""`Mechanism`: one frozen description of a run, from which batches, clip bound, noise *and* accounting are read.

>>> from dpgrad import sampling, schedules
>>> mechanism = Mechanism(
...     sampling.Poisson(0.01), steps=1000, noise_multiplier=1.0, clip=schedules.linear(12.0, 1000), hold_noise=True
... )
>>> mechanism.clip_at(500), mechanism.std_at(500), mechanism.multiplier_at(500)
(8.0, 12.0, 1.5)
>>> round(mechanism.profile().epsilon(1e-5), 2)
1.07
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np

from dpgrad import _validate
from dpgrad.accounting import account, calibrate
from dpgrad.accounting.events import NOTHING, Event, Inexact, Leaf, Relation, Repeat, group_multiplier, together
from dpgrad.accounting.guarantee import Guarantee, Profile
from dpgrad.errors import AccountingError, BudgetSpentError, OptionError
from dpgrad.mechanism import sampling, schedules, secure
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.sampling import Sampler
from dpgrad.mechanism.schedules import Array, Schedule

__all__ = ["Group", "Mechanism"]

_CHECKED_AT_ONCE = 100_000  # steps whose schedules are checked when a mechanism is made; the rest when priced or run
_CHUNK = 1 << 20
_MOST_DISTINCT = 2_000_000
_MOST_VALUES = 1 << 48


@dataclass(frozen=True)
class Group:
    """Parameters that are clipped and noised separately; ``clip`` and ``noise_multiplier`` scale the mechanism's.

    ``pattern`` matches parameter names like a shell pattern. Group g is clipped to C_g(t) = clip_g·clip(t) and gets
    noise of standard deviation z_g·z(t)·C_g(t), where z(t) is the mechanism's noise multiplier without groups. All
    groups together have the noise multiplier z(t)/√Σ z_g⁻².

    >>> Group("conv*", clip=0.5, noise_multiplier=2.0)
    Group(pattern='conv*', clip=0.5, noise_multiplier=2.0)
    """

    pattern: str
    clip: float = 1.0
    noise_multiplier: float = 1.0

    def __post_init__(self) -> None:
        pattern: object = self.pattern  # a caller may ignore types
        if not isinstance(pattern, str) or not pattern:
            raise OptionError(f"pattern must be a non-empty string that matches parameter names, got {self.pattern!r}")
        _validate.positive(**{"clip of a group": self.clip, "noise_multiplier of a group": self.noise_multiplier})


@dataclass(frozen=True)
class Mechanism:
    """A private run: sampler, steps, clip bound, noise and neighbouring relation.

    All fields are public. At step t the norm of one example's contribution is at most clip(t), and the noise has
    standard deviation z·noise(t)·clip(t), where z is ``noise_multiplier``. With ``hold_noise`` the noise keeps its
    absolute size z·noise(t)·clip(0) while the clip bound changes (Yu et al., 2018); the noise multiplier is then
    z·noise(t)·clip(0)/clip(t).

    ``batch_size`` divides the noisy sum. It is declared for Poisson sampling and full batches, and the size of
    the batches for samplers that have one; never the realised size.

    With ``adaptive_clip`` the clip bound of each group starts at ``clip`` and follows a noisy quantile of the norms,
    which is part of the same release: the step keeps its noise multiplier, and the gradients get more noise.

    ``secure_values`` is 0, the default, if batches and noise come from ordinary generators. With the secure source
    (`dpgrad.mechanism.secure`) it is the number of values that get noise at each step, plus one count per group with
    ``adaptive_clip``. Their distance from a Gaussian is part of the event.

    Guarantee: `event` composes, over all steps t, the sampler's event at noise multiplier std_at(t)/clip_at(t), or at
    that of gradients and counts together. Clipping and noise read the same two values. A sampler whose event has no
    price under ``relation`` is refused.

    >>> from dpgrad import sampling
    >>> Mechanism(sampling.Poisson(0.01), steps=10_000, noise_multiplier=4.0).event()
    Repeat(event=Poisson(sampling_rate=0.01, event=Gaussian(noise_multiplier=4.0)), count=10000)
    """

    sampler: Sampler
    steps: int
    noise_multiplier: float
    clip: float | Schedule = 1.0
    noise: float | Schedule = 1.0
    hold_noise: bool = False
    relation: Relation = Relation.ADD_REMOVE
    batch_size: float | None = None
    groups: tuple[Group, ...] = ()
    adaptive_clip: AdaptiveClip | None = None
    secure_values: int = 0

    def __post_init__(self) -> None:
        _validate.step_count(steps=self.steps)
        _validate.positive(noise_multiplier=self.noise_multiplier)
        if not isinstance(self.hold_noise, bool):
            raise OptionError(f"hold_noise must be True or False, got {self.hold_noise!r}")
        self._set(
            steps=int(self.steps), noise_multiplier=float(self.noise_multiplier), relation=_relation(self.relation)
        )
        if not isinstance(self.sampler, sampling.KINDS):
            raise OptionError(
                f"sampler must be one of dpgrad.sampling, such as sampling.Poisson(0.01), got {self.sampler!r:.80}"
            )
        if self.relation not in self.sampler.relations:
            raise AccountingError(
                f"{self.sampler.name} sampling has no price under {self.relation}: "
                f"use relation {' or '.join(self.sampler.relations)}, or the Poisson sampler"
            )
        self._check_groups()
        if self.batch_size is None:
            self._set(batch_size=self.sampler.batch_size)
        if self.batch_size is not None:
            _validate.positive(batch_size=self.batch_size)
            self._set(batch_size=float(self.batch_size))
        _validate.whole(most=_MOST_VALUES, secure_values=self.secure_values)
        self._set(secure_values=int(self.secure_values))
        self._check_schedules()
        if self.adaptive_clip is not None:
            self._check_adaptive(self.adaptive_clip)

    def _check_adaptive(self, rule: AdaptiveClip) -> None:
        given: object = rule  # a caller may ignore types
        if not isinstance(given, AdaptiveClip):
            raise OptionError(f"adaptive_clip must be an AdaptiveClip, got {given!r:.80}")
        if self.hold_noise or callable(self.clip):
            raise OptionError(
                "adaptive_clip moves the clip bound, and so does a schedule: give clip as a number, without hold_noise"
            )
        _ = self.divisor
        self._widening(1 if self._steady else min(self.steps, _CHECKED_AT_ONCE), 0)
        self._widening(1, self.steps - 1)
        if self.secure_values:
            secure.grid(self.count_std_at(0), 0.5, 1)  # refuses one that is too coarse

    def _check_groups(self) -> None:
        groups = (self.groups,) if isinstance(self.groups, Group) else tuple(self.groups)
        for group in groups:
            if not isinstance(group, Group):
                raise OptionError(f"groups must hold Group values, got {group!r:.80}")
        patterns = [group.pattern for group in groups]
        if len(set(patterns)) < len(patterns):
            raise OptionError(f"groups must have different patterns, got {patterns}")
        self._set(groups=groups)

    def _check_schedules(self) -> None:
        for name in ("clip", "noise"):
            value = getattr(self, name)
            schedules.as_schedule(value, name)
            if not callable(value):
                self._set(**{name: float(value)})
            many = 1 if schedules.is_constant(value) else min(self.steps, _CHECKED_AT_ONCE)
            schedules.values(value, many, name=name)
            schedules.values(value, 1, self.steps - 1, name)
        many = 1 if self._steady else min(self.steps, _CHECKED_AT_ONCE)
        next(self.sampler.plan(self._multipliers(many)))  # a generator: checks every step, builds the first
        self.sampler.event(self.multiplier_at(self.steps - 1), self.steps - 1)
        if self.secure_values:
            for steps in (range(many), range(self.steps - 1, self.steps)):
                for group in self.groups or (None,):
                    most = float((self.stds(steps, group) / self.clips(steps, group)).max())
                    secure.grid(most, 1.0, self.secure_values)  # refuses one that is too coarse

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def clip_at(self, step: int, group: Group | None = None) -> float:
        """Return the clip bound at ``step``, for ``group`` if there are groups; with ``adaptive_clip``, the first.

        >>> Mechanism(sampling.FullBatch(), 2, 1.0, clip=schedules.piecewise([1], [2.0, 0.5])).clip_at(1)
        0.5
        """
        self._check_step(step)
        return float(self.clips(range(step, step + 1), group)[0])

    def clips(self, steps: range, group: Group | None = None) -> Array:
        """Return `clip_at` for a range of steps.

        >>> Mechanism(sampling.FullBatch(), 3, 1.0, clip=schedules.piecewise([1], [2.0, 0.5])).clips(range(1, 3))
        array([0.5, 0.5])
        """
        self._check_steps(steps)
        factor = 1.0 if (chosen := self._chosen(group)) is None else chosen.clip
        return factor * schedules.values(self.clip, len(steps), steps.start, "clip")

    def std_at(self, step: int, group: Group | None = None) -> float:
        """Return the standard deviation of the noise added to each coordinate of the clipped sum at ``step``.

        >>> Mechanism(sampling.FullBatch(), 2, noise_multiplier=3.0, clip=2.0).std_at(0)
        6.0
        """
        self._check_step(step)
        return float(self.stds(range(step, step + 1), group)[0])

    def stds(self, steps: range, group: Group | None = None) -> Array:
        """Return `std_at` for a range of steps.

        >>> Mechanism(sampling.FullBatch(), 2, noise_multiplier=3.0, clip=2.0).stds(range(2))
        array([6., 6.])
        """
        self._check_steps(steps)
        factor = 1.0 if (chosen := self._chosen(group)) is None else chosen.clip * chosen.noise_multiplier
        noise = self.noise_multiplier * schedules.values(self.noise, len(steps), steps.start, "noise")
        clip = (
            schedules.values(self.clip, 1, 0, "clip")
            if self.hold_noise
            else schedules.values(self.clip, len(steps), steps.start, "clip")
        )
        found = factor * (noise * clip)
        return found if self.adaptive_clip is None else found * self._widening(len(steps), steps.start)

    def count_std_at(self, step: int) -> float:
        """Return the standard deviation of the noise on each count of ``adaptive_clip`` at ``step``.

        >>> rule = AdaptiveClip(quantile=0.5)
        >>> run = Mechanism(sampling.FullBatch(), 2, 1.0, batch_size=200, adaptive_clip=rule)
        >>> run.count_std_at(0), round(run.std_at(0), 5), run.event() == run.without_adaptive_clip().event()
        (10.0, 1.00125, True)
        """
        self._check_step(step)
        return float(self.count_stds(range(step, step + 1))[0])

    def count_stds(self, steps: range) -> Array:
        """Return `count_std_at` for a range of steps.

        >>> run = Mechanism(sampling.FullBatch(), 2, 1.0, batch_size=200, adaptive_clip=AdaptiveClip(quantile=0.5))
        >>> run.count_stds(range(2))
        array([10., 10.])
        """
        self._check_steps(steps)
        if self.adaptive_clip is None:
            raise OptionError("this mechanism counts nothing: it has no adaptive_clip")
        return self.adaptive_clip.count_stds(self._multipliers(len(steps), steps.start), self._counts, self.divisor)

    @property
    def _counts(self) -> int:
        return max(1, len(self.groups))

    def _widening(self, count: int, start: int) -> Array:
        """The factor by which the gradients' noise grows to pay for the counts."""
        assert self.adaptive_clip is not None
        return self.adaptive_clip.widening(self._multipliers(count, start), self._counts, self.divisor)

    def without_adaptive_clip(self) -> "Mechanism":
        """Return the mechanism with a clip bound that stays at its start; its event is the same."""
        return self if self.adaptive_clip is None else dataclasses.replace(self, adaptive_clip=None)

    def multiplier_at(self, step: int) -> float:
        """Return the noise multiplier accounted at ``step``: std_at/clip_at, or that of all groups together.

        >>> pair = (Group("a*"), Group("b*"))
        >>> round(Mechanism(sampling.FullBatch(), 1, noise_multiplier=2.0, groups=pair).multiplier_at(0), 6)
        1.414214
        """
        self._check_step(step)
        return float(self._multipliers(1, step)[0])

    def _multipliers(self, count: int, start: int = 0) -> Array:
        """`multiplier_at` of ``count`` steps from ``start``."""
        found = self.noise_multiplier * schedules.values(self.noise, count, start, "noise")
        if self.hold_noise:
            first = float(schedules.values(self.clip, 1, 0, "clip")[0])
            clip = schedules.values(self.clip, count, start, "clip")
            with np.errstate(over="ignore"):  # an infinite multiplier is refused where it is used
                found = found * first / clip
        if self.groups:
            found = found * group_multiplier(group.noise_multiplier for group in self.groups)
        return found

    def _check_steps(self, steps: range) -> None:
        if steps.step != 1 or not steps:
            raise OptionError(f"steps must be a range of one step after another, got {steps!r}")
        self._check_step(steps.start)
        self._check_step(steps.stop - 1)

    def _check_step(self, step: int) -> None:
        _validate.whole(step=step)
        if step >= self.steps:
            raise OptionError(f"step must be below steps = {self.steps:,}, got {step:,}: it is not accounted for")

    def _chosen(self, group: Group | None) -> Group | None:
        if group is None and self.groups:
            raise OptionError(f"group is required: this mechanism clips {len(self.groups)} groups, each by itself")
        if group is not None and group not in self.groups:
            raise OptionError(f"group must be one of this mechanism's {len(self.groups)}, got {group!r}")
        return group

    def group_of(self, parameter: str) -> Group:
        """Return the group whose pattern matches a parameter name; refuse a name that matches none or several.

        >>> two = (Group("conv*"), Group("head*", clip=0.5))
        >>> Mechanism(sampling.FullBatch(), 1, 1.0, groups=two).group_of("head.bias").clip
        0.5
        """
        found = [group for group in self.groups if fnmatchcase(parameter, group.pattern)]
        if len(found) != 1:
            seen = "no group" if not found else "groups " + ", ".join(repr(group.pattern) for group in found)
            raise OptionError(f"parameter {parameter!r} must match one group, it matches {seen}: change the patterns")
        return found[0]

    @property
    def divisor(self) -> float:
        """The divisor of the noisy sum, ``batch_size``; refused if it was not declared.

        >>> Mechanism(sampling.FixedSize(1000, 50), 1, 1.0, relation=Relation.REPLACE_ONE).divisor
        50.0
        """
        if self.batch_size is None:
            raise OptionError(
                f"batch_size is required to train with {self.sampler.name} sampling: declare the public "
                "number that divides the noisy sum; never the realised size of a batch"
            )
        return self.batch_size

    @cached_property
    def _steady(self) -> bool:
        """Whether every step is known to cost the same."""
        held = not self.hold_noise or schedules.is_constant(self.clip)
        return held and schedules.is_constant(self.noise) and self.sampler.steady

    def step_event(self, step: int, start: int = 0) -> Event:
        """Return the event that ``step`` adds; all steps together make `event`.

        If one event covers an epoch (shuffled batches), its first step pays for all of it and the others add nothing.
        ``start`` is the first step of the current key: an epoch that a new key enters half-way is paid again.

        >>> epochs = Mechanism(sampling.Shuffle(100, 50), steps=4, noise_multiplier=1.0, relation=Relation.ZERO_OUT)
        >>> [epochs.step_event(t) == NOTHING for t in range(4)]
        [False, True, False, True]
        """
        self._check_step(step)
        span = self.sampler.span
        if span == 1 and self._steady:
            return self._every_step
        first = step - step % span
        if step not in (first, start):
            return NOTHING
        least = self._multipliers(min(span, self.steps - first), first).min()
        return self._drawn(self.sampler.event(float(least), first))

    @cached_property
    def _every_step(self) -> Event:
        """The event of each step if all cost the same; read at every step of a run."""
        return self._drawn(self.sampler.event(float(self._multipliers(1, 0)[0]), 0))

    def _drawn(self, leaf: Leaf) -> Leaf:
        """The event of a span of steps with the distance of its noise."""
        if not self.secure_values:
            return leaf
        distance = secure.inexact(self.secure_values, self.sampler.span)
        return Inexact(leaf, distance)  # type: ignore[arg-type]  # a sampler's event is noise on a sum

    def event(self) -> Event:
        """Return the event of the whole run, with consecutive equal steps counted together.

        >>> two = Mechanism(sampling.FullBatch(), 3, 1.0, noise=schedules.piecewise([1], [1.0, 2.0])).event()
        >>> [(leaf.event.noise_multiplier, leaf.count) for leaf in two.events]
        [(1.0, 1), (2.0, 2)]
        """
        return together(*(_repeat(leaf, count) for leaf, count in self._runs()))

    def _runs(self) -> Iterator[tuple[Leaf, int]]:
        """The events of the run in order, and how often each is repeated; by chunks, so memory stays small."""
        span = self.sampler.span
        if self._steady:
            yield self._drawn(self.sampler.event(self.multiplier_at(0))), -(-self.steps // span)
            return
        chunk = span * max(1, _CHUNK // span)
        distinct, held = 0, 0  # held: how often the last leaf of the previous chunk, which may go on, was applied
        last: Leaf | None = None
        for start in range(0, self.steps, chunk):
            planned = self.sampler.plan(self._multipliers(min(chunk, self.steps - start), start), start)
            runs = [(self._drawn(leaf), count) for leaf, count in planned]
            if last == runs[0][0]:
                runs[0] = (last, held + runs[0][1])
            elif last is not None:
                runs.insert(0, (last, held))
            last, held = runs.pop()
            yield from runs
            distinct += len(runs)
            if distinct > _MOST_DISTINCT:
                raise AccountingError(
                    f"the schedules change more than {_MOST_DISTINCT:,} times: hold values longer, "
                    "for example with schedules.piecewise"
                )
        if last is not None:
            yield last, held

    def profile(self, accountant: str = "pld", *, also_released: Event = NOTHING) -> Profile:
        """The privacy profile of the whole run, together with ``also_released``, another release from the same data.

        >>> round(Mechanism(sampling.FullBatch(), 8, noise_multiplier=8.0).profile("exact").epsilon(1e-5), 6)
        1.356467
        """
        return account(together(also_released, self.event()), self.relation, accountant)

    def guarantee(self, delta: float, accountant: str = "pld", *, also_released: Event = NOTHING) -> Guarantee:
        """The (ε, δ) that ``accountant`` certifies for the whole run, together with ``also_released``.

        >>> print(Mechanism(sampling.FullBatch(), 8, noise_multiplier=8.0).guarantee(1e-5))
        ε = 1.3565 at δ = 1e-05 for datasets that differ by the presence of one row (full batch, pld accountant)
        """
        return Guarantee.of(self.profile(accountant, also_released=also_released), delta)

    def with_steps(self, steps: int) -> "Mechanism":
        """Return the mechanism with another number of steps; schedules do not stretch.

        >>> Mechanism(sampling.FullBatch(), 8, 1.0).with_steps(2).steps
        2
        """
        return dataclasses.replace(self, steps=steps)

    def with_noise(self, noise_multiplier: float) -> "Mechanism":
        """Return the mechanism with another noise multiplier.

        >>> Mechanism(sampling.FullBatch(), 8, 1.0).with_noise(2.0).std_at(0)
        2.0
        """
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    def calibrated(
        self,
        epsilon: float,
        delta: float,
        accountant: str = "pld",
        grid: float | None = None,
        *,
        also_released: Event = NOTHING,
    ) -> "Mechanism":
        """Return the mechanism with the least noise multiplier (or multiple of ``grid``) that is (ε, δ)-private.

        ``also_released`` is another release from the same data, such as the event of a PCA: both together are private.

        Guarantee: the ε that ``accountant`` certifies for the mechanism returned, together with ``also_released``, was
        computed and is at most ``epsilon``.

        >>> run = Mechanism(sampling.FullBatch(), 8, noise_multiplier=1.0)
        >>> run.calibrated(epsilon=1.0, delta=1e-5, grid=0.01).noise_multiplier
        10.56
        >>> from dpgrad.accounting.events import Gaussian
        >>> run.calibrated(epsilon=1.0, delta=1e-5, grid=0.01, also_released=Gaussian(10.0)).noise_multiplier
        11.38
        """
        self._refuse_spent(also_released, epsilon, delta, accountant)
        priced = self.without_adaptive_clip()  # the search may try noise that adaptive_clip would refuse
        found = calibrate.noise_multiplier(
            lambda z: together(also_released, priced.with_noise(z).event()),
            epsilon,
            delta,
            self.relation,
            accountant,
            grid,
        )
        return self.with_noise(found)

    def _refuse_spent(self, also_released: Event, epsilon: float, delta: float, accountant: str) -> None:
        """Refuse a budget that ``also_released`` uses up."""
        _validate.positive(epsilon=epsilon)
        if (
            also_released != NOTHING
            and (cost := account(also_released, self.relation, accountant).epsilon(delta)) >= epsilon
        ):
            raise BudgetSpentError(
                f"also_released alone costs epsilon {cost:.6g} at delta {delta:g}, of {epsilon:g} in all: nothing is "
                "left for the run; give it more noise or allow a larger epsilon"
            )

    def longest(
        self, epsilon: float, delta: float, accountant: str = "pld", *, also_released: Event = NOTHING
    ) -> "Mechanism":
        """Return the mechanism with the most steps that are (ε, δ)-private; one more step was found to exceed it.

        >>> Mechanism(sampling.FullBatch(), 1, noise_multiplier=10.0).longest(epsilon=3.0, delta=1e-5).steps
        51
        """
        self._refuse_spent(also_released, epsilon, delta, accountant)
        return self.with_steps(
            calibrate.steps(
                lambda n: together(also_released, self.with_steps(n).event()), epsilon, delta, self.relation, accountant
            )
        )

    def more_steps(
        self,
        epsilon: float,
        delta: float,
        accountant: str = "pld",
        grid: float | None = 0.01,
        *,
        also_released: Event = NOTHING,
    ) -> "Mechanism":
        """*more-steps* of Yu et al. (2018): noise for a constant clip bound, then as many steps as the budget allows.

        >>> clip = schedules.affine(12.0, 10)
        >>> run = Mechanism(sampling.FullBatch(), 10, 1.0, clip=clip, hold_noise=True).more_steps(2.0, 1e-5, grid=0.5)
        >>> run.noise_multiplier, run.steps
        (6.5, 27)
        """
        self._refuse_spent(also_released, epsilon, delta, accountant)
        priced = self.without_adaptive_clip()
        still = dataclasses.replace(priced, clip=schedules.as_schedule(self.clip)(0))
        found = calibrate.more_steps(
            lambda z, n: together(also_released, dataclasses.replace(still, noise_multiplier=z, steps=n).event()),
            lambda z, n: together(also_released, dataclasses.replace(priced, noise_multiplier=z, steps=n).event()),
            epsilon, delta, self.steps, self.relation, accountant, grid,
        )  # fmt: skip
        return dataclasses.replace(self, noise_multiplier=found.noise_multiplier, steps=found.steps)

    def less_noise(
        self,
        epsilon: float,
        delta: float,
        accountant: str = "pld",
        grid: float | None = None,
        *,
        also_released: Event = NOTHING,
    ) -> "Mechanism":
        """*less-noise* of Yu et al. (2018): the least noise at which the shrinking clip bound lasts ``steps``.

        >>> clip = schedules.affine(12.0, 10)
        >>> run = Mechanism(sampling.FullBatch(), 10, 1.0, clip=clip, hold_noise=True).less_noise(2.0, 1e-5, grid=0.5)
        >>> run.noise_multiplier, run.steps
        (5.0, 10)
        """
        return self.calibrated(epsilon, delta, accountant, grid, also_released=also_released)

    def to_dict(self) -> dict[str, Any]:
        """Return the mechanism as plain values, for JSON; refuse a schedule that is a plain function.

        >>> run = Mechanism(sampling.Poisson(0.01), 100, 1.0, clip=schedules.linear(8.0, 100))
        >>> Mechanism.from_dict(run.to_dict()) == run
        True
        """
        return {
            "sampler": sampling.to_dict(self.sampler),
            "steps": self.steps,
            "noise_multiplier": self.noise_multiplier,
            "clip": schedules.to_plain(self.clip, "clip"),
            "noise": schedules.to_plain(self.noise, "noise"),
            "hold_noise": self.hold_noise,
            "relation": self.relation.value,
            "batch_size": self.batch_size,
            "groups": [dataclasses.asdict(group) for group in self.groups],
            **({} if self.adaptive_clip is None else {"adaptive_clip": dataclasses.asdict(self.adaptive_clip)}),
            **({"secure_values": self.secure_values} if self.secure_values else {}),
        }

    @classmethod
    def from_dict(cls, data: object) -> "Mechanism":
        """Return the mechanism that `to_dict` wrote; refuse missing or unknown fields."""
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, Mapping) or {*data, "adaptive_clip", "secure_values"} != fields:
            raise OptionError(f"not a mechanism: {data!r:.80}; expected an object with fields {sorted(fields)}")
        groups = data["groups"]
        wanted = {field.name for field in dataclasses.fields(Group)}
        if not isinstance(groups, list) or not all(isinstance(g, Mapping) and set(g) == wanted for g in groups):
            raise OptionError(f"groups must be a list of objects with fields {sorted(wanted)}, got {groups!r:.80}")
        rule = data.get("adaptive_clip")
        known = {field.name for field in dataclasses.fields(AdaptiveClip)}
        if rule is not None and (not isinstance(rule, Mapping) or set(rule) != known):
            raise OptionError(f"adaptive_clip must be an object with fields {sorted(known)}, got {rule!r:.80}")
        return cls(
            **{
                **data,
                "adaptive_clip": None if rule is None else AdaptiveClip(**rule),
                "sampler": sampling.from_dict(data["sampler"]),
                "clip": schedules.from_plain(data["clip"]),
                "noise": schedules.from_plain(data["noise"]),
                "groups": tuple(Group(**group) for group in groups),
            }
        )


def _relation(value: object) -> Relation:
    _validate.one_of([relation.value for relation in Relation], relation=value)
    return Relation(value)  # type: ignore[arg-type]


def _repeat(leaf: Leaf, count: int) -> Repeat:
    """``leaf`` repeated, without checks: it comes from a sampler, which counted it."""
    made = object.__new__(Repeat)
    object.__setattr__(made, "event", leaf)
    object.__setattr__(made, "count", count)
    return made
