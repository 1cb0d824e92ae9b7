"""What is released of a model holds nothing of the rows that was not paid for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpgrad.runs.weights import Weights
from spread import fit

ROWS = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
LABELS = (ROWS[:, 0] > 0).long()


class Holding(nn.Module):
    """A linear model with one buffer, to which a pass over more rows than are probed may write."""

    def __init__(self, buffer: Tensor, writes: bool = False) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(3, 2), writes
        self.register_buffer("held", buffer)

    def forward(self, x: Tensor) -> Tensor:
        if self.writes and len(x) > 4:
            self.held += x.sum()
        output: Tensor = self.linear(x)
        return output


class Remembering(Holding):
    def get_extra_state(self) -> Any:
        return ROWS.max()

    def set_extra_state(self, state: Any) -> None: ...


def released(model: nn.Module, folder: Path, **options: Any) -> dict[str, Tensor]:
    fit(model, (ROWS, LABELS), noise_multiplier=5.0, delta=1e-4, steps=3, batch_size=50, folder=folder, **options)
    found: dict[str, Tensor] = torch.load(folder / "release" / "weights.pt", weights_only=True)
    return found


def test_a_view_of_the_rows_is_written_without_the_rows_beside_it(tmp_path: Path) -> None:
    model = Holding(ROWS[5, 1:2])
    found = released(model, tmp_path / "run")
    assert found["held"].untyped_storage().nbytes() == 4
    assert (tmp_path / "run" / "release" / "weights.pt").stat().st_size < ROWS.numel() * 4 + 2000
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value)


def test_a_buffer_that_changed_is_not_released(tmp_path: Path) -> None:
    model = Holding(torch.zeros(()), writes=True)
    with pytest.raises(
        ValueError, match=r"held of the model changed during the run, and is not trained|of the batch to buffer held"
    ) as raised:
        released(model, tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run" / "release" / "weights.pt").exists()


def test_no_checkpoint_holds_a_buffer_that_changed(tmp_path: Path) -> None:
    """Else it would be there from the beginning, as far as a run can tell that is resumed."""
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"held of the model changed|of the batch to buffer held"):
            released(Holding(torch.zeros(()), writes=True), tmp_path / "run", checkpoint_every=1, resume=resume)
    found = released(Holding(torch.zeros(())), tmp_path / "run", resume=True)
    assert found["held"] == 0


def test_extra_state_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="_extra_state, neither a parameter nor a buffer, which would be released"):
        released(Remembering(torch.zeros(())), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [7, [1.0]], ids=["number", "list"])
def test_what_a_hook_adds_is_refused(value: Any) -> None:
    model = nn.Linear(3, 2)
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.update(seen=value))
    with pytest.raises(ValueError, match="the state of the model has seen, neither a parameter nor a buffer"):
        Weights(model)


def test_a_frozen_parameter_must_stay() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    weights = Weights(model)
    with torch.no_grad():
        model.weight += 1
        weights.state()
        model.bias += 1
    with pytest.raises(ValueError, match="bias of the model changed"):
        weights.state()


def test_what_may_change() -> None:
    """Tied weights, under each of their names, and the vectors of spectral normalization."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), parametrizations.spectral_norm(nn.Linear(3, 3)))
    model[1].weight = model[0].weight
    model.register_buffer("unknown", torch.tensor(torch.nan))
    weights = Weights(model)
    with torch.no_grad():
        model[0].weight += 1
        model(torch.ones(1, 3))
    found = weights.state()
    assert torch.equal(found["1.weight"], model[0].weight)
    assert found["1.weight"].requires_grad is False
