"""Gradients of single examples: engines for one definition, and the clipped sum made of them.

`vmap` defines the answer; `bookkeeping` computes the same from one forward and one backward pass, in one of three ways
(`ways`); `single` passes one example after another. `clipped_sum` turns a
batch into a `ClippedSum`, in pieces that fit in memory. `check` refuses models whose examples act on each other or
that an engine does not get right, `convert` replaces BatchNorm by GroupNorm, and `InnerMomentum` scales a momentum of
each example's gradients instead of the gradient.
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
