"""Standard errors: each part against a simulation or another formula, and neighbours within the stated distance."""

import math

import numpy as np
import pytest

from dpgrad.accounting import exact
from dpgrad.accounting.events import Relation
from dpgrad.convex import inference
from dpgrad.convex.design import Design
from dpgrad.convex.estimators import extras
from dpgrad.convex.inference import Curvature, Descended, Errors, Moments, Perturbed
from dpgrad.convex.losses import Counts, Logistic
from dpgrad.mechanism.keys import Key

RANDOM = np.random.default_rng(5)
ZERO, REPLACE = Relation.ZERO_OUT, Relation.REPLACE_ONE


class TestNeighbours:
    """What one row moves, at the places where it moves most."""

    @pytest.mark.parametrize("loss", [Logistic(), Counts()], ids=repr)
    def test_curvature(self, loss: Logistic | Counts) -> None:
        """Rows as long as allowed, at scores 0, where both losses curve most; exchanged for one at right angles."""
        rest = RANDOM.normal(size=(40, 3))
        plan = {
            relation: Curvature(1.0, relation, most=loss.smoothness(2.0)).sensitivity for relation in (ZERO, REPLACE)
        }

        def total(first: list[float]) -> np.ndarray:
            rows = np.vstack([first, rest])
            return inference.curvature(Design(rows, radius=2.0), loss.curvatures(np.zeros((41, 1)), np.ones(41)))

        along, across, none = total([9.0, 0, 0]), total([0, 9.0, 0]), total([0.0, 0, 0])
        assert 0.999 * plan[ZERO] < np.linalg.norm(along - none) <= plan[ZERO]
        assert 0.999 * plan[REPLACE] < np.linalg.norm(along - across) <= plan[REPLACE]

    def test_curvature_of_any_rows(self) -> None:
        plan = Curvature(1.0, REPLACE, most=0.25 * 4.0)
        rows, scores = RANDOM.normal(size=(200, 3)), RANDOM.normal(size=(200, 1))
        bends = Logistic().curvatures(scores, np.ones(200))
        for first, other in ((0, 1), (2, 3), (4, 5)):
            one = inference.curvature(Design(rows[[first, *range(9, 60)]], radius=2.0), bends[[first, *range(9, 60)]])
            two = inference.curvature(Design(rows[[other, *range(9, 60)]], radius=2.0), bends[[other, *range(9, 60)]])
            assert np.linalg.norm(one - two) <= plan.sensitivity

    def test_class_counts(self) -> None:
        places = np.array([0, 1, 1, 2])
        moved = extras.class_counts(places, 3) - extras.class_counts(np.array([2, 1, 1, 2]), 3)
        assert np.linalg.norm(moved) == pytest.approx(extras.ClassCounts(1.0, REPLACE).sensitivity)
        left_out = extras.class_counts(places, 3) - extras.class_counts(places[1:], 3)
        assert np.linalg.norm(left_out) == extras.ClassCounts(1.0, ZERO).sensitivity

    def test_squared_errors(self) -> None:
        rest = RANDOM.normal(size=20)
        sums = [inference.squared_errors(np.append(rest, first), 1.0) for first in (0.0, 5.0, -1e300)]
        assert max(sums) - min(sums) <= 1.0
        assert sums[1] - sums[0] > 0.999

    @pytest.mark.parametrize("relation", [ZERO, REPLACE])
    def test_prices(self, relation: Relation) -> None:
        """Each release costs the μ it was given: its sensitivity over its noise."""
        for plan in (
            Curvature(0.25, relation, most=3.0),
            Errors(0.25, relation, bound=2.0),
            extras.ClassCounts(0.25, relation),
        ):
            assert exact.account(plan.event, relation).mu == pytest.approx(0.25)  # type: ignore[union-attr]
        curved, errors = Curvature(0.25, relation, most=3.0), Errors(0.25, relation, bound=2.0)
        assert curved.sensitivity / curved.std == pytest.approx(0.25)
        assert errors.bound**2 / errors.std == pytest.approx(0.25)


def test_noise_on_the_curvature_has_its_law() -> None:
    plan = Curvature(0.5, ZERO, most=1.0)
    found = np.array([plan.noisy(np.zeros((4, 4)), Key.from_seed(seed)) for seed in range(400)])
    assert (found == found.transpose(0, 2, 1)).all()
    squares = np.sum(found**2, axis=(1, 2)) / plan.std**2  # χ² of p(p + 1)/2 = 10 coordinates
    assert abs(squares.mean() - 10) < 5 * math.sqrt(20 / 400)


