"""What an engine returns, and the words the engines share.

A *row* is one entry of a batch's first dimension. An *example* is what is protected: one row, or K rows (augmentations,
one person's records) whose mean gradient is scaled once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad.errors import OptionError

__all__ = ["Batch", "ClippedSum", "Groups", "Loss", "Scale", "sum_dtype", "trainable"]

Batch = Any  # a tensor, or any pytree of tensors with a common first dimension
Loss = Callable[[nn.Module, Batch], Tensor]  # one value per row
Scale = Callable[[Tensor], Tensor]  # norms (groups, examples) -> factors of the same shape
Groups = Mapping[str, int]  # name of a parameter -> its group


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; one that is tied appears once, under its first name.

    >>> list(trainable(nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@cache
def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of ``dtype`` are measured and summed: float32, or float64 for float64.

    >>> sum_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class ClippedSum:
    """Σ wᵢ gᵢ over examples, by name of parameter; sums of disjoint examples add.

    It is private: nothing of it may be seen before noise is added.

    >>> one = ClippedSum({"weight": torch.ones(2)})
    >>> (one + one).sums["weight"]
    tensor([2., 2.])
    """

    sums: Mapping[str, Tensor]

    def __add__(self, other: "ClippedSum") -> "ClippedSum":
        if self.sums.keys() != other.sums.keys():
            raise OptionError(f"sums of different parameters do not add: {set(self.sums) ^ set(other.sums)}")
        return ClippedSum({name: total + other.sums[name] for name, total in self.sums.items()})

    @classmethod
    def zero(cls, model: nn.Module) -> "ClippedSum":
        """The sum over no examples.

        >>> ClippedSum.zero(nn.Linear(2, 1, bias=False)).sums
        {'weight': tensor([[0., 0.]])}
        """
        return cls(
            {
                name: torch.zeros(parameter.shape, dtype=sum_dtype(parameter.dtype), device=parameter.device)
                for name, parameter in trainable(model).items()
            }
        )
