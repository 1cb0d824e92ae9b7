"""The secure noise has the law that docs/proofs/secure_noise.md claims, by enumeration, and rounding the cost."""

import hashlib
import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpgrad.mechanism import chacha, secure
from dpgrad.mechanism.keys import Key

STD, SHIFT, HALF = 1024, 9, 32768
KEY = Key.from_seed(7)
# Of a test that compares a statistic of a fixed seed with its law: how often an honest sampler would fail it.
FALSE_ALARM = 1e-6


@pytest.fixture(scope="module")
def weights() -> list[int]:
    return secure.weights()


class TestTable:
    def test_its_columns_give_the_weights(self, weights: list[int]) -> None:
        """Every probability of the table, exactly: thresholds below 2^80 and what they leave to the other value."""
        high, low, other = secure.table()
        found = [0] * len(weights)
        for column in range(len(weights)):
            threshold = (int(high[column]) << 16) + int(low[column])
            found[column] += threshold
            found[int(other[column])] += 2**80 - threshold
        assert found == weights
        assert sum(weights) == 2**96

    def test_no_probability_is_too_small(self, weights: list[int]) -> None:
        """p_i ≥ (1 − 2^-80)·t_i for every i, where t is the discrete Gaussian: hence p = (1 − 2^-80)·t + 2^-80·(rest).

        The normaliser √(2π)·1024·(1 + 2Σe^{-2π²·1024²k²}) is taken without its tail, which makes t larger.
        """
        with mp.workdps(60):
            total = STD * mp.sqrt(2 * mp.pi)
            least = (1 - mp.mpf(2) ** -80) * mp.mpf(2) ** 96 / total
            for i in range(HALF + 1):
                needed = least * mp.exp(-mp.mpf(i * i) / (2 * STD**2))
                assert weights[HALF - i] >= needed
                assert i == HALF or weights[HALF + i] >= needed

    def test_what_is_given_beyond_the_gaussian_is_below_2_to_the_minus_80(self, weights: list[int]) -> None:
        with mp.workdps(60):
            total = STD * mp.sqrt(2 * mp.pi)
            exact = [mp.exp(-mp.mpf((i - HALF) ** 2) / (2 * STD**2)) / total for i in range(0, 2 * HALF, 1)]
            distance = sum(abs(mp.mpf(w) / 2**96 - t) for w, t in zip(weights, exact, strict=True)) / 2
            assert distance <= mp.mpf(2) ** -80

    def test_is_the_same_everywhere(self) -> None:
        high, low, other = secure.table()
        made = hashlib.sha256(high.astype("<u8").tobytes())
        made.update(low.astype("<u2").tobytes())
        made.update(other.astype("<u2").tobytes())
        assert made.hexdigest() == "04003ab618ee384bf389cfdaed9cfbeb60e5068ea2d5ee0dc1e14765a72d3554"


