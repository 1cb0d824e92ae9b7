"""Per-example gradients: the engines, and the clipped sum of a batch.

`vmap` defines the result. `bookkeeping` computes the same from one forward and one backward pass, in one of three ways
(`ways`). `single` passes one example at a time. `clipped_sum` returns the `ClippedSum` of a batch, in pieces that fit
in memory. `check` refuses models that mix examples or that an engine gets wrong. `convert` replaces BatchNorm by
GroupNorm. `InnerMomentum` scales a momentum of each example's gradients in place of the gradient.

>>> import torch
>>> from dpgrad import grads, scaling
>>> model = torch.nn.Linear(1, 1, bias=False)
>>> rows = torch.tensor([[0.5], [2.0]])
>>> total = grads.clipped_sum(model, lambda model, x: model(x)[:, 0], rows, lambda norms: scaling.Hard()(norms, 1.0))
>>> round(float(total.sums["weight"]), 2)  # gradients 0.5 and 2; the second is shortened to 1
1.5
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute
from dpgrad.grads.accumulate import ENGINES, Engine, clipped_sum
from dpgrad.grads.check import check
from dpgrad.grads.convert import convert
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.sums import ClippedSum
from dpgrad.grads.ways import Way

__all__ = ["ENGINES", "ClippedSum", "Engine", "InnerMomentum", "Way", "check", "clipped_sum", "convert"]

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
