"""The secret key of a run: where it comes from, what is made of it, and that it is never shown."""

import copy
import hashlib
import pickle
import traceback
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.mechanism.keys import Key

names = st.lists(st.text(max_size=4), max_size=4)


class TestSource:
    def test_fresh_keys_come_from_the_operating_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("secrets.token_bytes", lambda size: bytes(range(size)))
        assert Key.fresh() == Key(bytes(range(32)), reproducible=False)

    def test_fresh_keys_differ(self) -> None:
        assert len({Key.fresh() for _ in range(100)}) == 100

    def test_a_seed_marks_the_run(self) -> None:
        assert Key.from_seed(3).reproducible is True
        assert Key.from_seed(3).label == "reproducible, not for release"
        assert Key.fresh().reproducible is False
        assert "reproducible" not in Key.fresh().label

    def test_what_is_given_counts_as_a_seed(self) -> None:
        assert Key.of(3) == Key.of(np.int64(3)) == Key.from_seed(3)
        assert Key.of(b"\x03" * 32).reproducible is True
        fresh = Key.fresh()
        assert Key.of(fresh) is fresh

    def test_all_of_a_seed_counts(self) -> None:
        given = [0, 1, 255, 256, 2**32, 2**64, 2**128 + 1, 2**2000, b"\0", b"\0\0", b"\1", b"a" * 200]
        assert len({Key.of(seed).secret for seed in given}) == len(given)

    @pytest.mark.parametrize("seed", [-1, 1.5, True, "7", None, b"7"])
    def test_hostile_seed(self, seed: Any) -> None:
        with pytest.raises(ValueError, match="seed must be a whole number"):
            Key.from_seed(seed)

    @pytest.mark.parametrize("secret", [b"", b"short", bytes(31), bytes(33), "a" * 32, 5, None, bytearray(32)])
    def test_hostile_secret(self, secret: Any) -> None:
        with pytest.raises(ValueError, match=r"secret must be 32 bytes, got .*: use Key.fresh\(\)"):
            Key(secret, reproducible=False)

    def test_where_the_secret_came_from_must_be_said(self) -> None:
        with pytest.raises(TypeError, match="reproducible"):
            Key(bytes(32))  # type: ignore[call-arg]


class TestSecrecy:
    SECRET = b"Zebra-Quagga-Okapi-Lynx-Marmot-1"

    def shown(self, text: str) -> bool:
        return any(part in text for part in ("Zebra", "Quagga", self.SECRET.hex(), self.SECRET.hex().upper()))

    def test_no_text_of_a_key_shows_it(self) -> None:
        key = Key(self.SECRET, reproducible=False)
        assert repr(key) == str(key) == f"{key}" == "Key(secret)"
        assert not self.shown(f"{[key]!r} {key!a}")
        assert repr(Key.from_seed(3)) == "Key(reproducible, not for release)"

    @pytest.mark.parametrize(
        "make",
        [
            lambda s: Key(s[:-1], reproducible=False),
            lambda s: Key(s.decode(), reproducible=False),
            lambda s: Key.of(s.decode()),
            lambda s: Key.from_seed(s),
        ],
    )
    def test_no_refusal_shows_it(self, make: Any) -> None:
        with pytest.raises(ValueError, match="must be") as caught:
            make(self.SECRET)
        assert not self.shown("".join(traceback.format_exception_only(caught.value)))

    def test_a_wrong_number_is_not_repeated(self) -> None:
        with pytest.raises(ValueError, match=r"^key must be a whole number of at least 0, got a negative one$"):
            Key.of(-987654321)

    def test_pickles_and_copies_are_equal(self) -> None:
        for key in (Key.fresh(), Key.from_seed(5)):
            assert pickle.loads(pickle.dumps(key)) == copy.deepcopy(key) == key
            assert pickle.loads(pickle.dumps(key)).reproducible is key.reproducible

    def test_frozen(self) -> None:
        with pytest.raises(AttributeError, match="secret"):
            Key.from_seed(5).secret = bytes(32)  # type: ignore[misc]


class TestDerive:
    key = Key.from_seed(11)

    @given(names, names)
    def test_encoding_is_injective(self, a: list[str], b: list[str]) -> None:
        assert (self.key.derive("p", *a) == self.key.derive("p", *b)) == (a == b)

    def test_purpose_is_apart_from_names_and_keys_from_each_other(self) -> None:
        uses = [("a",), ("a", ""), ("", "a"), ("ab",), ("a", "b"), ("b", "a")]
        made = {Key.from_seed(seed).derive(*use) for use in uses for seed in range(20)}
        assert len(made) == 20 * len(uses)

    def test_is_keyed_blake2b(self) -> None:
        message = b"\5\0\0\0\0\0\0\0noise\2\0\0\0\0\0\0\0\xc3\xa9"
        expected = hashlib.blake2b(message, key=self.key.secret, digest_size=16, person=b"dpgrad derive").digest()
        assert self.key.derive("noise", "é", size=16) == expected

    @pytest.mark.parametrize("name", [5, None, b"weight"])
    def test_names_are_text(self, name: Any) -> None:
        with pytest.raises(ValueError, match="name must be text, got"):
            self.key.derive("noise", name)
