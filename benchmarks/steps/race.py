"""Times engines, side by side or each in a process of its own.

On a CPU, which others may be using, engines take turns within each round in one process, and ratios are medians over
rounds: what slows down a round slows down all. A CUDA device is used by nobody else: there every engine has a process
of its own in each row, in which blocks of steps are timed.
"""

import gc
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.steps.engines import COMPILED, EAGER, GRAPH, ORDINARY, OURS, Engine, Prepared
from benchmarks.steps.processes import Failed, Worker, most_resident, said
from benchmarks.steps.sums import ROUNDED_TOLERANCE, TOLERANCE, Sketch, definitions, difference, sketched
from benchmarks.steps.workloads import Workload

WARM_SECONDS = 0.2  # until the clocks of an idle device have risen, and lots of all sizes were seen
MOST_WARM_SECONDS = 3.0
WARM_LOTS = 8  # steps on Poisson lots before the set-up counts as done, while there is time
BLOCK_SECONDS = 0.05  # on CUDA steps are timed in blocks of about so long: a short one is over before it was waited for
MOST_IN_BLOCK = 256
PERIOD_SECONDS = 0.5  # a block holds whole periods of a step where one is over so soon: a median pays their cost too
LOTS_IN_BLOCK, LOTS_SECONDS = 16, 3.0  # Poisson lots differ: so many are timed at once where that is over so soon
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Settings:
    """How engines are measured: rounds end after ``seconds`` of timed steps; an engine of a row is cut at ``limit``."""

    device: str
    repeat: int = 15
    threads: int = 1
    tf32: bool = True
    seconds: float = 3.0
    limit: float = 60.0

    def tolerance(self, workload: Workload) -> float:
        """By how much sums may differ from the definition, relatively: by more where they are formed of fewer bits."""
        rounded = workload.autocast or (self.device == "cuda" and self.tf32)
        return ROUNDED_TOLERANCE if rounded else TOLERANCE


@dataclass
class Row:
    """One engine on one workload; ``reason`` says why it could not run."""

    name: str
    workload: str
    batch_size: int
    engine: str
    seconds: list[float] = field(default_factory=list)  # of a step on the expected number of examples, one a round
    setup: float | None = None  # seconds of the first steps beyond those of as many steady ones
    mebibytes: float | None = None  # most that was allocated from the first step on, beyond the data
    form: str = ""  # how dpgrad took its steps, and why they were not captured
    apart: float | None = None  # the largest relative difference of a parameter's clipped sum from the definition's
    reason: str = ""
    sketch: Sketch = field(default_factory=dict, repr=False)  # of what the first step summed, as it is timed
    lots: bool = field(default=False, repr=False)  # whether that step was on the first Poisson lot

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    def fields(self) -> dict[str, Any]:
        """All but the sketch, for JSON."""
        return {name: value for name, value in asdict(self).items() if name not in ("sketch", "lots")}


@contextmanager
def conditions(settings: Settings) -> Iterator[None]:
    """Within the block torch computes as the settings say, and peers, which warn at ordinary settings, are silent."""
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    before, threads = [place.fp32_precision for place in places], torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        for place in places:
            place.fp32_precision = "tf32" if settings.tf32 else "ieee"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
        torch.set_num_threads(threads)
        logging.disable(disabled)


@dataclass
class _Running:
    """An engine that has begun."""

    prepared: Prepared
    row: Row
    first: list[float]  # seconds of the steps that were not timed
    block: int = 1


def raced(name: str, workload: Workload, engines: Mapping[str, Engine], settings: Settings) -> list[Row]:
    """The rows of one workload, timed in turns."""
    rows = {engine: Row(name, workload.title, workload.batch_size, engine) for engine in engines}
    running: dict[str, _Running] = {}
    with conditions(settings):
        for engine, begin in engines.items():
            with _told(rows[engine]):
                running[engine] = _begun(begin, workload, settings, rows[engine])
        for _ in range(settings.repeat):
            for one in running.values():
                enough = one.block * sum(one.row.seconds) > settings.seconds and len(one.row.seconds) >= LEAST_ROUNDS
                if not enough and not one.row.reason:
                    with _told(one.row):
                        one.row.seconds.append(timed(one.prepared, one.block, clock(settings)))
        for one in running.values():
            with _told(one.row):
                _end(one, settings.device, alone=len(engines) == 1)
    return list(rows.values())