class TestLaw:
    """The constants of the proof, computed."""

    def smoothing(self, ratio: mp.mpf) -> mp.mpf:
        """ε with Σ_{x∈Z} ρ_s(x − c) = s√(2π)(1 ± ε) for all c (Poisson summation), s = ratio."""
        return 2 * mp.nsum(lambda k: mp.exp(-2 * mp.pi**2 * ratio**2 * k**2), [1, 20])

    def test_distance_covers_every_part(self) -> None:
        with mp.workdps(60):
            ratio = 2 / mp.sqrt(1 + mp.mpf(2) ** -18)
            smooth = self.smoothing(ratio)
            assert smooth < mp.mpf(2) ** -112
            tail = 4 * mp.exp(-(mp.mpf(HALF - 1) ** 2) / (2 * STD**2))  # of one part, beyond the table
            assert tail < mp.mpf(2) ** -735
            pieces = 3 * mp.mpf(2) ** -80 + 8 * smooth + 3 * tail * (1 + mp.exp(256))
            assert pieces <= secure.DISTANCE

    def test_scale_is_at_most_that_of_the_gaussian(self) -> None:
        square = STD**2 * (1 + 2 ** (2 * SHIFT) + 2 ** (4 * SHIFT))
        assert math.isqrt(square - 4) == secure.SCALE
        assert secure._STD == STD
        assert secure._SHIFT == SHIFT

    @pytest.mark.parametrize("value", [0, 12345, 2**28 + 511, -(5 * 2**28) + 77, 11 * 2**28 + 3])
    def test_parts_add_up_to_a_discrete_gaussian(self, value: int) -> None:
        """The probability of one value from the convolution of exact parts, against the closed form, to 2^-108."""
        with mp.workdps(50):
            square = mp.mpf(STD**2 * (1 + 2 ** (2 * SHIFT) + 2 ** (4 * SHIFT)))
            inner = [self.two_parts(value - 2 ** (2 * SHIFT) * x) for x in range(*self.near(value, 2 * SHIFT))]
            outer = [mp.exp(-mp.mpf(x * x) / (2 * STD**2)) for x in range(*self.near(value, 2 * SHIFT))]
            found = sum(a * b for a, b in zip(inner, outer, strict=True)) / (STD * mp.sqrt(2 * mp.pi)) ** 3
            expected = mp.exp(-mp.mpf(value * value) / (2 * square)) / mp.sqrt(2 * mp.pi * square)
            assert abs(found / expected - 1) < mp.mpf(2) ** -108

    def two_parts(self, rest: int) -> mp.mpf:
        near = range(*self.near(rest, SHIFT))
        return sum(
            (mp.exp(-mp.mpf(x * x + (rest - 2**SHIFT * x) ** 2) / (2 * STD**2)) for x in near), mp.mpf(0)
        )  # fmt: skip

    def near(self, value: int, shift: int) -> tuple[int, int]:
        """The values of a part whose terms count: 14 standard deviations of the parts below on either side."""
        middle = round(value / 2**shift)
        return middle - 40, middle + 41

    def test_a_tie_is_decided_by_the_spare_digits(self) -> None:
        """A column whose threshold is met by 64 digits gives its own value below the last 16 digits only."""
        high, low, other = secure.table()
        column = int(np.flatnonzero((low > 100) & (low < 60_000) & (other != np.arange(2 * HALF)))[0])
        words = np.zeros((2, 4), np.uint64)
        words[:, 0] = np.uint64(column << 32)  # of the third part; the others take column 0
        words[:, 3] = high[column]
        words[0, 0] |= np.uint64((int(low[column]) - 1) << 48)
        words[1, 0] |= np.uint64(int(low[column]) << 48)
        below, above = secure.numbers(words).tolist()
        assert below - above == (column - int(other[column])) << (2 * SHIFT)


class TestDraw:
    def test_committed_values(self) -> None:
        assert secure.draw(KEY, 0, 5, "noise", "weight", "0").tolist() == DRAWN

    def test_values_are_made_of_their_own_words(self) -> None:
        """Of so many values that the digits of each part decide some: in most columns they do not matter."""
        words = chacha.words(KEY.derive("secure noise", "a"), 0, 400).reshape(800, 4)
        assert secure.draw(KEY, 0, 800, "a").tolist() == secure.numbers(words).tolist()
        assert secure.numbers(words).tolist() == [one(line.tolist()) for line in words]

    @given(st.integers(0, 2**34), st.integers(0, 9), st.integers(0, 9))
    def test_any_part_is_a_part_of_the_whole(self, start: int, before: int, count: int) -> None:
        whole = secure.draw(KEY, start, before + count + 3, "a")
        assert secure.draw(KEY, start + before, count, "a").tolist() == whole[before : before + count].tolist()

    def test_what_is_drawn_together_has_streams_of_its_own(self) -> None:
        names, sizes = [("noise", "a", "0"), ("noise", "b", "0"), ("noise", "a", "1")], (5, 7, 40_000)
        together = [
            secure.Wanted(np.empty(size), name, start)
            for start, name, size in zip((1, 0, 2), names, sizes, strict=True)
        ]
        secure.fill(KEY, together)
        for wanted in together:
            assert wanted.values.tolist() == secure.draw(KEY, wanted.start, len(wanted.values), *wanted.names).tolist()
        assert together[0].values.tolist() != together[1].values[1:6].tolist()

    def test_threads_do_not_matter(self) -> None:
        count = 3 * secure._AT_ONCE + 7
        assert (secure.draw(KEY, 1, count, "a", threads=3) == secure.draw(KEY, 1, count, "a")).all()

    def test_other_names_keys_and_steps_are_other_values(self) -> None:
        drawn = {
            tuple(secure.draw(key, 0, 3, *names)) for key in (KEY, Key.from_seed(8))
            for names in (("a",), ("b",), ("a", "b"), ("ab",))
        }  # fmt: skip
        assert len(drawn) == 8

    @pytest.mark.parametrize("bad", [{"start": -1}, {"count": -1}, {"start": 1.5}, {"count": True}])
    def test_places_are_counts(self, bad: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="whole number"):
            secure.draw(KEY, **{"start": 0, "count": 1, **bad})  # type: ignore[arg-type]


