"""`SelfScaled`: Adam whose total displacement is rescaled on the way, an optimizer for noisy gradients.

>>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
>>> optimizer = SelfScaled([weight], lr=0.5)
>>> weight.grad = torch.tensor([3.0, -4.0])
>>> optimizer.step()
>>> weight.detach()
tensor([0.5000, 1.5000])
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad import _validate
from dpgrad.errors import OptionError

__all__ = ["SelfScaled"]

PACE = 0.015  # one standard deviation of evidence changes the scale by 1.5 %: over 144 steps, chance makes a sixth
CLAMP = 3.0  # beyond three standard deviations evidence is certain, and more of it is not better
SQUARES = 0.99  # the decay of the mean square, Adam's β₂; shorter than usual, since runs are


class SelfScaled(torch.optim.Optimizer):
    """Adam whose total displacement is rescaled along the way.

    Adam's steps add up to a displacement D from the starting weights w₀: D ← D − lr·m/√v, where m and v are the running
    means of the gradients and of their squares. The weights are w₀ + s·D with one scale s. It begins at 1 and follows
    the slope of the loss in s, which is the inner product of the gradient with D: log s ← log s − 0.015·⟨g, D⟩/(‖D‖·r),
    the quotient clamped to ±3, with r² the mean of v over all coordinates. Where going further along D still lowers the
    loss, s grows; where D has gone too far, s shrinks. (The idea of Cutkosky, Defazio & Mehta, "Mechanic: a learning
    rate tuner", 2023, with a multiplicative update.)

    In a private run the noise of step t is independent of D, so ⟨g, D⟩ has the noise of one coordinate, however many
    there are: the scale of the inputs shows in it long before single coordinates can be told from noise.

    Guarantee: it reads gradients and weights alone. Given private gradients, everything here is post-processing.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        _validate.positive(lr=lr)
        if not 0 <= momentum < 1:
            raise OptionError(f"momentum must lie in [0, 1), got {_validate.shown(momentum)}")
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.param_groups[0].update(taken=0, log_scale=0.0)  # shared by all parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the parameters by their gradients; those without one stay."""
        if closure is not None:
            raise OptionError("SelfScaled uses gradients that are already computed: leave closure out")
        moving = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not moving:
            return
        for parameter in moving:
            if not self.state[parameter]:
                self.state[parameter].update(
                    {name: torch.zeros_like(parameter) for name in ("mean", "square", "moved")}
                )
        gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
        shared, evidence = self.param_groups[0], self._evidence(moving, gradients)
        before = torch.as_tensor(shared["log_scale"]).to(evidence)
        after = before - PACE * evidence
        shared.update(taken=shared["taken"] + 1, log_scale=after)
        self._move(before.exp(), after.exp())

    def _evidence(self, moving: list[nn.Parameter], gradients: list[Tensor]) -> Tensor:
        """The slope of the loss in the scale, in standard deviations of a coordinate; 0 before the first step."""
        moved = [self.state[parameter]["moved"] for parameter in moving]
        squares = [self.state[parameter]["square"] for parameter in moving]
        total = torch.stack([torch.sum(one, dtype=_kind(one)) for one in squares]).sum()
        mean = total / (sum(one.numel() for one in squares) * _filled(SQUARES, self.param_groups[0]["taken"]))
        length = (_inner(moved, moved) * mean).sqrt()
        return torch.where(length > 0, _inner(gradients, moved) / length, 0.0).clamp(-CLAMP, CLAMP)

    def _move(self, before: Tensor, after: Tensor) -> None:
        """Take Adam's step, and carry the displacement from one scale to the other."""
        taken = self.param_groups[0]["taken"]
        for group in self.param_groups:
            pace = group["lr"] / _filled(group["momentum"], taken)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean, square, moved = (self.state[parameter][name] for name in ("mean", "square", "moved"))
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                square.lerp_(parameter.grad.square(), 1 - SQUARES)
                size = (square / _filled(SQUARES, taken)).sqrt()
                step = pace * torch.where(size > 0, mean / size, 0.0)
                parameter.add_(moved * (after - before).to(moved.dtype))
                moved.sub_(step)
                parameter.sub_(step * after.to(step.dtype))


def _filled(decay: float, taken: int) -> float:
    """The weight that a running mean from zero has gathered; 1 where there is none yet."""
    return 1 - decay**taken if taken else 1.0


def _kind(one: Tensor) -> torch.dtype:
    return torch.promote_types(one.dtype, torch.float32)


def _inner(one: list[Tensor], other: list[Tensor]) -> Tensor:
    """The inner product over all tensors, in at least float32."""
    kind = _kind(one[0])
    return torch.stack([torch.sum(a.to(kind) * b.to(kind)) for a, b in zip(one, other, strict=True)]).sum()
