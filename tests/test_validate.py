"""Checks of arguments: what passes, and the one line that says why the rest does not."""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad import _validate
from dpgrad.errors import OptionError

Check = Callable[..., None]
REAL: list[Check] = [_validate.positive, _validate.non_negative, _validate.unit_interval, _validate.open_unit]
NOT_NUMBERS = [True, False, "0.5", b"1", None, [0.5], (0.5,), {}, 1j, object]


def message(check: Check, **named: Any) -> str:
    with pytest.raises(ValueError, match="must") as error:
        check(**named)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("check", REAL)
class TestNumbers:
    @pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
    def test_only_numbers(self, check: Check, value: Any) -> None:
        assert message(check, delta=value).startswith("delta must be a number, got ")

    def test_nan_is_not_one(self, check: Check) -> None:
        for value in (math.nan, np.float32("nan"), Decimal("nan")):
            assert message(check, delta=value) == "delta must be a number, got nan"

    @pytest.mark.parametrize("value", [Fraction(1, 2), Decimal("0.5"), np.float32(0.5), np.float64(0.5), np.array(0.5)])
    def test_any_kind_of_number_will_do(self, check: Check, value: Any) -> None:
        check(delta=value)

    def test_infinities(self, check: Check) -> None:
        for value in (math.inf, -math.inf, np.float64("inf")):
            assert message(check, delta=value).startswith("delta must ")

    def test_what_no_float_can_hold(self, check: Check) -> None:
        for value in (10**400, -(10**400), np.array([0.5]), np.array([0.5, 0.5])):
            assert message(check, delta=value).startswith("delta must ")

    def test_the_message_is_short(self, check: Check) -> None:
        assert len(message(check, delta=list(range(100_000)))) < 300

    def test_the_first_bad_one_is_named(self, check: Check) -> None:
        assert message(check, good=0.5, bad=-1.0, worse="x").startswith("bad must ")


class TestBounds:
    @given(st.floats(allow_nan=False))
    def test_each_accepts_its_interval_and_nothing_else(self, value: float) -> None:
        holds = {
            _validate.positive: 0 < value < math.inf,
            _validate.non_negative: 0 <= value < math.inf,
            _validate.unit_interval: 0 <= value <= 1,
            _validate.open_unit: 0 < value < 1,
        }
        for check, fits in holds.items():
            if fits:
                check(x=value)
            else:
                assert repr(value) in message(check, x=value)

    def test_what_each_says(self) -> None:
        assert message(_validate.positive, sigma=0) == "sigma must be positive and finite, got 0"
        assert message(_validate.non_negative, epsilon=-1) == "epsilon must be zero or more and finite, got -1"
        assert message(_validate.unit_interval, rate=1.5) == "rate must lie in [0, 1], got 1.5"
        assert message(_validate.open_unit, delta=1) == "delta must lie strictly between 0 and 1, got 1"


class TestWhole:
    @pytest.mark.parametrize("value", [True, np.bool_(True), 2.0, "2", None, math.nan, np.float64(2), Fraction(2), []])
    def test_only_whole_numbers(self, value: Any) -> None:
        assert message(_validate.whole, steps=value) == f"steps must be a whole number, got {value!r}"

    @given(st.integers(), st.integers(-100, 100), st.integers(0, 100))
    def test_bounds(self, value: int, least: int, width: int) -> None:
        if least <= value <= least + width:
            _validate.whole(least=least, most=least + width, steps=value)
        else:
            assert message(_validate.whole, least=least, most=least + width, steps=value).startswith("steps must be ")

    def test_numpy_integers_will_do(self) -> None:
        _validate.whole(steps=np.int32(3))
        _validate.whole(steps=np.uint8(3))

    def test_step_counts(self) -> None:
        _validate.step_count(steps=1)
        _validate.step_count(steps=10**9)
        assert message(_validate.step_count, steps=0) == "steps must be a whole number of at least 1, got 0"
        assert (
            message(_validate.step_count, steps=10**12) == "steps must be at most 1,000,000,000, got 1,000,000,000,000"
        )


class TestNames:
    @pytest.mark.parametrize("place", range(4))
    @pytest.mark.parametrize("name", ["learning_rate", "mnist", "auto", "cross-entropy", "replace-one"])
    def test_two_letters_that_changed_place(self, name: str, place: int) -> None:
        place = min(place, len(name) - 2)
        swapped = name[:place] + name[place + 1] + name[place] + name[place + 2 :]
        known = ["clip", "learning_rate", "mnist", "auto", "cross-entropy", "replace-one"]
        assert _validate.nearest(swapped, known) == name

    @pytest.mark.parametrize(
        ("given", "name"),
        [("dg", "gd"), ("GD", "gd"), ("lr", "learning_rate"), ("--learning-rat", "learning_rate"), ("zzz", None),
         ("", None), (3, None), (None, None)],
    )  # fmt: skip
    def test_nearest(self, given: object, name: str | None) -> None:
        assert _validate.nearest(given, ["learning_rate", "gd", "output"]) == name

    @pytest.mark.parametrize("value", ["dg", None, 3, ["gd"], b"gd", ""])
    def test_only_known_names(self, value: object) -> None:
        _validate.one_of(["gd", "sgd"], solver="sgd")
        said = message(_validate.one_of, known=["gd", "sgd"], also="a Solver", solver=value)
        assert said.startswith(f"solver must be a Solver or one of gd, sgd, got {value!r}")

    def test_keywords_of_a_subclass(self) -> None:
        class Inner:
            @_validate.keywords(lambda name: ": write l2" if name == "C" else "")
            def __init__(self, l2: float = 0.0, clip: float = 1.0) -> None:
                self.l2, self.clip = l2, clip

        class Shown(Inner): ...

        assert Shown(2.0, clip=3.0).clip == 3.0
        for option, said in (("C", "write l2"), ("clpi", "did you mean clip?"), ("zzz", "it takes l2, clip")):
            with pytest.raises(TypeError, match=f"Shown has no option '{option}': {re.escape(said)}") as raised:
                Shown(**{option: 1.0})
            assert isinstance(raised.value, OptionError)
