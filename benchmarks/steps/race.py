"""Times engines, side by side or each in a process of its own, and compares what they compute.

On a CPU, which others may be using, engines take turns within each round in one process, and ratios are medians over
rounds: what slows down a round slows down all. A CUDA device is used by nobody else: there every engine has a process
of its own, in which blocks of steps are timed.
"""

import gc
import logging
import math
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.steps.engines import GRAPH, ORDINARY, Engine, Prepared
from benchmarks.steps.workloads import Workload

WARM_UP = 2
BLOCK_SECONDS = 0.05  # on CUDA steps are timed in blocks of about so long: a short one is over before it was waited for
MOST_IN_BLOCK = 256
PERIOD_SECONDS = 0.5  # a block holds whole periods of a step where one is over so soon: a median pays their cost too
WARM_SECONDS = 0.2  # until the clocks of an idle device have risen
STARTING = 60.0  # seconds that a process may take to start, and beyond its limit to prepare a step
RESTART_PEAK = Path("/proc/self/clear_refs")  # Linux: writing 5 sets the peak of resident memory to what it is now
PROJECTIONS = 8
# Book-keeping adds to each norm what rounding may have hidden, and all of dpgrad shortens factors by τ; peers neither.
TOLERANCE = 1e-2
# What TF32 rounds grows on its way through many layers: on ResNet-9 it moved the sums of torch's own vmap by 8 %. What
# is another computation is found all the same.
TF32_TOLERANCE = 0.25
# A parameter whose sum is a smaller share of the whole is compared with that share. The bias of an attention's keys has
# no gradient but rounding errors; and to take noise of length √p off a sum of p values leaves errors of about 3e-8·√p,
# 3e-5 of the whole for the largest parameter here.
SMALL_SHARE = 1e-3
SEED = 3

T = TypeVar("T")
R = TypeVar("R")
Sketch = dict[str, list[float]]


@dataclass(frozen=True)
class Settings:
    """How engines are measured: ``limit`` is in seconds, for the timed steps of one engine on one workload."""

    device: str
    repeat: int = 15
    threads: int = 2
    tf32: bool = True
    limit: float = 60.0

    @property
    def tolerance(self) -> float:
        """By how much sums may differ from the definition, relatively: by more where they are formed in TF32."""
        return TF32_TOLERANCE if self.device == "cuda" and self.tf32 else TOLERANCE


@dataclass
class Row:
    """One engine on one workload; ``reason`` says why it could not run, or where it was cut."""

    workload: str
    batch_size: int
    engine: str
    seconds: list[float] = field(default_factory=list)  # of a step, one figure a round
    mebibytes: float | None = None  # most that was allocated
    apart: float | None = None  # the largest relative difference of a parameter's clipped sum from the definition's
    reason: str = ""
    sketch: Sketch = field(default_factory=dict, repr=False)  # of what the first step summed, as it is timed
    definition: Sketch = field(default_factory=dict, repr=False)  # of what it should have summed

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    def fields(self) -> dict[str, Any]:
        """All but the sketches, for JSON."""
        return {name: value for name, value in asdict(self).items() if name not in ("sketch", "definition")}


@dataclass(frozen=True)
class Failed:
    """Why a process has no result."""

    reason: str


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


def raced(
    workload: Workload, engines: Mapping[str, Engine], settings: Settings, *, warm_up: int = WARM_UP, block: int = 1
) -> list[Row]:
    """The rows of one workload, timed in turns; at least ``block`` steps are timed at a time."""
    _free()
    with conditions(settings):
        rows = {name: Row(workload.title, workload.batch_size, name) for name in engines}
        ready: dict[str, tuple[Prepared, int]] = {}
        for name, engine in engines.items():
            with _told(rows[name]):
                prepared = _prepared(rows[name], engine, workload, settings.device)
                ready[name] = prepared, paced(prepared, settings.device, warm_up, block)
        for done in range(settings.repeat):
            for name, (prepared, many) in ready.items():
                row = rows[name]
                if many * sum(row.seconds) > settings.limit and not row.reason:
                    row.reason = f"cut after {done} of {settings.repeat} rounds: over {settings.limit:g} s"
                if not row.reason:
                    with _told(row):
                        row.seconds.append(timed(prepared, many))
        for name, (prepared, _) in ready.items():
            own = settings.device == "cuda" and len(engines) == 1  # else the device holds others' memory too
            rows[name].mebibytes = _most_held(prepared, rows[name].mebibytes) if own else None
    return list(rows.values())


