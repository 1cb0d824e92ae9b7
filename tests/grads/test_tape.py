"""Which arguments of a torch function a rule is given."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dpgrad.grads.layers import RULES
from dpgrad.grads.tape import _bound

X = torch.zeros(2)  # compared by identity alone: == of tensors has no truth


def by_inspect(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    try:
        bound = inspect.signature(RULES[func]).bind(None, *args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "g"}


@pytest.mark.parametrize(
    "func", [F.linear, torch.addmm, torch.matmul, F.embedding, F.layer_norm, F.batch_norm, F.conv2d]
)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"input": X}, {"weight": X}, {"bias": X}, {"weight": X, "bias": None}, {"beta": 2.0},
     {"eps": 1.0, "weight": X}, {"mat1": X}, {"g": X}],
    ids=lambda kwargs: "-".join(kwargs) or "none",
)  # fmt: skip
def test_arguments_are_bound_as_python_binds_them(func: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    for count in range(12):
        args = tuple(torch.zeros(1) for _ in range(count))
        found, wanted = _bound(func, args, kwargs), by_inspect(func, args, kwargs)
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert list(found) == list(wanted)
            assert all(found[name] is value for name, value in wanted.items())
