"""One run priced by every accountant, as a table and in words that need no knowledge of privacy."""

import dataclasses
import io
import math
import re
from collections import Counter
from dataclasses import dataclass

from dpgrad.accounting import ACCOUNTANTS, account
from dpgrad.accounting.events import Compose, Event, Gaussian, Inexact, Leaf, Noised, Relation, Repeat, leaves
from dpgrad.accounting.guarantee import down, up
from dpgrad.accounting.inexact import InexactProfile
from dpgrad.accounting.pld import NAME, PldProfile
from dpgrad.errors import AccountingError
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["MANY", "ROUNDED", "Figure", "assumed_public", "coarse", "compare", "figure", "page", "runs", "words"]

MANY = 1000  # distinct steps beyond which the accountants that were not chosen see rounded noise

_WHAT = {
    "pld": "privacy loss distribution",
    "rdp": "Rényi, improved conversion",
    "moments": "moments accountant, as papers report it",
    "exact": "closed form",
    "strong": "strong composition, in a form that holds",
    "rdp-classic": "Rényi, classical conversion",
    "moments-closed": "moments accountant, as a binomial sum",
    "moments-asymptotic": "historical: leading term only, can understate",
    "strong-printed": "historical: as Abadi et al. print it, can understate",
}


@dataclass(frozen=True)
class Figure:
    """The ε of one accountant at one δ; ``lower`` and ``estimate`` where it has them.

    ``rounded`` says that it is the ε of noise rounded down by up to 0.1 % (see `coarse`): a bound, but a little above
    what the accountant gives for the noise of the run.
    """

    accountant: str
    epsilon: float
    guarantee: bool
    lower: float | None = None
    estimate: float | None = None
    chosen: bool = False
    rounded: bool = False

    @property
    def shown(self) -> str:
        """ε rounded up, with a ~ where the noise was rounded."""
        return ("~" if self.rounded else "") + up(self.epsilon)


def figure(event: Event, relation: Relation, accountant: str, delta: float, chosen: bool = False) -> Figure:
    """The figure of one accountant, with all it knows where it is the chosen one; what it cannot price it refuses.

    >>> figure(Gaussian(4.0), Relation.ADD_REMOVE, "exact", 1e-5).guarantee
    True
    """
    try:
        profile = account(event, relation, accountant)
        if chosen and isinstance(profile, PldProfile | InexactProfile) and accountant == NAME:
            found = profile.interval(delta)
            return Figure(accountant, float(found.upper), True, float(found.lower), float(found.estimate), chosen)
        return Figure(accountant, float(profile.epsilon(delta)), profile.guarantee, chosen=chosen)
    except ArithmeticError:
        raise AccountingError(
            f"accountant {accountant} cannot price this event: its numbers leave the range of floating point; choose a "
            "noise multiplier nearer to 1 or fewer steps"
        ) from None


def runs(event: Event) -> int:
    """How many stretches of equal steps the event has.

    >>> runs(Repeat(Gaussian(1.0), 5))
    1
    """
    return len(event.events) if isinstance(event, Compose) else 1


def coarse(event: Event, grid: int = 1000, most: int = MANY) -> Event:
    """The event itself up to ``most`` distinct steps; beyond, with noise rounded down by less than 1/grid.

    Less noise is never cheaper, so a bound on the answer is a bound on the event.

    >>> coarse(Compose((Gaussian(1.0), Gaussian(1.05))), grid=10, most=1)
    Compose(events=(Repeat(event=Gaussian(noise_multiplier=1.0), count=2),))
    """
    distinct = leaves(event)
    if len(distinct) <= most:
        return event
    counts: Counter[Leaf] = Counter()
    for leaf, count in distinct.items():
        if isinstance(leaf, Inexact):
            counts[Inexact(_rounded(leaf.event, grid), leaf.distance)] += count
            continue
        if not isinstance(leaf, Noised):
            counts[leaf] += count
            continue
        counts[_rounded(leaf, grid)] += count
    return Compose(tuple(Repeat(leaf, count) for leaf, count in counts.items()))


