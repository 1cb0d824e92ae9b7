"""Progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dpgrad.accounting.guarantee import up
from dpgrad.cli import _options

if TYPE_CHECKING:
    from dpgrad.papers.running import Ended
    from dpgrad.training.curves import Progress

_LINES = 10  # how many plain lines a run has
_MOST_TRIALS = 50  # plain lines of an experiment
_QUIET = 0.1  # seconds between two drawings of the bar

_Show = Callable[["Progress"], None]


def said(now: "Progress", metric: str) -> str:
    """ε so far and the latest held-out metric."""
    held_out = "" if now.held_out is None else f"  held-out {metric} {_figure(now.held_out, metric)}"
    return f"ε {up(now.epsilon):<7}{held_out}"


def _figure(value: float, metric: str) -> str:
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(75.2)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextlib.contextmanager
def showing(label: str, metric: str) -> Iterator[_Show]:
    """Within the block, what is called after each step to show it."""
    with _bar(label, metric) if sys.stderr is not None and sys.stderr.isatty() else _lines(label, metric) as show:
        yield show


@contextlib.contextmanager
def _drawing(label: str) -> "Iterator[Callable[[int, int, str], None]]":
    """Within the block, what is called with the work done, all of it, and words, to draw a bar."""
    from rich import progress
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    named, text = TextColumn("{task.description}"), TextColumn("{task.fields[said]}")
    columns = (named, BarColumn(bar_width=24), MofNCompleteColumn(), text)
    with progress.Progress(*columns, console=Console(stderr=True, highlight=False)) as bar:
        task = bar.add_task(label, total=None, said="")
        yield lambda done, total, said: bar.update(task, completed=done, total=total, said=said)


@contextlib.contextmanager
def _bar(label: str, metric: str) -> Iterator[_Show]:
    with _drawing(f"{label:<16}") as draw:
        drawn = 0.0

        def show(now: "Progress") -> None:
            nonlocal drawn
            if now.step == now.steps or time.monotonic() - drawn > _QUIET:
                drawn = time.monotonic()
                draw(now.step, now.steps, f"{said(now, metric)}  {clock(now.seconds_left)} left")

        yield show


@contextlib.contextmanager
def _lines(label: str, metric: str) -> Iterator[_Show]:
    with _options.late(f"checking the model and computing the noise for {label}") as begun:

        def show(now: "Progress") -> None:
            begun()
            if now.step == now.steps or now.step % -(-now.steps // _LINES) == 0:
                left = f"{said(now, metric)}  {clock(now.seconds_left)} left"
                print(f"{label}: step {now.step:,} of {now.steps:,}  {left}", file=sys.stderr, flush=True)

        yield show


@contextlib.contextmanager
def counting(label: str, metric: str) -> "Iterator[Callable[[Ended], None]]":
    """Within the block, what is called after each trial of an experiment to show it."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda now: _trial(now, label, metric)
        return
    with _drawing(label) as draw:
        yield lambda now: draw(now.done, now.total, _after(now, metric))


def _trial(now: "Ended", label: str, metric: str) -> None:
    if now.done == now.total or now.done % -(-now.total // _MOST_TRIALS) == 0:
        print(f"{label}: {now.done} of {now.total}  {_after(now, metric)}", file=sys.stderr, flush=True)


def _after(now: "Ended", metric: str) -> str:
    """The trial that has just ended, and the time left."""
    value = now.figures.get(metric)
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else ""
    figure = f"  {metric} {shown}" if shown else ""
    return f"{now.job.arm.name}, seed {now.job.seed}{figure}  {clock(now.seconds_left)} left"
