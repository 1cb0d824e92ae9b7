"""The named models: their shapes, the fixed features against a plain loop, and what is refused."""

import math

import numpy as np
import pytest
import torch

from dpgrad import data
from dpgrad.training.models import MODELS, OrientedGradients, build


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_one_output_a_class(name: str) -> None:
    assert build(name, (1, 8, 8), 10)(torch.rand(3, 1, 8, 8)).shape == (3, 10)


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_vectors(name: str) -> None:
    assert build(name, (5,), 2)(torch.rand(3, 5)).shape == (3, 2)


@pytest.mark.parametrize("name", ["cnn", "oriented-gradients"])
@pytest.mark.parametrize("shape", [(5,), (1, 3, 8)], ids=str)
def test_images_only(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"for images of .*choose linear or mlp"):
        build(name, shape, 10)


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