def _rounded(leaf: Noised, grid: int) -> Noised:
    z = leaf.noise_multiplier if isinstance(leaf, Gaussian) else leaf.event.noise_multiplier
    return _with_noise(leaf, min(z, math.exp(math.floor(math.log(z) * grid) / grid)))


def _with_noise(leaf: Noised, noise_multiplier: float) -> Noised:
    if isinstance(leaf, Gaussian):
        return Gaussian(noise_multiplier)
    return dataclasses.replace(leaf, event=Gaussian(noise_multiplier))


def compare(event: Event, relation: Relation, delta: float, chosen: Figure) -> list[tuple[str, Figure | str]]:
    """Each accountant with its figure, or with its reason for refusing; ``chosen`` is not computed again."""
    rounded = coarse(event)
    found: list[tuple[str, Figure | str]] = []
    for name in ACCOUNTANTS:
        if name == chosen.accountant:
            found.append((name, chosen))
            continue
        try:
            own = figure(rounded, relation, name, delta)
            found.append((name, dataclasses.replace(own, rounded=rounded is not event)))
        except ValueError as error:
            found.append((name, _short(name, str(error))))
    return found


def _short(name: str, refusal: str) -> str:
    """What an accountant prices, out of its refusal: without its own name, what it got, and the remedy."""
    return re.split(r", got |: ", refusal.removeprefix(f"accountant {name} "))[0]


def assumed_public(run: Mechanism, dataset_size: int | None) -> list[str]:
    """What the guarantee takes to be known to everyone. Under add-remove all of it is declared, not read from the data.

    >>> from dpgrad import sampling
    >>> assumed_public(Mechanism(sampling.FullBatch(), 5, 1.0), None)
    ['the number of steps (5)', 'the clip bound', 'the noise multiplier', 'δ']
    """
    public = []
    if isinstance(run.sampler, sampling.Poisson):
        public.append("the sampling rate")
    elif isinstance(run.sampler, sampling.Shuffle):
        public.append(f"the number of batches in an epoch ({run.sampler.span:,})")
    elif isinstance(run.sampler, sampling.FixedSize):
        public.append(f"the batch size ({run.sampler.batch_size:,})")
    public.append(f"the number of steps ({run.steps:,})")
    if run.adaptive_clip is not None:
        public.append("the first clip bound and the rule by which it follows the norms")
    else:
        public.append("the clip bound and its schedule" if run.hold_noise else "the clip bound")
    public.extend(["the noise multiplier", "δ"])
    if dataset_size is not None:
        public.append(f"the number of rows ({dataset_size:,})")
    elif run.relation is not Relation.ADD_REMOVE:
        public.append("the number of rows")
    return public


_NEIGHBOURS = {
    Relation.ADD_REMOVE: "what stays hidden is whether any one row is in the data (add-remove)",
    Relation.ZERO_OUT: "the number of rows is public; what stays hidden is whether any one row counts (zero-out)",
    Relation.REPLACE_ONE: "the number of rows is public; what stays hidden is what any one row says (replace-one)",
}
_OTHERWISE = {
    Relation.ADD_REMOVE: "without that row",
    Relation.ZERO_OUT: "with nothing in place of that row",
    Relation.REPLACE_ONE: "with any other row in place of that row",
}


def _covered(chosen: Figure, run: Mechanism, delta: float) -> str:
    if math.isinf(chosen.epsilon):
        return "Nothing is promised: at this δ no finite ε was found. Add noise, sample less or take fewer steps."
    if not chosen.guarantee:
        return f"Nothing is promised: accountant {chosen.accountant} repeats a paper's arithmetic. Use pld."
    times = f"e^{up(chosen.epsilon)}" if chosen.epsilon > 50 else up(math.exp(chosen.epsilon))
    text = (
        "Whatever anyone sees of the model, even after every step, is "
        f"at most {times} times more or less likely than {_OTHERWISE[run.relation]}, up to a chance of {delta:g} (δ)."
    )
    return text + (" A factor that large protects hardly anyone." if chosen.epsilon > 10 else "")


