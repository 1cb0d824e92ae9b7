"""`fit` with ``noise="secure"``: what it costs and reports, and that a resumed run goes on to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpgrad
from dpgrad import recipes
from dpgrad.accounting.events import Inexact, Repeat
from dpgrad.accounting.inexact import parted
from dpgrad.mechanism import normal, secure
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.keys import Key
from dpgrad.training.plan import make


def rows() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs[:, 0] > 0).long()


def fitted(noise: str = "secure", **options: Any) -> dpgrad.Fitted:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "method": "dpsgd", "delta": 1e-3, "steps": 6, "batch_size": 20, "seed": 3,
        "privacy": dpgrad.Privacy(noise=noise, noise_multiplier=1.0, accountant="rdp"),
    }  # fmt: skip
    return dpgrad.fit(nn.Linear(3, 2), rows(), **{**settings, **options})


def weights(done: dpgrad.Fitted) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in done.model.parameters()])


def test_what_it_costs_and_reports() -> None:
    done, ordinary = fitted(), fitted("ordinary")
    assert isinstance(done.event, Repeat)
    assert isinstance(done.event.event, Inexact)
    assert done.event.event.distance == secure.inexact(8)
    assert done.guarantee.epsilon == pytest.approx(ordinary.guarantee.epsilon, rel=1e-9)
    assert done.report()["noise"] == {"source": "secure", "distance": pytest.approx(48 * secure.DISTANCE)}
    assert ordinary.report()["noise"] == {"source": "ordinary", "distance": 0.0}
    said = "attacks on floating-point noise, and on its generators, which are not cryptographic"
    assert said in ordinary.outside
    assert said not in done.outside
    assert "secure source: ChaCha20" in done.report().text()
    assert not torch.equal(weights(done), weights(ordinary))


@pytest.mark.parametrize(
    "method",
    [recipes.dpsgd(), recipes.dpsgd(adaptive_clip=AdaptiveClip()), recipes.auto(temperature=0.1)],
    ids=["gradients", "adaptive clip", "temperature"],
)
def test_every_value_is_secure_and_paid_for_once(method: dpgrad.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    fill = secure.fill

    def spied(key: Key, wanted: Any, threads: int = 1) -> None:
        wanted = list(wanted)
        drawn.extend(len(each.values) for each in wanted)
        fill(key, wanted, threads)

    def refused(*given: object) -> None:
        raise AssertionError("ordinary noise was drawn, or ordinary batches")

    monkeypatch.setattr(secure, "fill", spied)
    monkeypatch.setattr(normal, "fill", refused)
    monkeypatch.setattr("dpgrad.mechanism.sampling._philox", refused)
    privacy = dpgrad.Privacy(noise="secure")
    done = fitted(method=method, privacy=privacy, epsilon=50.0, seed=None)
    assert parted(done.guarantee.event)[1] == pytest.approx(sum(drawn) * secure.DISTANCE, rel=1e-9)
    assert len(drawn) >= 6


def test_noisy_counts_are_paid_for() -> None:
    done = fitted(method=dpgrad.recipes.dpsgd(clip=2.0, adaptive_clip="0.5"))
    assert done.event.event.distance == secure.inexact(9)  # type: ignore[union-attr]
    assert len({bounds[0] for bounds in done.clip_bounds}) == 6


def test_a_run_that_goes_on_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    fitted(folder=tmp_path / "run", callbacks=lambda seen: seen.step == 3)
    done = fitted(folder=dpgrad.RunFolder(tmp_path / "run", resume=True))
    assert torch.equal(weights(done), weights(fitted()))
    assert done.event == done.plan.mechanism.event()


def test_another_source_is_another_key(tmp_path: Path) -> None:
    fitted(folder=tmp_path / "run", callbacks=lambda seen: seen.step == 3)
    with pytest.raises(dpgrad.DpgradError, match="mechanism"):
        fitted("ordinary", folder=dpgrad.RunFolder(tmp_path / "run", resume=True))


def test_unknown_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="noise must be one of ordinary, secure"):
        dpgrad.Privacy(noise="loud")


def test_a_plan_needs_the_number_of_parameters() -> None:
    options: dict[str, Any] = {"rows": 60, "steps": 6, "batch_size": 20, "delta": 1e-3, "noise_multiplier": 1.0}
    assert make("dpsgd", parameters=8, noise="secure", **options).mechanism.secure_values == 8
    with pytest.raises(ValueError, match="adds to delta for each trained value"):
        make("dpsgd", noise="secure", **options)
