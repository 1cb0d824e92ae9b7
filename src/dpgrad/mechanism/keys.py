"""The secret key of a run: all randomness of a private step is a function of (key, step, purpose).

>>> key = Key.fresh()
>>> key
Key(secret)
>>> Key.from_seed(7).label
'reproducible, not for release'
"""

import dataclasses
import hashlib
import operator
import secrets
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

from dpgrad import _validate
from dpgrad.errors import OptionError

__all__ = ["SIZE", "AnyKey", "Key"]

SIZE = 32  # bytes


@dataclass(frozen=True, repr=False)
class Key:
    """32 secret bytes, whether they come from a seed, and which source they are the key of.

    With ``secure``, batches and noise come from the ChaCha20 stream (`dpgrad.mechanism.secure`); else from generators
    that are quick and not cryptographic.

    Guarantee: anyone who has the key of a run can redraw its batches and subtract its noise. It is never printed, and
    may be written only to a file that is not released. Use one key for one run on one dataset: two results with the
    same noise and different sums reveal their difference.

    >>> Key(bytes(32), reproducible=True) == Key(bytes(32), reproducible=True)
    True
    """

    secret: bytes
    reproducible: bool
    secure: bool = False

    def __post_init__(self) -> None:
        _check_secret(self.secret)

    def __repr__(self) -> str:
        return f"Key({self.label})"

    @classmethod
    def fresh(cls) -> "Key":
        """Draw a key from the operating system.

        >>> Key.fresh() == Key.fresh()
        False
        """
        return cls(secrets.token_bytes(SIZE), reproducible=False)

    @classmethod
    def from_seed(cls, seed: int) -> "Key":
        """Derive a key from a whole number. Anyone who guesses the number has the key.

        >>> Key.from_seed(7) == Key.from_seed(7)
        True
        """
        number = _whole("seed", seed)
        digest = _digest(b"dpgrad seed", number.to_bytes(number.bit_length() // 8 + 1, "little"))
        return cls(digest, reproducible=True)

    @classmethod
    def of(cls, key: "AnyKey") -> "Key":
        """Return a key as it is; treat a whole number or bytes as a seed, because others may know them.

        >>> Key.of(7) == Key.from_seed(7), Key.of(b"told by a friend").label
        (True, 'reproducible, not for release')
        """
        match key:
            case Key():
                return key
            case bytes():
                if not key:
                    raise OptionError("key must not be empty, got b'': use Key.fresh()")
                return cls(_digest(b"dpgrad bytes", key), reproducible=True)
            case _:
                return cls.from_seed(_whole("key", key))

    @property
    def label(self) -> str:
        """The public label of the key; every result from a seed must carry it."""
        return "reproducible, not for release" if self.reproducible else "secret"

    def secured(self) -> "Key":
        """Return the same key for the secure source.

        >>> Key.from_seed(7).secured().secure
        True
        """
        return dataclasses.replace(self, secure=True)

    def child(self, purpose: str, *names: str) -> "Key":
        """Return a key for one use, of the same source and with the same label.

        >>> Key.from_seed(7).secured().child("class counts").secure
        True
        """
        return dataclasses.replace(self, secret=self.derive(purpose, *names))

    def derive(self, purpose: str, *names: str, size: int = SIZE) -> bytes:
        """Derive ``size`` bytes for one use: keyed BLAKE2b (RFC 7693) of purpose and names, with lengths.

        Guarantee: different lists of names are hashed from different bytes, so distinct uses get independent bytes.

        >>> key = Key.from_seed(7)
        >>> key.derive("noise", "ab", "c") == key.derive("noise", "a", "bc")
        False
        """
        words = [_text(word) for word in (purpose, *names)]
        message = b"".join(len(word).to_bytes(8, "little") + word for word in words)
        return hashlib.blake2b(message, digest_size=size, key=self.secret, person=b"dpgrad derive").digest()


AnyKey: TypeAlias = Key | int | bytes


def _check_secret(secret: object) -> None:
    if not isinstance(secret, bytes) or len(secret) != SIZE:
        given = f"{len(secret)} of them" if isinstance(secret, bytes) else f"a {type(secret).__name__}"
        raise OptionError(f"secret must be {SIZE} bytes, got {given}: use Key.fresh() or Key.from_seed(seed)")


def _whole(name: str, value: object) -> int:
    """The whole number; unlike other checks, a refusal does not repeat what may be a secret."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        remedy = "" if name == "seed" else ", bytes or a Key"
        raise OptionError(f"{name} must be a whole number{remedy}, got a {type(value).__name__}")
    number = operator.index(value)
    if number < 0:
        raise OptionError(f"{name} must be a whole number of at least 0, got a negative one")
    return number


def _text(word: object) -> bytes:
    if not isinstance(word, str):
        raise OptionError(f"name must be text, got {_validate.shown(word)}")
    return word.encode()


def _digest(person: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=SIZE, person=person).digest()
