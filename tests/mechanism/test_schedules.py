"""Schedules: their values, that arrays and steps agree to the bit, and what is refused."""

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dpgrad.mechanism import schedules
from dpgrad.mechanism.schedules import Formula

positive = st.floats(1e-3, 1e3)
horizon = st.integers(1, 5000)


@st.composite
def falling(draw: st.DrawFn) -> tuple[float, float]:
    start = draw(positive)
    return start, start * draw(st.floats(0.01, 1.0))


# Every formula that stays positive: found by name below, so that a new one cannot be forgotten.
POSITIVE: dict[str, st.SearchStrategy[Formula]] = {
    "constant": st.builds(schedules.constant, positive),
    "linear": st.builds(schedules.linear, positive, horizon),
    "affine": st.builds(schedules.affine, positive, horizon),
    "geometric": st.builds(lambda p, r: schedules.geometric(p[0], r, p[1]), falling(), st.floats(0.5, 1.0)),
    "arithmetic": st.builds(lambda p, d: schedules.arithmetic(p[0], d, p[1]), falling(), st.floats(0, 10)),
    "decay_then_hold": st.builds(schedules.decay_then_hold, positive, positive, horizon),
    "cosine": st.builds(schedules.cosine, positive, positive, horizon),
    "warmup": st.builds(schedules.warmup, st.builds(schedules.linear, positive, horizon), horizon),
    "piecewise": st.lists(st.integers(1, 300), unique=True, max_size=5).flatmap(
        lambda b: st.builds(
            schedules.piecewise, st.just(sorted(b)), st.lists(positive, min_size=len(b) + 1, max_size=len(b) + 1)
        )
    ),
}
formulas = st.one_of(*POSITIVE.values())


def test_every_formula_is_tested() -> None:
    made = {name for name in vars(schedules) if not name.startswith("_") and f"_{name}" in vars(schedules)}
    assert made == POSITIVE.keys()


