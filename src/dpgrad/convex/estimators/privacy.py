"""What a fitted estimator says about privacy: the guarantee, every release, and what was taken for granted."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags

from dpgrad import _validate
from dpgrad.accounting import account
from dpgrad.accounting.events import Compose, Event, Poisson, Relation, leaves, to_dict
from dpgrad.accounting.guarantee import FLOATING, Guarantee
from dpgrad.accounting.inexact import parted
from dpgrad.accounting.ledger import Ledger
from dpgrad.convex.solvers import gd
from dpgrad.convex.solvers.auto import Statistic
from dpgrad.errors import DataError, OptionError
from dpgrad.reports.report import Report, report

__all__ = [
    "FitPrivacy",
    "PrivacyWarning",
    "Reported",
    "charging",
    "delta_for",
    "exact_delta",
    "guarantee",
    "not_covered",
    "relation_of",
    "warn_of_steps",
]


_SET_ASIDE = 2.0**-10  # of δ, for the distance of secure noise
_HOLDERS = ("steps", "transformers", "transformer_list")  # of pipelines, column transformers and unions


class PrivacyWarning(UserWarning):
    """Something was read from the data that the guarantee does not cover; `FitPrivacy.outside` lists it too."""


@dataclass(frozen=True)
class FitPrivacy:
    """The guarantee of one fit, the releases it is made of, what is assumed public, and what it does not cover.

    ``title`` names the method, ``preprocessing`` says what was done to rows by public rules, ``schema`` what was
    declared of the columns, and ``notes`` what else to know of the result. `dpgrad.report` shows all of it.

    >>> from dpgrad.accounting.events import Gaussian
    >>> cost = Guarantee(1.0, 1e-6, Relation.ZERO_OUT, "exact", Gaussian(4.9))
    >>> print(FitPrivacy(cost, (Statistic("mean", 0.02, 0.098, 1.0),), ("n = 100",), ("held-out scores",), True))
    ε = 1 at δ = 1e-06 for datasets of the same public size, one row's contribution replaced by nothing (full batch, exact accountant)
    released: mean, sensitivity 0.02, noise 0.098, 100 % of the budget
    assumed public: n = 100
    not covered: held-out scores
    reproducible, not for release
    """  # noqa: E501

    guarantee: Guarantee
    releases: tuple[Statistic, ...]
    public: tuple[str, ...]
    outside: tuple[str, ...]
    reproducible: bool
    title: str = "an estimator"
    preprocessing: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [str(self.guarantee)]
        lines += [f"released: {_told(release)}" for release in self.releases]
        lines += [f"assumed public: {fact}" for fact in self.public]
        lines += [f"not covered: {fact}" for fact in self.outside]
        lines += [f"note: {fact}" for fact in self.notes]
        return "\n".join(lines + ["reproducible, not for release"] * self.reproducible)

    def to_dict(self) -> dict[str, Any]:
        """The same in plain values, for JSON; an infinite ε is None.

        >>> from dpgrad.accounting.events import Gaussian
        >>> cost = Guarantee(1.0, 1e-6, Relation.ZERO_OUT, "exact", Gaussian(4.9))
        >>> FitPrivacy(cost, (Statistic("mean", 0.02, 0.098, 1.0),), (), (), False).to_dict()["releases"][0]["name"]
        'mean'
        """
        promise = self.guarantee
        return {
            "guarantee": {
                "statement": str(promise),
                "epsilon": _validate.json_number(promise.epsilon),
                "delta": promise.delta,
                "relation": promise.relation.value,
                "neighbours": promise.neighbours,
                "privacy_unit": "one row",
                "sampling": promise.sampling,
                "accountant": promise.accountant,
            },
            "releases": [asdict(release) for release in self.releases],
            "public": list(self.public),
            "outside": list(self.outside),
            "reproducible": self.reproducible,
            "event": to_dict(promise.event),
        }


class Reported:
    """What every estimator has: its privacy report."""

    def report(self) -> Report:
        """The privacy report, in the format of docs/report.md: a dictionary that prints as text and can be saved."""
        return report(self)


def _told(release: Statistic) -> str:
    times = "" if release.count == 1 else f", {release.count:,} times"
    return (
        f"{release.name}, sensitivity {release.sensitivity:.4g}, noise {release.std:.4g}{times}, "
        f"{100 * release.share:.3g} % of the budget"
    )


def guarantee(event: Event, relation: Relation, delta: float) -> Guarantee:
    """What the event costs: in closed form, or by the privacy loss distribution where rows were sampled.

    >>> from dpgrad.accounting.events import Gaussian
    >>> guarantee(Gaussian(4.0), Relation.ZERO_OUT, 1e-5).accountant
    'exact'
    """
    sampled = any(isinstance(leaf, Poisson) for leaf in leaves(parted(event)[0]))
    return Guarantee.of(account(event, relation, "pld" if sampled else "exact"), delta)


def warn_of_steps(estimator: object) -> None:
    """Warn if ``estimator`` is being fitted by a pipeline with a step that learned from the rows without noise.

    scikit-learn does not tell an estimator of its pipeline, which is therefore looked for among the callers. Steps
    that learn nothing, by their tag ``requires_fit``, and those of dpgrad, whose ``privacy_`` says what they cost, are
    passed over.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Pipeline) and caller.steps[-1][1] is estimator:
            for name, step in caller.steps[:-1]:
                if (learned := _learning(step)) is not None:
                    _validate.warn(
                        f"the step {_validate.shown(name)} of the pipeline ({learned}) learned from these rows without "
                        "noise, which the guarantee does not cover: use DPStandardScaler, RowNormalizer or a public "
                        "rule in its place",
                        PrivacyWarning,
                    )
            return
        frame = frame.f_back  # type: ignore[assignment]


