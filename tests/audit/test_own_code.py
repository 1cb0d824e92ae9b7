"""Code that is not dpgrad's: a loop written out, two processes, and scripts of Opacus, with and without a fault."""

import copy
import math
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import planted
from dpgrad import Relation, audit, sampling, schedules
from dpgrad.audit import sensitivity
from dpgrad.audit.trials import PrivateSteps, Trial, UnderAudit
from dpgrad.errors import AuditError, OptionError

MECHANISM = planted.poisson(steps=8)


def audited(run: Any, checks: list[str], mechanism: Any = MECHANISM, steps: int = 32) -> audit.Audit:
    return audit.step(
        planted.mlp(), planted.cross_entropy, mechanism, planted.rows(), run=run, checks=checks, canaries=1, steps=steps
    )


def test_honest_loop_is_not_refuted() -> None:
    audited(planted.own_loop, ["sensitivity", "noise", "sampling"], steps=16).assert_held()


def test_loop_with_less_noise_is_refuted() -> None:
    assert audited(partial(planted.own_loop, noise_factor=0.8), ["noise"]).refuted


def test_loop_that_draws_rows_by_their_values_is_refuted() -> None:
    found = audited(partial(planted.own_loop, by_value=True), ["sensitivity"])
    assert found.refuted
    assert "a row with other values is not in the same batches" in found.words


def test_loop_that_keeps_rows_that_are_not_finite_is_refuted() -> None:
    """The loop is honest about rows that are finite."""
    found = audited(planted.own_loop, ["overflow"])
    assert found.refuted
    assert "a row whose gradient is inf makes the release one that is not finite" in found.words


def test_loop_without_a_seed_cannot_be_audited() -> None:
    def unseeded(trial: Trial) -> list[dict[str, Tensor]]:
        return [{name: torch.randn_like(p) for name, p in trial.model.named_parameters()} for _ in trial.steps]

    with pytest.raises(AuditError, match=r"different gradients for the same trial: draw all randomness from"):
        audited(unseeded, ["sensitivity"])


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda trial: [], "run must return the gradients of 2 steps, got 0"),
        (lambda trial: [{} for _ in trial.steps], "left no gradient of 0.weight"),
        (
            lambda trial: [{n: p * torch.nan for n, p in trial.model.named_parameters()} for _ in trial.steps],
            "not finite",
        ),
    ],
)
def test_what_a_run_must_return(run: Any, said: str) -> None:
    with pytest.raises(AuditError, match=said):
        audited(run, ["sensitivity"])


def test_run_and_options_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="give run, or rule and options"):
        audit.step(
            planted.mlp(), planted.cross_entropy, MECHANISM, planted.rows(), run=planted.own_loop, several_rows=True
        )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[planted.TwoRanks]:
    found = planted.TwoRanks(Path(tmp_path_factory.mktemp("ranks")))
    yield found
    found.close()


class TestTwoProcesses:
    def test_honest_ranks_are_not_refuted(self, ranks: planted.TwoRanks) -> None:
        ranks.lost = None
        audited(ranks, ["noise"]).assert_held()

    def test_lost_noise_of_one_rank_is_refuted(self, ranks: planted.TwoRanks) -> None:
        ranks.lost = 1
        assert audited(ranks, ["noise"]).refuted


class TestTwoRanksOfDpgrad:
    """dpgrad's own steps on two real processes, which meet, exchange their sums and each add the noise of a part."""

    def test_honest_ranks_are_not_refuted(self, ranks: planted.TwoRanks) -> None:
        ranks.lost = "none"
        audited(ranks, ["noise"], steps=16).assert_held()

    @pytest.mark.exhaustive
    def test_no_row_of_honest_ranks_contributes_more_than_the_clip_bound(self, ranks: planted.TwoRanks) -> None:
        ranks.lost = "none"
        audited(ranks, ["sensitivity"]).assert_held()

    def test_lost_noise_of_one_rank_is_refuted(self, ranks: planted.TwoRanks) -> None:
        ranks.lost = "noise lost"
        assert audited(ranks, ["noise"], steps=16).refuted

    def test_a_rank_that_does_not_clip_is_refuted(self, ranks: planted.TwoRanks) -> None:
        ranks.lost = "clip not applied"
        found = audited(ranks, ["sensitivity"])
        assert found.refuted
        assert "of the clip bound" in found.words


