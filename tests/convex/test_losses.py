"""Losses of linear models: derivatives by differences, constants as maxima over grids, scores of any size."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpgrad.convex.losses import Counts, Hinge, HuberSvm, Logistic, RowLoss, Softmax, Squared

Array = NDArray[np.float64]

LOGISTIC = [Logistic(slope) for slope in (1.0, 0.9, 0.5, 0.45, 0.25)]
MARGIN: list[Any] = [*LOGISTIC, HuberSvm(), HuberSvm(0.7), Hinge()]
ONE_OUTPUT = [*MARGIN, Squared(2.0), Squared(math.inf), Counts(), Counts(-1.5)]
ALL = [*ONE_OUTPUT, Softmax(2), Softmax(5)]
SMOOTH_MARGIN = [loss for loss in MARGIN if loss.smooth]


def corners(loss: RowLoss) -> list[float]:
    """Margins, or errors, at which a second derivative jumps."""
    match loss:
        case Logistic(slope):
            return [math.log((1 - slope) / slope)] if slope < 1 else []
        case HuberSvm(width):
            return [1 - width, 1 + width]
        case Hinge():
            return [1.0]
        case Squared(bound):
            return [-bound, bound]
        case Counts(offset):
            return [-offset]
    return []


def problem(loss: RowLoss, rows: int = 400, seed: int = 0) -> tuple[Array, NDArray[Any]]:
    """Scores and targets of every kind that the loss knows, away from its corners."""
    random = np.random.default_rng(seed)
    scores = random.uniform(-4, 4, (rows, loss.outputs))
    match loss:
        case Softmax(classes):
            return scores, random.integers(0, classes, rows)
        case Squared():
            targets = random.uniform(-2, 2, rows)
            places = scores[:, 0] - targets
        case Counts():
            targets, places = random.uniform(0, 1, rows), scores[:, 0]
        case _:
            targets = random.choice([-1.0, 1.0], rows)
            places = scores[:, 0] * targets
    far = np.all([np.abs(places - corner) > 1e-3 for corner in [*corners(loss), math.inf]], axis=0)
    return scores[far], targets[far]


@pytest.mark.parametrize("loss", ALL, ids=repr)
class TestDerivatives:
    def test_residuals_are_the_slopes_of_values(self, loss: RowLoss) -> None:
        scores, targets = problem(loss)
        found, step = loss.residuals(scores, targets), 1e-5
        assert found.shape == scores.shape
        for output in range(loss.outputs):
            move = step * np.eye(loss.outputs)[output]
            slope = (loss.values(scores + move, targets) - loss.values(scores - move, targets)) / (2 * step)
            np.testing.assert_allclose(found[:, output], slope, atol=2e-9)

    def test_values_are_convex_and_not_negative(self, loss: RowLoss) -> None:
        (a, targets), (b, _) = problem(loss, seed=1), problem(loss, seed=1)
        b = np.random.default_rng(2).permutation(b)
        middle = loss.values((a + b) / 2, targets)
        assert (middle <= (loss.values(a, targets) + loss.values(b, targets)) / 2 + 1e-12).all()
        assert (loss.values(a, targets) >= 0).all()


@pytest.mark.parametrize("loss", ONE_OUTPUT, ids=repr)
def test_curvatures_are_the_slopes_of_residuals(loss: Any) -> None:
    scores, targets = problem(loss)
    step = 1e-5
    slope = (loss.residuals(scores + step, targets) - loss.residuals(scores - step, targets))[:, 0] / (2 * step)
    np.testing.assert_allclose(loss.curvatures(scores, targets), slope, atol=2e-9)


@pytest.mark.parametrize("loss", MARGIN, ids=repr)
def test_a_margin_is_symmetric_in_sign(loss: RowLoss) -> None:
    scores, targets = problem(loss)
    np.testing.assert_array_equal(loss.values(scores, targets), loss.values(-scores, -targets))
    np.testing.assert_array_equal(loss.residuals(scores, targets), -loss.residuals(-scores, -targets))


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_hessian_product_is_the_change_of_residuals(classes: int) -> None:
    loss = Softmax(classes)
    scores, targets = problem(loss)
    directions = np.random.default_rng(3).standard_normal(scores.shape)
    step = 1e-5
    ahead, behind = (loss.residuals(scores + sign * step * directions, targets) for sign in (1, -1))
    found = loss.hessian_product(scores, targets, directions)
    np.testing.assert_allclose(found, (ahead - behind) / (2 * step), atol=1e-9)


class TestConstants:
    """L and β bound what a dense grid finds, and the grid comes within a thousandth of them."""

    MARGINS = np.linspace(-30, 30, 600_001)[:, None]

    @pytest.mark.parametrize("loss", [*MARGIN, Squared(2.0)], ids=repr)
    def test_lipschitz_bounds_residuals(self, loss: Any) -> None:
        steepest = np.abs(loss.residuals(self.MARGINS, np.ones(len(self.MARGINS)))).max()
        assert 0.999 * loss.lipschitz(1.0) <= steepest <= loss.lipschitz(1.0)
        assert loss.lipschitz(3.0) == pytest.approx(3 * loss.lipschitz(1.0))

    @pytest.mark.parametrize("loss", [*SMOOTH_MARGIN, Squared(2.0)], ids=repr)
    def test_smoothness_bounds_curvatures(self, loss: Any) -> None:
        largest = loss.curvatures(self.MARGINS, np.ones(len(self.MARGINS))).max()
        assert 0.999 * loss.smoothness(1.0) <= largest <= loss.smoothness(1.0) * (1 + 1e-12)
        assert loss.smoothness(3.0) == pytest.approx(9 * loss.smoothness(1.0))

    @pytest.mark.parametrize("classes", [2, 3, 6])
    def test_constants_of_softmax(self, classes: int) -> None:
        loss = Softmax(classes)
        random = np.random.default_rng(4)
        scores = random.uniform(-12, 12, (4000, classes)) * random.choice([0.1, 1.0, 5.0], (4000, 1))
        scores[0] = [0, 0, *[-40.0] * (classes - 2)]  # two even classes: the largest curvature
        scores[1] = [0, 40.0, *[-40.0] * (classes - 2)]  # sure and wrong: the steepest residual
        targets = np.zeros(4000, np.int64)
        steepest = np.linalg.norm(loss.residuals(scores, targets), axis=1).max()
        assert 0.999 * loss.lipschitz(1.0) <= steepest <= loss.lipschitz(1.0) * (1 + 1e-12)
        columns = [loss.hessian_product(scores, targets, np.tile(d, (4000, 1))) for d in np.eye(classes)]
        largest = np.linalg.eigvalsh(np.stack(columns, axis=-1)).max()
        assert 0.999 * loss.smoothness(1.0) <= largest <= loss.smoothness(1.0) * (1 + 1e-12)

    @pytest.mark.parametrize(
        ("loss", "lipschitz", "smoothness"),
        [
            (Logistic(), 2.0, 1.0),
            (Logistic(0.5), 1.0, 1.0),
            (Logistic(0.25), 0.5, 0.75),
            (HuberSvm(0.1), 2.0, 20.0),
            (Hinge(), 2.0, math.inf),
            (Softmax(3), 2 * math.sqrt(2), 2.0),
            (Squared(3.0), 6.0, 4.0),
        ],
        ids=repr,
    )
    def test_constants_at_radius_two(self, loss: RowLoss, lipschitz: float, smoothness: float) -> None:
        assert loss.lipschitz(2.0) == pytest.approx(lipschitz, rel=1e-15)
        assert loss.smoothness(2.0) == pytest.approx(smoothness, rel=1e-15)

    @given(
        st.sampled_from([loss for loss in ALL if loss != Squared(math.inf)]),
        st.integers(0, 2**32 - 1),
        st.floats(1e-3, 1e3),
    )
    def test_differences_obey_the_constants(self, loss: Any, seed: int, scale: float) -> None:
        random = np.random.default_rng(seed)
        a, b = scale * random.standard_normal((2, 50, loss.outputs))
        b = np.where(random.random((50, 1)) < 0.5, a + 1e-3 * (b - a), b)
        targets = random.integers(0, 2, 50) if isinstance(loss, Softmax) else random.choice([-1.0, 1.0], 50)
        targets = np.abs(targets) if isinstance(loss, Counts) else targets
        gap = np.linalg.norm(a - b, axis=1)
        values = np.abs(loss.values(a, targets) - loss.values(b, targets))
        assert (values <= loss.lipschitz(1.0) * gap + 1e-12 * scale).all()
        if loss.smooth:
            residuals = np.linalg.norm(loss.residuals(a, targets) - loss.residuals(b, targets), axis=1)
            assert (residuals <= loss.smoothness(1.0) * gap + 1e-12 * scale).all()


class TestValues:
    @pytest.mark.parametrize("slope", [0.1, 0.25, 0.5, 0.9, 1.0])
    def test_logistic_keeps_its_digits(self, slope: float) -> None:
        loss = Logistic(slope)
        margins = [-800.0, -40.0, -3.0, -1e-9, 0.0, 1e-9, 0.7, 3.0, 40.0, 700.0]
        found = loss.values(np.array(margins)[:, None], np.ones(len(margins)))
        corner = mpmath.log((1 - mpmath.mpf(slope)) / slope) if slope < 1 else -mpmath.inf
        with mpmath.workdps(60):
            for margin, value in zip(margins, found, strict=True):
                top = max(mpmath.mpf(margin), corner)
                exact = mpmath.log1p(mpmath.exp(-top)) + slope * (top - margin)
                assert value == pytest.approx(float(exact), rel=1e-14, abs=1e-300)

    def test_huber_is_the_published_formula(self) -> None:
        z, h = np.linspace(-3, 4, 1401), 0.1
        published = np.where(z > 1 + h, 0, np.where(np.abs(1 - z) <= h, (1 + h - z) ** 2 / (4 * h), 1 - z))
        np.testing.assert_allclose(HuberSvm(h).values(z[:, None], np.ones(1401)), published, atol=1e-14)

    def test_huber_of_no_width_is_the_hinge(self) -> None:
        z, ones = np.linspace(-3, 4, 1401)[:, None], np.ones(1401)
        np.testing.assert_allclose(HuberSvm(1e-9).values(z, ones), Hinge().values(z, ones), atol=1e-8)

    def test_two_classes_are_the_logistic_loss(self) -> None:
        scores, targets = problem(Softmax(2))
        margins = (scores[:, 1] - scores[:, 0])[:, None]
        signs = 2.0 * targets - 1
        np.testing.assert_allclose(Softmax(2).values(scores, targets), Logistic().values(margins, signs), rtol=1e-13)

    def test_squared_goes_on_straight(self) -> None:
        values = Squared(2.0).values(np.array([[1.0], [2.0], [5.0], [-5.0]]), np.zeros(4))
        assert values.tolist() == [0.5, 2.0, 8.0, 8.0]

    def test_hinge_at_its_corner(self) -> None:
        found = Hinge().residuals(np.array([[1.0], [-1.0], [0.0]]), np.array([1.0, -1.0, -1.0]))
        assert np.abs(found).tolist() == [[0.0], [0.0], [1.0]]


@pytest.mark.parametrize("loss", ALL, ids=repr)
@pytest.mark.parametrize("size", [1e3, 1e30, 1e150, 1e300])
def test_huge_scores(loss: RowLoss, size: float) -> None:
    random = np.random.default_rng(5)
    scores = size * random.uniform(-1, 1, (200, loss.outputs))
    targets = random.integers(0, 2, 200) if isinstance(loss, Softmax) else random.choice([-1.0, 1.0], 200)
    targets = np.abs(targets) if isinstance(loss, Counts) else targets
    residuals = loss.residuals(scores, targets)
    assert np.isfinite(residuals).all()
    if loss == Squared(math.inf):
        np.testing.assert_allclose(residuals, scores - targets[:, None])
        return
    values = loss.values(scores, targets)
    assert np.isfinite(values).all()
    assert (np.linalg.norm(residuals, axis=1) <= loss.lipschitz(1.0) * (1 + 1e-15)).all()
    # far out every loss is linear along its residual
    np.testing.assert_allclose(values, np.sum(residuals * scores, axis=1), atol=10 + 1e-9 * size, rtol=1e-9)


class TestRefusals:
    @pytest.mark.parametrize("loss", MARGIN, ids=repr)
    def test_signs(self, loss: RowLoss) -> None:
        assert loss.checked([1, -1], 2).tolist() == [1.0, -1.0]
        for bad in ([0, 1], [1.0, math.nan], [1, 2]):
            with pytest.raises(ValueError, match=r"^targets must be -1 or \+1: write 2\*y - 1 for y in 0, 1$"):
                loss.checked(bad, 2)
        with pytest.raises(ValueError, match=r"targets must be -1 or \+1: write"):
            loss.checked([True, True], 2)

    def test_classes(self) -> None:
        assert Softmax(3).checked([0.0, 2.0], 2).tolist() == [0, 2]
        for bad in ([0, 3], [-1, 0], [0.5, 1.0], [math.nan, 0.0], [math.inf, 0.0]):
            with pytest.raises(
                ValueError,
                match=r"^targets must be class indices from 0 to 2: number the",
            ):
                Softmax(3).checked(bad, 2)

    def test_numbers(self) -> None:
        assert Squared(1.0).checked(np.array([1, 2]), 2).dtype == np.float64
        with pytest.raises(ValueError, match=r"^targets must be finite numbers$"):
            Squared(1.0).checked([0.0, math.nan], 2)

    @pytest.mark.parametrize("loss", ALL, ids=repr)
    def test_shapes_and_kinds(self, loss: RowLoss) -> None:
        with pytest.raises(ValueError, match="one value for each of 3 rows, got shape"):
            loss.checked([1.0, 1.0], 3)
        with pytest.raises(ValueError, match="one value for each of 2 rows, got shape"):
            loss.checked([[1.0], [1.0]], 2)
        with pytest.raises(ValueError, match="targets must be numbers, got dtype"):
            loss.checked(["a", "b"], 2)
        with pytest.raises(ValueError, match=r"scores must have shape \(2, "):
            loss.values(np.zeros((2, loss.outputs + 1)), np.ones(2, np.int64))
        with pytest.raises(ValueError, match="radius must be zero or more"):
            loss.smoothness(-1.0)

    def test_parameters(self) -> None:
        with pytest.raises(ValueError, match="slope must be at most 1"):
            Logistic(1.5)
        with pytest.raises(ValueError, match="slope must be positive"):
            Logistic(0.0)
        with pytest.raises(ValueError, match="width must be positive"):
            HuberSvm(-0.1)
        with pytest.raises(ValueError, match="classes must be a whole number of at least 2"):
            Softmax(1)
        with pytest.raises(ValueError, match="bound must be positive"):
            Squared(0.0)
        with pytest.raises(ValueError, match="bound must be a number"):
            Squared("2")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no Lipschitz constant"):
            Squared(math.inf).lipschitz(1.0)