def one(words: list[int]) -> int:
    """A value by its definition, in Python's whole numbers."""
    high, low, other = secure.table()
    total = 0
    for part in range(3):
        column = words[0] >> (16 * part) & 0xFFFF
        digits = (words[1 + part] << 16) + (words[0] >> 48)
        threshold = (int(high[column]) << 16) + int(low[column])
        total += ((column if digits < threshold else int(other[column])) - HALF) << (SHIFT * part)
    return total


@pytest.fixture(scope="module")
def drawn() -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return secure.draw(Key.from_seed(11), 0, 1 << 18, "statistics")


class TestStatistics:
    """Each statistic of a fixed seed would be as extreme with probability `FALSE_ALARM` from an honest sampler."""

    def test_the_law_is_normal(self, drawn: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        assert stats.kstest(drawn / secure.SCALE, "norm").pvalue > FALSE_ALARM
        assert stats.chi2.cdf(float(((drawn / secure.SCALE) ** 2).sum()), len(drawn)) > FALSE_ALARM / 2
        assert stats.chi2.sf(float(((drawn / secure.SCALE) ** 2).sum()), len(drawn)) > FALSE_ALARM / 2

    @pytest.mark.parametrize("place", [0, 5, 9, 14, 18, 22])
    def test_low_digits_are_uniform(self, drawn: "np.ndarray[tuple[int], np.dtype[np.int64]]", place: int) -> None:
        """Up to 2^22 of a standard deviation of 2^28, digits are uniform to far below what is seen."""
        counts = np.bincount(drawn >> place & 15, minlength=16)
        assert stats.chisquare(counts).pvalue > FALSE_ALARM

    def test_neighbours_are_independent(self, drawn: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        z = drawn / secure.SCALE
        for lag in (1, 2, 3):
            correlation = float((z[lag:] * z[:-lag]).mean()) * math.sqrt(len(z) - lag)
            assert 2 * stats.norm.sf(abs(correlation)) > FALSE_ALARM


class TestGrid:
    @given(
        st.floats(1e-200, 1e200), st.floats(1e-3, 1e2), st.integers(1, 10**8)
    )  # fmt: skip
    def test_the_noise_multiplier_is_kept(self, clip: float, multiplier: float, values: int) -> None:
        """SCALE ≥ z·(clip/grid + 2√d): what the event says holds for the rounded sums."""
        std = multiplier * clip
        unit = secure.grid(std, clip, values)
        with mp.workdps(40):
            sensitivity = mp.mpf(clip) / mp.mpf(unit) + 2 * mp.sqrt(values)
            assert secure.SCALE / sensitivity >= mp.mpf(std) / mp.mpf(clip)
        assert unit * secure.SCALE <= std * (1 + 4 * math.sqrt(values) * multiplier / secure.SCALE + 1e-9)

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.floats(1e-12, 1e3))
    def test_rounding_moves_by_at_most_one_unit(self, totals: list[float], unit: float) -> None:
        found = secure.rounded(np.array(totals), unit)
        assert (found == np.rint(found)).all()
        for total, whole in zip(totals, found.tolist(), strict=True):
            exact = mp.mpf(total) / mp.mpf(unit)
            assert abs(whole - max(-secure.LIMIT, min(secure.LIMIT, exact))) <= 1

    def test_far_sums_stay_exact(self) -> None:
        most = secure.rounded(np.array([1e300, -1e300, np.inf, np.nan]), 1e-9)
        assert most.tolist() == [2.0**52, -(2.0**52), 2.0**52, 0.0]
        assert 2**52 + 32768 * (1 + 2**9 + 2**18) < 2**53  # whole numbers of float64

    @pytest.mark.parametrize(("std", "clip"), [(0.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (1.0, math.inf), (-1.0, 1.0)])
    def test_no_other_sizes(self, std: float, clip: float) -> None:
        with pytest.raises(ValueError, match="must be positive and finite"):
            secure.grid(std, clip, 10)

    def test_too_coarse_for_so_many_values(self) -> None:
        with pytest.raises(ValueError, match=r"too coarse for 1,000,000,000,000 values at noise multiplier 100: use"):
            secure.grid(100.0, 1.0, 10**12)

    def test_too_small_to_be_held(self) -> None:
        with pytest.raises(ValueError, match="rescale the loss"):
            secure.grid(1e-300, 1e-300, 10)

    def test_distance_of_many_steps(self) -> None:
        assert secure.inexact(0) == 0
        assert secure.inexact(10, 10) >= 100 * secure.DISTANCE
        assert secure.inexact(2**50, 2**50) == 1.0
        for values, steps in ((-1, 1), (1, -1), (0.5, 1)):
            with pytest.raises(ValueError, match="must be a whole number"):
                secure.inexact(values, steps)  # type: ignore[arg-type]


DRAWN = [-220249842, 100944726, -156607620, -77843938, -132532524]
