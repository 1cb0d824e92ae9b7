"""Short runs, whose reports the tests of this folder read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpgrad.training.fit import Fitted
from spread import fit


def _short(**options: Any) -> Fitted:
    torch.manual_seed(0)
    inputs = torch.randn(200, 3)
    labels = (inputs[:, 0] > 0).long()
    held_out = inputs[100:], labels[100:]
    settings = {"epsilon": 2.0, "delta": 1e-4, "steps": 3, "batch_size": 20, "held_out": held_out, **options}
    return fit(nn.Linear(3, 2), (inputs[:100], labels[:100]), **settings)


@pytest.fixture(scope="session")
def short() -> Callable[..., Fitted]:
    """Makes a run of three steps on made-up rows."""
    return _short


@pytest.fixture(scope="session")
def fitted() -> Fitted:
    return _short()
