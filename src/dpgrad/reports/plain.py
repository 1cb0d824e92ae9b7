"""The guarantee in words for people who do not know differential privacy, and what it does not mean.

An attacker who knows every other row weighs two possibilities of one row against each other, each with 50 %. The two
laws of what is released are (ε, δ)-indistinguishable, and every such pair is a randomised function of one experiment
(Kairouz, Oh and Viswanath 2015): with probability δ it tells which of the two is true, and otherwise it answers
rightly with probability e^ε/(1 + e^ε). So what is released tells no more than that experiment, and

    belief after the experiment, unless it tells all:    e^ε/(1 + e^ε)
    probability of guessing right after any release:     (e^ε + δ)/(1 + e^ε)

The second bounds every attack: it is 1/2 plus half the largest total variation distance, (e^ε − 1 + 2δ)/(e^ε + 1).
Beliefs after one particular release may exceed the first, for instance with Gaussian noise, so it is stated for the
experiment.

>>> found = odds(1.0, 1e-6)
>>> round(found["sure"], 6), round(found["guess"], 6)
(0.731059, 0.731059)
"""

import math
from decimal import ROUND_CEILING, Decimal
from typing import Any

from dpgrad.accounting.events import Relation
from dpgrad.accounting.guarantee import UNIT, plural, up

__all__ = ["LITTLE", "attack", "explained", "odds", "per_cent"]

LITTLE = 0.99  # a belief from which on the words say that little is promised

_ASKED = {
    Relation.ADD_REMOVE: "that one particular {unit} is among the data",
    Relation.ZERO_OUT: "that one particular {unit} was used",
    Relation.REPLACE_ONE: "that one particular {unit} holds these values and not certain others",
}
_GUESSED = {
    Relation.ADD_REMOVE: "whether one particular {unit} is among the data",
    Relation.ZERO_OUT: "whether one particular {unit} was used",
    Relation.REPLACE_ONE: "which of two values one particular {unit} holds",
}
_FOUND = "a test that wrongly accuses {wrongly} of those who are not finds {most} of those who are"
_TESTED = {
    Relation.ADD_REMOVE: _FOUND,
    Relation.ZERO_OUT: _FOUND,
    Relation.REPLACE_ONE: "a test that wrongly claims one of them {wrongly} of the time claims it rightly {most} of it",
}
_ACCUSED = 0.01  # the false-positive rate that the words take as an example
_NUMBER = "It does not hide how many {units} there were: their number counts as public."
_OWNED = "It does not protect someone who has several rows as well as someone who has one: the bound is for one row."
_TOGETHER = "It does not protect several {units} who belong together as well as one: the bound is for one {unit}."
_NOT_MEANT = (
    "It does not mean that nothing can be inferred about a person: what holds for many rows can be learned and applied "
    "to anyone, whether or not their row was used.",
    "It does not make the data anonymous. It covers what was released under this guarantee, not the rows, copies of "
    "them, or anything else computed from them.",
    "It does not hold for several releases together: every further release from the same rows adds to ε. A ledger adds "
    "them up.",
    "It does not hold where a fact that the report lists as public is secret, nor for what it lists as not covered.",
    "It does not say that the result is accurate, fair or safe to use.",
)


def odds(epsilon: float | None, delta: float) -> dict[str, float | None]:
    """What an attacker who is 50 % sure can reach: ``sure`` and ``guess`` of this module; None if ε is not finite.

    >>> odds(None, 1e-6)
    {'before': 0.5, 'sure': None, 'guess': None}
    """
    if epsilon is None or not math.isfinite(epsilon):
        return {"before": 0.5, "sure": None, "guess": None}
    sure = 1 / (1 + math.exp(-epsilon))
    return {"before": 0.5, "sure": sure, "guess": min(1.0, sure + delta * (1 - sure))}


