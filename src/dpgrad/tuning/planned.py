"""The plan of a selection: the settings, the noise of each, and what the whole costs, before anything is spent."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpgrad import _validate
from dpgrad.accounting import account
from dpgrad.accounting.events import NOTHING, Event, Relation, Selection, together
from dpgrad.accounting.guarantee import ORDINARY, Guarantee, up
from dpgrad.accounting.trials import LAWS, Trials, law_named
from dpgrad.errors import BudgetSpentError, OptionError
from dpgrad.reports import markdown
from dpgrad.training.options import Budget, Privacy
from dpgrad.training.plan import Plan, planned
from dpgrad.training.recipes import Recipe, recipe
from dpgrad.tuning.prices import price, table
from dpgrad.tuning.scores import PrivateScore, Score

__all__ = ["Configuration", "SelectionPlan", "plan"]

ACCOUNTANT = "rdp"
_PRECISION = 2e-3  # of the budget: how much of it may stay unused
FREE = (
    "method auto chooses steps, batch size, clip bound and learning rate from public facts and needs no tuning: with "
    "the whole budget for one run its noise multiplier is {alone:.4g}, and {share:.4g} as one of these trials"
)


@dataclass(frozen=True)
class Configuration:
    """One choice of settings: a method with its constants, and how long it trains.

    >>> Configuration("auto").method
    'auto'
    """

    method: str | Recipe = "auto"
    epochs: float | None = None
    steps: int | None = None
    batch_size: float | None = None

    def __post_init__(self) -> None:
        recipe(self.method)
        self.budget(1.0, 1e-5)

    @classmethod
    def of(cls, given: "str | Recipe | Configuration") -> "Configuration":
        """A configuration as it is; a method by name, or a recipe, with its own lengths."""
        return given if isinstance(given, cls) else cls(given)  # type: ignore[arg-type]

    @property
    def recipe(self) -> Recipe:
        """The method with its constants."""
        return recipe(self.method)

    def budget(self, epsilon: float, delta: float) -> Budget:
        """The budget of one trial, and what it is spent on."""
        return Budget(epsilon, delta, self.epochs, self.steps, self.batch_size)


@dataclass(frozen=True, repr=False)
class SelectionPlan:
    """A selection as it will be charged. ``plans`` has the plan of each configuration, whose noise its trials have.

    Guarantee: ``guarantee`` is that of the whole selection, ``event``, however many trials there will be. It was
    computed for these plans and is within the budget.
    """

    configurations: tuple[Configuration, ...]
    plans: tuple[Plan, ...]
    trials: Trials
    score: Score
    event: Selection
    guarantee: Guarantee
    trial_epsilon: float
    target: float

    def __repr__(self) -> str:
        return f"<SelectionPlan of {len(self.configurations)} configurations, {self.trials}; {self.guarantee}>"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The plan in words: the candidates, the cost of each way of choosing, and what needs no choice."""
        delta, relation = self.guarantee.delta, self.guarantee.relation
        few = price(self.event.events, mean=self.trials.mean, delta=delta, relation=relation)
        found = [
            f"trials            {self.trials}; 99 of 100 selections run at most {self.trials.quantile(0.99):,}",
            f"score             {self.score}",
            f"guarantee         {self.guarantee}",
            f"each trial        ε = {up(self.trial_epsilon)} at δ = {delta:g}",
        ]
        for number, one in enumerate(self.plans):
            found.append(
                f"configuration {number:<4}{one.recipe.name}: {one.steps:,} steps of {one.batch_size:g}, noise "
                f"multiplier {one.mechanism.multiplier_at(0):.4g}"
            )
        free = self._free()
        return [*found, *([] if free is None else [f"without a choice  {free}"]), "", markdown.table(table(few))]

    def _free(self) -> str | None:
        first = self.plans[0]
        if first.parameters is None:
            return None
        own = Privacy(
            relation=first.mechanism.relation, accountant=ACCOUNTANT,
            dataset_size=first.dataset_size if first.declared else None,
        )  # fmt: skip

        def noise(epsilon: float) -> float:
            budget = Budget(epsilon, self.guarantee.delta)
            return planned(recipe("auto"), budget, own, first.dataset_size, first.parameters).mechanism.multiplier_at(0)

        return FREE.format(alone=noise(self.target), share=noise(self.trial_epsilon))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
        prices = price(
            self.event.events, mean=self.trials.mean, delta=self.guarantee.delta, relation=self.guarantee.relation
        )
        return {
            "trials": str(self.trials),
            "mean_trials": self.trials.mean,
            "most_trials": self.trials.quantile(0.99),
            "score": str(self.score),
            "epsilon": self.guarantee.epsilon,
            "delta": self.guarantee.delta,
            "relation": self.guarantee.relation.value,
            "accountant": self.guarantee.accountant,
            "trial_epsilon": self.trial_epsilon,
            "configurations": [one.to_dict() for one in self.plans],
            "prices": [dataclasses.asdict(one) for one in prices],
        }


