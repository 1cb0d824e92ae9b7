"""What an experiment of a paper is: arms, a trial of one arm with one seed, and the claims to be checked.

An experiment is a value: its arms are plain settings, a trial is a function of (arm, seed, place), and the claims are
functions of the outcomes. `dpgrad.papers.running` runs it, `tables` and `figures` show it.

>>> outcomes = Outcomes({"DP-SGD": [{"accuracy": 97.0}, {"accuracy": 97.4}], "DP-PSASC": [{"accuracy": 98.3}]})
>>> round(outcomes.mean("DP-SGD", "accuracy"), 2), round(outcomes.error("DP-SGD", "accuracy"), 2)
(97.2, 0.2)
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Arm", "ArmKind", "Claim", "Experiment", "Outcomes", "Place", "Size"]

Size = Literal["full", "quick", "tiny"]
ArmKind = Literal["paper", "ours", "construction"]
_BY_SIZE = {"quick": 2, "tiny": 1}  # the most seeds of each arm


@dataclass(frozen=True)
class Arm:
    """A row of the table or a curve; ``setting`` is everything its trials depend on besides seed and size.

    ``choice`` says how the setting was found, where a search was to find it; trials do not depend on it.

    >>> Arm("DP-SGD", {"method": "dpsgd", "clip": 0.3}).setting["clip"]
    0.3
    """

    name: str
    setting: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values
    choice: str = ""


@dataclass(frozen=True)
class Place:
    """Where a trial runs, and how large it is: the paper's size, a minute on a CPU, or seconds for the tests.

    >>> Place().size
    'full'
    """

    device: str = "cpu"
    data: Path | None = None  # the data folder; None: the one DPGRAD_DATA names
    size: Size = "full"


class Outcomes:
    """The trials of each arm, by its name, in the order of the arms.

    >>> Outcomes({"a": [{"x": 1.0}]}).mean("b", "x")
    nan
    """

    def __init__(self, trials: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._trials = {arm: tuple(ran) for arm, ran in trials.items()}

    @property
    def arms(self) -> tuple[str, ...]:
        """The names of the arms that have a trial."""
        return tuple(arm for arm, ran in self._trials.items() if ran)

    def of(self, arm: str) -> tuple[Mapping[str, Any], ...]:
        """The figures of each trial of an arm; none where it has not run."""
        return self._trials.get(arm, ())

    def values(self, arm: str, figure: str) -> list[float]:
        """One number per trial, without those that are missing or not finite."""
        found = (trial.get(figure) for trial in self.of(arm))
        return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]

    def mean(self, arm: str, figure: str) -> float:
        """The mean of a figure; NaN where no trial has it."""
        found = self.values(arm, figure)
        return statistics.fmean(found) if found else math.nan

    def error(self, arm: str, figure: str) -> float:
        """The standard error of the mean; NaN where there are not two trials."""
        found = self.values(arm, figure)
        return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan

    def above(self, one: str, other: str, figure: str, errors: float = 2.0) -> bool | None:
        """Whether the mean of ``one`` is above that of ``other`` by more than ``errors`` standard errors.

        False where it is below by as much, None where they are closer or an arm is missing. Without two trials of each
        arm the error is unknown, and so is the answer, unless ``errors`` is 0.

        >>> one, other = [{"x": 2.0}, {"x": 2.2}], [{"x": 1.0}, {"x": 1.1}]
        >>> Outcomes({"a": one, "b": other}).above("b", "a", "x"), Outcomes({"a": one}).above("a", "b", "x")
        (False, None)
        """
        apart = self.mean(one, figure) - self.mean(other, figure)
        within = errors * math.hypot(self.error(one, figure), self.error(other, figure)) if errors else 0.0
        if math.isnan(apart) or math.isnan(within) or abs(apart) <= within:
            return None
        return apart > 0

    def curve(self, arm: str, name: str) -> list[float]:
        """The mean over trials of a list of numbers, as long as the shortest of them; NaN where one has no number."""
        lists = [trial[name] for trial in self.of(arm) if trial.get(name)]
        columns = zip(*lists, strict=False)
        return [statistics.fmean(math.nan if value is None else float(value) for value in column) for column in columns]


@dataclass(frozen=True)
class Claim:
    """A direction that the paper claims, and whether outcomes show it; None where they cannot tell.

    A ``certain`` claim holds at any size, and the tests fail where it does not. ``kind`` says whose it is: the paper's,
    ours, or one that holds by construction, whose failure would be a fault of the code.

    >>> Claim("a is above b", lambda outcomes: outcomes.above("a", "b", "x")).certain
    False
    """

    text: str
    holds: Callable[[Outcomes], bool | None]
    certain: bool = False
    kind: ArmKind = "paper"


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper.

    ``name`` is what is typed. ``about`` says what is run, which settings the paper does not print and what was chosen
    for them. ``needs`` are datasets of `dpgrad.data`. ``figure`` is the number of a trial that the table shows,
    ``also`` are further columns, and ``printed`` holds the paper's values by arm. ``trial`` returns plain JSON values:
    numbers, and lists for curves. ``after`` names searches, and ``settle`` fills in what they chose
    (`papers.searching`). ``source`` is the digest of the code of an arm, where arms depend on different code.

    >>> toy = Experiment("toy", "Nobody 2026", "Table 1", "Counts.", (), lambda size: (Arm("one"),), lambda *_: {}, "x")
    >>> toy.repeats("full"), toy.repeats("quick"), toy.repeats("tiny")
    (5, 2, 1)
    """

    name: str
    paper: str
    item: str
    about: str
    needs: tuple[str, ...]
    arms: Callable[[Size], tuple[Arm, ...]]
    trial: Callable[[Arm, int, Place], dict[str, Any]]
    figure: str
    printed: Mapping[str, float] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    seeds: int = 5
    draw: "Callable[[Outcomes, Figure], None] | None" = None
    also: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    settle: Callable[[Arm, Mapping[str, Outcomes]], Arm] | None = None
    source: Callable[[Arm], str] | None = None

    def repeats(self, size: Size) -> int:
        """How many seeds each arm has at a size."""
        return min(self.seeds, _BY_SIZE.get(size, self.seeds))