def opacus_script(trial: Trial, *, ghost: bool = False, realised: bool = False) -> list[dict[str, Tensor]]:
    """A training script of Opacus with a clip bound that falls, at learning rate 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.grad_sample import GradSampleModule
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.schedulers import LambdaGradClip
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
        from opacus.utils.uniform_sampler import UniformWithReplacementSampler

        mechanism, model = trial.mechanism, copy.deepcopy(trial.model)
        clip = mechanism.clip_at(0)
        module: Any = (
            GradSampleModuleFastGradientClipping(model, max_grad_norm=clip, use_ghost_clipping=True)
            if ghost
            else GradSampleModule(model)
        )
        kind = DPOptimizerFastGradientClipping if ghost else DPOptimizer
        optimizer = kind(
            torch.optim.SGD(module.parameters(), lr=0.0), noise_multiplier=mechanism.noise_multiplier,
            max_grad_norm=clip, expected_batch_size=mechanism.divisor, loss_reduction="mean",
            generator=torch.Generator().manual_seed(trial.seed),
        )  # fmt: skip
        last = mechanism.steps - 1
        scheduler = LambdaGradClip(
            optimizer, scheduler_function=lambda t: mechanism.clip_at(min(max(t, 0), last)) / clip
        )
        count = planted._length(trial.data)
        sampler = UniformWithReplacementSampler(
            num_samples=count, sample_rate=1.0 if trial.full_batch else 1 / mechanism.sampler.steps_per_epoch,
            generator=torch.Generator().manual_seed(trial.seed + 1), steps=trial.steps.stop,
        )  # fmt: skip
        found = []
        for taken in sampler:
            if realised:
                optimizer.expected_batch_size = max(1, len(taken))
            optimizer.zero_grad()
            losses = trial.loss(module, _picked(trial.data, taken))
            if ghost:
                DPTensorFastGradientClipping(module, optimizer, losses, loss_reduction="mean").backward()
            else:
                losses.mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return found[trial.steps.start :]


def _picked(data: Any, rows: list[int]) -> Any:
    return tuple(_picked(part, rows) for part in data) if isinstance(data, tuple) else data[rows]


FALLING = planted.poisson(
    steps=8, sampler=sampling.FullBatch(), clip=schedules.geometric(1.0, 0.9, 0.5), relation=Relation.ADD_REMOVE
)


@pytest.mark.filterwarnings("ignore")
class TestOpacus:
    def test_script_without_a_fault_is_not_refuted(self) -> None:
        audited(opacus_script, ["sensitivity", "noise"], FALLING).assert_held()

    def test_clip_scheduler_that_changes_one_copy_is_refuted(self) -> None:
        """With ghost clipping the scheduler changes the bound that noise is made from, not the one that clips."""
        found = audited(partial(opacus_script, ghost=True), ["sensitivity"], FALLING)
        assert found.refuted
        assert "of the clip bound" in found.words

    def test_division_by_the_realised_size_is_refuted(self) -> None:
        assert audited(partial(opacus_script, realised=True), ["sensitivity"], MECHANISM).refuted

    def test_sampler_is_not_refuted(self) -> None:
        audited(opacus_script, ["sampling"], MECHANISM, steps=8).assert_held()


def bump(model: torch.nn.Module, batch: tuple[Tensor]) -> Tensor:
    """A loss whose gradient is small at the rows as they are and vanishes far from them."""
    (inputs,) = batch
    found: Tensor = model(inputs)[:, 0] * torch.exp(-inputs.square().sum(1) / 8)
    return found


def test_gradient_ascent_finds_rows_that_contribute_more_than_real_ones_at_any_scale() -> None:
    model, inputs = planted.seeded(lambda: torch.nn.Linear(4, 1, bias=False)), 0.02 * planted.rows()[0]
    target = UnderAudit.of(model, bump, MECHANISM, (inputs,), PrivateSteps(), 0)

    def length(row: tuple[Tensor, ...]) -> float:
        (found,) = torch.autograd.grad(bump(model, row).sum(), [model.weight])
        return float(found.norm())

    real = (inputs[:1],)
    (found,) = sensitivity.ascended(target, real)
    assert length((found,)) > 1.1 * max(length((inputs[:1] * scale,)) for scale in sensitivity.SCALES)
    assert length((found,)) > 0.9 * 2 * math.exp(-0.5)  # the largest there is
    said = audited(planted.own_loop, ["sensitivity"])
    assert not any("ascent" in left for left in said.not_tried)
