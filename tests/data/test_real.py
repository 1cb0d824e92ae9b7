"""The real files: shapes, counts and figures that the papers and the data's authors print."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from dpgrad import data
from dpgrad.data import imagenette64

NOT_HERE = {
    "celeba",
    "cifar10",
    "cifar10-simclr",
    "real-sim",
    "rcv1",
    "gisette",
    "kddcup99",
}  # tested on files of the same form
RECIPES = [
    pytest.param(name, recipe, marks=[pytest.mark.slow] if name == "imagenette64" else [])
    for name in data.names()
    for recipe in data.preprocessings(name)
    if data.sources(name) and name not in NOT_HERE and (name, recipe) != ("imagenette64", "raw")
]
READS_PRIVATE_ROWS = {
    ("adult", "yu2020"), ("covertype", "yu2020"), ("graduate-admission", "yu2020"), ("sonar", "yu2020"),
    ("boston-housing", "yu2020"), ("swedish-motor-insurance", "yu2020"),
    ("swedish-motor-insurance", "yu2020-with-target"), ("reuters", "legacy-scramble"),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _decoded_once() -> Iterator[None]:
    """The thousands of images of Imagenette are decoded once for all its forms, which share no memory with them."""
    real, decoded = imagenette64.parse, {}

    def parse(blob: bytes, name: str, *, counts: dict[str, int]) -> Any:
        if hash(blob) not in decoded:
            decoded[hash(blob)] = real(blob, name, counts=counts)
        return {part: (images.copy(), labels) for part, (images, labels) in decoded[hash(blob)].items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imagenette64, "parse", parse)
        yield


@pytest.mark.parametrize(("name", "recipe"), RECIPES)
def test_recipe_loads_and_says_what_it_read(name: str, recipe: str, data_dir) -> None:
    dataset = data.load(name, data_dir, recipe)
    assert (dataset.name, dataset.preprocessing) == (name, recipe)
    assert dataset.split
    assert dataset.public
    assert bool(dataset.outside_guarantee) is ((name, recipe) in READS_PRIVATE_ROWS)
    for x in (dataset.x_train, dataset.x_test):
        values = x if isinstance(x, np.ndarray) else x.data
        assert values.dtype.kind == "u" or np.isfinite(values.sum(dtype=np.float64))
    # In default form every value lies in a range known in advance; features of a network have none.
    if recipe == "default" and name != "cifar10-features":
        values = dataset.x_train if isinstance(dataset.x_train, np.ndarray) else dataset.x_train.data
        assert -1e-9 <= values.min() <= values.max() <= 1 + 1e-9


def test_adult_yu2020(data_dir) -> None:
    adult = data.load("adult", data_dir, "yu2020")
    assert (adult.x_train.shape, adult.x_test.shape) == ((36176, 104), (9044, 104))
    labels = np.concatenate([adult.y_train, adult.y_test])
    assert round(100 * float((labels == 0).mean()), 1) == 75.2
    norms = np.linalg.norm(np.concatenate([adult.x_train, adult.x_test]), axis=1)
    assert (round(norms.min(), 2), round(norms.max(), 2)) == (2.84, 3.34)
    assert_allclose(adult.x_train[:, :98].sum(axis=1), 8)  # eight one-hot blocks come first, then six numbers


def test_adult_default_keeps_every_row(data_dir) -> None:
    adult = data.load("adult", data_dir)
    assert (adult.x_train.shape, adult.x_test.shape) == ((32561, 105), (16281, 105))
    assert (np.bincount(adult.y_train).tolist(), np.bincount(adult.y_test).tolist()) == ([24720, 7841], [12435, 3846])
    missing = [int((part[:, 6:].sum(axis=1) < 8).sum()) for part in (adult.x_train, adult.x_test)]
    assert missing == [2399, 1221]


def test_mnist(data_dir) -> None:
    mnist = data.load("mnist", data_dir)
    assert (mnist.x_train.shape, mnist.x_test.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert_allclose(
        [mnist.x_train.mean(dtype=np.float64), mnist.x_train.std(dtype=np.float64)], [0.1307, 0.3081], atol=1e-4
    )
    assert mnist.y_train[:5].tolist() == [5, 0, 4, 1, 9]
    benchmark = data.load("mnist", data_dir, "yu2020")
    assert (benchmark.x_train.shape, benchmark.x_test.shape) == ((52000, 784), (13000, 784))
    counts = np.bincount(np.concatenate([benchmark.y_train, benchmark.y_test]))
    expected = np.bincount(mnist.y_train[5000:]) + np.bincount(mnist.y_test)
    np.testing.assert_array_equal(counts, expected)
    norms = np.linalg.norm(benchmark.x_train, axis=1)
    assert (round(float(norms.min()), 1), int(norms.max())) == (3.6, 17)


def test_fashion_mnist(data_dir) -> None:
    fashion = data.load("fashion-mnist", data_dir, "raw")
    assert np.bincount(fashion.y_train).tolist() == [6000] * 10
    assert np.bincount(fashion.y_test).tolist() == [1000] * 10
    assert data.load("fashion-mnist", data_dir, "huang2024").x_train.shape == (40000, 1, 28, 28)


def test_covertype(data_dir) -> None:
    covertype = data.load("covertype", data_dir, "yu2020")
    assert (covertype.x_train.shape, covertype.x_test.shape) == ((464809, 54), (116203, 54))
    labels = np.concatenate([covertype.y_train, covertype.y_test])
    assert np.bincount(labels).tolist() == [211840, 283301, 35754, 2747, 9493, 17367, 20510]
    norms = np.linalg.norm(covertype.x_train, axis=1)
    assert (round(norms.min(), 1), round(norms.max(), 2)) == (1.8, 2.75)
    assert_allclose(covertype.x_train[:, 10:].sum(axis=1), 2)  # one wilderness area, one soil type


@pytest.mark.parametrize(
    ("name", "recipe", "least", "average"),
    [
        ("graduate-admission", "yu2020", 6.68e-3, 0.401),  # as printed
        ("sonar", "yu2020", 4.00e-4, 0.190),  # printed 3.63e-4, .19
        ("boston-housing", "yu2020", 4.89e-3, 0.266),  # printed 3.44e-3, .34: not from this file
        ("swedish-motor-insurance", "yu2020", 2.17e-4, 0.241),  # printed average .24
        ("swedish-motor-insurance", "yu2020-with-target", 9.06e-6, 0.2074),  # printed least 9.07e-6
    ],
)
def test_curvature_of_table_2(name: str, recipe: str, least: float, average: float, data_dir) -> None:
    x = data.load(name, data_dir, recipe).x_train
    curvatures = np.linalg.eigvalsh(x.T @ x / len(x))
    assert_allclose([curvatures[0], curvatures.mean()], [least, average], rtol=2e-3)


def test_regression_defaults(data_dir) -> None:
    shapes = {
        name: (data.load(name, data_dir).x_train.shape, data.load(name, data_dir).x_test.shape)
        for name in ("graduate-admission", "sonar", "boston-housing", "swedish-motor-insurance")
    }
    assert shapes == {
        "graduate-admission": ((400, 7), (100, 7)),
        "sonar": ((166, 60), (42, 60)),
        "boston-housing": ((404, 13), (102, 13)),
        "swedish-motor-insurance": ((1745, 6), (437, 6)),
    }


def test_reuters(data_dir) -> None:
    reuters = data.load("reuters", data_dir)
    assert (reuters.x_train.shape, reuters.x_test.shape) == ((7770, 8315), (3299, 8315))
    assert (int(reuters.y_train.sum()), int(reuters.y_test.sum())) == (538, 179)
    assert reuters.x_train.format == "csr"
    assert_allclose(np.sqrt(reuters.x_train.power(2).sum(axis=1)), 1, atol=1e-6)


def test_reuters_scramble_moves_values_and_keeps_places(data_dir) -> None:
    right, scrambled = (data.load("reuters", data_dir, recipe) for recipe in ("shuffled", "legacy-scramble"))
    np.testing.assert_array_equal(right.y_train, scrambled.y_train)
    np.testing.assert_array_equal(right.x_train.indices, scrambled.x_train.indices)
    np.testing.assert_array_equal(right.x_train.indptr, scrambled.x_train.indptr)
    assert (right.x_train.data != scrambled.x_train.data).mean() > 0.9


def test_cifar10_features(data_dir) -> None:
    features = data.load("cifar10-features", data_dir, "unit-norm")
    assert (features.x_train.shape, features.x_test.shape) == ((50000, 320), (10000, 320))
    assert np.bincount(features.y_train).tolist() == [5000] * 10
    assert_allclose(np.linalg.norm(features.x_train, axis=1), 1, rtol=1e-5)


@pytest.mark.slow
def test_imagenette(data_dir) -> None:
    images = data.load("imagenette64", data_dir, "raw")
    assert (images.x_train.shape, images.x_test.shape) == ((9469, 3, 64, 64), (3925, 3, 64, 64))
    assert images.classes is not None
    assert len(images.classes) == 10
    assert images.x_train.flags.writeable


@pytest.mark.slow
def test_cifar10(data_dir) -> None:
    if not (data_dir / "cifar10").is_dir():
        pytest.skip(f"no CIFAR-10 at {data_dir / 'cifar10'}: put there the binary archive or the npm sprites")
    images = data.load("cifar10", data_dir, "raw")
    assert (images.x_train.shape, images.x_test.shape) == ((50000, 3, 32, 32), (10000, 3, 32, 32))
    mean = images.x_train.mean(axis=(0, 2, 3)) / 255
    assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=1e-4)
    assert images.y_train[:5].tolist() == [6, 9, 9, 4, 1]
