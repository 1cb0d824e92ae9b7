"""Temperature: probabilities that can be trusted, at a share of the budget, with the classes as they were."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dpgrad
from dpgrad import recipes
from dpgrad.accounting.events import Compose
from dpgrad.errors import OptionError, UnsupportedModelError
from dpgrad.training import fit as fitting
from dpgrad.training import plan, temperature


def overlapping(rows: int = 1500, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes that no model can tell apart well."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=random)
    return x, (torch.rand(rows, generator=random) < torch.sigmoid(0.6 * x[:, 0] - 0.7)).long()


def fitted(share: float | None, data, model: nn.Module | None = None, **options):
    torch.manual_seed(0)
    method = recipes.auto() if share is None else recipes.auto(temperature=share)
    given = {"epsilon": 2.0, "delta": 1e-5, "steps": 60, "seed": 3, **options}
    return dpgrad.fit(nn.Linear(8, 2) if model is None else model, data, method=method, **given)


class TestProbabilities:
    def test_they_become_honest_and_classes_stay(self):
        rows, (x, y) = overlapping(), overlapping(seed=1)
        found = fitted(0.01, rows)
        share = rows[1].double().mean()
        constant = -(share * share.log() + (1 - share) * (1 - share).log())
        with torch.no_grad():
            logits = found.model(x)
        assert found.temperature > 2
        assert F.cross_entropy(found.temperature * logits, y) > constant + 0.1  # as they would be without
        assert F.cross_entropy(logits, y) < constant
        assert bool(((found.temperature * logits).argmax(1) == logits.argmax(1)).all())
        assert any("divided by a temperature" in note for note in found.report()["notes"])

    @pytest.mark.parametrize("outputs", [1, 2])
    def test_bce_of_labels(self, outputs):
        x, y = overlapping()
        targets = torch.stack([y, y], 1)[:, :outputs].float()
        found = fitted(0.01, (x, targets), nn.Linear(8, outputs), loss="bce")
        assert found.temperature > 1.5

    def test_noise_alone_hardly_raises_it(self):
        # larger logits would be better for classes that are far apart: a wrong halving needs noise beyond 1 deviation
        x = torch.cat([torch.randn(200, 8) + 3, torch.randn(200, 8) - 3])
        found = fitted(0.01, (x, torch.arange(400) // 200), epsilon=1.0)
        assert found.temperature < 1.5

    def test_persons(self):
        x, y = overlapping(600)
        ids = torch.arange(600) // 2
        found = fitted(0.01, (x, y), steps=20, privacy=dpgrad.Privacy(units=ids, rows_per_unit=2))
        assert found.temperature >= 1
        assert found.guarantee.unit != "row"

    def test_secure_noise(self):
        made = plan.make(
            rows=600, parameters=18, epsilon=2.0, delta=1e-5, steps=5, temperature=0.01, noise="secure"
        ).temperature
        assert made.secure_values == 1


class TestBudget:
    def test_both_are_within_it(self):
        found = fitted(0.01, overlapping(400), steps=10)
        made = found.plan
        assert made.also_released == made.temperature.event()
        both = Compose((made.temperature.event(), made.mechanism.event()))
        epsilon = dpgrad.accounting.account(both, made.mechanism.relation).epsilon(1e-5)
        assert epsilon == pytest.approx(found.guarantee.epsilon)
        assert epsilon <= 2.0
        plain = plan.make(rows=400, parameters=18, epsilon=2.0, delta=1e-5, steps=10)
        assert 1 < made.mechanism.noise_multiplier / plain.mechanism.noise_multiplier < 1.01

    @pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
    def test_a_share_is_that_of_mu_squared(self, relation):
        made = plan.make(
            rows=400, parameters=18, epsilon=2.0, delta=1e-5, steps=10, temperature=0.04, relation=relation
        )
        reach = 2 if relation == "replace-one" else 1
        mu = reach * math.sqrt(made.temperature.steps) / made.temperature.noise_multiplier
        whole = dpgrad.Mechanism(
            dpgrad.sampling.FullBatch(), 1, 1.0, relation=relation, batch_size=400
        ).calibrated(2.0, 1e-5, "exact")  # fmt: skip
        assert mu == pytest.approx(0.2 * reach / whole.noise_multiplier, rel=1e-3)

    def test_the_ledger_has_it(self, tmp_path):
        ledger = dpgrad.Ledger(tmp_path / "ledger.json")
        found = fitted(0.01, overlapping(400), steps=10, ledger=ledger)
        assert ledger.guarantee(1e-5).epsilon == pytest.approx(found.guarantee.epsilon, rel=1e-6)

    def test_the_slope_of_one_example_is_cut(self, monkeypatch):
        """One row moves the noisy sums by at most the clip bound, whatever its logits are."""
        sums = []

        def taken(self, data):
            before(self, data)
            if isinstance(self.model, temperature._Scale):
                sums.append(float(self.model.log_scale.grad) * self.mechanism.divisor)

        before = dpgrad.PrivateGradient.step
        monkeypatch.setattr(dpgrad.PrivateGradient, "step", taken)
        x, y = overlapping(64)
        layer = nn.Linear(8, 2)
        made = plan.make(rows=64, parameters=18, epsilon=1e4, delta=1e-5, steps=10, temperature=0.5).temperature
        for factor in (1e4, math.nan):  # a row whose slope is not finite is dropped
            copy = nn.Linear(8, 2)
            copy.load_state_dict(layer.state_dict())
            rows = (torch.cat([factor * x[:1], x[1:]]), y)
            key = temperature.Key.from_seed(1)
            temperature.cooled(copy, copy, temperature.ScaledLoss("cross-entropy"), made, rows, key)
        assert 0.99 < abs(sums[0] - sums[made.steps]) <= 1.0001

    def test_its_noise_is_not_that_of_the_run(self, monkeypatch):
        keys = []
        made = temperature.PrivateGradient

        def kept(*args, key, **options):
            keys.append(key)
            return made(*args, key=key, **options)

        monkeypatch.setattr(temperature, "PrivateGradient", kept)
        fitted(0.01, overlapping(100), steps=5)
        assert keys[0].secret != temperature.Key.from_seed(3).secret
        assert keys[0].reproducible


class TestRuns:
    def test_memory_is_that_of_a_few_rows_and_a_run_may_be_replayed(self, tmp_path, monkeypatch):
        made, found = temperature.PrivateGradient, []

        def kept(*args, **options):
            private = made(*args, **options)
            found.append(private.work)
            return private

        monkeypatch.setattr(temperature, "PrivateGradient", kept)
        given = dpgrad.Computing(microbatch=7)
        for options in ({}, {"folder": tmp_path / "run"}, {"computing": given}):
            fitted(0.01, overlapping(100), steps=2, **options)
        assert [(work.microbatch, work.replayed) for work in found] == [(512, False), (512, True), (7, False)]

    @pytest.mark.unmeasured
    def test_a_resumed_run_finds_the_same(self, tmp_path, monkeypatch):
        whole = fitted(0.01, overlapping(400), steps=10, folder=tmp_path / "one")

        def crash(*args, **options):
            raise KeyboardInterrupt

        with monkeypatch.context() as broken, contextlib.suppress(KeyboardInterrupt):
            broken.setattr(fitting, "_finish", crash)
            fitted(0.01, overlapping(400), steps=10, folder=tmp_path / "two")
        again = fitted(0.01, overlapping(400), steps=10, folder=dpgrad.RunFolder(tmp_path / "two", resume=True))
        assert again.temperature == whole.temperature
        assert torch.equal(again.model.weight, whole.model.weight)
        held = torch.load(tmp_path / "two" / "release" / "weights.pt")
        assert torch.equal(held["weight"], whole.model.weight)

    def test_under_a_new_key_it_is_left_out(self, tmp_path, monkeypatch):
        def crash(*args, **options):
            raise KeyboardInterrupt

        with monkeypatch.context() as broken, contextlib.suppress(KeyboardInterrupt):
            broken.setattr(fitting, "_finish", crash)
            fitted(0.01, overlapping(400), steps=10, folder=tmp_path / "two")
        with pytest.warns(dpgrad.training.fit.ResumeWarning):
            again = fitted(
                0.01, overlapping(400, seed=5), steps=10, folder=dpgrad.RunFolder(tmp_path / "two", resume=True)
            )
        assert again.temperature is None

    def test_a_stopped_run_has_none(self):
        found = fitted(0.01, overlapping(100), steps=10, callbacks=lambda progress: progress.step == 4)
        assert found.stopped == "interrupted"
        assert found.temperature is None

    def test_modes_and_gradients_stay(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        fitted(0.01, overlapping(100), model, steps=4)
        assert model[1].training
        assert all(parameter.requires_grad for parameter in model.parameters())


class TestRefused:
    @pytest.mark.parametrize(
        ("model", "options", "error", "said"),
        [
            (nn.Linear(8, 1), {"loss": "squared"}, OptionError, "class probabilities"),
            (nn.Sequential(nn.Linear(8, 2), nn.Tanh()), {}, UnsupportedModelError, "end it with one"),
            (nn.Linear(8, 2), {"epsilon": None, "privacy": dpgrad.Privacy(noise_multiplier=3.0)}, OptionError, "share"),
        ],
    )
    def test_before_a_step(self, model, options, error, said):
        x, y = overlapping(100)
        targets = y.float() if options.get("loss") == "squared" else y
        with pytest.raises(error, match=said):
            fitted(0.01, (x, targets), model, **options)

    @pytest.mark.parametrize("share", [0, 1, "1%", -0.1])
    def test_a_share(self, share):
        with pytest.raises(OptionError, match="temperature"):
            recipes.auto(temperature=share)
