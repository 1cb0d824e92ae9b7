"""Diagnostics against plain loops over single examples; where they may be written; that they change nothing."""

import itertools
import json
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpgrad.grads import scaling
from dpgrad.grads.scaling import Hard, Psac, Psasc, ScaleRule
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.training.diagnostics import DEFINITIONS, FILE, LABEL, Diagnostics, Recorder, similarity
from dpgrad.training.private import Observed, PrivateGradient

ROWS, RATE = 40, 0.3


def data(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(rows, 3, generator=random, dtype=torch.float64)
    return inputs, (inputs @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)).tanh()


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return (model(inputs)[:, 0] - targets).square()


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def gradient(model: nn.Module, batch: Any, i: int) -> np.ndarray[Any, Any]:
    """One example's gradient by autograd, all parameters flattened."""
    one = loss(model, (batch[0][i : i + 1], batch[1][i : i + 1]))[0]
    found = torch.autograd.grad(one, list(model.parameters()))
    return np.concatenate([g.flatten().numpy() for g in found])


def every_gradient(model: nn.Module, batch: Any) -> np.ndarray[Any, Any]:
    return np.stack([gradient(model, batch, i) for i in range(len(batch[0]))])


def flat(tensors: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([t.detach().flatten().numpy() for t in tensors])


def cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def train(
    steps: int = 4,
    rule: ScaleRule | None = None,
    recorded: Diagnostics | None = None,
    watch: Any = None,
    model: nn.Module | None = None,
    **fields: Any,
) -> tuple[nn.Module, Recorder | None]:
    """Full batches, so that the loops below know which rows were used."""
    model, rows = model or network(), data()
    mechanism = Mechanism(
        sampling.FullBatch(), steps, **{"noise_multiplier": 0.5, "clip": 0.7, "batch_size": ROWS, **fields}
    )
    recorder = None if recorded is None else Recorder(recorded, model, loss, rows)
    private = PrivateGradient(model, loss, mechanism, rule=rule, seed=9, observe=recorder)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(steps):
        if recorder is not None:
            recorder.learning_rate = RATE
        private.step(rows)
        if watch is not None:
            watch(model)
        optimizer.step()
    return model, recorder


def observed(norms: list[float], factors: list[float], step: int = 0, clip: float = 1.0) -> Observed:
    model = network()
    means = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    return Observed(step, torch.tensor([norms]), torch.tensor([factors]), clip, means, means, means)


@pytest.fixture(scope="module")
def run() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = []

    def watch(model: nn.Module) -> None:
        noisy = flat([p.grad for p in model.parameters()])
        seen.append({"g": every_gradient(model, data()), "noisy": noisy, "w": flat(model.parameters())})

    _, recorder = train(recorded=Diagnostics(probe=ROWS), watch=watch)
    assert recorder is not None
    return recorder.report(), seen


class TestAgainstLoops:
    """Every column of every step, from the gradients of single examples by autograd."""

    def test_gradient_norms(self, run: Any) -> None:
        report, seen = run
        norms = [np.linalg.norm(s["g"], axis=1) for s in seen]
        np.testing.assert_allclose(report["steps"]["mean_norm"], [n.mean() for n in norms], rtol=1e-6)
        every = np.concatenate(norms)
        assert report["gradient_norm"]["mean"] == pytest.approx(every.mean(), rel=1e-6)
        assert report["gradient_norm"]["quantiles"]["0.9"] == pytest.approx(np.quantile(every, 0.9), rel=1e-6)
        slope = np.polyfit(np.arange(4), [n.mean() for n in norms], 1)[0]
        assert report["gradient_norm"]["trend_per_step"] == pytest.approx(slope, rel=1e-6)
        counts, edges = np.histogram(every, 20, (0, every.max()))
        np.testing.assert_allclose(report["gradient_norm"]["histogram"]["edges"], edges, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(report["gradient_norm"]["histogram"]["share"], counts / len(every))

    def test_weights(self, run: Any) -> None:
        report, seen = run
        weights = [np.minimum(1, 0.7 / np.linalg.norm(s["g"], axis=1)) for s in seen]
        np.testing.assert_allclose(report["steps"]["weight"], [w.mean() for w in weights], rtol=1e-6)
        np.testing.assert_allclose(
            report["steps"]["noise_relative_weight"], [w.mean() / 0.7 for w in weights], rtol=1e-6
        )
        assert report["weight"]["mean"] == pytest.approx(np.concatenate(weights).mean(), rel=1e-6)
        assert report["noise_relative_weight"]["mean"] == pytest.approx(np.concatenate(weights).mean() / 0.7, rel=1e-6)
        assert not all(w.min() == 1 for w in weights)  # some were clipped

    def test_gradient_similarity(self, run: Any) -> None:
        report, seen = run
        expected = [cosine(s["noisy"], s["g"].mean(0)) for s in seen]
        np.testing.assert_allclose(report["steps"]["gradient_similarity"], expected, rtol=1e-6)
        counts, edges = np.histogram(expected, 20)
        np.testing.assert_allclose(report["gradient_similarity"]["histogram"]["edges"], edges, rtol=1e-6)
        assert report["gradient_similarity"]["histogram"]["share"] == (counts / 4).tolist()

    def test_parameter_similarity(self, run: Any) -> None:
        report, seen = run
        expected = [cosine(s["w"] - RATE * s["noisy"], s["w"] - RATE * s["g"].mean(0)) for s in seen]
        np.testing.assert_allclose(report["steps"]["parameter_similarity"], expected, rtol=1e-6)
        assert max(expected) < 1 - 1e-6

    def test_tau_squared(self, run: Any) -> None:
        report, seen = run
        expected = [((s["g"] - s["g"].mean(0)) ** 2).sum() / (ROWS - 1) for s in seen]
        np.testing.assert_allclose(report["steps"]["tau_squared"], expected, rtol=1e-5)
        assert report["tau_squared"]["most"] == pytest.approx(max(expected), rel=1e-5)

    def test_share_fell(self, run: Any) -> None:
        report, seen = run
        norms = [np.linalg.norm(s["g"], axis=1) for s in seen]
        expected = [float((now <= before).mean()) for before, now in itertools.pairwise(norms)]
        assert report["steps"]["share_fell"][0] is None
        np.testing.assert_allclose(report["steps"]["share_fell"][1:], expected)
        assert report["share_fell"]["mean"] == pytest.approx(np.mean(expected))
        assert 0 < np.mean(expected) < 1

    def test_label_comes_first_and_every_column_is_defined(self, run: Any) -> None:
        report, _ = run
        assert next(iter(report)) == "label"
        assert report["label"] == LABEL
        assert LABEL.startswith("outside the guarantee: ")
        assert set(report["steps"]) == {"step", *DEFINITIONS}
        assert report["steps"]["step"] == [0, 1, 2, 3]


class TestWeightsOfThePaper:
    def test_relative_to_its_noise_psasc_weighs_less_than_psac(self) -> None:
        """Huang et al., Eq. 7: with clip = C/s the raw weight is larger, and s times it smaller, at every norm."""
        C, s, r = 0.2, 0.5, 0.01
        found = {}
        for rule in (Psac(r), Psasc(s, r)):
            _, recorder = train(2, rule, Diagnostics(), clip=rule.sensitivity(C), noise_multiplier=1e-6)
            assert recorder is not None
            found[type(rule)] = recorder.report()["steps"]
            norms = np.linalg.norm(every_gradient(network(), data()), axis=1)
            factor = s if isinstance(rule, Psasc) else 1.0
            printed = C / (factor * norms + r / (norms + r))
            assert found[type(rule)]["weight"][0] == pytest.approx(printed.mean(), rel=1e-6)
            relative = factor * printed.mean() / C
            assert found[type(rule)]["noise_relative_weight"][0] == pytest.approx(relative, rel=1e-6)
        assert found[Psasc]["weight"][0] > found[Psac]["weight"][0]
        assert found[Psasc]["noise_relative_weight"][0] < found[Psac]["noise_relative_weight"][0]

    def test_clip_bound_of_the_step_is_used(self) -> None:
        clip = schedules.linear(0.7, 4)
        _, recorder = train(recorded=Diagnostics(), clip=clip)
        assert recorder is not None
        steps = recorder.report()["steps"]
        for step, (weight, relative) in enumerate(zip(steps["weight"], steps["noise_relative_weight"], strict=True)):
            assert relative == pytest.approx(weight / clip(step), rel=1e-6)

    def test_groups_are_clipped_by_themselves_and_measured_together(self) -> None:
        groups = (Group("0.*", clip=0.5), Group("2.*", clip=2.0))
        _, recorder = train(1, recorded=Diagnostics(), groups=groups)
        assert recorder is not None
        steps = recorder.report()["steps"]
        gradients = every_gradient(network(), data())
        norms = [np.linalg.norm(part, axis=1) for part in (gradients[:, :16], gradients[:, 16:])]
        factors = [np.minimum(1, clip / norm) for clip, norm in zip((0.35, 1.4), norms, strict=True)]
        assert steps["mean_norm"][0] == pytest.approx(np.linalg.norm(gradients, axis=1).mean(), rel=1e-6)
        assert steps["weight"][0] == pytest.approx(np.mean(factors), rel=1e-6)
        assert steps["noise_relative_weight"][0] == pytest.approx(
            np.mean([factors[0] / 0.35, factors[1] / 1.4]), rel=1e-6
        )


class TestNothingChanges:
    def test_the_weights_of_a_run_are_the_same_with_and_without(self) -> None:
        def fresh() -> nn.Module:
            torch.manual_seed(4)
            return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).double()

        state = torch.get_rng_state()
        plain, _ = train(model=fresh())
        watched, _ = train(model=fresh(), recorded=Diagnostics())
        for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
            assert torch.equal(a, b)
        torch.set_rng_state(state)
        recorder = Recorder(Diagnostics(), plain, loss, data())
        recorder._on_probe(0)
        assert torch.equal(torch.get_rng_state(), state)

    def test_masks_of_dropout_are_the_same_at_every_step(self) -> None:
        """With the same weights no norm moves, so all of them count as fallen."""
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        recorder = Recorder(Diagnostics(), model, loss, data())
        recorder._on_probe(0)
        torch.rand(3)  # another state of the generator from which dropout draws
        assert recorder._on_probe(1)["share_fell"] == 1.0


class TestOddSteps:
    def test_an_empty_batch_has_noise_and_nothing_else(self) -> None:
        model, rows = network(), data()
        mechanism = Mechanism(sampling.Poisson(1e-9), 2, noise_multiplier=1.0, batch_size=1)
        recorder = Recorder(Diagnostics(), model, loss, rows)
        recorder.learning_rate = RATE
        private = PrivateGradient(model, loss, mechanism, seed=1, observe=recorder)
        private.step(rows)
        report = recorder.report()
        assert report["steps"]["mean_norm"] == [None]
        assert report["steps"]["gradient_similarity"] == [None]
        assert report["weight"]["mean"] is None
        assert report["gradient_norm"]["histogram"] == {"edges": [], "share": []}
        assert report["steps"]["tau_squared"][0] > 0  # of the probe, which does not depend on the batch
        json.dumps(report, allow_nan=False)

    def test_examples_that_are_not_finite_are_left_out(self) -> None:
        recorder = Recorder(Diagnostics(), network(), loss, data())
        recorder(observed([3.0, math.inf, math.nan, 5.0], [0.5, 0.0, 0.0, 0.25]))
        report = recorder.report()
        assert report["steps"]["mean_norm"] == [4.0]
        assert report["weight"]["mean"] == report["steps"]["weight"][0] == 0.375

    def test_a_row_of_the_probe_that_is_not_finite_is_left_out(self) -> None:
        inputs, targets = data()
        inputs = inputs.clone()
        inputs[3] = math.nan
        model = network()
        found = Recorder(Diagnostics(probe=ROWS), model, loss, (inputs, targets))._on_probe(0)
        keep = [i for i in range(ROWS) if i != 3]
        rest = Recorder(Diagnostics(probe=ROWS), model, loss, (inputs[keep], targets[keep]))._on_probe(0)
        assert found["tau_squared"] == pytest.approx(rest["tau_squared"], rel=1e-9)

    def test_norms_are_compared_only_with_the_step_before(self) -> None:
        recorder = Recorder(Diagnostics(), network(), loss, data())
        for step in (3, 5, 6):
            recorder(observed([1.0], [1.0], step))
        assert recorder.report()["steps"]["share_fell"] == [None, None, 1.0]

    def test_without_a_learning_rate_there_is_no_parameter_similarity(self) -> None:
        recorder = Recorder(Diagnostics(), network(), loss, data())
        recorder(observed([1.0], [1.0]))
        assert recorder.report()["steps"]["parameter_similarity"] == [None]
        assert recorder.report()["steps"]["gradient_similarity"] == [pytest.approx(1.0)]

    def test_no_data_and_no_steps(self) -> None:
        recorder = Recorder(Diagnostics(), network(), loss, (torch.zeros(0, 3), torch.zeros(0)))
        assert json.dumps(recorder.report(), allow_nan=False)
        recorder(observed([1.0], [1.0]))
        assert recorder.report()["steps"]["tau_squared"] == [None]

    def test_probe_is_spread_evenly(self) -> None:
        recorder = Recorder(Diagnostics(probe=4), network(), loss, (torch.arange(31.0)[:, None], torch.arange(31.0)))
        assert recorder._probe[1].tolist() == [0, 10, 20, 30]

    def test_examples_of_several_rows(self) -> None:
        inputs, targets = data()
        pairs = inputs.view(ROWS // 2, 2, 3), targets.view(ROWS // 2, 2)
        model = network()
        found = Recorder(Diagnostics(probe=ROWS), model, loss, pairs, several_rows=True)._on_probe(0)
        gradients = every_gradient(model, (inputs, targets)).reshape(ROWS // 2, 2, -1).mean(1)
        expected = ((gradients - gradients.mean(0)) ** 2).sum() / (ROWS // 2 - 1)
        assert found["tau_squared"] == pytest.approx(expected, rel=1e-5)


class TestWritten:
    def test_to_private_alone_and_for_the_owner_alone(self, tmp_path: Path) -> None:
        _, recorder = train(recorded=Diagnostics())
        assert recorder is not None
        path = recorder.write(tmp_path)
        assert path == tmp_path / "private" / FILE
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        text = path.read_text("utf-8")
        assert json.loads(text) == recorder.report()
        assert text.index(LABEL) < 40

    def test_neither_sizes_nor_rows_are_written(self) -> None:
        """The realised size of a Poisson batch is never written; nor are the rows of the probe."""
        _, recorder = train(recorded=Diagnostics(probe=8))
        assert recorder is not None
        assert set(recorder.report()["steps"]) == {"step", *DEFINITIONS}
        assert repr(recorder) == "Recorder(4 steps, private)"

    def test_goes_on_from_its_state(self, tmp_path: Path) -> None:
        whole, first = (Recorder(Diagnostics(), network(), loss, data()) for _ in range(2))
        steps = [observed([1.0 + t, 2.0], [0.5, 0.1 * t], t, clip=2.0) for t in range(4)]
        for one in steps:
            whole(one)
        for one in steps[:2]:
            first(one)
        torch.save(first.state(), tmp_path / "state.pt")
        second = Recorder(Diagnostics(), network(), loss, data())
        second.restore(torch.load(tmp_path / "state.pt", weights_only=True))
        for one in steps[2:]:
            second(one)
        assert second.report() == whole.report()
        assert first.report()["steps"]["step"] == [0, 1]

    def test_a_state_of_another_version_is_refused(self) -> None:
        recorder = Recorder(Diagnostics(), network(), loss, data())
        state = {**recorder.state(), "columns": {"step": []}}
        with pytest.raises(ValueError, match="of another version"):
            recorder.restore(state)


class TestWindow:
    @pytest.mark.parametrize(
        ("last", "steps", "per_epoch", "first"),
        [
            (10, 2343, 60_000 / 512, 1171),
            (10, 100, 20.0, 0),
            (1, 100, 7.5, 92),
            (math.inf, 100, 5.0, 0),
            (0.5, 9, 3.0, 7),
        ],
    )
    def test_first_step(self, last: float, steps: int, per_epoch: float, first: int) -> None:
        assert Diagnostics(last_epochs=last).first_step(steps, per_epoch) == first

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"last_epochs": 0}, "last_epochs must be positive"),
            ({"last_epochs": math.nan}, "last_epochs must be a number"),
            ({"bins": 0}, "bins must be a whole number of at least 1"),
            ({"probe": 1}, "probe must be a whole number of at least 2"),
        ],
    )
    def test_refused(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Diagnostics(**fields)


def test_similarity_of_nothing_is_unknown() -> None:
    assert math.isnan(similarity({"a": torch.zeros(2)}, {"a": torch.ones(2)}))


def test_every_rule_can_be_observed() -> None:
    for kind in scaling.RULES:
        rule = kind(s=0.5) if kind is Psasc else kind()  # type: ignore[call-arg]
        _, recorder = train(1, rule, Diagnostics())
        assert recorder is not None
        assert recorder.report()["weight"]["mean"] > 0
    assert Hard in scaling.RULES