@contextmanager
def _told(row: Row) -> Iterator[None]:
    """Within the block an exception, of whatever kind an engine raises, becomes the reason in its row."""
    try:
        yield
    except Exception as error:
        row.seconds.clear()
        row.reason = _said(error)
    if row.reason:
        _free()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _free() -> None:
    """Give back what steps that are no longer needed have left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _prepared(row: Row, engine: Engine, workload: Workload, device: str) -> Prepared:
    """The engine after its first step, whose sums are sketched; on CUDA with the most bytes that preparing it held.

    A graph takes its memory while it is captured, which is here.
    """
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    prepared = engine(workload, device)
    if cuda:
        row.mebibytes = torch.cuda.max_memory_allocated() / 2**20
    if prepared.definition is not None:
        row.definition = sketched(prepared.definition())
    if prepared.sums is not None:
        row.sketch = sketched(prepared.sums())
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    return prepared


def _most_held(prepared: Prepared, before: float | None) -> float:
    if prepared.peak is not None:
        return prepared.peak() / 2**20
    return max(before or 0.0, torch.cuda.max_memory_allocated() / 2**20)


def paced(prepared: Prepared, device: str, warm_up: int = WARM_UP, block: int = 1) -> int:
    """Warm up; how many steps to time at once, at least ``block``."""
    taken = [timed(prepared, 1) for _ in range(warm_up)]
    if device == "cpu":
        return block
    while sum(taken[1:]) < WARM_SECONDS:
        taken.append(timed(prepared, 1))
    each = statistics.median(taken[1:])
    many = max(block, min(MOST_IN_BLOCK, round(BLOCK_SECONDS / each)), 1)
    whole = prepared.period * each <= PERIOD_SECONDS
    return -(-many // prepared.period) * prepared.period if whole else many


def timed(prepared: Prepared, many: int) -> float:
    """Seconds of one step among ``many``."""
    prepared.wait()
    began = time.perf_counter()
    for _ in range(many):
        prepared.step()
    prepared.wait()
    return (time.perf_counter() - began) / many


def sketched(sums: Mapping[str, Tensor]) -> Sketch:
    """Each tensor's projections on a few Gaussian vectors, the same for every engine, and its norm at the end.

    The root mean square of the differences of projections estimates the norm of the difference of tensors (Johnson and
    Lindenstrauss, 1984), so that large sums need not leave their process to be compared.

    >>> sketched({"weight": torch.zeros(3)})["weight"][-1]
    0.0
    """
    sketch = {}
    for name in sorted(sums):
        flat = sums[name].detach().flatten().float()
        random = torch.Generator(flat.device).manual_seed(SEED)
        directions = (torch.randn(flat.numel(), generator=random, device=flat.device) for _ in range(PROJECTIONS))
        # No dot product, which would take scratch memory on the device beside the step that is measured there.
        sketch[name] = [float((flat * direction).sum()) for direction in directions] + [float(flat.norm())]
    return sketch


def difference(found: Sketch, definition: Sketch) -> float:
    """The largest relative difference of a tensor, estimated; infinite where one is missing or is not finite.

    >>> one = sketched({"weight": torch.ones(100)})
    >>> difference(one, one), difference(sketched({"weight": torch.zeros(100)}), one) > 0.5
    (0.0, True)
    """
    if found.keys() != definition.keys() or not all(map(math.isfinite, chain(*found.values()))):
        return math.inf
    least = SMALL_SHARE * math.hypot(*(values[-1] for values in definition.values()))
    apart = []
    for name, values in definition.items():
        squares = [(a - b) ** 2 for a, b in zip(found[name][:-1], values[:-1], strict=True)]
        apart.append(math.sqrt(statistics.fmean(squares)) / max(values[-1], least))
    return max(apart)


def compared(rows: Sequence[Row], definition: str, otherwise: str, tolerance: float) -> None:
    """Write into each row how far what it summed is from what ``definition`` defines, or else ``otherwise`` summed.

    An engine that computes something else is not timed: the reason takes the place of its seconds. Nothing is compared
    with itself.
    """
    by_name = {row.engine: row for row in rows}
    truths = [by_name[definition].definition] if definition in by_name else []
    truths += [by_name[otherwise].sketch] if otherwise in by_name else []
    truth = next(filter(None, truths), None)
    for row in rows:
        if row.sketch and truth and row.sketch is not truth:
            apart = difference(row.sketch, truth)
            row.apart = apart if math.isfinite(apart) else None  # JSON has no other numbers
            if apart > tolerance:
                row.seconds, row.reason = [], f"its clipped sums are {apart:.2g} from the definition's"


def alone(name: str, engine: Engine, settings: Settings, workload: Workload) -> Row:
    """One engine's row of one workload."""
    return raced(workload, {name: engine}, settings)[0]


