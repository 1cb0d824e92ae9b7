"""Find the least noise, or the most steps, within a privacy budget.

`least` and `most_steps` know nothing about mechanisms or accountants. They take a price, the certified ε of a choice,
and return a choice whose price was computed and is within the target. A quick estimate may guide the search; it never
decides.

>>> from dpgrad.accounting.events import Gaussian
>>> z = noise_multiplier(Gaussian, epsilon=1.0, delta=1e-5, accountant="exact")
>>> round(z, 4)
3.7306
"""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from dpgrad import _validate
from dpgrad.accounting import _search, account
from dpgrad.accounting.events import Event, Relation
from dpgrad.accounting.guarantee import Profile, refuse_history
from dpgrad.accounting.pairs import TooLittleNoise
from dpgrad.errors import AccountingError, BudgetSpentError, OptionError

__all__ = ["Reading", "least", "more_steps", "most_steps", "noise_multiplier", "steps"]

# the noise multipliers that are looked for; a target that the least of them meets gets the least of them
LEAST_NOISE, MOST_NOISE = 0.01, 1e7
# how far, relative to ε, a certified price is expected to lie above a quick estimate: aimed at, then measured
_SLACK = 2.5e-5
_TOLERANCE = 1e-7
_FINEST = 1e-6  # grid over answer


def least(
    price: Callable[[float], float],
    target: float,
    *,
    low: float,
    high: float,
    quick: Callable[[float], float] | None = None,
    grid: float | None = None,
    name: str = "noise_multiplier",
) -> float:
    """Return the least x in [low, high] with price(x) ≤ target, for a price that falls with x.

    Without a grid, the answer exceeds the least one by a relative error below about 1e-4. With a grid, it is the least
    multiple of ``grid``: the multiple below it was tried and fails.

    Guarantee: price(x) was computed for the x returned and is at most ``target``.

    >>> least(lambda x: 1 / x, 4.0, low=0.01, high=100.0, grid=0.1)
    0.3
    """
    _validate.positive(**{f"target of {name}": target}, low=low, high=high)
    if grid is not None:
        _validate.positive(grid=grid)
    search = _Falling(price, quick, target, low, high, name)
    x = search.root()
    return search.certified(x) if grid is None else search.on_grid(x, grid)


class _Falling:
    """A search for the least x whose price is within the target; every price is computed once."""

    def __init__(
        self,
        price: Callable[[float], float],
        quick: Callable[[float], float] | None,
        target: float,
        low: float,
        high: float,
        name: str,
    ) -> None:
        self.target, self.low, self.high, self.name = target, low, high, name
        self.price = _once(price)
        self.quick = self.price if quick is None else _once(quick)
        self.slack = 0.0 if quick is None else _SLACK
        self.slope = -1.0  # of log ε in log x, as last seen

    def excess(self, x: float) -> float:
        """log of quick(x) over the target less the slack: positive where there is too little noise."""
        return _log_ratio(self.quick(x), self.target * (1 - self.slack))

    def root(self) -> float:
        """An x at which the quick price meets the target less the slack, from the side that is within it."""
        u = math.log(min(max(1.0, self.low), self.high))
        bottom, top = math.log(self.low), math.log(self.high)
        f = self.excess(math.exp(u))
        low = high = None  # (log x, excess) with too little noise, with enough
        step = 0.0
        while low is None or high is None:
            if f > 0:
                low = (u, f)
                if u >= top:
                    raise BudgetSpentError(
                        f"no {self.name} up to {self.high:g} reaches epsilon {self.target:g} (there it is "
                        f"{self.quick(self.high):.6g}): allow a larger epsilon or delta, or fewer steps"
                    )
            else:
                high = (u, f)
                if u <= bottom:
                    return self.low
            if low is None or high is None:
                # ε falls about as 1/x where noise is plenty and faster where it is scarce; do not leap into scarcity
                reach = 1.3 * f + 0.05 if f > 0 else max(0.6 * f - 0.05, -0.7)
                step = max(reach, 1.5 * step) if f > 0 else min(reach, 1.5 * step)
                u = min(max(u + step, bottom), top)
                f = self.excess(math.exp(u))
        x, self.slope = _search.root(lambda v: self.excess(math.exp(v)), low, high, max(self.slack / 5, _TOLERANCE))
        return math.exp(x)

    def certified(self, x: float) -> float:
        """x, moved up until its price is within the target."""
        margin = 1e-7
        for _ in range(60):
            gap = _log_ratio(self.price(x), self.target)
            if gap <= 0:
                return x
            if x >= self.high:
                break
            # by the slope that was seen; never by more than a quarter at once
            x = min(x * math.exp(min((gap + margin) / min(max(-self.slope, 0.5), 20.0), 0.25)), self.high)
            margin *= 4
        raise BudgetSpentError(
            f"no {self.name} up to {self.high:g} is certified to reach epsilon {self.target:g} (at {x:g} it is "
            f"{self.price(x):.6g}): allow a larger epsilon or delta, or fewer steps"
        )

    def on_grid(self, x: float, grid: float) -> float:
        """The least multiple of the grid whose price is within the target."""
        if grid < _FINEST * x:  # x is not known more exactly: many multiples would have to be tried
            raise OptionError(
                f"grid (--precision) must be at least {_FINEST * x:.2g} for a {self.name} of about {x:.2g}, got "
                f"{grid:g}: choose a coarser one, or leave it out"
            )
        unit = Decimal(repr(float(grid)))

        def fits(k: int) -> bool:
            return self.price(float(k * unit)) <= self.target

        k = max(1, math.ceil(x * (1 - self.slack) / grid), math.ceil(self.low / grid * (1 - 1e-12)))
        if fits(k):
            while k > 1 and (k - 1) * grid >= self.low and fits(k - 1):
                k -= 1
        else:
            while not fits(k):
                k += 1
                if k * grid > self.high:
                    return self.certified(self.high)  # raises: nothing up to here is within the target
        return float(k * unit)