def _learning(step: Any) -> str | None:
    """The class of a step that learns from rows without noise, also of one that it holds."""
    held = next((found for name in _HOLDERS if isinstance(found := getattr(step, name, None), list)), None)
    if held is not None:
        return next((found for one in held if (found := _learning(one[1])) is not None), None)
    if step is None or isinstance(step, str | Reported) or not get_tags(step).requires_fit:
        return None
    return type(step).__name__


def relation_of(value: object) -> Relation:
    """The relation, refused where it is none for which the number of rows is public: estimators read it.

    >>> relation_of("add-remove")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: relation must be replace-one or zero-out, got 'add-remove': the number of rows ...
    """
    if value == Relation.ADD_REMOVE:
        raise OptionError(
            "relation must be replace-one or zero-out, got 'add-remove': the number of rows is taken as public"
        )
    _validate.one_of((Relation.REPLACE_ONE.value, Relation.ZERO_OUT.value), relation=value)
    return Relation(str(value))


def delta_for(delta: float | None, rows: int) -> float:
    """δ, by default 1/n²; one row, or a δ of 1/n or more, is refused.

    >>> delta_for(None, rows=1000)
    1e-06
    """
    if rows == 1:
        raise DataError("n_samples = 1: one row alone cannot be hidden, and no delta is below 1/n")
    found = 1 / rows**2 if delta is None else delta
    gd.check_delta(found, rows)
    return float(found)


def exact_delta(delta: float, secure: bool) -> float:
    """What is left of δ for exact noise: all but a 1,024th, which is set aside for the distance of secure noise.

    >>> exact_delta(1e-6, secure=False), exact_delta(1024e-9, secure=True)
    (1e-06, 1.023e-06)
    """
    return delta * (1 - _SET_ASIDE) if secure else delta


def _refuse_far(event: Event, delta: float) -> None:
    """Refuse secure noise whose distance exceeds what was set aside of δ."""
    _, distance = parted(event)
    if distance > _SET_ASIDE * delta:
        raise OptionError(
            f"delta is too small for noise secure: a 1,024th of {delta:g} may go to the noise of this fit, which needs "
            f"{distance:.3g}; give a larger delta, fewer columns or steps, or the ordinary noise"
        )


def charging(ledger: object, relation: Relation, label: str, delta: float) -> Callable[[Event], None]:
    """What charges an event to the ledger, where there is one; all events of a fit share ``delta``.

    >>> charging("spent.jsonl", Relation.ZERO_OUT, "a model", 1e-6)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: ledger must be a dpgrad.Ledger or None, got 'spent.jsonl': Ledger(path) opens a file
    """
    if ledger is not None and not isinstance(ledger, Ledger):
        raise OptionError(
            f"ledger must be a dpgrad.Ledger or None, got {_validate.shown(ledger)}: Ledger(path) opens a file"
        )

    charged: list[Event] = []

    def charge(event: Event) -> None:
        charged.append(event)
        _refuse_far(Compose(tuple(charged)), delta)
        if ledger is not None:
            ledger.add(event, relation, label)

    return charge


def not_covered(ledger: Ledger | None, secure: bool) -> tuple[str, ...]:
    """What no single fit can cover, and what ordinary noise does not."""
    others = "other fits on the same rows, as tuning makes them: " + (
        "they are not added up, give them one shared ledger" if ledger is None else "ledger.guarantee(delta) adds them"
    )
    return (
        others,
        "scores on these rows or on held-out ones, and choices made from them",
        "what was computed from these rows before the fit, such as means of a scaler without privacy",
        *(() if secure else (FLOATING,)),
    )
