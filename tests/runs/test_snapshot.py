"""The file of a run's state: what is written is read again, and nothing in it is run. See also test_checkpoint."""

import dataclasses
import io
from pathlib import Path

import pytest
import torch

from dpgrad.mechanism.keys import Key
from dpgrad.runs import snapshot
from dpgrad.runs.replay import Identity
from dpgrad.runs.snapshot import Snapshot

MADE = Snapshot("run", 2, 7, 9, Key.from_seed(3), Identity({"steps": 9}, "d", "c", "cpu", 1, 4, {"a": 1}), {})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    state = {"weights": torch.randn(3), "names": ["a", "b"], "deep": {"rate": 0.1, "none": None, "large": 10**12}}
    dataclasses.replace(MADE, state=state).write(tmp_path / "file")
    found = Snapshot.read(tmp_path / "file")
    assert (found.run, found.attempt, found.step, found.due, found.key) == ("run", 2, 7, 9, MADE.key)
    assert found.identity == MADE.identity
    assert torch.equal(found.state.pop("weights"), state.pop("weights"))  # type: ignore[arg-type]
    assert found.state == state
    assert MADE.key.secret.hex() not in repr(found)


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run by a checkpoint",)


@pytest.mark.parametrize(
    ("content", "message"),
    [(Hostile(), "holds more than tensors and plain values"), ({"run": "x"}, "does not have the fields")],
    ids=["hostile", "fields"],
)
def test_a_file_with_a_checksum_and_other_content_is_refused(
    content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = io.BytesIO()
    torch.save(content, held)
    body = held.getvalue()
    (tmp_path / "file").write_bytes(snapshot._MAGIC + snapshot._checksum(body) + b"\n" + body)
    with pytest.raises(ValueError, match=message):
        Snapshot.read(tmp_path / "file")
    assert capsys.readouterr().out == ""
