"""The named models: their shapes, the fixed features against a plain loop, and what is refused."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dpgrad import data, fit
from dpgrad.training.models import MODELS, OrientedGradients, Words, build

# Rows on which a network is tried: those of its paper, or small ones.
SHAPES = {"words": (5,), "yu2018-cnn": (1, 28, 28), "yu2018-covertype": (54,), "resnet9": (3, 8, 8)}
# The numbers of trained parameters that the papers' layers have, counted by hand: weights and biases of each layer.
PAPERS = {
    "yu2018-softmax": ((784,), 10, 784 * 10 + 10),
    "yu2018-cnn": ((1, 28, 28), 10, (25 * 10 + 10) + (250 * 20 + 20) + (320 * 50 + 50) + (50 * 10 + 10)),
    "yu2018-covertype": ((54,), 7, (54 * 100 + 100) + (100 * 100 + 100) + (100 * 7 + 7)),
    "linear": ((4096,), 10, 4096 * 10 + 10),
    "resnet9": ((3, 32, 32), 10, 6_575_370),
}


def rows(name: str, count: int) -> torch.Tensor:
    shape = SHAPES.get(name, (1, 8, 8))
    return torch.randint(0, 20_000, (count, *shape)) if name == "words" else torch.rand(count, *shape)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_a_private_step(name: str) -> None:
    """One output a class, and one step on rows of its shape, of which the engine's gradients were compared."""
    torch.manual_seed(0)
    inputs = rows(name, 6)
    model = build(name, inputs.shape[1:], 3)
    assert model(inputs).shape == (6, 3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    done = fit(model, (inputs, torch.arange(6) % 3), steps=1, batch_size=3, epsilon=9.0, delta=0.01)
    assert done.way is not None
    assert done.way.name == "batched"
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", PAPERS)
def test_networks_of_papers_have_their_sizes(name: str) -> None:
    shape, outputs, wanted = PAPERS[name]
    assert sum(parameter.numel() for parameter in build(name, shape, outputs).parameters()) == wanted


def test_the_network_of_huang_has_four_convolutions_and_one_linear_layer() -> None:
    kinds = [type(layer) for layer in build("huang2024-cnn", (1, 28, 28), 10).modules()]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.Linear)) == (4, 1)


class TestWords:
    def test_the_mean_is_over_words_alone(self) -> None:
        model = Words(3, words=10, width=4)
        table, head = model.embedding.weight, model.head
        text = torch.tensor([[4, 10, 11, 0, 0]])  # 11 shares the embedding of 1
        torch.testing.assert_close(model(text), head((table[4] + table[10] + table[1])[None] / 3))

    def test_numbers_of_any_size_are_words(self) -> None:
        assert Words(3)(torch.tensor([[2**40, 1, 0]])).isfinite().all()


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_vectors(name: str) -> None:
    assert build(name, (5,), 2)(torch.rand(3, 5)).shape == (3, 2)


@pytest.mark.parametrize("name", ["cnn", "oriented-gradients", "yu2018-cnn", "huang2024-cnn", "resnet9"])
@pytest.mark.parametrize("shape", [(5,), (1, 3, 8)], ids=str)
def test_images_only(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"for images of .*choose linear or mlp"):
        build(name, shape, 10)


def test_words_are_not_images() -> None:
    with pytest.raises(ValueError, match=r"words is for rows of word numbers, got rows of shape \(1, 8, 8\)"):
        build("words", (1, 8, 8), 10)


def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(ValueError, match=r"model must be .* got 'oriented': did you mean oriented-gradients"):
        build("oriented", (1, 8, 8), 10)


def histograms(image: np.ndarray, bins: int, cell: int) -> np.ndarray:
    """Oriented gradients of one image (channels, height, width), pixel by pixel."""
    channels, height, width = image.shape
    found = np.zeros((bins, channels, height // cell, width // cell))

    def at(c: int, i: int, j: int) -> float:
        return float(image[c, i, j]) if 0 <= i < height and 0 <= j < width else 0.0

    for c in range(channels):
        for i in range(height):
            for j in range(width):
                across, down = at(c, i, j + 1) - at(c, i, j - 1), at(c, i + 1, j) - at(c, i - 1, j)
                place = (math.atan2(down, across) % (2 * math.pi)) * bins / (2 * math.pi)
                low, share = int(place) % bins, place - int(place)
                found[low, c, i // cell, j // cell] += (1 - share) * math.hypot(across, down)
                found[(low + 1) % bins, c, i // cell, j // cell] += share * math.hypot(across, down)
    return found.ravel()


@pytest.mark.parametrize("channels", [1, 2])
def test_oriented_gradients_are_their_definition(channels: int) -> None:
    images = data.load("digits").x_train[: 4 * channels].reshape(4, channels, 8, 8)
    for image, row in zip(images, OrientedGradients()(torch.from_numpy(images)), strict=True):
        wanted = histograms(image, 8, 2)
        wanted = wanted / np.linalg.norm(wanted) - 0.6 / math.sqrt(len(wanted))
        np.testing.assert_allclose(row, wanted / np.linalg.norm(wanted), atol=2e-6)


def test_an_empty_image_has_finite_features() -> None:
    assert OrientedGradients()(torch.zeros(1, 1, 8, 8)).isfinite().all()


def test_rows_do_not_mix() -> None:
    rows = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(OrientedGradients()(rows)[2:3], OrientedGradients()(rows[2:3]))
