"""The plan of a run: everything that is fixed, and public, before a row of the data is read.

>>> plan = make("psasc", rows=60_000, batch_size=512, epochs=20, epsilon=3.0, delta=1e-5)
>>> plan.steps, round(plan.mechanism.noise_multiplier, 3)
(2343, 0.892)
>>> print(plan.guarantee)
ε = 3 at δ = 1e-05 for datasets of the same public size, one row's contribution replaced by nothing (Poisson ...
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dpgrad import _validate
from dpgrad.accounting import account
from dpgrad.accounting.events import NOTHING, Event, Relation, together
from dpgrad.accounting.guarantee import ORDINARY, SECURE, UNIT, Guarantee, plural, several, up
from dpgrad.errors import BudgetSpentError, DataError, OptionError, UnknownOptionError
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.schedules import Schedule
from dpgrad.reports import compare
from dpgrad.reports.report import Report, report
from dpgrad.training import advice, auto, cooling
from dpgrad.training.averaging import parse as parse_averaging
from dpgrad.training.learning_rates import parse_learning_rate, plain_learning_rate
from dpgrad.training.options import ROWS_PER_UNIT, UNIT_RULES, Budget, Privacy, parted, written
from dpgrad.training.recipes import Recipe, optimizer_name, recipe

__all__ = ["Plan", "accumulated_noise", "make", "planned", "theorem_2_learning_rate", "theorem_3_scales"]


@dataclass(frozen=True, repr=False)
class Plan:
    """A run as it will be charged, and what theory and the papers say about its settings.

    ``dataset_size`` is the public number of rows from which sampling rate, steps and divisor follow; ``declared`` says
    whether it was given or counted. ``target`` is the ε asked for, None where only noise was given; ``ends`` says what
    set the number of steps. ``learning_rate`` is None where it is the optimizer's own. ``parameters`` and ``classes``
    are those of the model, and ``seconds`` the time a run is expected to take, where they are known. ``also_released``
    is the event of other releases from the same data, such as a PCA; that of ``temperature``, the full batches that
    find the temperature of class probabilities (`dpgrad.training.temperature`), is among them. ``unit`` is what one
    example is: a row, or a person with at most ``rows_per_unit`` rows chosen by ``unit_rule``; sizes and epochs then
    count persons.

    Guarantee: ``guarantee`` is that of ``mechanism``, which clips, adds the noise and is charged, and of
    ``also_released``, together. It is within ``target``.

    >>> make("dpgd", rows=1000, steps=50, noise_multiplier=20.0, delta=1e-5).epochs
    50.0
    """

    recipe: Recipe
    mechanism: Mechanism
    guarantee: Guarantee
    batch_size: float
    dataset_size: int
    declared: bool
    learning_rate: float | Schedule | None
    target: float | None = None
    reading: str | None = None
    ends: Literal["plan", "budget"] = "plan"
    parameters: int | None = None
    classes: int | None = None
    seconds: float | None = None
    also_released: Event = NOTHING
    unit: str = UNIT
    rows_per_unit: int | None = None
    unit_rule: str | None = None
    temperature: Mechanism | None = None

    def __repr__(self) -> str:
        drawn = plural(self.unit) if self.batch_size != 1 else self.unit
        return (
            f"<Plan of {self.recipe.name}: {self.steps:,} steps of {self.batch_size:g} {drawn}, noise multiplier "
            f"{self.mechanism.multiplier_at(0):.6g}; {self.guarantee}>"
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @property
    def optimizer(self) -> str:
        """The name of the optimizer."""
        return optimizer_name(self.recipe.optimizer)

    @property
    def steps(self) -> int:
        """How many steps the run takes."""
        return self.mechanism.steps

    @property
    def delta(self) -> float:
        """The δ of the guarantee."""
        return self.guarantee.delta

    @property
    def steps_per_epoch(self) -> float:
        """N/B: an epoch is as many batches as hold all rows once, in expectation."""
        return self.dataset_size / self.batch_size

    @property
    def epochs(self) -> float:
        """How many epochs the steps make."""
        return self.steps / self.steps_per_epoch

    def learning_rate_at(self, step: int) -> float | None:
        """The learning rate of one step; None where it is the optimizer's own."""
        return self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate

    def event_after(self, steps: int) -> Event:
        """The event of the first ``steps`` steps, together with the other release.

        >>> plan = make("dpgd", rows=1000, steps=50, noise_multiplier=20.0, delta=1e-5)
        >>> plan.event_after(2)
        Repeat(event=Gaussian(noise_multiplier=20.0), count=2)
        """
        run = self.mechanism.with_steps(steps).event() if steps else NOTHING
        return together(self.also_released, run)

    def guarantee_of(self, event: Event) -> Guarantee:
        """The guarantee of ``event``, which a run released, together with the other release.

        >>> plan = make("dpgd", rows=1000, steps=50, noise_multiplier=20.0, delta=1e-5)
        >>> plan.guarantee_of(plan.mechanism.event()) == plan.guarantee
        True
        """
        if event == self.mechanism.event():
            return self.guarantee
        profile = account(together(self.also_released, event), self.mechanism.relation, self.guarantee.accountant)
        return replace(Guarantee.of(profile, self.delta), unit=self.unit)

    def epsilon_after(self, steps: int) -> float:
        """The ε of the first ``steps`` steps, for a run whose number of steps was fixed in advance.

        >>> plan = make("dpgd", rows=1000, steps=50, noise_multiplier=20.0, delta=1e-5)
        >>> plan.epsilon_after(0), plan.epsilon_after(50) == plan.guarantee.epsilon
        (0.0, True)
        """
        if steps == self.steps:
            return self.guarantee.epsilon
        return account(self.event_after(steps), self.mechanism.relation, self.guarantee.accountant).epsilon(self.delta)

    def figures(self) -> list[tuple[str, compare.Figure | str]]:
        """The ε by each accountant, or why it has none; figures that are not guarantees come last.

        >>> plan = make("dpgd", rows=1000, steps=50, noise_multiplier=20.0, delta=1e-5)
        >>> [name for name, found in plan.figures() if isinstance(found, str)]
        ['moments-asymptotic']
        """
        event, relation = self.guarantee.event, self.mechanism.relation
        chosen = compare.figure(event, relation, self.guarantee.accountant, self.delta, chosen=True)
        return compare.compare(event, relation, self.delta, chosen)

    @property
    def momentum_noise(self) -> float:
        """(1 − c^{2T})/(1 − c²): how many times the variance of one step's noise the last momentum carries.

        Yu et al. (2018) for m ← c·m + g; Huang et al. (2024) write c = 1 − γ₁.

        >>> plan = make("dpgd", rows=1000, steps=500, momentum=0.9, noise_multiplier=20.0, delta=1e-5)
        >>> round(plan.momentum_noise, 2)
        5.26
        """
        return accumulated_noise(self.recipe.momentum, self.steps)

    @property
    def public(self) -> tuple[str, ...]:
        """The values that the guarantee assumes to be public."""
        found = compare.assumed_public(self.mechanism, None)
        counted = "declared" if self.declared else "taken from the data"
        size = f"the number of {plural(self.unit)} ({self.dataset_size:,}, {counted})"
        found = [entry for entry in found if entry != "the number of rows"]
        return (
            *found,
            size,
            *([] if self.rows_per_unit is None else [self.contributed]),
            f"the batch size ({self.batch_size:g}, which divides the noisy sum)",
            "the method and its constants",
        )

    @property
    def contributed(self) -> str:
        """How many rows of one person are used, and which."""
        rule = "their order" if self.unit_rule == "first" else "a public hash of their positions"
        most = several("row", self.rows_per_unit or 1).replace("one ", "1 ")
        return f"that at most {most} of one {self.unit} are used, chosen by {rule} among the rows of that {self.unit}"

    @property
    def chosen_by_rule(self) -> str | None:
        """What method auto chose and why, in one line; None for other methods.

        >>> make(rows=600, parameters=78, epsilon=1.0, delta=1e-5).chosen_by_rule
        '144 steps of 50 rows (12 epochs), learning rate 0.1, self-scaled: from 600 rows, 78 parameters and ε'
        """
        if not self.recipe.by_rule:
            return None
        return auto.reason(self.recipe, self.steps, self.batch_size, self.dataset_size, self.parameters, self.unit)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON; a clip bound that is a plain function is refused."""
        figures: dict[str, Any] = {
            name: {"refused": found} if isinstance(found, str) else _figure(found) for name, found in self.figures()
        }
        return {
            "method": self.recipe.to_dict(),
            "mechanism": self.mechanism.to_dict(),
            "epsilon": _validate.json_number(self.guarantee.epsilon),
            "delta": self.delta,
            "relation": self.guarantee.relation.value,
            "accountant": self.guarantee.accountant,
            "target_epsilon": self.target,
            "reading": self.reading,
            "steps": self.steps,
            "steps_set_by": self.ends,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "dataset_size": self.dataset_size,
            "dataset_size_declared": self.declared,
            "unit": self.unit,
            "rows_per_unit": self.rows_per_unit,
            "unit_rule": self.unit_rule,
            "noise_multiplier": self.mechanism.noise_multiplier,
            "noise": SECURE if self.mechanism.secure_values else ORDINARY,
            "learning_rate": plain_learning_rate(self.learning_rate),
            "optimizer": self.optimizer,
            "averaging": self.recipe.averaging,
            "parameters": self.parameters,
            "accountants": figures,
            "momentum_noise": self.momentum_noise,
            "chosen_by_rule": self.chosen_by_rule,
            "suggestions": dict(self.suggestions()),
            "public": list(self.public),
            "expected_seconds": self.seconds,
        }

    def report(self) -> Report:
        """The privacy report of the plan, before anything is released, in the format of docs/report.md."""
        return report(self)

    @property
    def reach(self) -> float:
        """√T·B/σ: what T steps on B gradients that all agree would add up to, over the noise in their direction.

        It follows from public facts and bounds what can be learned from the run: real gradients agree far less.

        >>> make("dpgd", rows=1000, steps=100, noise_multiplier=20.0, delta=1e-5).reach
        500.0
        """
        return math.sqrt(self.steps) * self.batch_size / self.mechanism.multiplier_at(0)

    def cautions(self) -> Iterator[tuple[str, str]]:
        """What to think about before the budget is spent, each with a name; from public facts alone.

        >>> [name for name, _ in make("dpgd", rows=50_000, steps=9, noise_multiplier=1e4, delta=1e-5).cautions()]
        ['delta', 'usefulness']
        """
        return advice.cautions(self)

    def suggestions(self) -> Iterator[tuple[str, str]]:
        """Cautions and the papers' advice on these settings, each with a name; in words, since constants are unknown.

        The noise that Adam's second moment takes in is that of Tang, Shpilevskiy and Lécuyer, "DP-AdamBC: your DP-Adam
        is actually DP-SGD (unless you apply bias correction)" (2024): the variance of one coordinate of the noisy mean.
        """
        yield from self.cautions()
        if not self.recipe.by_rule:
            yield "batches", advice.batches(self)
        if self.recipe.momentum and self.optimizer == "sgd":
            yield (
                "momentum",
                f"with c = {self.recipe.momentum:g} (γ₁ = {1 - self.recipe.momentum:.3g}) the momentum carries "
                f"{self.momentum_noise:.3g} times the noise variance of one step (Yu et al., 2018: 5.26 at c = 0.9; "
                "they find 0.6 to 0.7 best)",
            )
        if self.recipe.rule == "psasc":
            yield from _theorems(self)
        if self.optimizer.lower() in _ADAPTIVE:
            floor = self.mechanism.std_at(0, *self.mechanism.groups[:1]) / self.mechanism.divisor
            yield (
                "noise bias",
                f"the second moment of {self.optimizer} holds the noise too: about {floor**2:.3g} is added to every "
                f"squared gradient, and where gradients are below {floor:.3g} all coordinates get nearly the same rate",
            )
        first, last = self.learning_rate_at(0), self.learning_rate_at(self.steps - 1)
        if first and last is not None and last < first / 20 and not self.recipe.by_rule:
            yield (
                "learning rate",
                f"it falls from {first:.3g} to {last:.3g}: with noise there is no need to end near zero (Abadi et al., "
                "2016)",
            )

    def _followed(self) -> str:
        """How the clip bound moves from its start, where it follows the norms."""
        mechanism = self.mechanism
        if (rule := mechanism.adaptive_clip) is None:
            return ""
        more = mechanism.std_at(0, *mechanism.groups[:1]) / replace(mechanism, adaptive_clip=None).std_at(
            0, *mechanism.groups[:1]
        )
        return (
            f" at step 0, then by the noisy {rule.quantile:g} quantile of the norms, at {100 * (more - 1):.2g}% more "
            "noise on the gradients"
        )

    def lines(self) -> list[str]:
        """The plan in words, one fact per line."""
        mechanism, named = self.mechanism, self.recipe
        first, last = mechanism.multiplier_at(0), mechanism.multiplier_at(self.steps - 1)
        of = "" if self.unit == UNIT else f" {plural(self.unit)}"
        drawn = f"every {self.unit}" if named.full_batch else f"batches of {self.batch_size:g}{of} by Poisson sampling"
        found = [
            f"method            {named.title} ({named.citation})",
            f"noise multiplier  {first:.6g}" + ("" if last == first else f" at step 0, {last:.6g} at the last"),
            f"clip bound        {advice.over(self, mechanism.clip)}" + self._followed(),
            f"learning rate     {advice.learning_rate(self)}",
            f"steps             {self.steps:,} = {self.epochs:.4g} epoch{'s' * (self.epochs != 1)} of {drawn}"
            + (", as many as the budget allows" if self.ends == "budget" else ""),
            f"guarantee         {self.guarantee}",
        ]
        found += cooling.line(named.temperature, self.temperature)
        figures = self.figures()
        for name, figure in figures:
            told = figure if isinstance(figure, str) else f"ε = {figure.shown}"
            found.append(f"  {name:<20}{told}" + ("" if isinstance(figure, str) or figure.guarantee else " (no proof)"))
        if any(not isinstance(figure, str) and figure.rounded for _, figure in figures):
            found.append(f"  of these, {compare.ROUNDED}")
        if self.chosen_by_rule is not None:
            found.append(f"chosen by rule    {self.chosen_by_rule}")
        found += [f"{name:<18}{text}" for name, text in self.suggestions()]
        if named.chosen:
            found.append(f"chosen by us      {', '.join(named.chosen)}: not printed in the paper")
        if self.seconds is not None:
            found.append(
                f"expected time     {advice.duration(self.seconds)}, measured on random rows of the same shape"
            )
        return found


_ADAPTIVE = {"adam", "adamw", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adadelta"}


def _figure(found: compare.Figure) -> dict[str, Any]:
    return {
        "epsilon": _validate.json_number(found.epsilon),
        "epsilon_lower": found.lower,
        "guarantee": found.guarantee,
        "noise_rounded": found.rounded,
    }


def accumulated_noise(momentum: float, steps: int) -> float:
    """(1 − c^{2T})/(1 − c²), the variance of m_T = Σ c^{T−t} b_t over that of one b (Yu et al., 2018).

    >>> accumulated_noise(0.0, 10), round(accumulated_noise(0.9, 1000), 2)
    (1.0, 5.26)
    """
    if not 0 <= momentum < 1:
        raise OptionError(f"momentum must lie in [0, 1), got {_validate.shown(momentum)}")
    _validate.whole(least=1, steps=steps)
    return (1 - momentum ** (2 * steps)) / (1 - momentum**2)


def theorem_2_learning_rate(
    steps: int, noise_multiplier: float, parameters: int, s: float, loss: float, smoothness: float
) -> float:
    """η = √(2s²F(w)/(βT(2 + σ²d))): the learning rate of Theorem 2 of Huang et al. (2024), with k̂ = 0.

    F(w) is the loss at the start, β the smoothness and d the number of parameters. The theorem is stated for C = 1.

    >>> found = theorem_2_learning_rate(2343, noise_multiplier=0.892, parameters=10_000, s=0.9, loss=2.3, smoothness=1)
    >>> round(found, 6)
    0.000447
    """
    _validate.whole(least=1, steps=steps, parameters=parameters)
    _validate.positive(noise_multiplier=noise_multiplier, s=s, loss=loss, smoothness=smoothness)
    return math.sqrt(2 * s**2 * loss / (smoothness * steps * (2 + noise_multiplier**2 * parameters)))


def theorem_3_scales(steps: int) -> dict[str, float]:
    """T^(−1/2), T^(−1/4), T^(−1/4) and T^(−3/4): how r, s, γ and η fall with T in Theorem 3 of Huang et al. (2024).

    The theorem leaves their constant factors open: these are the values for factors of 1.

    >>> theorem_3_scales(10_000)
    {'r': 0.01, 's': 0.1, 'gamma': 0.1, 'learning_rate': 0.001}
    """
    _validate.whole(least=1, steps=steps)
    return {"r": steps**-0.5, "s": steps**-0.25, "gamma": steps**-0.25, "learning_rate": steps**-0.75}


def _theorems(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.parameters and plan.classes and plan.classes > 1 and plan.recipe.s is not None:
        learning_rate = theorem_2_learning_rate(
            plan.steps, plan.mechanism.noise_multiplier, plan.parameters, plan.recipe.s, math.log(plan.classes), 1.0
        )
        yield (
            "Theorem 2",
            f"of Huang et al. (2024): η = {learning_rate:.3g} at C = 1, with log({plan.classes}) as the loss at the "
            f"start, smoothness 1 and {plan.parameters:,} parameters; r = O(T^(-1/2)) = {plan.steps**-0.5:.3g}",
        )
    scales = ", ".join(f"{name} = {value:.3g}" for name, value in theorem_3_scales(plan.steps).items())
    yield "Theorem 3", f"of Huang et al. (2024): {scales}, up to constant factors that it leaves open"


def make(
    method: str | Recipe = "auto",
    *,
    rows: int | None = None,
    parameters: int | None = None,
    classes: int | None = None,
    **options: Any,
) -> Plan:
    """The plan of a run from options by name: fields of `Budget`, `Privacy` and `Recipe`.

    >>> make("dpgd", rows=60_000, steps=500, epsilon=2.0, delta=1e-5).steps
    500
    """
    known = [field.name for record in (Budget, Privacy, Recipe) for field in fields(record)]
    for name in options:
        if name not in known:
            raise UnknownOptionError(f"a plan has no option {name!r:.40}{_validate.meant(name, known)}")
    budget, privacy, own = parted(options)
    return planned(recipe(method).with_options(**own), budget, privacy, rows, parameters, classes)


def planned(
    method: Recipe,
    budget: Budget,
    privacy: Privacy,
    rows: int | None = None,
    parameters: int | None = None,
    classes: int | None = None,
) -> Plan:
    """The plan of a run on ``rows`` rows within its budget.

    With ``epsilon`` and ``delta``, the noise is the least with which ``epochs`` (or ``steps``) stay within the budget,
    over the whole schedule (``reading="less-noise"``); with ``reading="more-steps"`` it is the noise for a clip bound
    that stays at its start, and the run goes on until the budget is spent (Yu et al., 2018). With ``noise_multiplier``
    as well, the run takes as many steps as the budget allows; where ``epochs`` is given too, they are checked to be
    within it. With ``noise_multiplier`` and no ``epsilon``, the run costs what that noise gives.

    Method auto fills in whatever is not given, by the rule of `dpgrad.training.auto`. For the others, without
    ``batch_size`` there are as many batches per epoch as epochs, as Abadi et al. advise. An epoch is N/B batches and
    T = int(epochs·N/B). The relation is zero-out where the number of rows was taken from the data, and add-remove
    where it was declared (``dataset_size``): then sampling rate, steps, divisor and δ do not depend on the data.
    """
    privacy.refuse_without_units()
    declared = privacy.dataset_size is not None
    size = privacy.dataset_size if privacy.dataset_size is not None else rows
    if not size:
        raise DataError("data must hold at least one row, got none")
    if method.by_rule:
        budget = auto.lengthened(budget, privacy, size)
    delta = _checked(budget, privacy, size)
    batch_size = _batch_size(method, budget, size, privacy.unit)
    count = _steps(size, batch_size, budget.epochs, budget.steps)
    sampler = sampling.FullBatch() if method.full_batch else sampling.Poisson(batch_size / size)
    mechanism = Mechanism(
        sampler, count or 1, privacy.noise_multiplier or 1.0, method.clip_over(_clock(method, count)),
        hold_noise=method.clip_schedule is not None, relation=_relation(privacy.relation, declared),
        batch_size=batch_size, groups=method.groups, secure_values=privacy.secure_values(parameters, method.counts),
    )  # fmt: skip
    tempering, other = cooling.planned(method.temperature, budget, mechanism, size, privacy.other_event)
    mechanism, ends = _within(mechanism, budget.epsilon, delta, privacy, count, other)
    mechanism = replace(mechanism, adaptive_clip=method.adaptive)  # its price is the same
    guarantee = replace(mechanism.guarantee(delta, privacy.accountant, also_released=other), unit=privacy.unit)
    if budget.epsilon is not None and guarantee.epsilon > budget.epsilon:
        raise BudgetSpentError(
            f"noise_multiplier = {privacy.noise_multiplier:g} over {mechanism.steps:,} steps costs epsilon "
            f"{up(guarantee.epsilon)}, above the budget {budget.epsilon:g}: leave out {_NOISE} to have the noise "
            "found, leave out epochs to stop in time, or allow more"
        )
    if method.averaging is not None:
        parse_averaging(method.averaging, mechanism.steps)
    if method.by_rule:
        method = auto.completed(method, mechanism, parameters)
    learning_rate = _learning_rate(method, mechanism.steps, size / batch_size)
    target = None if budget.epsilon is None else float(budget.epsilon)
    return Plan(
        method, mechanism, guarantee, batch_size, int(size), declared, learning_rate, target, privacy.reading, ends,
        parameters, classes, also_released=other, unit=privacy.unit, temperature=tempering, **_owned(privacy),
    )  # fmt: skip


def _owned(privacy: Privacy) -> dict[str, Any]:
    """How many rows of one person are used and which, where rows belong to persons."""
    most, rule = privacy.rows_per_unit or ROWS_PER_UNIT, privacy.unit_rule or UNIT_RULES[0]
    return {} if privacy.units is None else {"rows_per_unit": most, "unit_rule": rule}


_NOISE = written("noise_multiplier")


def _checked(budget: Budget, privacy: Privacy, size: int) -> float:
    """Check that the budget is complete; return δ."""
    if budget.epsilon is None and privacy.noise_multiplier is None:
        raise OptionError(f"a budget is required: give epsilon and delta, or delta and {_NOISE}")
    if budget.delta is None:
        raise OptionError(
            "delta is required: the probability that the ε bound fails; choose it well below 1/n = "
            f"{1 / size:.2g}, e.g. {advice.power(advice.usual_delta(size))}"
        )
    if budget.delta >= 1 / size:
        raise OptionError(
            f"delta must be below 1/n = {1 / size:.4g}, got {budget.delta:g}: a mechanism that publishes one "
            f"{privacy.unit} at random has delta 1/n; choose e.g. {advice.power(advice.usual_delta(size))}"
        )
    if budget.epochs is not None and budget.steps is not None:
        raise OptionError("epochs and steps both say how long to train: give one of them")
    both = budget.epsilon is not None and privacy.noise_multiplier is not None
    if budget.epochs is None and budget.steps is None and not both:
        raise OptionError(f"epochs or steps is required: how long to train (or both epsilon and {_NOISE})")
    if privacy.reading is not None and budget.epsilon is None:
        raise OptionError(f"reading says how a budget is used: give epsilon, or leave out {written('reading')}")
    return float(budget.delta)


def _batch_size(method: Recipe, budget: Budget, size: int, unit: str) -> float:
    given, epochs, steps = budget.batch_size, budget.epochs, budget.steps
    if method.full_batch:
        if given not in (None, size):
            raise OptionError(
                f"method {method.name} takes all {size:,} {plural(unit)} at every step: leave batch_size out"
            )
        return float(size)
    if given is None:
        batches = epochs if epochs is not None else math.sqrt(steps) if steps is not None else None
        if batches is None:
            raise OptionError(
                f"batch_size is required: the expected number of {plural(unit)} in a step; or give epochs"
            )
        given = max(1, round(size / max(1, batches)))
    if given > size:
        raise OptionError(f"batch_size must be at most the number of {plural(unit)}, {size:,}, got {given:g}")
    return float(given)


def _steps(dataset_size: int, batch_size: float, epochs: float | None, steps: int | None) -> int | None:
    if epochs is None:
        return steps
    most = 2 * _validate.MOST_STEPS  # beyond which a mechanism refuses it
    count = int(min(epochs * dataset_size / batch_size, most))
    if not count:
        raise OptionError(
            f"epochs = {epochs:g} of {dataset_size:,} rows in batches of {batch_size:g} make no step: train longer"
        )
    return count


def _clock(method: Recipe, steps: int | None) -> int:
    """The number of steps over which the clip bound shrinks."""
    if method.schedule_steps is not None:
        if method.clip_schedule is None:
            raise OptionError(f"schedule_steps is for a clip_schedule, and {method.name} has none: leave it out")
        return method.schedule_steps
    if steps is None and method.clip_schedule is not None:
        raise OptionError("schedule_steps is required: over how many steps the clip bound shrinks; or give epochs")
    return steps or 1


def _relation(relation: str | Relation | None, declared: bool) -> Relation:
    if relation is None:
        return Relation.ADD_REMOVE if declared else Relation.ZERO_OUT
    if relation == Relation.ADD_REMOVE and not declared:
        raise OptionError(
            "relation add-remove needs a declared dataset_size: sampling rate, steps and divisor must not depend on "
            f"the data. Give {written('dataset_size')} as a constant, or use relation zero-out or replace-one"
        )
    return relation  # type: ignore[return-value]  # the mechanism turns a name into a relation, or refuses it


def _within(
    mechanism: Mechanism, epsilon: float | None, delta: float, privacy: Privacy, steps: int | None, other: Event
) -> tuple[Mechanism, Literal["plan", "budget"]]:
    """The mechanism with the noise or the steps that fit the budget, and what set the number of steps."""
    if epsilon is None:
        return mechanism, "plan"
    if privacy.noise_multiplier is not None:
        if steps is None or privacy.reading == "more-steps":
            return mechanism.longest(epsilon, delta, privacy.accountant, also_released=other), "budget"
        return mechanism, "plan"
    if privacy.reading == "more-steps":
        return mechanism.more_steps(epsilon, delta, privacy.accountant, also_released=other), "budget"
    return mechanism.less_noise(epsilon, delta, privacy.accountant, also_released=other), "plan"


def _learning_rate(method: Recipe, steps: int, epoch: float) -> float | Schedule | None:
    """The learning rate of a recipe over its schedule."""
    learning_rate, named = method.learning_rate, method.learning_rate_schedule
    if callable(learning_rate):
        schedules.values(learning_rate, steps, name="learning_rate", zero=True)
    if learning_rate is None or callable(learning_rate):
        return learning_rate
    return float(learning_rate) if named is None else parse_learning_rate(named, learning_rate, steps, epoch)
