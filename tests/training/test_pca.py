"""Private principal directions: exact without noise, noised and priced by what one row can change.

Statistical tests are seeded; with a fresh seed each would fail about once in a million.
"""

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats
from torch import nn

from dpgrad.accounting import account, exact
from dpgrad.accounting.events import Compose, Gaussian, Inexact, Poisson, Relation, Repeat
from dpgrad.accounting.ledger import Ledger
from dpgrad.mechanism import sampling, secure
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import noise
from dpgrad.training import pca
from dpgrad.training.private import PrivateGradient
from spread import fit

FALSE_ALARM = 1e-6
LITTLE = 1e-6  # the least noise multiplier that an event may have


def rows_of(count: int, features: int, seed: int = 0) -> torch.Tensor:
    """Rows with a spectrum that falls: their principal directions are well apart."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.linspace(3.0, 0.3, features, dtype=torch.float64)
    turned = torch.linalg.qr(torch.randn(features, features, generator=random, dtype=torch.float64)).Q
    return torch.randn(count, features, generator=random, dtype=torch.float64) * spread @ turned


def second_moment(rows: Any) -> np.ndarray[Any, Any]:
    """Σ x xᵀ over rows at norm 1, row by row."""
    flat = np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)
    total = np.zeros((flat.shape[1], flat.shape[1]))
    for row in flat:
        norm = np.linalg.norm(row)
        if 0 < norm < math.inf:
            total += np.outer(row, row) / norm**2
    return total


def projector(components: torch.Tensor) -> np.ndarray[Any, Any]:
    """The projection on the span, which does not depend on signs or on the order of directions."""
    found: np.ndarray[Any, Any] = (components.T @ components).numpy()
    return found


def largest(matrix: np.ndarray[Any, Any], directions: int) -> np.ndarray[Any, Any]:
    vectors = np.linalg.eigh(matrix).eigenvectors[:, -directions:]
    return np.asarray(vectors @ vectors.T)


class TestDirections:
    @pytest.mark.parametrize("directions", [1, 3, 8])
    def test_exact_principal_directions_without_noise(self, directions: int) -> None:
        rows = rows_of(400, 8)
        found = pca.principal_directions(rows, directions, LITTLE)
        assert found.components.shape == (directions, 8)
        np.testing.assert_allclose(projector(found.components), largest(second_moment(rows), directions), atol=1e-6)

    def test_order_is_that_of_the_eigenvalues_and_signs_are_settled(self) -> None:
        rows = rows_of(400, 6)
        found = pca.principal_directions(rows, 6, LITTLE).components
        along = ((found.numpy() @ second_moment(rows)) * found.numpy()).sum(1)
        assert (np.diff(along) < 0).all()
        assert (found.gather(1, found.abs().argmax(1, keepdim=True)) > 0).all()
        torch.testing.assert_close(found @ found.T, torch.eye(6, dtype=torch.float64))

    def test_neither_centred_nor_divided_by_the_number_of_rows(self) -> None:
        """Rows far from the origin: their mean is the first direction, which centring would remove."""
        rows = rows_of(300, 5) * 0.01 + torch.tensor([0.0, 0, 0, 0, 1])
        found = pca.principal_directions(rows, 1, LITTLE)
        assert float(found.components[0, 4]) > 0.999

    def test_every_row_counts_the_same_whatever_its_length(self) -> None:
        rows = rows_of(200, 5)
        scales = torch.logspace(-200, 200, 200, dtype=torch.float64)[:, None]
        plain, scaled = (pca.principal_directions(x, 2, LITTLE).components for x in (rows, rows * scales))
        np.testing.assert_allclose(projector(scaled), projector(plain), atol=1e-6)

    def test_rows_without_a_finite_norm_add_nothing(self) -> None:
        rows = rows_of(200, 5)
        odd = torch.tensor([[0.0] * 5, [math.nan, 1, 1, 1, 1], [math.inf, 1, 1, 1, 1], [1, -math.inf, math.nan, 0, 0]])
        found = pca.principal_directions(torch.cat([odd.double(), rows]), 2, LITTLE)
        plain = pca.principal_directions(rows, 2, LITTLE)
        np.testing.assert_allclose(projector(found.components), projector(plain.components), atol=1e-6)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64", ">f4", "bool"])
    def test_arrays_of_any_real_type(self, dtype: str) -> None:
        values = np.abs(rows_of(100, 12).numpy()) * 20 % 251
        rows = values > 20 if dtype == "bool" else values.astype(dtype)
        found = pca.principal_directions(rows.reshape(100, 3, 2, 2), 2, LITTLE)
        np.testing.assert_allclose(projector(found.components), largest(second_moment(rows), 2), atol=1e-5)

    def test_memory_maps_are_read_by_blocks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = rows_of(1000, 6).numpy()
        np.save(tmp_path / "rows.npy", rows)
        mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
        monkeypatch.setattr(pca, "_HELD", 6 * 64)
        sizes: list[int] = []
        blocks = pca.source.blocks
        monkeypatch.setattr(
            pca.source, "blocks", lambda *args: (sizes.append(len(few)) or few for few in blocks(*args))
        )
        found = pca.principal_directions(mapped, 3, LITTLE)
        assert sizes == [64] * 15 + [40]
        np.testing.assert_allclose(projector(found.components), largest(second_moment(rows), 3), atol=1e-6)
        coordinates = found(mapped)
        assert sizes == 2 * ([64] * 15 + [40])
        np.testing.assert_allclose(coordinates, rows @ found.components.numpy().T, atol=1e-12)

    def test_no_rows_at_all_is_noise_alone(self) -> None:
        found = pca.principal_directions(torch.zeros(0, 4), 2, 1.0, seed=3)
        assert found.components.isfinite().all()
        assert found(torch.zeros(0, 4)).shape == (0, 2)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_on_the_device_of_the_rows(self) -> None:
        rows = rows_of(400, 8)
        found = pca.principal_directions(rows.cuda(), 3, LITTLE)
        assert found.components.is_cuda
        assert found(rows.cuda()).is_cuda
        np.testing.assert_allclose(projector(found.components.cpu()), largest(second_moment(rows), 3), atol=1e-6)


class TestProjection:
    @pytest.mark.parametrize("kind", ["float32", "float64", "float16", "uint8"])
    def test_arrays_and_tensors_alike(self, kind: str) -> None:
        found = pca.principal_directions(rows_of(50, 6), 2, 1.0, seed=1)
        rows = (np.abs(rows_of(7, 6).numpy()) * 9).astype(kind)
        expected = rows.astype(np.float64) @ found.components.numpy().T
        array, tensor = found(rows), found(torch.from_numpy(rows))
        assert isinstance(array, np.ndarray)
        assert isinstance(tensor, torch.Tensor)
        assert array.dtype == (np.float64 if kind == "float64" else np.float32)
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(array, tensor.numpy())

    def test_layer_is_frozen_and_a_model_that_begins_with_it_is_trained(self) -> None:
        rows = rows_of(50, 6).float()
        found = pca.principal_directions(rows, 2, 1.0, seed=1)
        model = nn.Sequential(found.layer(), nn.Linear(2, 1))
        torch.testing.assert_close(model[0](rows), found(rows))
        run = Mechanism(sampling.FullBatch(), 1, 1.0, batch_size=50)
        PrivateGradient(model, lambda model, x: model(x)[:, 0].square(), run).step(rows)
        assert model[0].weight.grad is None
        assert model[1].weight.grad is not None

    def test_rows_of_another_width_are_refused(self) -> None:
        found = pca.principal_directions(rows_of(50, 6), 2, 1.0)
        with pytest.raises(ValueError, match=r"rows must have 6 features, .* got shape \(3, 5\)"):
            found(np.zeros((3, 5)))

    def test_shown_without_values(self) -> None:
        found = pca.principal_directions(rows_of(50, 6), 2, 1.5)
        assert repr(found) == "Projection(6 features to 2, Gaussian(noise_multiplier=1.5), add-remove)"


VECTORS = [np.array(v, dtype=np.float64) for v in itertools.product((-1.0, 0.0, 2.0), repeat=2)]


class TestSensitivity:
    """What one row can change, by brute force over neighbouring datasets of a few rows."""

    def moved(self, data: tuple[Any, ...], other: tuple[Any, ...]) -> float:
        totals = [pca._second_moment(np.array(rows).reshape(-1, 2), 2).numpy() for rows in (data, other)]
        return float(np.linalg.norm(totals[0] - totals[1]))

    def test_add_remove_and_zero_out(self) -> None:
        worst = 0.0
        for data in itertools.product(VECTORS, repeat=2):
            for i in range(2):
                zeroed = (*data[:i], np.zeros(2), *data[i + 1 :])
                removed = (*data[:i], *data[i + 1 :])
                assert self.moved(data, zeroed) == self.moved(data, removed) <= 1
                worst = max(worst, self.moved(data, removed))
        assert worst > 1 - 1e-12

    def test_replace_one_moves_by_the_root_of_two_and_is_priced_at_two(self) -> None:
        worst = max(
            self.moved(data, (other, data[1])) for data in itertools.product(VECTORS, repeat=2) for other in VECTORS
        )
        assert math.sqrt(2) - 1e-12 < worst <= math.sqrt(2)
        found = pca.principal_directions(rows_of(20, 3), 1, 4.0, relation=Relation.REPLACE_ONE)
        price = found.guarantee(1e-5, "exact").epsilon
        assert price == pytest.approx(exact.account(Gaussian(2.0), Relation.ADD_REMOVE).epsilon(1e-5))  # distance 2/z
        assert price > exact.account(Gaussian(4.0 / math.sqrt(2)), Relation.ADD_REMOVE).epsilon(1e-5)  # √2/z would do

    @given(
        arrays.arrays(
            np.float64,
            st.tuples(st.just(1), st.integers(1, 40)),
            elements=st.floats(allow_nan=True, allow_infinity=True, width=64),
        )
    )
    def test_no_row_is_longer_than_one(self, row: np.ndarray[Any, Any]) -> None:
        """In exact arithmetic, not in floats."""
        unit = pca._unit(torch.from_numpy(row))[0].tolist()
        length = sum(Fraction(value) ** 2 for value in unit)
        assert length <= 1
        if np.isfinite(row).all() and row.any():
            assert length > 1 - Fraction(1, 10**12)


class TestNoise:
    def released(self, seed: int, features: int, z: float) -> np.ndarray[Any, Any]:
        """What is decomposed, of data that are empty: the noise alone."""
        seen: list[torch.Tensor] = []
        whole = torch.linalg.eigh

        def spied(matrix: torch.Tensor) -> Any:
            seen.append(matrix)
            return whole(matrix)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", spied)
            pca.principal_directions(torch.zeros(0, features), 1, z, seed=seed)
        return seen[0].numpy()

    def test_law(self) -> None:
        """Symmetric; variance z² on the diagonal and z²/2 off it, all entries independent and normal."""
        z, features = 3.0, 400
        matrix = self.released(11, features, z)
        np.testing.assert_array_equal(matrix, matrix.T)
        above = matrix[np.triu_indices(features, 1)] / (z / math.sqrt(2))
        assert stats.kstest(above, "norm").pvalue > FALSE_ALARM
        energy = float((above**2).sum())
        assert 2 * min(stats.chi2.cdf(energy, len(above)), stats.chi2.sf(energy, len(above))) > FALSE_ALARM
        diagonal = np.concatenate([np.diag(self.released(s, features, z)) for s in range(12, 22)]) / z
        assert stats.kstest(diagonal, "norm").pvalue > FALSE_ALARM
        energy = float((diagonal**2).sum())
        assert 2 * min(stats.chi2.cdf(energy, len(diagonal)), stats.chi2.sf(energy, len(diagonal))) > FALSE_ALARM

    def test_seed_repeats_and_no_seed_does_not(self) -> None:
        rows = rows_of(50, 6)
        seeded = [pca.principal_directions(rows, 2, 5.0, seed=7) for _ in range(2)]
        assert torch.equal(seeded[0].components, seeded[1].components)
        assert seeded[0].reproducible
        fresh = [pca.principal_directions(rows, 2, 5.0) for _ in range(2)]
        assert not torch.equal(fresh[0].components, fresh[1].components)
        assert not fresh[0].reproducible

    def test_noise_is_not_that_of_a_parameter_of_a_run_with_the_same_seed(self) -> None:
        matrix = self.released(7, 30, 1.0)
        drawn = noise.gaussian(torch.zeros(30, 30, dtype=torch.float64), 1.0, 7, 0, "second moment").numpy()
        assert not np.isclose(np.diag(matrix), np.diag(drawn)).any()


class TestPrice:
    @pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.ZERO_OUT])
    def test_exact_for_one_row_more_or_less(self, relation: Relation) -> None:
        found = pca.principal_directions(rows_of(20, 3), 1, 4.0, relation=relation)
        assert (found.event, found.relation) == (Gaussian(4.0), relation)
        guarantee = found.guarantee(1e-5, "exact")
        assert (guarantee.epsilon, guarantee.relation) == (
            account(Gaussian(4.0), relation, "exact").epsilon(1e-5),
            relation,
        )
        # the classical closed form of the Gaussian mechanism at ε: Φ(1/2z − εz) − e^ε Φ(−1/2z − εz)
        epsilon, z = guarantee.epsilon, 4.0
        delta = stats.norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * stats.norm.cdf(-0.5 / z - epsilon * z)
        assert delta == pytest.approx(1e-5, rel=1e-6)

    def test_composes_with_training_in_one_guarantee(self) -> None:
        run = Mechanism(sampling.Poisson(0.01), steps=500, noise_multiplier=1.0)
        found = pca.principal_directions(rows_of(20, 3), 1, 16.0)
        together = run.guarantee(1e-5, also_released=found.event)
        assert together.event == Compose((Gaussian(16.0), Repeat(Poisson(0.01, Gaussian(1.0)), 500)))
        alone = run.guarantee(1e-5).epsilon
        assert alone < together.epsilon < alone + found.guarantee(1e-5).epsilon

    @pytest.mark.parametrize("relation", list(Relation))
    def test_both_calibrated_together(self, relation: Relation) -> None:
        run = Mechanism(sampling.Poisson(0.05), steps=100, noise_multiplier=1.0, relation=relation)
        event, calibrated = pca.calibrated(run, epsilon=2.0, delta=1e-5, share=0.3)
        assert 2.0 * (1 - 1e-3) < calibrated.guarantee(1e-5, also_released=event).epsilon <= 2.0
        assert 0.6 * (1 - 1e-3) < account(event, relation, "pld").epsilon(1e-5) <= 0.6
        assert calibrated.noise_multiplier > run.calibrated(2.0, 1e-5).noise_multiplier

    def test_training_on_projected_rows_is_within_the_budget_of_both(self) -> None:
        rows, labels = rows_of(60, 6).float(), torch.arange(60) % 2
        found = pca.principal_directions(rows, 2, 4.0, relation=Relation.ZERO_OUT)
        fitted = fit(
            nn.Linear(2, 2), (found(rows), labels),
            epsilon=2.0, delta=1e-5, epochs=2, batch_size=12, learning_rate=0.1, also_released=found.event,
        )  # fmt: skip
        assert fitted.guarantee.event == Compose((found.event, fitted.plan.mechanism.event()))
        assert found.guarantee(1e-5).epsilon < fitted.guarantee.epsilon <= 2.0
        assert fitted.guarantee.relation == found.relation

    @pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan])
    def test_share_must_leave_something_for_both(self, share: float) -> None:
        run = Mechanism(sampling.FullBatch(), 1, 1.0)
        with pytest.raises(ValueError, match="share must"):
            pca.calibrated(run, 1.0, 1e-5, share)


@pytest.mark.parametrize(
    ("rows", "directions", "z", "message"),
    [
        (np.zeros(5), 1, 1.0, r"rows must be an array or tensor of shape \(rows, features\), got shape \(5,\)"),
        ([[1.0]], 1, 1.0, "rows must be an array or tensor .* got a list"),
        (np.zeros((5, 0)), 1, 1.0, "rows must be an array or tensor"),
        (np.zeros((5, 2), dtype=complex), 1, 1.0, "rows must hold real numbers, got complex128"),
        (torch.zeros(5, 2, dtype=torch.complex64), 1, 1.0, "rows must hold real numbers"),
        (np.full((5, 2), "x"), 1, 1.0, "rows must hold real numbers"),
        (np.zeros((5, 2)), 3, 1.0, "directions must be at most 2, got 3"),
        (np.zeros((5, 2)), 0, 1.0, "directions must be a whole number of at least 1"),
        (np.zeros((5, 2)), 1, 0.0, "noise_multiplier must be positive"),
        (np.zeros((5, 2)), 1, math.nan, "noise_multiplier must be a number"),
    ],
)
def test_refused(rows: Any, directions: int, z: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pca.principal_directions(rows, directions, z)


def test_secure_noise_is_whole_numbers_on_the_rounded_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decomposed is (rounded moment + numbers of the stream)·grid, and δ pays for every entry."""
    seen = []
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda moment: seen.append(moment) or original(moment))
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    found = pca.principal_directions(rows, 2, 1.5, seed=3, noise="secure")
    assert found.event == Inexact(Gaussian(1.5), secure.inexact(16))
    seed = Key.from_seed(3)
    drawn = secure.draw(Key(seed.derive("pca"), True), 0, 16, "noise", "second moment", "0")
    unit = secure.grid(1.5, 1.0, 16)
    total = pca._second_moment(rows, 4)
    noisy = torch.from_numpy((secure.rounded(total.numpy(), unit) + drawn.reshape(4, 4)) * unit)
    assert torch.equal(seen[0], (noisy + noisy.T) / 2)
    with pytest.raises(ValueError, match="noise must be one of ordinary, secure"):
        pca.principal_directions(rows, 2, 1.5, noise="loud")