def _drawn(run: Mechanism) -> str:
    steps = f"{run.steps:,} step{'s' if run.steps > 1 else ''}"
    match run.sampler:
        case sampling.Poisson():
            return (
                f"Each row must enter each of {steps} by a coin of its own, with chance "
                f"{run.sampler.sampling_rate_at(0):g} (Poisson sampling); shuffled or fixed-size batches are not "
                "covered by this figure and cost far more."
            )
        case sampling.Shuffle():
            return (
                f"The rows are shuffled into {run.sampler.span:,} batches an epoch, {steps} in all. Every row is sure "
                "to be used once per epoch, so an epoch costs one full Gaussian release and sampling saves nothing: "
                "much worse than Poisson sampling at the same rate. Pricing it as Poisson would understate ε: "
                "where that claims 3, a known pair of datasets already shows 17.6."
            )
        case sampling.FixedSize():
            return (
                f"Each of {steps} draws exactly {run.sampler.batch_size:,} of {run.sampler.dataset_size:,} rows "
                "without replacement; exchanging a row moves the sum by two clip bounds, one row out and another in: "
                "much worse than Poisson sampling at the same rate."
            )
        case _:
            return f"Every row takes part in each of {steps} (full batch)."


ROUNDED = "those with ~ are for noise rounded down by up to 0.1 %, to answer soon"


def words(chosen: Figure, run: Mechanism, delta: float, public: list[str], rough: bool) -> list[tuple[str, str]]:
    """What is covered, for whom, how rows were drawn, what is public, and why accountants differ; each with a label."""
    declared = "Declared, not read from the data: " if run.relation is Relation.ADD_REMOVE else ""
    listed = f"{declared}{', '.join(public[:-1])} and {public[-1]}."
    return [
        ("what is covered", _covered(chosen, run, delta)),
        ("for whom", f"The unit is one row; {_NEIGHBOURS[run.relation]}. Someone with several rows is protected less."),
        ("sampling", _drawn(run)),
        ("assumed public", listed[0].upper() + listed[1:]),
        (
            "accountants",
            "Every figure marked yes is a proven bound on the same truth, so the least may be quoted; some proofs lose "
            "more than others. Figures marked no repeat a paper's arithmetic and can be too small."
            + (f" {ROUNDED.capitalize()}." if rough else ""),
        ),
    ]


def page(
    headline: list[str],
    rows: list[tuple[str, Figure | str]],
    explained: list[tuple[str, str]],
    terminal: bool,
    width: int,
) -> str:
    """The answer for people: a headline, the table of accountants, and the words."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("accountant", no_wrap=True)
    table.add_column("ε", justify="right", no_wrap=True)
    table.add_column("guarantee", no_wrap=True)
    table.add_column("note")
    for name, found in rows:
        if isinstance(found, str):
            table.add_row(name, "–", "–", Text(found), style="dim")
            continue
        table.add_row(
            f"{name} (chosen)" if found.chosen else name,
            found.shown,
            "yes" if found.guarantee else "no",
            Text(_note(found)),
            style="bold" if found.chosen else "" if found.guarantee else "dim",
        )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for label, text in explained:
        grid.add_row(label, Text(text))
    buffer = io.StringIO()
    console = Console(
        file=buffer, force_terminal=terminal or None, width=width, highlight=False, markup=False, emoji=False
    )
    for line in headline:
        console.print(Text(line, style="bold"))
    console.print()
    console.print(table)
    console.print()
    console.print(grid)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _note(found: Figure) -> str:
    what = _WHAT.get(found.accountant, "")
    if found.lower is None or found.lower == found.epsilon:
        return what
    return f"{what}; truth in [{down(found.lower)}, {up(found.epsilon)}]"