def per_cent(share: float) -> str:
    """Per cent with one digit, rounded up; what would round to all is said to lie above the last figure below it.

    >>> per_cent(0.73105), per_cent(0.5), per_cent(0.99999)
    ('at most 73.2 %', 'at most 50 %', 'possibly more than 99.9 %')
    """
    rounded = (Decimal(share) * 100).quantize(Decimal("0.1"), ROUND_CEILING)
    return "possibly more than 99.9 %" if rounded >= 100 else f"at most {float(rounded):g} %"


def explained(promise: dict[str, Any], released: dict[str, Any], subject: str) -> dict[str, Any]:
    """One paragraph on a guarantee, its odds, and a list of what it does not mean, all as plain values.

    ``promise`` and ``released`` are the fields ``guarantee`` and ``release`` of a report, and ``subject`` names what
    was released.

    >>> promise = {"epsilon": 1.0, "delta": 1e-6, "relation": "zero-out"}
    >>> told = explained(promise, {"allowed": True, "reason": ""}, "this model")
    >>> told["promise"].split(". ")[1]
    'Imagine an attacker who knows every other row and is 50 % sure that one particular row was used'
    """
    relation, found = Relation(promise["relation"]), odds(promise["epsilon"], promise["delta"])
    unit = _unit(promise)
    several = _OWNED if unit == UNIT else _TOGETHER.format(unit=unit, units=plural(unit))
    meant = [*_NOT_MEANT[:2], several, *_NOT_MEANT[2:]]
    if relation is not Relation.ADD_REMOVE:
        meant.append(_NUMBER.format(units=plural(unit)))
    if released["allowed"] is False:
        meant.insert(0, f"It does not allow you to share the result as it is: {released['reason']}.")
    words = {"promise": _promise(promise, relation, found, subject), "attack": attack(promise)}
    return {**words, "odds": found, "does_not_mean": meant}


def attack(promise: dict[str, Any]) -> str | None:
    """One sentence with the bounds on attacks; None where they are not known.

    >>> told = {"membership_advantage": 0.125, "power": [{"false_positives": 0.01, "power": 0.02, "precision": 0.67}]}
    >>> attack({"attacks": told, "relation": "add-remove"}).split(": ")[1].split(", ")[0]
    'any guess whether one particular row is among the data is right at most 56.3 % of the time'
    """
    found = promise.get("attacks")
    if found is None:
        return None
    asked = _GUESSED[Relation(promise["relation"])].format(unit=_unit(promise))
    guess = per_cent((1 + found["membership_advantage"]) / 2)
    tested = next(one for one in found["power"] if one["false_positives"] == _ACCUSED)
    test = _TESTED[Relation(promise["relation"])].format(
        wrongly=f"{100 * _ACCUSED:g} %", most=per_cent(tested["power"])
    )
    return (
        f"Taken over the whole privacy curve, the bounds are tighter: any guess {asked} is right {guess} of the time, "
        f"and {test}."
    )


def _unit(promise: dict[str, Any]) -> str:
    """The word for one protected unit."""
    return str(promise.get("privacy_unit", UNIT)).removeprefix("one ")


def _promise(promise: dict[str, Any], relation: Relation, found: dict[str, float | None], subject: str) -> str:
    sure, guess, delta, unit = found["sure"], found["guess"], promise["delta"], _unit(promise)
    if sure is None or guess is None:
        return (
            f"No promise holds for {subject}: no finite ε is certified at δ = {delta:g}, so an attacker may become "
            f"certain about one {unit}."
        )
    asked = f"an attacker who knows every other {unit} and is 50 % sure {_ASKED[relation].format(unit=unit)}"
    game = f"a game that tells them the answer with probability {delta:g} (δ) and otherwise leaves them"
    little = " A bound this close to certainty promises little." if sure > LITTLE else ""
    return (
        f"Differential privacy hides what any single {unit} contributed to {subject}. Imagine {asked}. Whatever else "
        f"they know and however they study what was released, they learn no more than in {game} {per_cent(sure)} sure "
        f"(ε = {up(promise['epsilon'])}). If they have to guess, they are right {_times(guess)}, where tossing a coin "
        f"is right 50 % of the time.{little}"
    )


def _times(guess: float) -> str:
    return f"{per_cent(guess)} of the time"