def test_unknown_relation_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a valid Relation"):
        pca.principal_directions(np.zeros((5, 2)), 1, 1.0, relation="swap")  # type: ignore[arg-type]


def test_a_ledger_is_charged_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    pca.principal_directions(rows_of(20, 4), 2, 3.0, relation=Relation.REPLACE_ONE, ledger=ledger)
    (entry,) = ledger.entries()
    assert (entry.event, entry.relation, entry.label) == (Gaussian(3.0), Relation.REPLACE_ONE, "principal directions")

    def dies(rows: object, features: int) -> torch.Tensor:
        assert len(ledger.entries()) == 2
        raise MemoryError

    monkeypatch.setattr(pca, "_second_moment", dies)
    with pytest.raises(MemoryError):
        pca.principal_directions(rows_of(20, 4), 2, 3.0, relation=Relation.REPLACE_ONE, ledger=ledger)
    assert ledger.event() == Compose((Gaussian(3.0), Gaussian(3.0)))
    with pytest.raises(ValueError, match="directions must be at most 4"):
        pca.principal_directions(rows_of(20, 4), 5, 3.0, ledger=ledger)
    assert len(ledger.entries()) == 2


class TestTypes:
    """How one row is read does not depend on the type that another gives the whole array."""

    WHOLE = np.random.default_rng(0).integers(-(2**24), 2**24, (200, 5))

    def neighbours(self, kind: str) -> tuple[Any, Any]:
        other = self.WHOLE.astype(np.float64)
        other[0] = 0.5
        if kind == "array":
            return self.WHOLE, other
        return torch.tensor(self.WHOLE.tolist()), torch.tensor([[0.5] * 5, *self.WHOLE[1:].tolist()])

    @pytest.mark.parametrize("kind", ["array", "tensor"])
    def test_projected_rows_stay_alike(self, kind: str) -> None:
        components = torch.linalg.qr(rows_of(5, 5)).Q[:2]
        made = pca.Projection(components, Gaussian(1.0), Relation.ADD_REMOVE, reproducible=False)
        one, other = (torch.as_tensor(made(rows)).float() for rows in self.neighbours(kind))
        assert torch.equal(one[1:], other[1:])

    @pytest.mark.parametrize("kind", ["array", "tensor"])
    def test_second_moments_differ_by_one_row(self, kind: str) -> None:
        one, other = (rows[1:] for rows in self.neighbours(kind))
        assert torch.equal(pca._second_moment(one, 5), pca._second_moment(other, 5))

    def test_whole_numbers_that_torch_would_round_are_refused(self) -> None:
        rows = torch.tensor([[2**24 + 1, 0]] * 3)
        for call in (
            lambda: pca.principal_directions(rows, directions=1, noise_multiplier=1.0),
            lambda: pca.Projection(torch.eye(2)[:1], Gaussian(1.0), Relation.ADD_REMOVE, reproducible=False)(rows),
        ):
            with pytest.raises(
                ValueError, match=r"^rows must hold whole numbers of at most 2\^24, .*rows\.double\(\)$"
            ):
                call()

    @pytest.mark.parametrize("dtype", [np.longdouble, object, "datetime64[D]"])
    def test_types_that_torch_does_not_have_are_refused_in_words(self, dtype: Any) -> None:
        with pytest.raises(ValueError, match=r"^rows must hold (numbers of a type that torch has|real numbers), got "):
            pca.principal_directions(np.ones((3, 2)).astype(dtype), directions=1, noise_multiplier=1.0)
