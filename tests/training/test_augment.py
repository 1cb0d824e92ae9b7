"""An example's rows are made of that example and of its own draws, whatever else is in the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpgrad import Mechanism, PrivateGradient
from dpgrad.mechanism import sampling
from dpgrad.training.augment import Augment, Shifts, augmented, probed
from dpgrad.training.private import Observed

Pair = tuple[Tensor, Tensor]


def jittered(batch: Pair, generator: torch.Generator) -> Pair:
    inputs, targets = (leaf[:, None].expand(-1, 3, *leaf.shape[1:]) for leaf in batch)
    return inputs + torch.randn(inputs.shape, generator=generator), targets


def mixup(batch: Pair, generator: torch.Generator) -> Pair:
    """With probability 0.3 the mean with a neighbour in the batch."""
    inputs, targets = batch
    if torch.rand((), generator=generator) < 0.3:
        inputs = (inputs + inputs[torch.randperm(len(inputs), generator=generator)]) / 2
    return inputs[:, None], targets[:, None]


MIXING: dict[str, Augment] = {
    "the last example": lambda batch, generator: ((batch[0] + batch[0][-1:])[:, None], batch[1][:, None]),
    "the size of the batch": lambda batch, generator: ((batch[0] * len(batch[0]))[:, None], batch[1][:, None]),
    "beyond the probe": lambda batch, generator: (
        (batch[0] - (batch[0].mean() if len(batch[0]) > 4 else 0))[:, None],
        batch[1][:, None],
    ),
    "mixup": mixup,
    "none": jittered,
}


def rows(count: int = 9) -> Pair:
    random = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, generator=random), torch.randn(count, generator=random)


def norms(augment: Augment, data: Pair) -> Tensor:
    """The norm of each example's gradient, at every step."""
    plan = Mechanism(sampling.FullBatch(), steps=12, noise_multiplier=1.0, batch_size=10)
    torch.manual_seed(0)
    seen: list[Observed] = []
    private = PrivateGradient(
        nn.Linear(3, 1),
        lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square(),
        plan,
        augment=augment,
        observe=seen.append,
        seed=5,
    )
    for _ in range(12):
        private.step(data)
    return torch.stack([found.norms[0] for found in seen])


