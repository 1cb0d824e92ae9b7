"""The model without privacy learns, and leaves alone what is not trained."""

import torch
from torch import nn

from dpgrad.training.baseline import non_private


def test_it_learns() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(256, 2)
    rows = inputs, (inputs.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.eye_(model[0].requires_grad_(False).weight)
    before = model[0].weight.clone()
    assert non_private(model, rows, "cross-entropy", rows, epochs=50) > 0.97
    assert torch.equal(model[0].weight, before)


def test_real_targets_are_judged_by_their_loss() -> None:
    inputs = torch.linspace(-1, 1, 64)[:, None]
    rows = inputs, 2 * inputs[:, 0]
    assert non_private(nn.Linear(1, 1), rows, "squared", rows, epochs=1000) < 1e-3