@given(formulas, st.integers(1, 200))
def test_steps_and_arrays_agree_to_the_bit(formula: Formula, steps: int) -> None:
    whole = formula(np.arange(steps))
    assert whole.dtype == np.float64
    assert [formula(t) for t in range(steps)] == whole.tolist()
    assert formula(np.arange(steps)[steps // 2 :]).tolist() == whole[steps // 2 :].tolist()


@given(formulas)
def test_json_pickle_and_hash(formula: Formula) -> None:
    again = schedules.from_dict(json.loads(json.dumps(formula.to_dict(), allow_nan=False)))
    assert again == formula
    assert hash(again) == hash(formula)
    assert repr(again) == repr(formula)
    assert pickle.loads(pickle.dumps(formula)) == formula
    assert eval(repr(formula), dict(vars(schedules))) == formula


@given(formulas, st.integers(0, 10_000))
def test_formulas_are_positive_and_finite(formula: Formula, step: int) -> None:
    assert 0 < formula(step) < math.inf


def test_different_parameters_differ() -> None:
    assert schedules.linear(1.0, 10) != schedules.linear(1.0, 11)
    assert schedules.linear(1.0, 10) != schedules.affine(1.0, 10)


class TestShapes:
    def test_linear_is_equation_6_of_yu_et_al(self) -> None:
        clip = schedules.linear(12.0, 1000)
        assert [clip(t) for t in (0, 500, 1000, 5000)] == [12.0, 8.0, 6.0, 6.0]
        assert clip(250) == 12.0 / 1.25

    def test_affine_is_the_straight_line(self) -> None:
        clip = schedules.affine(12.0, 1000)
        assert [clip(t) for t in (0, 500, 1000, 5000)] == [12.0, 9.0, 6.0, 6.0]

    def test_geometric_stops_at_its_floor(self) -> None:
        clip = schedules.geometric(8.0, 0.999, 4.0)
        assert clip(1) == pytest.approx(7.992)
        assert clip(692) > 4.0
        assert clip(693) == 4.0  # 0.999^693 = 0.49990

    def test_arithmetic_stops_at_its_floor(self) -> None:
        clip = schedules.arithmetic(8.0, 0.008, 4.0)
        assert clip(1) == pytest.approx(7.992)
        assert (clip(500), clip(501)) == (4.0, 4.0)

    def test_cosine_matches_torch(self) -> None:
        torch = pytest.importorskip("torch")
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1)
        ours = schedules.cosine(0.5, 0.1, 20)
        for step in range(20):
            assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
            optimizer.step()
            theirs.step()

    @given(st.floats(0.01, 10), st.floats(0, 10), horizon)
    def test_ends_are_exact(self, start: float, end: float, steps: int) -> None:
        for formula in (schedules.cosine(start, end, steps), schedules.decay_then_hold(start, end, steps)):
            assert formula(0) == pytest.approx(start, rel=1e-15)
            assert formula(steps) == formula(10 * steps) == end

    def test_warmup_multiplies_and_its_clock_runs_on(self) -> None:
        lr = schedules.warmup(schedules.piecewise([2], [1.0, 0.5]), 4)
        assert [lr(t) for t in range(5)] == [0.25, 0.5, 0.375, 0.5, 0.5]

    def test_warmup_of_a_plain_function(self) -> None:
        lr = schedules.warmup(lambda t: 2.0 + t, 2)
        assert lr(np.arange(3)).tolist() == [1.0, 3.0, 4.0]
        with pytest.raises(ValueError, match="of is a plain function and cannot be written as JSON"):
            lr.to_dict()


class TestValues:
    @given(formulas, st.integers(1, 50), st.integers(0, 1000))
    def test_of_a_formula(self, formula: Formula, steps: int, start: int) -> None:
        assert schedules.values(formula, steps, start).tolist() == [formula(t) for t in range(start, start + steps)]

    def test_of_a_number_and_of_a_function(self) -> None:
        assert schedules.values(1.5, 2).tolist() == [1.5, 1.5]
        assert schedules.values(lambda t: t + 1, 3, start=2).tolist() == [3.0, 4.0, 5.0]
        assert schedules.values(1.0, 0).tolist() == []

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
    def test_names_the_first_bad_step(self, bad: float) -> None:
        with pytest.raises(ValueError, match=rf"^clip at step 7 must be positive and finite, got {bad!r}$"):
            schedules.values(lambda t: bad if t in (7, 9) else 1.0, 20, name="clip")

    def test_zero_can_be_admitted(self) -> None:
        assert schedules.values(schedules.cosine(1.0, 0.0, 2), 3, zero=True).tolist() == [1.0, 0.5, 0.0]

    @pytest.mark.parametrize("bad", [None, "1.0", True, 1j, [1.0, 2.0]])
    def test_a_function_must_return_numbers(self, bad: Any) -> None:
        with pytest.raises(ValueError, match="clip at step 0 must be a number, got"):
            schedules.values(lambda t: bad, 3, name="clip")

    @pytest.mark.parametrize("bad", [None, "linear", True, math.nan, -1, 0, [1.0]])
    def test_what_is_no_schedule(self, bad: Any) -> None:
        with pytest.raises(ValueError, match=r"^clip must be .*; give a number or a function of the step$"):
            schedules.values(bad, 3, name="clip")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(math.nan), "value must be a number, got nan"),
        (lambda: schedules.constant(True), "value must be a number, got True"),
        (lambda: schedules.linear("1", 10), "start must be a number, got '1'"),
        (lambda: schedules.linear(0.0, 10), "start must be positive"),
        (lambda: schedules.linear(1.0, 0), "steps must be a whole number of at least 1"),
        (lambda: schedules.linear(1.0, 2.5), "steps must be a whole number, got 2.5"),
        (lambda: schedules.affine(1.0, 10**12), "steps must be at most 1,000,000,000"),
        (lambda: schedules.geometric(1.0, 1.5, 0.5), "ratio must lie strictly between 0 and 1"),
        (lambda: schedules.geometric(1.0, 0.5, 2.0), "floor must be at most start = 1.0, got 2.0"),
        (lambda: schedules.geometric(1.0, 0.5, 0.0), "floor must be positive"),
        (lambda: schedules.arithmetic(1.0, -0.1, 0.5), "decrement must be zero or more"),
        (lambda: schedules.cosine(1.0, -0.1, 5), "end must be zero or more"),
        (lambda: schedules.warmup("x", 5), "of must be a number"),
        (lambda: schedules.piecewise([5], [1.0]), "values must be one more than the 1 boundaries, got 1"),
        (lambda: schedules.piecewise([5, 5], [1.0, 2.0, 3.0]), "boundaries must rise, got 5 after 5"),
        (lambda: schedules.piecewise([0], [1.0, 2.0]), r"boundaries\[0\] must be a whole number of at least 1"),
        (lambda: schedules.piecewise([1], [1.0, math.nan]), r"values\[1\] must be a number, got nan"),
        (lambda: schedules.linear(1.0, 10)(-1), "step must be a whole number of at least 0, got -1"),
        (lambda: schedules.linear(1.0, 10)(1.5), "step must be a whole number, got 1.5"),
        (lambda: schedules.linear(1.0, 10)(np.array([3, -2])), "step must be a whole number of at least 0"),
    ],
)
def test_bad_parameters_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"schedule": "values", "schedules": 1.0, "steps": 2},
        {"schedule": "_linear", "start": 1.0, "steps": 2},
        {"schedule": "parse_clip", "text": "linear", "start": 1.0, "steps": 2},
        {"schedule": "Formula"},
        {"schedule": "linear"},
        {"schedule": "linear", "start": 1.0, "steps": 2, "extra": 3},
        {"schedule": "linear", "start": "1", "steps": 2},
        {"schedule": "piecewise", "boundaries": 1, "values": 2},
        {"schedule": "warmup", "of": {"schedule": "nothing"}, "steps": 3},
        {"schedule": ["linear"]},
    ],
)
def test_from_dict_refuses_anything_else(data: object) -> None:
    with pytest.raises(ValueError, match=r"schedule|start"):
        schedules.from_dict(data)