@contextmanager
def _told(row: Row) -> Iterator[None]:
    """Within the block an exception, of whatever kind an engine raises, becomes the reason in its row."""
    try:
        yield
    except Exception as error:
        row.seconds.clear()
        row.reason = said(error)
    if row.reason:
        _free()


def _free() -> None:
    """Give back what steps that are no longer needed have left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _begun(begin: Engine, workload: Workload, settings: Settings, row: Row) -> _Running:
    """The engine after its first steps; the first is sketched, and the most bytes until then are in the row."""
    cuda, now = settings.device == "cuda", clock(settings)
    _free()
    prepared = begin(workload, settings.device)
    prepared.wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first = [timed(prepared, 1, now)]
    if cuda:
        row.mebibytes = torch.cuda.max_memory_allocated() / 2**20
    if prepared.sums is not None:
        row.sketch, row.lots = sketched(prepared.sums()), prepared.lots
        _free()  # sketches take memory too
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    running = _Running(prepared, row, first)
    _pace(running, now, cuda)
    return running


def _pace(running: _Running, now: Callable[[], float], cuda: bool) -> None:
    """Warm up, and choose how many steps are timed at once."""
    prepared, first = running.prepared, running.first
    more = WARM_LOTS if prepared.lots and cuda else 0

    def cold() -> bool:
        spent = sum(first[1:])
        some = len(first) < more or (cuda and spent < WARM_SECONDS)
        return len(first) < prepared.warm_up or (some and spent < MOST_WARM_SECONDS)

    while cold():
        first.append(timed(prepared, 1, now))
    if cuda:
        running.block = block(prepared, statistics.median(first[1:]))


def block(prepared: Prepared, each: float) -> int:
    """How many steps of ``each`` seconds are timed at once on CUDA."""
    many = max(min(MOST_IN_BLOCK, round(BLOCK_SECONDS / each)), 1)
    if prepared.period * each <= PERIOD_SECONDS:
        return -(-many // prepared.period) * prepared.period
    return max(many, LOTS_IN_BLOCK) if prepared.lots and LOTS_IN_BLOCK * each <= LOTS_SECONDS else many


def _end(running: _Running, device: str, alone: bool) -> None:
    row, prepared = running.row, running.prepared
    if not row.seconds:
        return
    row.form = prepared.form()
    row.setup = max(0.0, sum(running.first) - len(running.first) * row.median)
    if device != "cuda" or not alone:  # the device holds others' memory too
        row.mebibytes = None
    elif prepared.peak is not None:
        row.mebibytes = prepared.peak() / 2**20
    else:
        most = max(row.mebibytes or 0.0, torch.cuda.max_memory_allocated() / 2**20)
        row.mebibytes = most - prepared.data_bytes / 2**20


def clock(settings: Settings) -> Callable[[], float]:
    """Seconds: on a CPU with one thread those that the process computes, which others on it do not lengthen."""
    return time.process_time if settings.device == "cpu" and settings.threads == 1 else time.perf_counter


def timed(prepared: Prepared, many: int, now: Callable[[], float] | None = None) -> float:
    """Seconds of one step among ``many``, on the expected number of examples."""
    now = now or time.perf_counter
    prepared.wait()
    began = now()
    for _ in range(many):
        prepared.step()
    prepared.wait()
    took = (now() - began) / many
    share = prepared.share(many)
    return took / share if share else took


def compared(row: Row, truths: Mapping[bool, Sketch], tolerance: float) -> None:
    """Write into a row how far what it summed is from the definition.

    An engine that computes something else is not timed: the reason takes the place of its seconds.
    """
    if row.sketch and row.lots in truths:
        apart = difference(row.sketch, truths[row.lots])
        row.apart = apart if math.isfinite(apart) else None  # JSON has no other numbers
        if apart > tolerance:
            row.seconds, row.reason = [], f"its clipped sums are {apart:.2g} from the definition's"


def alone(name: str, workload: Workload, engine: str, begin: Engine, settings: Settings) -> Row:
    """The row of one engine."""
    return raced(name, workload, {engine: begin}, settings)[0]


def weighed(begin: Engine, settings: Settings, workload: Workload) -> float | None:
    """MiB of the CPU's memory that a model, its data and a step take beyond what the process holds anyhow."""

    def prepare(size: Workload) -> Callable[[], object]:
        prepared = begin(size, settings.device)
        return lambda: (prepared.step(), prepared.wait())

    with conditions(settings):
        prepare(workload.of(2))()  # loads what is loaded at first use
        return most_resident(partial(prepare, workload))


