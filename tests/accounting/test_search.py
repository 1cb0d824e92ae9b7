"""The root searches keep their side, however the function is shaped."""

import math

from hypothesis import given
from hypothesis import strategies as st

from dpgrad.accounting import _search

PLACES = st.floats(1e-9, 1e9)


@given(PLACES, st.floats(0.0, 0.9), st.sampled_from([0.0, 1e-15, 1e-12, 1e-3]))
def test_a_bracket_holds_the_turn(place: float, low: float, width: float) -> None:
    def beyond(x: float) -> bool:
        return x < place

    below, above = _search.halved(beyond, low * place, 3 * place, relative=width)
    assert below < place <= above
    assert above - below <= width * above or math.nextafter(below, math.inf) == above


@given(PLACES, PLACES)
def test_doubling_ends_on_the_far_side(place: float, start: float) -> None:
    low, high = _search.doubled(lambda x: x < place, 0.0, start)
    assert low < place <= high <= max(2 * place, start)


@given(PLACES, st.floats(0.2, 5.0))
def test_doubling_stops_where_it_is_told(most: float, start: float) -> None:
    calls: list[float] = []
    assert _search.doubled(lambda x: not calls.append(x), 0.0, start, most)[1] == math.inf
    assert max(calls) <= max(most, start)


@given(st.floats(-5.0, 5.0), st.floats(0.1, 9.0), st.sampled_from([1e-9, 1e-6, 1e-3]))
def test_a_root_is_met_from_the_side_within(place: float, power: float, tolerance: float) -> None:
    def falling(x: float) -> float:
        return -math.copysign(abs(x - place) ** power, x - place)

    x, slope = _search.root(falling, (-9.0, falling(-9.0)), (9.0, falling(9.0)), tolerance)
    assert -tolerance * (1 + 1e-9) <= falling(x) <= 0 or math.isclose(x, place, abs_tol=1e-11)
    assert slope <= 0


@given(st.floats(-5.0, 5.0))
def test_a_jump_is_met_from_its_right_side(place: float) -> None:
    x, _ = _search.root(lambda x: 1.0 if x < place else -1.0, (-9.0, 1.0), (9.0, -1.0), 1e-6)
    assert place <= x <= place + 1e-10