class TestParseClip:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("linear", schedules.linear(8.0, 100)),
            ("affine", schedules.affine(8.0, 100)),
            ("geometric:0.001", schedules.geometric(8.0, 0.999, 4.0)),
            ("arithmetic:1e-3", schedules.arithmetic(8.0, 0.008, 4.0)),
        ],
    )
    def test_grammar(self, text: str, expected: Formula) -> None:
        assert schedules.parse_clip(text, 8.0, 100) == expected

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("cosine", "clip schedule must be linear, affine, geometric:R or arithmetic:R, got 'cosine'"),
            ("", "got ''"),
            ("Linear", "got 'Linear': did you mean linear"),
            ("linear:0.1", "clip schedule linear takes no rate"),
            ("geometric", "needs a rate R between 0 and 1, got 'geometric' without one: write geometric:0.001"),
            ("geometric:", "needs a rate R between 0 and 1, got 'geometric:'"),
            ("arithmetic:x", "needs a rate R between 0 and 1, got 'arithmetic:x'"),
            ("geometric:0", "rate of clip schedule geometric must lie strictly between 0 and 1, got 0.0"),
            ("geometric:1", "must lie strictly between 0 and 1"),
            ("arithmetic:-0.1", "must lie strictly between 0 and 1"),
            ("arithmetic:nan", "rate of clip schedule arithmetic must be a number, got nan"),
            ("geometric:inf", "must lie strictly between 0 and 1"),
        ],
    )
    def test_refuses(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            schedules.parse_clip(text, 8.0, 100)
        assert "\n" not in str(caught.value)

    @given(st.text(max_size=20))
    def test_any_other_text_is_refused_in_one_line(self, text: str) -> None:
        assume(text not in ("linear", "affine"))
        with pytest.raises(ValueError, match="clip schedule") as caught:
            schedules.parse_clip(text, 1.0, 10)
        assert len(str(caught.value).splitlines()) == 1
