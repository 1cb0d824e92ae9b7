"""The file that holds the state of a run: the key, what the key may be used for, and where training was. Private."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpgrad import _files, _validate
from dpgrad.errors import OptionError, ResumeError
from dpgrad.mechanism.keys import Key
from dpgrad.runs.replay import Identity

__all__ = ["REMEDY", "Snapshot", "refuse_unreadable"]

_MAGIC = b"dpgrad checkpoint 1 "
_FIELDS = {"run", "attempt", "step", "due", "key", "seeded", "identity", "state"}
REMEDY = "put back the file that the run wrote, or begin in another folder and count what the ledger says as spent"


@dataclass(frozen=True, repr=False)
class Snapshot:
    """The state of a run after ``step`` steps, and the key and identity of the attempt that made it. Private.

    The key lies in the same file as the state: after a crash one cannot belong to another attempt than the other. No
    step from ``due`` on is taken before the next checkpoint is written.

    >>> Snapshot("name", 1, 0, 50, Key.fresh(), Identity({}, "", "", "cpu", 1, None, {}), {})
    Snapshot(attempt 1, step 0, private)
    """

    run: str
    attempt: int
    step: int
    due: int
    key: Key
    identity: Identity
    state: dict[str, Any]

    def __repr__(self) -> str:
        return f"Snapshot(attempt {self.attempt}, step {self.step}, private)"

    def write(self, path: Path) -> None:
        """Replace the checkpoint in ``path``."""
        held = io.BytesIO()
        torch.save(
            {
                "run": self.run,
                "attempt": self.attempt,
                "step": self.step,
                "due": self.due,
                "key": self.key.secret.hex(),
                "seeded": self.key.reproducible,
                "identity": self.identity.to_json(),
                "state": self.state,
            },
            held,
        )
        body = held.getbuffer()
        _files.replace(path, _MAGIC + _checksum(body) + b"\n", body)

    @classmethod
    def read(cls, path: Path) -> "Snapshot":
        """The checkpoint in ``path``; anything but what `write` wrote is refused."""
        with _files.told(path, "read"):
            head, _, body = path.read_bytes().partition(b"\n")
        if not head.startswith(_MAGIC):
            raise ResumeError(f"{path} is not a checkpoint of dpgrad: {REMEDY}")
        if head != _MAGIC + _checksum(body):
            raise ResumeError(f"{path} is incomplete or was edited, its checksum does not match: {REMEDY}")
        found = _loaded(path, body)
        if not isinstance(found, dict) or set(found) != _FIELDS:
            raise ResumeError(f"{path} does not have the fields of a checkpoint: {REMEDY}")
        key = Key(bytes.fromhex(found["key"]), found["seeded"])
        identity = Identity.from_json(found["identity"])
        return cls(found["run"], found["attempt"], found["step"], found["due"], key, identity, found["state"])


def _checksum(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=32, person=b"dpgrad check").hexdigest().encode()


def _loaded(path: Path, body: bytes) -> Any:
    """What ``body`` holds, tensors and plain values; nothing in it is run."""
    try:
        return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
    except Exception as error:  # torch names no kind
        raise ResumeError(
            f"{path} holds more than tensors and plain values ({type(error).__name__}): {REMEDY}"
        ) from None


def refuse_unreadable(state: object) -> None:
    """Refuse a state that could be written and not read again.

    >>> refuse_unreadable({"model": torch.nn.Linear(1, 1)})
    Traceback (most recent call last):
    dpgrad.errors.OptionError: state must hold tensors and plain values only, got what torch does not load safely: ...
    """
    if not isinstance(state, dict):
        raise OptionError(f"state must be a dict, got {_validate.shown(state)}")
    held = io.BytesIO()
    try:
        torch.save(state, held)
        held.seek(0)
        torch.load(held, weights_only=True)
    except Exception as error:  # torch names no kind
        raise OptionError(
            "state must hold tensors and plain values only, got what torch does not load safely: "
            f"{_validate.shown(str(error))}"
        ) from None
