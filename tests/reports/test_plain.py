"""Plain words say what the guarantee says, rounded against comfort."""

import math

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr

from dpgrad.accounting import exact
from dpgrad.accounting.events import Relation
from dpgrad.reports import plain

YES = {"allowed": True, "reason": ""}


def told(epsilon: float | None, delta: float, relation: str = "zero-out") -> str:
    promise = {"epsilon": epsilon, "delta": delta, "relation": relation}
    return str(plain.explained(promise, YES, "this model")["promise"])


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 8.0, 30.0])
@pytest.mark.parametrize("delta", [1e-9, 0.01])
def test_odds_are_those_of_the_worst_pair(epsilon: float, delta: float) -> None:
    """Of the experiment that every (ε, δ) pair is a function of: tell all, or answer rightly with odds e^ε."""
    true = np.array([delta, (1 - delta) * math.exp(epsilon), 1 - delta, 0.0])
    true[1:3] /= 1 + math.exp(epsilon)
    other = true[::-1]
    found = plain.odds(epsilon, delta)
    assert found["guess"] == pytest.approx(np.maximum(true, other).sum() / 2, rel=1e-12)
    assert found["sure"] == pytest.approx(float(mpmath.exp(epsilon) / (1 + mpmath.exp(epsilon))), rel=1e-14)
    assert found["sure"] == pytest.approx(true[1] / (true[1] + other[1]), rel=1e-12)


@pytest.mark.parametrize("delta", [1e-6, 1e-2])
def test_no_attack_on_gaussian_noise_guesses_better(delta: float) -> None:
    """The best guess between N(0, 1) and N(μ, 1) is right with probability Φ(μ/2), at every ε that μ allows."""
    for mu in (0.1, 1.0, 3.0):
        guess = plain.odds(exact.epsilon(mu, delta), delta)["guess"]
        assert guess is not None
        assert ndtr(mu / 2) <= guess


def test_per_cent_is_rounded_up_and_never_to_certainty() -> None:
    assert plain.per_cent(0.7310585) == "at most 73.2 %"
    assert plain.per_cent(0.731) == "at most 73.1 %" or plain.per_cent(0.731) == "at most 73.2 %"
    assert plain.per_cent(0.5) == "at most 50 %"
    assert plain.per_cent(0.9999) == "possibly more than 99.9 %"


def test_the_paragraph_states_every_figure() -> None:
    one = told(1.0, 1e-6)
    for words in ("50 % sure", "at most 73.2 % sure (ε = 1)", "probability 1e-06 (δ)", "right at most 73.2 %"):
        assert words in one
    assert "promises little" not in one
    assert "promises little" in told(8.0, 1e-6)
    assert "\n" not in one


def test_each_relation_has_its_question() -> None:
    questions = {told(1.0, 1e-6, relation.value) for relation in Relation}
    assert len(questions) == len(Relation)
    hidden = plain.explained({"epsilon": 1.0, "delta": 1e-6, "relation": "add-remove"}, YES, "it")["does_not_mean"]
    counted = plain.explained({"epsilon": 1.0, "delta": 1e-6, "relation": "zero-out"}, YES, "it")["does_not_mean"]
    assert not any("how many rows" in entry for entry in hidden)
    assert any("how many rows" in entry for entry in counted)


def test_without_a_finite_epsilon_nothing_is_promised() -> None:
    assert told(None, 1e-6).startswith("No promise holds for this model")


def test_what_is_not_for_release_says_so_first() -> None:
    refused = {"allowed": False, "reason": "it was made from a seed"}
    found = plain.explained({"epsilon": 1.0, "delta": 1e-6, "relation": "zero-out"}, refused, "this model")
    assert found["does_not_mean"][0].startswith("It does not allow you to share the result")
    assert all(entry.startswith("It does not") for entry in found["does_not_mean"])
