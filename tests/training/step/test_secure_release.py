"""Secure noise in a step: what is written follows from rounded sums and whole numbers alone, however it is computed."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpgrad.distributed.ranks import Ranks
from dpgrad.errors import RunError
from dpgrad.mechanism import chacha, sampling, secure
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.randomness import secure_noise
from dpgrad.randomness.device_noise import Segment
from dpgrad.training.private import PrivateGradient
from dpgrad.training.step.release import Exchanged, Figures, SecureOnDevice, SecureOnHost, release
from replayed import on_cpu

GROUPS = (Group("0.*", clip=0.5), Group("2.*", noise_multiplier=2.0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def values(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def mechanism(model: nn.Module, **options: Any) -> Mechanism:
    settings = {"noise_multiplier": 0.7, "clip": 0.3, "batch_size": 8, "secure_values": values(model)}
    return Mechanism(sampling.Poisson(0.1), 6, **{**settings, **options})


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum(1)


def private(model: nn.Module, **options: Any) -> PrivateGradient:
    named = {
        name: options.pop(name)
        for name in ("groups", "noise_multiplier", "secure_values", "adaptive_clip")
        if name in options
    }
    return PrivateGradient(model, losses, mechanism(model, **named), **{"seed": 3, **options})


def rows() -> Tensor:
    return torch.randn(80, 4, generator=torch.Generator().manual_seed(1)).double()


def grads(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


class TestStep:
    def test_gradients_are_rounded_sums_and_whole_noise(self) -> None:
        """The clipped sum that the step shows, rounded here, plus the stream's numbers: ``.grad`` to the bit."""
        model, seen = network(), []
        step = private(model, groups=GROUPS, observe=seen.append)
        for _ in range(2):
            step.step(rows())
        for observed in seen:
            for place, (prefix, clip) in enumerate((("0.", 0.15), ("2.", 0.3))):
                names = [name for name in observed.clipped_sum if name.startswith(prefix)]
                std = clip * 0.7 * (1.0 if place == 0 else 2.0)
                unit = secure.grid(std, clip, sum(observed.clipped_sum[name].numel() for name in names))
                for name in names:
                    total = observed.clipped_sum[name].numpy()
                    noise = secure.draw(step.key, 0, total.size, "noise", name, str(observed.step))
                    expected = (secure.rounded(total, unit) + noise.reshape(total.shape)) * unit / 8
                    assert np.array_equal(observed.noisy[name].numpy(), expected)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("capture", [True, False])
    def test_on_a_cuda_device(self, capture: bool) -> None:
        """The same of a captured step, for several batches."""
        model, seen = network().cuda(), []
        step = private(model, observe=seen.append, capture=capture)
        for _ in range(4):
            step.step(rows().cuda())
            written = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
            unit = secure.grid(0.7 * 0.3, 0.3, 43)
            for name, total in seen[-1].clipped_sum.items():
                noise = secure.draw(step.key, 0, total.numel(), "noise", name, str(seen[-1].step))
                expected = (secure.rounded(total.cpu().numpy(), unit) + noise.reshape(total.shape)) * unit / 8
                assert np.array_equal(written[name].numpy(), expected)

    def test_what_rounding_hides_leaves_no_trace(self) -> None:
        """Sums that round to the same numbers give the same gradients; with ordinary noise they do not."""
        unit, noise = 1e-9, secure_noise.drawn(Key.from_seed(7), 0, "a", 1000)
        totals = torch.round(torch.randn(1000).double() / unit) * unit
        moved = totals + 0.3 * unit * torch.rand(1000).double()
        assert (totals != moved).any()
        assert torch.equal(secure_noise.added(totals, noise, unit), secure_noise.added(moved, noise, unit))

    def test_sums_beyond_the_grid_are_cut_as_on_a_cpu(self) -> None:
        """Where no number of units stands for a sum, one does not show how far beyond it is."""
        totals, noise = torch.tensor([np.nan, np.inf, -np.inf, 1e300, -1e18, 2.6]).double(), torch.ones(6).double()
        expected = (secure.rounded(totals.numpy(), 0.5) + 1) * 0.5
        assert np.array_equal(secure_noise.added(totals, noise, 0.5).numpy(), expected)
        assert float(np.abs(expected).max()) <= (secure.LIMIT + 1) * 0.5

    def test_a_part_of_a_parameter_gets_its_part_of_the_noise(self) -> None:
        whole = secure_noise.drawn(Key.from_seed(7), 3, "a", 9)
        assert torch.equal(secure_noise.drawn(Key.from_seed(7), 3, "a", 4, start=5), whole[5:])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_other_types(self, dtype: torch.dtype) -> None:
        model = network().to(dtype)
        step = private(model, engine="vmap")
        step.step(rows().to(dtype))
        assert grads(model).dtype == dtype
        assert grads(model).isfinite().all()

    def test_ledger_is_the_mechanisms_event(self) -> None:
        model = network()
        step = private(model)
        for _ in range(6):
            step.step(rows())
        assert step.ledger == step.mechanism.event()
        assert step.key.secure

    def test_steps_are_replayed_to_the_bit(self) -> None:
        key = Key.fresh()
        model = network()
        step = private(model, seed=None, key=key)
        found = []
        for _ in range(3):
            step.step(rows())
            found.append(grads(model).clone())
        state = step.state()
        step.step(rows())
        again = network()
        later = private(again, seed=None, key=key)
        later.restore(state)
        later.step(rows())
        assert torch.equal(grads(again), grads(model))
        assert not torch.equal(found[0], found[1])

    def test_replayed_and_called_steps_are_equal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain, replayed = network(), network()
        follows: dict[str, Any] = {"groups": GROUPS, "adaptive_clip": AdaptiveClip(), "secure_values": 45}
        called = private(plain, capture=False, **follows)
        on_cpu(monkeypatch)
        monkeypatch.setattr("dpgrad.training.step.release.SecureOnHost", on_a_device)
        as_graphs = private(replayed, **follows)
        for _ in range(4):
            called.step(rows())
            as_graphs.step(rows())
            torch.testing.assert_close(grads(replayed), grads(plain), rtol=0, atol=1e-9)

    def test_counts_are_whole_numbers_of_their_grid(self) -> None:
        """The bound follows Σ(bᵢ − ½), rounded to its grid, plus one number of the stream."""
        model, seen = network(), []
        step = private(model, adaptive_clip=AdaptiveClip(0.5, 1.0), secure_values=44, observe=seen.append)
        step.step(rows())
        run, (first, second) = step.mechanism, (step.clip_bounds[0][0], step.clip_after(1))
        norms = seen[0].norms
        count = float(((norms <= first).double() - 0.5).sum())
        unit = secure.grid(run.count_std_at(0), 0.5, 1)
        drawn = int(secure.draw(step.key, 0, 1, "noise", ".clip", "0")[0])
        noisy = (round(count / unit) + drawn) * unit
        assert second == AdaptiveClip(0.5, 1.0).following(first, noisy, run.divisor)
        assert step.ledger.event.distance == secure.inexact(44)  # type: ignore[union-attr]

    def test_an_empty_batch_is_noise_alone(self) -> None:
        model = network()
        step = PrivateGradient(
            model, losses, Mechanism(sampling.Poisson(1e-9), 2, 1.0, batch_size=1, secure_values=values(model)), seed=1
        )
        with pytest.warns(UserWarning, match="of the 80 rows given are drawn"):
            step.step(rows())
        unit = secure.grid(1.0, 1.0, values(model))
        expected = secure.draw(step.key, 0, 3, "noise", "2.bias", "0") * unit
        assert np.array_equal(model[2].bias.grad.numpy(), expected)  # type: ignore[union-attr]


