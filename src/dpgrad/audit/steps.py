"""The step audit: sensitivity, noise, sampling and price of private steps, from what they leave in ``.grad``."""

from collections.abc import Collection
from typing import Any

from torch import nn

from dpgrad import _validate
from dpgrad.audit import keyed, moving, noise, price, sampled, sensitivity
from dpgrad.audit.claims import AnyClaim, Claimed, claimed
from dpgrad.audit.record import Audit, Check, judged
from dpgrad.audit.trials import PrivateSteps, Stepper, UnderAudit
from dpgrad.errors import OptionError
from dpgrad.grads.scaling import ScaleRule
from dpgrad.grads.sums import Loss
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.training.losses import loss_named

__all__ = ["CHECKS", "step"]

CHECKS = ("sensitivity", "overflow", "noise", "sampling", "price", "ledger", "keys")
_NOT_TRIED = (
    "rows and weights other than those tried",
    "timing and errors",
    "attacks on floating-point noise",
    "whether randomness without a seed is as good as with one, but for keys that come again",
)


def step(
    model: nn.Module,
    loss: str | Loss,
    mechanism: Mechanism,
    data: Any,
    *,
    rule: ScaleRule | None = None,
    run: Stepper | None = None,
    claim: AnyClaim | None = None,
    canaries: int = 3,
    steps: int = 100,
    level: float = 1e-3,
    checks: Collection[str] = CHECKS,
    seed: int = 0,
    **options: Any,
) -> Audit:
    """Audit private steps: try to refute that they are what ``mechanism`` says and cost what ``claim`` says.

    Without ``run`` the steps are those of `PrivateGradient` with ``rule`` and ``options`` (``inner_momentum``,
    ``average``, ``several_rows``, ``augment``, ``engine``, ``microbatch``). ``run`` is any other code: a function of a
    `Trial` that returns what its steps leave in ``.grad``. ``data`` are some rows as tensors. ``claim`` is what the
    whole run is said to cost, by default what the pld accountant certifies for ``mechanism``. ``canaries`` real rows
    are tried at several scales, as are the gradient canary and rows found by gradient ascent, and noise and batches of
    ``steps`` steps are looked at. All checks together refute a true claim with probability at most ``level``; why is
    in docs/proofs/audit.md.

    The model is copied, and its dropout is turned off. The result is made from ``seed`` and is not for release.

    >>> import torch
    >>> from dpgrad import sampling
    >>> model, rows = nn.Linear(2, 1), (torch.randn(20, 2), torch.randn(20))
    >>> found = step(model, "squared", Mechanism(sampling.FullBatch(), 4, 2.0, batch_size=20), rows, steps=20)
    >>> found.refuted, found.words[:44]
    (False, 'Not refuted. This does not prove the claim; ')
    """
    _validate.open_unit(level=level)
    _validate.whole(least=1, canaries=canaries)
    _validate.whole(least=2, steps=steps)
    _validate.whole(seed=seed)
    for name in checks:
        _validate.one_of(CHECKS, check=name)
    if run is not None and (options or rule is not None):
        raise OptionError("give run, or rule and options of dpgrad's own step: run brings its own")
    moving.refuse_learning_rate(mechanism)
    stepper: Stepper = PrivateSteps(rule, dict(options)) if run is None else run
    target = UnderAudit.of(model, loss_named(loss), mechanism, data, stepper, seed)
    return _Auditor(target, level, tuple(checks), _claimed(mechanism, claim)).audit(canaries, steps)


def _claimed(mechanism: Mechanism, claim: AnyClaim | None) -> Claimed:
    """The claim, by default that of the mechanism; read once, before anything is run."""
    return claimed(mechanism if claim is None else claim)


class _Auditor:
    """The checks that were asked for, one after another."""

    def __init__(self, target: UnderAudit, level: float, wanted: tuple[str, ...], claim: Claimed) -> None:
        self.target, self.level, self.wanted, self.claim = target, level, wanted, claim
        self.checks: list[Check] = []
        self.not_tried: list[str] = [name for name in CHECKS if name not in wanted]

    def audit(self, canaries: int, steps: int) -> Audit:
        target, wanted = self.target, self.wanted
        largest = most = None
        if "sensitivity" in wanted:
            found = sensitivity.check(target, canaries)
            self.checks.append(found.check)
            self.not_tried += found.not_tried
            largest = found.largest
        if "overflow" in wanted:
            self.checks.append(sensitivity.overflow(target))
        if "noise" in wanted:
            seen = noise.check(target, steps, self.level / 7)
            self.checks += seen.checks
            self.not_tried += seen.not_tried
            most = seen.most
        if "sampling" in wanted:
            if isinstance(target.mechanism.sampler, sampling.FullBatch):
                self.not_tried.append("sampling (full batches)")
            elif (drawn := sampled.check(target, 2 * steps)) is not None:
                self.checks.append(drawn)
        if "price" in wanted:
            self.checks.append(price.check(target, self.claim))
        if "ledger" in wanted and target.ours is not None:
            self.checks.append(price.ledger(target, target.ours))
        if "keys" in wanted and target.ours is not None:
            self.checks.append(keyed.check(target, target.ours))
        return self._record(largest, most)

    def _record(self, largest: float | None, most: float | None) -> Audit:
        target = self.target
        claimed_multiplier = target.mechanism.multiplier_at(0)
        measured = None
        if most is not None and largest:
            measured = claimed_multiplier * most / largest
        return Audit(
            "step", self.claim.words, self.level, judged(self.checks, self.level),
            (*self.not_tried, *_also_left_out(target), *_NOT_TRIED), claimed_multiplier, measured, seed=target.seed,
            guarantee=self.claim.guarantee,
        )  # fmt: skip


def _also_left_out(target: UnderAudit) -> tuple[str, ...]:
    dropout = any(isinstance(module, nn.modules.dropout._DropoutNd) for module in target.model.modules())
    return ("dropout (turned off)",) if dropout else ()