def weighed(engine: Engine, settings: Settings, workload: Workload) -> float | None:
    """MiB of the CPU's memory that a model, its batch and a step take beyond what the process holds anyhow."""
    with conditions(settings):
        prepared = engine(workload.of(2), settings.device)  # loads what is loaded at first use
        prepared.step()
        prepared.wait()
        del prepared
        gc.collect()
        if not RESTART_PEAK.exists():
            return None
        before = _resident("VmRSS")
        prepared = engine(workload, settings.device)
        prepared.step()
        prepared.wait()
        RESTART_PEAK.write_text("5", encoding="utf-8")
        prepared.step()
        prepared.wait()
        return _resident("VmHWM") - before


def _resident(entry: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(entry))


class Worker:
    """A process that does ``work`` on items, one after the other; it has loaded what it needs before it is asked."""

    def __init__(self, work: Callable[[T], R], items: Sequence[T]) -> None:
        # What is freed goes back to the system at once: the peak is then that of tensors, not of malloc's leftovers.
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 16))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work, items), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has loaded what it needs."""
        self._pipe.poll(STARTING)

    def results(self, seconds: float) -> Iterator[Any]:
        """What comes of each item until one takes longer than ``seconds`` or the process dies, which ends it."""
        try:
            self.ready()
            self._pipe.recv()
            self._pipe.send("begin")
            while self._pipe.poll(seconds):
                yield self._pipe.recv()
            yield Failed(f"cut: no result within {seconds:g} s")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            yield Failed(f"the process ended with status {self._process.exitcode}")
        finally:
            self._process.kill()
            self._process.join()
            self._pipe.close()


def _serve(pipe: Connection, work: Callable[[T], R], items: Sequence[T]) -> None:
    pipe.send("ready")
    pipe.recv()
    for item in items:
        try:
            pipe.send(work(item))
        except Exception as error:
            pipe.send(Failed(_said(error)))


def streamed(
    work: Callable[[T], R], items: Sequence[T], seconds: float, first: Worker | None = None
) -> Iterator[R | Failed]:
    """``work`` of each item in a `Worker`, or why there is none; another serves what one that failed has left.

    ``first`` is a worker that was begun earlier with the same work and items.
    """
    done = 0
    while done < len(items):
        worker = first if first and not done else Worker(work, items[done:])
        for result in islice(worker.results(seconds), len(items) - done):
            done += 1
            yield result


def measured(
    workloads: Sequence[Workload],
    engines: Mapping[str, Engine],
    settings: Settings,
    *,
    memory: bool = True,
    say: Callable[[str], None] = lambda text: None,
    rows: list[Row] | None = None,
) -> list[Row]:
    """Every engine on every workload: on a CPU side by side, on CUDA each engine in its own process.

    ``say`` is told what is measured, and on CUDA what came of it. ``rows`` is filled as they come, so that what was
    measured is there when the rest is cut off.
    """
    wait = settings.limit + STARTING
    rows = [] if rows is None else rows
    if settings.device == "cuda":
        works = {name: partial(alone, name, engine, settings) for name, engine in engines.items()}
        # All are begun first: loading torch takes longer than most measurements.
        workers = {name: Worker(work, workloads) for name, work in works.items()}
        for worker in workers.values():
            worker.ready()
        for name, work in works.items():
            say(name)
            results = streamed(work, workloads, wait, workers[name])
            for workload, result in zip(workloads, results, strict=True):
                if isinstance(result, Failed):
                    result = Row(workload.title, workload.batch_size, name, reason=result.reason)
                rows.append(result)
                took = f"{1e3 * result.median:.4g} ms, {result.mebibytes or 0:.0f} MiB" if result.seconds else ""
                say(f"  {workload.title}: {took or result.reason}")
        return [row for workload in workloads for row in rows if row.workload == workload.title]
    for workload in workloads:
        say(workload.title)
        here = raced(workload, engines, settings)
        for row in here if memory else ():
            if row.seconds:
                (weight,) = streamed(partial(weighed, engines[row.engine], settings), [workload], wait)
                row.mebibytes = None if isinstance(weight, Failed) else weight
        rows += here
    return rows


def longer(row: Row, than: Row) -> float | None:
    """How many times as long ``row`` took: the median over rounds that both took part in; None without any."""
    ratios = _ratios(row, than)
    return statistics.median(ratios) if ratios else None


def quartiles(row: Row, than: Row) -> tuple[float, float] | None:
    """Between which ratios the middle half of the rounds lie; None for fewer than two rounds.

    >>> quartiles(Row("w", 1, "a", [1.0, 2.0, 3.0]), Row("w", 1, "b", [1.0, 1.0, 1.0]))
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