class TestSpreads:
    """Against the recursions and equations that they summarise, of a parabola with known noise."""

    def test_responses_are_those_of_the_descent(self) -> None:
        bends, rates, momentum = np.array([0.3, 1.1]), (0.5, 0.4, 0.3, 0.2, 0.1), 0.6
        averaged = (0.0, 0.0, 0.2, 0.3, 0.5)
        noise, start = RANDOM.normal(size=(2, 5)), RANDOM.normal(size=2)
        distance, velocity, result = start.copy(), np.zeros(2), np.zeros(2)
        for step, rate in enumerate(rates):
            velocity = momentum * velocity + bends * distance + noise[:, step]
            distance = distance - rate * velocity
            result += averaged[step] * distance
        each, rest = inference.responses(bends, rates, momentum, averaged)
        np.testing.assert_allclose(np.sum(each * noise, axis=1) + rest * start, result, rtol=1e-12)

    def test_a_descent_on_a_parabola(self) -> None:
        """5,000 descents at once, with a penalty on one coefficient: mean and covariance are the stated ones."""
        total, optimum, rows, penalty = np.array([[60.0, 20.0], [20.0, 40.0]]), np.array([1.0, -2.0]), 100, 0.05
        bend = total / rows + np.diag([penalty, 0.0])
        steps, many, std = 40, 5000, 0.02
        scattered = optimum[:, None] + np.linalg.solve(
            bend, RANDOM.multivariate_normal(np.zeros(2), total / rows**2, many).T
        )
        points, velocity, mean = np.zeros((2, many)), np.zeros((2, many)), np.zeros((2, many))
        averaged = (*(0.0,) * 20, *(0.05,) * 20)
        for step in range(steps):
            velocity = 0.5 * velocity + bend @ (points - scattered) + RANDOM.normal(0, std, (2, many))
            points = points - 0.4 * velocity
            mean += averaged[step] * points
        spread = Descended((0.4,) * steps, 0.5, averaged, np.array([penalty, 0.0]), std, left=0.5)
        linear = np.column_stack([spread.estimate(unit, total, rows) for unit in np.eye(2)])
        each = (linear @ mean).T
        covariance = spread.covariance(mean[:, 0], total, 1.0, rows)
        np.testing.assert_allclose(each.mean(axis=0), optimum, atol=5 * np.sqrt(np.diag(covariance) / many).max())
        np.testing.assert_allclose(np.cov(each.T), covariance, rtol=0.1, atol=2e-4)

    def test_sampling_of_rows_adds_to_the_noise(self) -> None:
        spread = Descended((0.5,) * 50, 0.0, (*(0.0,) * 49, 1.0), 0.0, 0.0, sampled=0.01)
        plain = Descended((0.5,) * 50, 0.0, (*(0.0,) * 49, 1.0), 0.0, 0.0)
        more, less = (one.covariance(np.ones(1), np.array([[50.0]]), 1.0, 100) for one in (spread, plain))
        # e ← (1 − ηλ)e − η·noise of variance 0.01·λ: η²·0.01·λ/(1 − (1 − ηλ)²), λ = 1/2, η = 1/2
        assert (more - less).item() == pytest.approx(0.25 * 0.005 / (1 - 0.75**2), rel=1e-5)

    def test_objective_perturbation(self) -> None:
        total, optimum = np.array([[60.0, 20.0], [20.0, 40.0]]), np.array([1.0, -2.0])
        spread = Perturbed(ridge=5.0, l2=0.0, std=3.0, output_std=0.01)
        gradients = RANDOM.multivariate_normal(np.zeros(2), total + 9 * np.eye(2), 4000)
        found = np.linalg.solve(total + 5 * np.eye(2), (total @ optimum - gradients).T)
        found += RANDOM.normal(0, 0.01, found.shape)
        linear = np.column_stack([spread.estimate(unit, total, 100) for unit in np.eye(2)])
        each = (linear @ found).T
        covariance = spread.covariance(found[:, 0], total, 1.0, 100)
        np.testing.assert_allclose(each.mean(axis=0), optimum, atol=5 * np.sqrt(np.diag(covariance) / 4000).max())
        np.testing.assert_allclose(np.cov(each.T), covariance, rtol=0.15, atol=2e-3)

    def test_moments(self) -> None:
        """AdaSSP on 2,000 draws of its noise, small enough that the noise on the moment is of first order."""
        moment, optimum = np.array([[600.0, 200.0], [200.0, 400.0]]), np.array([1.0, -2.0])
        many, errors = 2000, RANDOM.multivariate_normal(np.zeros(2), 0.04 * moment, 2000)
        found = []
        for error in errors:
            square = RANDOM.normal(0, 4.0, (2, 2))
            noisy = moment + (square + square.T) / 2
            target = moment @ optimum + error + RANDOM.normal(0, 3.0, 2)
            spread = Moments(noisy, np.full(2, 7.0), np.zeros(2), 4.0, 3.0)
            weights = np.linalg.solve(noisy + 7 * np.eye(2), target)
            found.append((spread.estimate(weights, noisy, 1000), spread.covariance(weights, noisy, 0.04, 1000)))
        estimates = np.array([estimate for estimate, _ in found])
        stated = np.mean([covariance for _, covariance in found], axis=0)
        np.testing.assert_allclose(estimates.mean(axis=0), optimum, atol=6 * np.sqrt(np.diag(stated) / many).max())
        np.testing.assert_allclose(np.cov(estimates.T), stated, rtol=0.15, atol=2e-5)

    def test_a_descent_that_did_not_arrive_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"no intervals: the descent has 61% of its way left.*raise max_iter"):
            Descended((0.1,) * 10, 0.0, (*(0.0,) * 9, 1.0), 0.0, 0.0).estimate(np.ones(1), np.eye(1) * 49, 100)
