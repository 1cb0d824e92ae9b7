"""`SelfScaled`: momentum whose total displacement is rescaled on the way, an optimizer for noisy gradients.

>>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
>>> optimizer = SelfScaled([weight], lr=0.5)
>>> weight.grad = torch.tensor([3.0, -4.0])
>>> optimizer.step()
>>> weight.detach()
tensor([0.5757, 1.5657])
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad import _validate
from dpgrad.errors import OptionError

__all__ = ["SelfScaled"]

PACE = 0.03  # one standard deviation of evidence changes the scale by 3 %: over 144 steps, chance makes a third
CLAMP = 3.0  # beyond three standard deviations evidence is certain, and more of it is not better
SQUARES = 0.99  # the decay of the mean square, Adam's second moment for all coordinates together


class SelfScaled(torch.optim.Optimizer):
    """Momentum on normalized gradients, whose total displacement is rescaled along the way.

    Ordinary steps add up to a displacement D from the starting weights w₀: D ← D − lr·m/√v, where m is the running mean
    of the gradients and v that of their mean square over *all* coordinates. The weights are w₀ + s·D with one scale s.
    It begins at 1 and follows the slope of the loss in s, which is the inner product of the gradient with D:
    log s ← log s − 0.03·⟨g, D⟩/(‖D‖√v), the quotient clamped to ±3. Where going further along D still lowers the
    loss, s grows; where D has gone too far, s shrinks. (The idea of Cutkosky, Defazio & Mehta, "Mechanic: a learning
    rate tuner", 2023, with a multiplicative update.)

    In a private run the noise of step t is independent of D, so that ⟨g, D⟩ has the noise of one coordinate however
    many there are: the scale of the inputs shows in it long before single coordinates can be told from noise.

    Guarantee: it reads gradients and weights alone. Given private gradients, everything here is post-processing.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        _validate.positive(lr=lr)
        if not 0 <= momentum < 1:
            raise OptionError(f"momentum must lie in [0, 1), got {_validate.shown(momentum)}")
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.param_groups[0].update(taken=0, log_scale=0.0, square=0.0)  # shared by all parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the parameters by their gradients; those without one stay."""
        if closure is not None:
            raise OptionError("SelfScaled takes gradients that are there already: leave closure out")
        moving = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not moving:
            return
        shared, like = self.param_groups[0], _inner(moving[:1], moving[:1])
        for parameter in moving:
            if not self.state[parameter]:
                self.state[parameter].update(mean=torch.zeros_like(parameter), moved=torch.zeros_like(parameter))
        gradients = [p.grad for p in moving if p.grad is not None]
        moved = [self.state[parameter]["moved"] for parameter in moving]
        before, square = (torch.as_tensor(shared[name]).to(like) for name in ("log_scale", "square"))
        after = before - PACE * self._evidence(gradients, moved, square / _filled(SQUARES, shared["taken"]))
        count = sum(gradient.numel() for gradient in gradients)
        square = SQUARES * square + (1 - SQUARES) * _inner(gradients, gradients) / count
        shared.update(taken=shared["taken"] + 1, log_scale=after, square=square)
        self._move(before.exp(), after.exp(), (square / _filled(SQUARES, shared["taken"])).sqrt())

    @staticmethod
    def _evidence(gradients: list[Tensor], moved: list[Tensor], square: Tensor) -> Tensor:
        """The slope of the loss in the scale, in standard deviations of a coordinate; 0 before the first step."""
        length = (_inner(moved, moved) * square).sqrt()
        return torch.where(length > 0, _inner(gradients, moved) / length, 0.0).clamp(-CLAMP, CLAMP)

    def _move(self, before: Tensor, after: Tensor, size: Tensor) -> None:
        """Step by the momentum over ``size``, and carry the displacement from one scale to the other."""
        taken = self.param_groups[0]["taken"]
        for group in self.param_groups:
            pace = torch.where(size > 0, group["lr"] / (_filled(group["momentum"], taken) * size), 0.0)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean, moved = self.state[parameter]["mean"], self.state[parameter]["moved"]
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.add_(moved * (after - before).to(moved.dtype))
                step = mean * pace.to(mean.dtype)
                moved.sub_(step)
                parameter.sub_(step * after.to(step.dtype))


def _filled(decay: float, taken: int) -> float:
    """The weight that a running mean from zero has gathered; 1 where there is none yet."""
    return 1 - decay**taken if taken else 1.0


def _inner(one: list[Tensor], other: list[Tensor]) -> Tensor:
    """The inner product over all tensors, in at least float32."""
    kind = torch.promote_types(one[0].dtype, torch.float32)
    return torch.stack([torch.sum(a.to(kind) * b.to(kind)) for a, b in zip(one, other, strict=True)]).sum()
