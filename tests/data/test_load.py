"""Every dataset, found by its file: one interface, complete tables of files, one message when files are missing."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpgrad import data
from dpgrad.data._dataset import OUTSIDE

REQUIRED = {
    "digits", "mnist", "fashion-mnist", "cifar10", "cifar10-features", "adult", "covertype", "graduate-admission",
    "sonar", "boston-housing", "swedish-motor-insurance", "reuters", "imagenette64", "real-sim", "rcv1", "gisette",
    "kddcup99", "celeba", "cifar10-simclr",
}  # fmt: skip
WITH_FILES = [name for name in data.names() if data.sources(name)]


def test_all_required_datasets_are_found() -> None:
    assert set(data.names()) == REQUIRED


def test_each_file_of_the_package_is_a_dataset_or_private() -> None:
    files = {path.stem for path in Path(data.__file__).parent.glob("*.py")} - {"__init__"}
    assert {name.replace("_", "-") for name in files if not name.startswith("_")} == set(data.names())


@pytest.mark.parametrize("name", data.names())
def test_interface(name: str) -> None:
    module = importlib.import_module(f"dpgrad.data.{name.replace('-', '_')}")
    assert module.__doc__
    assert ">>>" in module.load.__doc__
    assert data.preprocessings(name)[0] == "default"
    assert len(set(data.preprocessings(name))) == len(data.preprocessings(name))


@pytest.mark.parametrize("name", WITH_FILES)
def test_sources_are_complete(name: str) -> None:
    for source in data.sources(name):
        assert source.sha256 is None or re.fullmatch("[0-9a-f]{64}", source.sha256)
        assert source.content is None or re.fullmatch("[0-9a-f]{64}", source.content.sha256)
        assert source.size is None or source.size > 0
        assert source.url is None or (source.sha256 and source.size), "what is fetched is verified"
        assert source.published
        assert source.url is None or source.url.startswith("https://")
        assert not {"..", "/", "\\"} & {*source.folder, *source.file}


@pytest.mark.parametrize("name", WITH_FILES)
def test_missing_files_are_named_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(data.MissingFileError) as caught:
        data.load(name, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path) in message
    for source in data.sources(name):
        assert all(part in message for part in (source.place, source.checksum, source.length, source.published))


@pytest.mark.parametrize("name", WITH_FILES)
def test_without_a_folder_the_message_says_how_to_give_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPGRAD_DATA", raising=False)
    with pytest.raises(data.MissingFileError, match=r"root.*DPGRAD_DATA") as caught:
        data.load(name)
    assert all(source.place in str(caught.value) for source in data.sources(name))


def test_only_the_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data").write_text("there", "utf-8")
    with pytest.raises(data.MissingFileError) as caught:
        data.load("adult", tmp_path)
    assert "adult/adult.test" in str(caught.value)
    assert "adult/adult.data" not in str(caught.value)


def test_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPGRAD_DATA", str(tmp_path / "named"))
    with pytest.raises(data.MissingFileError, match="named"):
        data.load("sonar")
    with pytest.raises(data.MissingFileError, match="given"):
        data.load("sonar", tmp_path / "given")


@pytest.mark.parametrize("name", ["", "Digits", "_source", "../digits", "os", "numpy", "__init__"])
def test_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(data.DataError, match="dataset must be one of adult, "):
        data.load(name)


@pytest.mark.parametrize("name", data.names())
def test_unknown_preprocessing_is_refused_before_any_file_is_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=f"preprocessing of {name} must be one of default.*got 'magic'"):
        data.load(name, tmp_path, "magic")


def test_import_is_light() -> None:
    code = (
        "import dpgrad.data, sys; print([m for m in ('scipy', 'sklearn', 'PIL', 'torch', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]", done.stderr


def test_digits() -> None:
    digits = data.load("digits")
    assert digits.x_train.shape == (1437, 1, 8, 8)
    assert digits.x_test.shape == (360, 1, 8, 8)
    assert digits.x_train.dtype == np.float32
    assert (digits.x_train.min(), digits.x_train.max()) == (0, 1)
    raw = data.load("digits", preprocessing="raw")
    np.testing.assert_array_equal(raw.x_train / np.float32(16), digits.x_train)
    assert digits.flat().x_train.shape == (1437, 64)
    assert digits.outside_guarantee == ()


class TestDataset:
    def make(self, **changes: object) -> data.Dataset:
        rows, labels = np.full((3, 2), 77.25), np.array([0, 1, 1])
        fields: dict[str, object] = {
            "name": "toy", "x_train": rows, "y_train": labels, "x_test": rows, "y_test": labels, "classes": ("a", "b"),
            "preprocessing": "default", "split": "none", "public": ("n", OUTSIDE + "the maxima"),
        }  # fmt: skip
        return data.Dataset(**{**fields, **changes})  # type: ignore[arg-type]

    def test_representation_shows_no_row(self) -> None:
        assert "77" not in repr(self.make())

    def test_private_reads_are_told_apart(self) -> None:
        assert self.make().outside_guarantee == (OUTSIDE + "the maxima",)

    def test_fields_are_frozen(self) -> None:
        with pytest.raises(AttributeError):
            self.make().name = "other"  # type: ignore[misc]

    def test_lengths_must_agree(self) -> None:
        with pytest.raises(data.DataError, match="toy test: 3 rows but 2 labels"):
            self.make(y_test=np.array([0, 1]))

    @pytest.mark.parametrize("labels", [[0, 1, 2], [-1, 0, 1]])
    def test_labels_must_be_class_indices(self, labels: list[int]) -> None:
        with pytest.raises(data.DataError, match=r"a label lies outside 0\.\.1"):
            self.make(y_train=np.array(labels))

    def test_targets_are_free_without_classes(self) -> None:
        assert self.make(classes=None, y_train=np.array([-5.0, 2.5, 1e9])).classes is None