def most_steps(
    price: Callable[[int], float],
    target: float,
    *,
    limit: int = _validate.MOST_STEPS,
    quick: Callable[[int], float] | None = None,
) -> int:
    """Return the largest number of steps with price(n) ≤ target, for a price that grows with n.

    Guarantee: price(n) was computed and is at most ``target``; price(n+1) was computed and exceeds it. If the price is
    a loose upper bound, the true cost of more steps may still be within the target.

    >>> most_steps(lambda n: 0.1 * n**0.5, 2.0)
    400
    """
    _validate.positive(target=target)
    _validate.step_count(limit=limit)
    price = _once(price)
    fast = price if quick is None else _once(quick)
    guess = _last(lambda n: _log_ratio(fast(n), target), limit)
    if quick is None or guess == 0:
        if guess == 0 and (cost := price(1)) > target:
            raise BudgetSpentError(
                f"steps: one step already costs epsilon {cost:.6g}, above the target {target:g}: "
                "add noise, sample less or allow a larger epsilon or delta"
            )
        if guess == limit:
            _refuse_limit(price(limit), target, limit)
        return max(guess, 1)
    return _certified_steps(price, fast, target, guess, limit)


def _certified_steps(
    price: Callable[[int], float], quick: Callable[[int], float], target: float, guess: int, limit: int
) -> int:
    """From the answer by quick prices to the answer by certified ones, which is near."""
    near = max(1, guess - max(1, guess // 50))
    slope = 0.5
    if near < guess and quick(near) > 0:
        slope = min(max(_log_ratio(quick(guess), quick(near)) / math.log(guess / near), 0.02), 10.0)
    within, beyond, n, stride, tries = 0, limit + 1, guess, 1, 0
    while True:
        gap = _log_ratio(price(n), target)
        if gap <= 0:
            within = max(within, n)
        else:
            beyond = min(beyond, n)
        if beyond - within <= 1:
            break
        tries += 1
        if tries <= 3:
            n = math.floor(n * math.exp(min(-gap / slope, 1.0)))
        elif within and beyond <= limit:  # the price does not follow the slope: halve what is left
            n = (within + beyond) // 2
        else:  # or look for the other end of it with longer and longer strides
            n += stride if gap <= 0 else -stride
            stride *= 2
        n = min(max(n, within + 1), beyond - 1)
    if within == limit:
        _refuse_limit(price(limit), target, limit)
    if within == 0:
        raise BudgetSpentError(
            f"steps: one step already costs epsilon {price(1):.6g}, above the target {target:g}: "
            "add noise, sample less or allow a larger epsilon or delta"
        )
    return within


def _refuse_limit(cost: float, target: float, limit: int) -> None:
    raise OptionError(
        f"steps: {limit:,} steps, the most that are priced, cost epsilon {cost:.6g}, within the target {target:g}: "
        "there is no most number of steps to find; use less noise or a smaller epsilon"
    )


def _last(excess: Callable[[int], float], limit: int) -> int:
    """The largest n up to ``limit`` with excess(n) ≤ 0, for an excess that grows; 0 where there is none."""
    low, f_low, high, f_high = 0, -math.inf, limit + 1, math.inf
    n, f = min(1000, limit), math.nan
    stuck = 0
    while high - low > 1:
        f = excess(n)
        width = math.log(high / max(low, 0.5))
        if f <= 0:
            low, f_low = n, f
        else:
            high, f_high = n, f
        if high - low <= 1:
            break
        stuck = stuck + 1 if math.log(high / max(low, 0.5)) > width / 2 else 0
        if math.isinf(f_low) or math.isinf(f_high):  # not yet between two: ε grows about as √n
            guess = n * math.exp(min(max(-2.2 * f, -3.0), 3.0)) + (1 if f <= 0 else -1)
            n = limit if n > limit // 4 and f <= 0 else math.floor(guess)
        elif stuck > 2:
            n, stuck = math.floor(math.sqrt(low * high)), 0
        else:
            n = math.floor(low * math.exp(math.log(high / low) * f_low / (f_low - f_high)))
            n += 1 if n == low else 0
        n = min(max(n, low + 1), high - 1)
    return low


def _log_ratio(value: float, target: float) -> float:
    """log(value/target), held within ±500 for values that are zero or infinite; NaN is refused."""
    if math.isnan(value):
        raise AccountingError("the price is nan, so nothing can be calibrated")
    if value <= 0:
        return -500.0
    return min(max(math.log(value) - math.log(target), -500.0), 500.0)


N = TypeVar("N", int, float)


def _once(price: Callable[[N], float]) -> Callable[[N], float]:
    """The same price, each value computed once."""
    known: dict[N, float] = {}

    def remembered(x: N) -> float:
        if x not in known:
            known[x] = float(price(x))
        return known[x]

    return remembered


@runtime_checkable
class _Estimates(Protocol):
    """A profile that has a quick estimate as well as its certified ε."""

    def estimate(self, delta: float) -> float: ...


def _prices(
    event_of: Callable[[N], Event], probe: N, delta: float, relation: Relation, accountant: str
) -> tuple[Callable[[N], float], Callable[[N], float] | None]:
    """The certified price of a choice, and a quick one where the accountant has it."""

    def profile(x: N) -> Profile:
        return account(event_of(x), relation, accountant)

    # a trial with less noise than the accountant can price has too little
    def price(x: N) -> float:
        try:
            return profile(x).epsilon(delta)
        except TooLittleNoise:
            return math.inf

    def quick(x: N) -> float:
        try:
            found = profile(x)
        except TooLittleNoise:
            return math.inf
        assert isinstance(found, _Estimates)
        return found.estimate(delta)

    first = profile(probe)
    refuse_history(first)
    return price, quick if isinstance(first, _Estimates) else None


def noise_multiplier(
    event_of: Callable[[float], Event],
    epsilon: float,
    delta: float,
    relation: Relation = Relation.ADD_REMOVE,
    accountant: str = "pld",
    grid: float | None = None,
) -> float:
    """Return the least noise multiplier z at which event_of(z) is (ε, δ)-private according to ``accountant``.

    Guarantee: the certified ε of event_of(z) at ``delta`` was computed and is at most ``epsilon``. Accountants that are
    only historical comparisons are refused.

    >>> from dpgrad.accounting.events import Gaussian, Poisson, Repeat
    >>> z = noise_multiplier(lambda z: Repeat(Poisson(512 / 60_000, Gaussian(z)), 2343), epsilon=3.0, delta=1e-5)
    >>> round(z, 3)
    0.892
    """
    _budget(epsilon, delta)
    price, quick = _prices(event_of, 1.0, delta, relation, accountant)
    return least(price, epsilon, quick=quick, low=LEAST_NOISE, high=MOST_NOISE, grid=grid)


def steps(
    event_of: Callable[[int], Event],
    epsilon: float,
    delta: float,
    relation: Relation = Relation.ADD_REMOVE,
    accountant: str = "pld",
    limit: int = _validate.MOST_STEPS,
) -> int:
    """Return the largest n at which event_of(n) is (ε, δ)-private according to ``accountant``.

    Guarantee: the certified ε of event_of(n) was computed and is at most ``epsilon``; that of event_of(n+1) exceeds it.

    >>> from dpgrad.accounting.events import Gaussian, Repeat
    >>> steps(lambda n: Repeat(Gaussian(10.0), n), epsilon=3.0, delta=1e-5)
    51
    """
    _budget(epsilon, delta)
    price, quick = _prices(event_of, 1, delta, relation, accountant)
    return most_steps(price, epsilon, quick=quick, limit=limit)


def _budget(epsilon: float, delta: float) -> None:
    _validate.positive(epsilon=epsilon)
    _validate.open_unit(delta=delta)


class Reading(NamedTuple):
    """The noise multiplier at step 0 and the number of steps, by one reading of Yu et al. (2018)."""

    noise_multiplier: float
    steps: int


def more_steps(
    constant: Callable[[float, int], Event],
    scheduled: Callable[[float, int], Event],
    epsilon: float,
    delta: float,
    target_steps: int,
    relation: Relation = Relation.ADD_REMOVE,
    accountant: str = "pld",
    grid: float | None = 0.01,
) -> Reading:
    """Calibrate the noise for a constant clip bound over ``target_steps``; spend what a shrinking bound saves on steps.

    This is the first reading of σ̃ in Yu et al. (2018). A clip bound that shrinks while the noise keeps its absolute
    size raises the noise multiplier, and the budget saved buys more steps. The events are functions of noise multiplier
    and steps. The schedule runs over ``target_steps``, whatever the number of steps.

    >>> from dpgrad.accounting.events import Gaussian, Repeat
    >>> def run(z, n):
    ...     return Repeat(Gaussian(z), n)
    >>> more_steps(run, run, epsilon=2.0, delta=1e-5, target_steps=100, accountant="exact", grid=1.0)
    Reading(noise_multiplier=20.0, steps=100)
    """
    _validate.step_count(target_steps=target_steps)
    z = noise_multiplier(lambda z: constant(z, target_steps), epsilon, delta, relation, accountant, grid)
    return Reading(z, steps(lambda n: scheduled(z, n), epsilon, delta, relation, accountant))
