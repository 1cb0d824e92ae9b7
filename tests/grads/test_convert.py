"""BatchNorm becomes GroupNorm: what is kept, what is dropped, and what the copy computes."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad.grads.convert import convert


def by_hand(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Group normalization (Wu and He, 2018, Eqs. 1 to 4) as it is written."""
    parts = x.reshape(len(x), groups, -1)
    centred = parts - parts.mean(2, keepdim=True)
    normal = (centred / (centred.square().mean(2, keepdim=True) + eps).sqrt()).view(x.shape)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return normal * weight.view(shape) + bias.view(shape)


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (2, 2), (6, 6), (32, 32), (34, 17), (37, 1), (48, 24), (64, 32), (96, 32)]
)
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_groups_are_the_most_that_divide_the_channels(kind: type[nn.Module], channels: int, groups: int) -> None:
    made = convert(nn.Sequential(kind(channels)))[0]
    assert type(made) is nn.GroupNorm
    assert (made.num_groups, made.num_channels) == (groups, channels)


@pytest.mark.parametrize("space", [(), (5,)])
def test_one_dimension_takes_one_group(space: tuple[int, ...]) -> None:
    """A group for each channel would leave nothing of an input that is one number for each channel."""
    made = convert(nn.BatchNorm1d(6))
    x = torch.randn(4, 6, *space)
    torch.testing.assert_close(made(x), by_hand(x, 1, torch.ones(6), torch.zeros(6), 1e-5))
    assert made(x).std() > 0.5


@pytest.mark.parametrize(("kind", "dims"), [(nn.BatchNorm1d, 1), (nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_the_copy_is_group_normalization_with_the_old_scale_and_shift(
    kind: type[nn.Module], dims: int, affine: bool, tracked: bool
) -> None:
    torch.manual_seed(3)
    layer = kind(6, eps=1e-2, affine=affine, track_running_stats=tracked)
    weight, bias = torch.randn(6), torch.randn(6)
    if affine:
        layer.load_state_dict({"weight": weight, "bias": bias}, strict=False)
    else:
        weight, bias = torch.ones(6), torch.zeros(6)
    made = convert(layer)
    x = torch.randn(3, 6, *[4] * dims)
    torch.testing.assert_close(made(x), by_hand(x, 1 if dims == 1 else 6, weight, bias, 1e-2))
    assert made.affine is affine
    assert dict(made.named_buffers()) == {}
    assert [name for name, _ in made.named_parameters()] == (["weight", "bias"] if affine else [])


class Block(nn.Module):
    """A BatchNorm that stands in two places, one that shares its scale with another, and one of its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.again = self.first[1]
        self.other = nn.BatchNorm2d(8)
        self.other.weight = self.again.weight
        self.norms = nn.ModuleDict({"deep": nn.ModuleList([nn.SyncBatchNorm(8)])})

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.again(self.first(x)))


def test_ties_stay() -> None:
    made = convert(Block())
    assert made.again is made.first[1]
    assert made.other is not made.again
    assert made.other.weight is made.again.weight
    assert type(made.norms["deep"][0]) is nn.GroupNorm
    assert not any(isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm) for module in made.modules())
    assert set(dict(made.named_parameters())) == set(dict(Block().named_parameters()))


def test_the_model_itself_is_not_touched() -> None:
    model = Block().eval()
    before = copy.deepcopy(model.state_dict())
    made = convert(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert type(model.again) is nn.BatchNorm2d
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_type_device_flags_and_freezing_stay() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4, dtype=torch.float64), nn.BatchNorm2d(4, device="meta"))
    model[0].weight.requires_grad_(False)
    model[1].eval()
    made = convert(model)
    assert (made[0].weight.dtype, made[0].bias.dtype, made[1].weight.device.type) == (*[torch.float64] * 2, "meta")
    assert (made[0].weight.requires_grad, made[0].bias.requires_grad) == (False, True)
    assert (made[0].training, made[1].training) == (True, False)


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_forgets_its_statistics(affine: bool) -> None:
    model = nn.Sequential(nn.InstanceNorm1d(3, affine=affine, track_running_stats=True), nn.Tanh())
    x = torch.randn(5, 3, 7)
    model(x)
    made = convert(model)
    assert dict(made.named_buffers()) == {}
    for mode in (True, False):
        torch.testing.assert_close(made.train(mode)(x), F.instance_norm(x).tanh())
    assert set(dict(model.named_buffers())) == {
        f"0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_what_is_not_a_norm_of_batches_is_copied_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.Dropout(0.1))
    made = convert(model)
    assert repr(made) == repr(model)
    assert all(torch.equal(one, other) for one, other in zip(made.parameters(), model.parameters(), strict=True))


def test_a_compiled_model_is_unwrapped() -> None:
    made = convert(torch.compile(nn.Sequential(nn.BatchNorm1d(4))))
    assert type(made) is nn.Sequential


@pytest.mark.parametrize(
    ("model", "name"), [(nn.LazyBatchNorm2d(), "itself"), (nn.Sequential(nn.Sequential(nn.LazyBatchNorm1d())), "0.0")]
)
def test_lazy_layers_are_refused_by_name(model: nn.Module, name: str) -> None:
    with pytest.raises(ValueError, match=f"module '{name}' is lazy: run the model once, on public data"):
        convert(model)