def plan(
    configurations: "Sequence[str | Recipe | Configuration]",
    *,
    rows: int,
    score: Score,
    epsilon: float,
    delta: float,
    trials: str | Trials = "logarithmic",
    mean: float | None = None,
    parameters: int | None = None,
    privacy: Privacy | None = None,
) -> SelectionPlan:
    """The plan of a selection among ``configurations`` on ``rows`` training rows, within (ε, δ) in all.

    With ``Privacy(units=...)``, ``rows`` counts persons.

    ``trials`` names the law of the number of trials (logarithmic, geometric or poisson) with its ``mean`` (default:
    twice as many as there are configurations, at least 4), or is one. Every configuration gets the noise with which one
    trial costs the same ε, the largest at which the whole selection stays within the budget.

    >>> from dpgrad.tuning.scores import PublicScore
    >>> two = [Configuration("dpsgd", epochs=5, batch_size=100), Configuration("autos", epochs=9, batch_size=50)]
    >>> found = plan(two, rows=1000, score=PublicScore(function=float), epsilon=4.0, delta=1e-5)
    >>> found.guarantee.epsilon <= 4.0, found.trial_epsilon < 4.0
    (True, True)
    """
    privacy = Privacy() if privacy is None else privacy
    given = tuple(map(Configuration.of, configurations))
    if isinstance(score, PrivateScore) and privacy.units is not None:
        raise OptionError(
            f"a private score counts rows, and one {privacy.unit} may have many: give a public score or no units"
        )
    _refuse(given, privacy, epsilon, delta)
    law = _law(trials, mean, len(given))
    own = dataclasses.replace(privacy, accountant=ACCOUNTANT)

    def at(share: float) -> tuple[list[Plan], Selection, float]:
        plans = [planned(one.recipe, one.budget(share, delta), own, rows, parameters) for one in given]
        event = Selection(tuple(_trial(one, score) for one in plans), law)
        return plans, event, account(event, plans[0].mechanism.relation, ACCOUNTANT).epsilon(delta)

    least = epsilon / 1000
    if at(least)[2] > epsilon:
        raise BudgetSpentError(
            f"a selection of {law} costs more than epsilon {epsilon:g} whatever the noise of its trials"
            f"{'' if score.event == NOTHING else ', with this private score'}: allow more, choose fewer trials or "
            "a score with more noise"
        )
    share, high = least, float(epsilon)  # the first is within the budget
    while high - share > _PRECISION * epsilon:
        middle = (share + high) / 2
        share, high = (share, middle) if at(middle)[2] > epsilon else (middle, high)
    plans, event, found = at(share)
    relation = plans[0].mechanism.relation
    guarantee = Guarantee(found, delta, relation, ACCOUNTANT, event, privacy.unit)
    return SelectionPlan(given, tuple(plans), law, score, event, guarantee, share, float(epsilon))


def _trial(one: Plan, score: Score) -> Event:
    return together(one.mechanism.event(), score.event)


def _law(trials: str | Trials, mean: float | None, settings: int) -> Trials:
    if isinstance(trials, Trials):
        if mean is not None:
            raise OptionError("trials is a law, which has a mean of its own: leave out mean, or name the law")
        return trials
    _validate.one_of(LAWS, "a law of dpgrad.accounting.trials", trials=trials)
    return law_named(trials, max(4.0, 2.0 * settings) if mean is None else mean)


def _refuse(given: Sequence[Configuration], privacy: Privacy, epsilon: float, delta: float) -> None:
    if not given:
        raise OptionError("configurations must hold at least one choice of settings, got none")
    _validate.positive(epsilon=epsilon)
    _validate.open_unit(delta=delta)
    for number, one in enumerate(given):
        if one in given[:number]:
            raise OptionError(
                f"configurations {given.index(one)} and {number} are the same: leave one out; trials draw among them "
                "again and again anyway"
            )
    if privacy.also_released != NOTHING:
        raise OptionError(
            "also_released is not priced within a selection: record both in one ledger, and give the selection the "
            "budget that is left"
        )
    if any(one.recipe.temperature is not None for one in given):
        raise OptionError("temperature is not priced within a selection: leave it out, and fit once more with it")
    if privacy.noise_multiplier is not None or privacy.reading is not None:
        raise OptionError("the noise of a trial follows from epsilon: leave out noise_multiplier and reading")
    if privacy.noise != ORDINARY:
        raise OptionError(
            f"noise {privacy.noise} is not priced within a selection: choose with the ordinary noise, or train one run"
        )
    if privacy.relation == Relation.ADD_REMOVE and privacy.dataset_size is None:
        raise OptionError("relation add-remove needs a declared dataset_size: give it, or use zero-out or replace-one")