@pytest.mark.parametrize("augment", MIXING.values(), ids=MIXING.keys())
def test_no_example_acts_on_the_gradient_of_another(augment: Augment) -> None:
    """Neither by its value nor by its absence; the last example is exchanged, then left out."""
    inputs, targets = rows()
    whole = norms(augment, (inputs, targets))
    exchanged = norms(augment, (torch.cat([inputs[:-1], inputs[-1:] + 5]), targets))
    less = norms(augment, (inputs[:-1], targets[:-1]))
    torch.testing.assert_close(exchanged[:, :-1], whole[:, :-1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(less, whole[:, :-1], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(exchanged[:, -1], whole[:, -1])


def test_draws_are_those_of_key_step_and_example() -> None:
    inputs, targets = rows()

    def made(chosen: list[int], key: int = 7, step: int = 0) -> Tensor:
        found: Tensor = augmented(jittered, (inputs[chosen], targets[chosen]), torch.tensor(chosen), key, step)[0]
        return found

    whole = made([*range(9)])
    assert torch.equal(made([7, 2]), whole[[7, 2]])
    for other in (made([*range(9)], step=1), made([*range(9)], key=8)):
        assert not (other == whole).any()
    offsets = whole - inputs[:, None]
    assert len({round(value, 4) for value in offsets.flatten().tolist()}) == offsets.numel()


def test_shifts_are_spread_evenly_and_apart() -> None:
    """In each direction a third each of -1, 0 and 1, for every copy but the first, and others at other steps."""
    count = 30_000
    for copies in (2, 16, 60):
        drawn = Shifts(copies).drawn(torch.arange(count // copies), key=7, step=3)
        assert bool((drawn[:, :, 0] == 1).all())
        rest = drawn[:, :, 1:]
        shares = torch.stack([(rest == value).double().mean() for value in range(3)])
        assert float((shares - 1 / 3).abs().max()) < 6 * (2 / 9 / rest.numel()) ** 0.5
        down, right = rest[:, 0].double().flatten(), rest[:, 1].double().flatten()
        assert abs(float(torch.corrcoef(torch.stack([down, right]))[0, 1])) < 6 / len(down) ** 0.5
        assert not torch.equal(drawn, Shifts(copies).drawn(torch.arange(count // copies), key=7, step=4))
        assert not torch.equal(drawn, Shifts(copies).drawn(torch.arange(count // copies), key=8, step=3))


def test_shifts_of_a_lot_are_those_of_one_image_after_another() -> None:
    shifts = Shifts(4)
    batch, chosen = (torch.rand(6, 2, 5, 4), torch.arange(6)), torch.tensor([3, 1, 4, 15, 9, 2])
    together = augmented(shifts, batch, chosen, key=7, step=3)
    ones = [
        augmented(shifts, (batch[0][i : i + 1], batch[1][i : i + 1]), chosen[i : i + 1], key=7, step=3)
        for i in range(6)
    ]
    single = [torch.cat(column) for column in zip(*ones, strict=True)]
    assert torch.equal(together[0], single[0])
    assert torch.equal(together[1], single[1])


def test_shifted_images_stay_with_their_example() -> None:
    images, labels = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2])
    made, marks = Shifts(5)((images, labels), torch.Generator().manual_seed(0))
    assert made.shape == (3, 5, 1, 4, 4)
    assert marks.tolist() == [[0] * 5, [1] * 5, [2] * 5]
    assert torch.equal(made[:, 0], images)
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    shifted = [padded[:, :, i : i + 4, j : j + 4] for i in range(3) for j in range(3)]
    for example in range(3):
        for row in made[example]:
            assert any(torch.equal(row, candidate[example]) for candidate in shifted)


def test_all_nine_shifts_are_as_likely() -> None:
    """Of 900 draws each of the nine is expected 100 times; 50 is over five standard deviations away (9e-7 for all)."""
    drawn = Shifts(901).draws(torch.Generator().manual_seed(0))[:, 1:]
    counts = torch.bincount(3 * drawn[0] + drawn[1], minlength=9)
    assert len(counts) == 9
    assert bool(((counts - 100).abs() < 50).all())


remembered: list[Tensor] = []


def remembering(batch: Pair, generator: torch.Generator) -> Pair:
    remembered.append(batch[0])
    return (batch[0] + remembered[-min(2, len(remembered))])[:, None], batch[1][:, None]


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (lambda batch, generator: batch, r"tensors that begin with \(1, K\)"),
        (lambda batch, generator: tuple(leaf[:0, None] for leaf in batch), r"tensors that begin with \(1, K\)"),
        (lambda batch, generator: (batch[0][:, None], batch[1][:, None].expand(1, 2)), r"tensors that begin with"),
        (
            lambda batch, generator: tuple(
                leaf[:, None].repeat_interleave(1 + (batch[0][:, 0] > 0), 1) for leaf in batch
            ),
            "the same number of rows, of the same shape",
        ),
        (lambda batch, generator: tuple(torch.rand_like(leaf)[:, None] for leaf in batch), "from that example and the"),
        (remembering, "from that example and the"),
    ],
    ids=["no rows", "none", "labels", "number", "other randomness", "memory"],
)
def test_other_augmentations_are_refused_before_the_first_step(augment: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probed(augment, tuple(leaf[:4] for leaf in rows()), key=7)
    plan = Mechanism(sampling.FullBatch(), steps=1, noise_multiplier=1.0, batch_size=10)
    private = PrivateGradient(nn.Linear(3, 1), lambda model, batch: model(batch[0])[:, 0], plan, augment=augment)
    with pytest.raises(ValueError, match=message):
        private.step(rows())
    assert private.steps_taken == 0


def test_what_is_not_a_number_is_the_same_again() -> None:
    inputs, targets = rows(4)
    inputs[2, 1] = torch.nan
    assert bool(probed(jittered, (inputs, targets), key=7)[0].isnan().any())


def test_shifts_are_for_images() -> None:
    with pytest.raises(ValueError, match="Shifts is for images, got rows of shape"):
        Shifts(2)((torch.rand(3, 5), torch.zeros(3)), torch.Generator())
    with pytest.raises(ValueError, match="count must be a whole number of at least 1"):
        Shifts(0)
