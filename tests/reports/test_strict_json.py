"""Strict JSON: what is not finite, too deep or not JSON at all is refused with one line."""

from pathlib import Path

import pytest

from dpgrad.reports import strict_json

BAD = {
    "nothing": (b"", "is not JSON"),
    "torn": (b'{"a": ', "is not JSON"),
    "NaN": (b'{"a": NaN}', "NaN is no number of JSON"),
    "infinite": (b"[-Infinity]", "-Infinity is no number of JSON"),
    "infinite by size": (b"[1e999]", "1e999 is no number of JSON"),
    "too many digits": (b"[1" + b"0" * 30 + b"]", "is no number of JSON"),
    "more digits than Python reads": (b"9" * 10_000, "is no number of JSON"),
    "deep lists": (b"[" * 100_000 + b"]" * 100_000, "is nested too deeply"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is nested too deeply"),
    "latin": ("é".encode("latin-1"), "is not JSON"),
}


@pytest.mark.parametrize(("content", "said"), BAD.values(), ids=BAD)
def test_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"file\.json") as refusal:
        strict_json.read(tmp_path / "file.json")
    assert said in str(refusal.value)
    assert len(str(refusal.value)) < len(str(tmp_path)) + 300


def test_read(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"a": [1, 2.5, -123456789012345678, null, "é"]}', "utf-8")
    assert strict_json.read(tmp_path / "file.json") == {"a": [1, 2.5, -123456789012345678, None, "é"]}