def on_a_device(parameters: Any, figures: Any, key: Key, divisor: float) -> SecureOnDevice:
    return SecureOnDevice(parameters, figures, key, divisor, torch.device("cpu"))


class TestRelease:
    def test_host_and_device_write_the_same(self) -> None:
        one, other = network(), network()
        run = mechanism(one, groups=GROUPS)
        placed = {name: int(name.startswith("2.")) for name, _ in one.named_parameters()}
        key = Key.from_seed(5).secured()
        host = SecureOnHost(dict(one.named_parameters()), Figures(run, placed), key, run.divisor)
        device = on_a_device(dict(other.named_parameters()), Figures(run, placed), key, run.divisor)
        for step in (0, 4):
            for made in (host, device):
                generator = torch.Generator().manual_seed(step)
                totals = {n: torch.randn(p.shape, generator=generator).double() for n, p in one.named_parameters()}
                made.at(step)
                for part in made.parts:
                    made.add(part, part.joined(totals))
                made.finish()
                made.show()
            assert torch.equal(grads(one), grads(other))

    def test_the_source_follows_from_the_mechanism(self) -> None:
        model = network()
        run = mechanism(model)
        assert isinstance(release(model, run, Figures(run, None), Key.from_seed(1), Ranks.of(None)), SecureOnHost)
        ordinary = mechanism(model, secure_values=0)
        assert not PrivateGradient(model, losses, ordinary, key=Key.fresh().secured()).key.secure

    def test_nothing_is_written_without_noise(self) -> None:
        """Before a step is set, and where a rank did not draw the noise of its shard while sums travelled."""
        parameters, key = dict(network().named_parameters()), Key.from_seed(5)
        segment, one = Segment(("2.bias",), 3, 0), torch.ones((), dtype=torch.float64)
        stream = secure_noise.SecureStream(parameters, [segment], key.secured(), "cpu")
        with pytest.raises(RunError, match=r"at\(step\) before write"):
            stream.write(segment, torch.empty(3), one, torch.zeros(3), one)
        run = mechanism(network(), secure_values=0)
        shard = Exchanged(parameters, Figures(run, None), key, run.divisor, Ranks.of(None))
        with pytest.raises(ValueError, match="argument 2 is longer"):
            shard._on_host(torch.zeros(43, dtype=torch.float64), 0)


class TestRefusals:
    def test_values_that_are_not_accounted_for(self) -> None:
        with pytest.raises(ValueError, match="secure_values must be at least 43, the number of values that the model"):
            private(network(), secure_values=42)

    def test_parameters_that_are_trained_later(self) -> None:
        model = network()
        model[0].weight.requires_grad_(False)
        step = private(model, secure_values=23)
        step.step(rows())
        model[0].weight.requires_grad_(True)
        with pytest.raises(ValueError, match="secure_values must be at least 43"):
            step.step(rows())

    def test_counts_of_a_clip_bound_that_follows_the_norms(self) -> None:
        with pytest.raises(ValueError, match=r"secure_values must be at least 45, .* and its 2 noisy counts"):
            private(network(), groups=GROUPS, adaptive_clip=AdaptiveClip(), secure_values=44)

    def test_too_coarse_for_a_noisy_count(self) -> None:
        with pytest.raises(ValueError, match="too coarse for 1 values"):
            mechanism(network(), adaptive_clip=AdaptiveClip(noise=1e9))

    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chacha, "find_spec", lambda _: None)
        with pytest.raises(ValueError, match=r"pip install 'dpgrad\[secure\]'"):
            private(network())