def measured(
    name: str, workload: Workload, engines: Mapping[str, Engine], settings: Settings, memory: bool = False
) -> Iterator[Row]:
    """Every engine on one workload, each row as soon as it is known, compared with the definition."""
    tolerance = settings.tolerance(workload)
    if settings.device == "cuda":
        yield from _one_by_one(name, workload, engines, settings)
        return
    truths = definitions("cpu", _kinds(engines), workload)
    for row in raced(name, workload, engines, settings):
        compared(row, truths, tolerance)
        if memory and row.seconds:
            weight = Worker(partial(weighed, engines[row.engine], settings, workload)).result(settings.limit)
            row.mebibytes = None if isinstance(weight, Failed) else weight
        yield row


def _kinds(engines: Mapping[str, Engine]) -> set[bool]:
    """The batches that are summed: dpgrad's first lot, and the fixed one of peers."""
    return {name in (OURS, EAGER) for name in engines if name not in (ORDINARY, GRAPH, COMPILED)}


def _one_by_one(name: str, workload: Workload, engines: Mapping[str, Engine], settings: Settings) -> Iterator[Row]:
    """Each engine in its own process. All are begun first: loading torch takes longer than most measurements.

    Without a definition, dpgrad's two forms, which draw the same lots, are compared with each other.
    """
    defining = Worker(partial(definitions, settings.device, _kinds(engines), workload))
    workers = {
        engine: Worker(partial(alone, name, workload, engine, begin, settings)) for engine, begin in engines.items()
    }
    try:
        for worker in (defining, *workers.values()):
            worker.ready()
        found = defining.result(settings.limit)
        truths = {} if isinstance(found, Failed) else found
        for engine in engines:
            row = workers.pop(engine).result(settings.limit)
            if isinstance(row, Failed):
                row = Row(name, workload.title, workload.batch_size, engine, reason=row.reason)
            compared(row, truths, settings.tolerance(workload))
            if row.lots:
                truths.setdefault(True, row.sketch)
            yield row
    finally:
        for worker in workers.values():
            worker.end()


def longer(row: Row, than: Row) -> float | None:
    """How many times as long ``row`` took: the median over rounds that both took part in; None without any."""
    ratios = _ratios(row, than)
    return statistics.median(ratios) if ratios else None


def quartiles(row: Row, than: Row) -> tuple[float, float] | None:
    """Between which ratios the middle half of the rounds lie; None for fewer than two rounds.

    >>> quartiles(Row("w", "W", 1, "a", [1.0, 2.0, 3.0]), Row("w", "W", 1, "b", [1.0, 1.0, 1.0]))
    (1.5, 2.5)
    """
    ratios = _ratios(row, than)
    if len(ratios) < 2:
        return None
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, high


def _ratios(row: Row, than: Row) -> list[float]:
    return [a / b for a, b in zip(row.seconds, than.seconds, strict=False)]


def reference(rows: Sequence[Row]) -> Row | None:
    """The step without privacy that private ones are compared with: as a graph of torch's own kernels where it ran.

    The graph of compiled kernels may be faster. It is in the table, but not what is compared with: the private step is
    not compiled either.
    """
    ran = {row.engine: row for row in rows if row.seconds}
    return ran.get(GRAPH) or ran.get(ORDINARY)
