"""CelebA in its official layout, and features of one's own."""

import io
from pathlib import Path

import numpy as np
import pytest

from dpgrad import data
from dpgrad.data import celeba, cifar10_simclr
from dpgrad.errors import DataError, MissingFileError

PARTS = {1: 0, 2: 0, 3: 1, 4: 2, 5: 2}  # image and part
MALE = {1: 1, 2: -1, 3: 1, 4: 1, 5: -1}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    for number in PARTS:
        pixels = np.full((218, 178, 3), 40 * number, np.uint8)
        pixels[:, : 178 // 2] = (10, 20, 30)  # the left half
        image.fromarray(pixels).save(folder / f"{number:06d}.jpg", quality=95)
    lines = [f"{number:06d}.jpg  {-value} {value:2d}\n" for number, value in MALE.items()]
    text = f"{len(MALE)}\nYoung Male\n{''.join(lines)}"
    (folder.parent / "list_attr_celeba.txt").write_text(text, "utf-8")
    parts = "".join(f"{number:06d}.jpg {part}\n" for number, part in PARTS.items())
    (folder.parent / "list_eval_partition.txt").write_text(parts, "utf-8")
    return tmp_path


def test_official_layout(root: Path) -> None:
    found = data.load("celeba", root, "raw")
    assert found.x_train.shape == (2, 3, 64, 64)
    assert found.x_test.shape == (2, 3, 64, 64)
    assert found.y_train.tolist() == [1, 0]
    assert found.y_test.tolist() == [1, 0]
    assert found.classes == ("no", "yes")
    assert abs(found.x_test[0, :, 30, 60].astype(int) - 160).max() <= 2  # the fourth image
    assert abs(found.x_test[0, :, 30, 5].astype(int) - [10, 20, 30]).max() <= 2
    assert data.load("celeba", root).x_train.max() <= 1


def test_a_missing_image_is_named(root: Path) -> None:
    (root / "celeba" / "img_align_celeba" / "000004.jpg").unlink()
    with pytest.raises(MissingFileError, match=r"000004\.jpg is missing: unpack img_align_celeba\.zip"):
        data.load("celeba", root)


def test_missing_lists_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"celeba/list_attr_celeba\.txt .*celeba/list_eval_partition\.txt"):
        data.load("celeba", tmp_path)


def test_lists_of_different_images_are_refused(root: Path) -> None:
    with (root / "celeba" / "list_eval_partition.txt").open("a", encoding="utf-8") as file:
        file.write("000006.jpg 0\n")
    with pytest.raises(DataError, match="do not list the same images"):
        data.load("celeba", root)


@pytest.mark.parametrize(
    "text",
    ["", "1\n", "2\nMale\n000001.jpg 1\n", "1\nYoung\n000001.jpg 1\n", "1\nMale\n000001.jpg 0\n", "1\nMale\n../x 1\n",
     "x\nMale\n000001.jpg 1\n", "1\nMale\n000001.jpg 1 1\n"],
)  # fmt: skip
def test_damaged_lists_are_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"^f\b"):
        celeba.attributes(text.encode(), "f")


@pytest.mark.parametrize(
    "text", ["", "000001.jpg 3\n000002.jpg 0\n", "000001.jpg\n000002.jpg 0\n", "/etc 0\nx 0\n", "é"]
)
def test_damaged_parts_are_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"^f\b"):
        celeba.parts(text.encode(), "f")


class TestOwnFeatures:
    def blob(self, **changed: object) -> bytes:
        random = np.random.default_rng(0)
        arrays = {
            "x_train": random.standard_normal((6, 4)), "y_train": np.arange(6),
            "x_test": random.standard_normal((3, 4)), "y_test": np.arange(3),
        }  # fmt: skip
        into = io.BytesIO()
        np.savez(into, **{name: value for name, value in {**arrays, **changed}.items() if value is not None})
        return into.getvalue()

    def test_features(self, tmp_path: Path) -> None:
        (tmp_path / "cifar10-simclr").mkdir()
        (tmp_path / "cifar10-simclr" / "features.npz").write_bytes(self.blob())
        found = data.load("cifar10-simclr", tmp_path)
        assert found.x_train.shape == (6, 4)
        assert found.x_train.dtype == np.float32

    @pytest.mark.parametrize(
        "changed",
        [{"x_train": None}, {"x_train": np.zeros(6)}, {"x_test": np.zeros((3, 5))}, {"y_train": np.arange(6) + 5},
         {"y_test": np.arange(3) * 0.5}, {"x_train": np.full((6, 4), np.nan)}, {"y_train": np.arange(5)},
         {"x_train": np.array([["a"]])}, {"y_train": np.array([{}] * 6, dtype=object)}],
        ids=str,
    )  # fmt: skip
    def test_other_arrays_are_refused(self, changed: dict[str, object]) -> None:
        with pytest.raises(DataError, match=r"^f\b"):
            cifar10_simclr.parse(self.blob(**changed), "f")

    @pytest.mark.parametrize("blob", [b"", b"PK\x03\x04", b"nonsense"])
    def test_other_files_are_refused(self, blob: bytes) -> None:
        with pytest.raises(DataError, match=r"^f is not an \.npz file"):
            cifar10_simclr.parse(blob, "f")
