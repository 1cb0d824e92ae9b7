"""Running an experiment: every arm with every seed, each outcome kept as soon as it is there.

Trials are lines of ``OUT/NAME.jsonl`` (``OUT/NAME.quick.jsonl`` at another size). A line is not run again as long as
its arm, setting and seed are asked for, so a run that was stopped goes on where it was. A last line that was torn by a
crash is dropped. Several processes may run trials; one writes.
"""

import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from dpgrad import _files
from dpgrad.data import MissingFileError, Source, sources
from dpgrad.data import data_folder as folder_of_data
from dpgrad.errors import DpgradError, ReportError, RunError
from dpgrad.papers import prepared, searching
from dpgrad.papers import sources as code
from dpgrad.papers.experiment import Arm, Experiment, Outcomes, Place, Size
from dpgrad.reports import environment
from dpgrad.reports.kinds import plain_values

__all__ = [
    "Done",
    "Ended",
    "Job",
    "TrialLog",
    "arms_of",
    "digest",
    "has_trials",
    "lacks",
    "missing",
    "processes",
    "reproduce",
    "stem",
    "trials_path",
]

_Show = Callable[["Ended"], None]


@dataclass(frozen=True)
class Job:
    """One trial to be run."""

    arm: Arm
    seed: int


@dataclass(frozen=True)
class Ended:
    """Progress: the trial that has just ended, how many of how many there are, and the seconds that are left."""

    job: Job
    figures: Mapping[str, Any]
    done: int
    total: int
    seconds_left: float


@dataclass(frozen=True)
class Done:
    """The trials of an experiment that were asked for: as outcomes, and as the lines of their file."""

    experiment: Experiment
    place: Place
    arms: tuple[Arm, ...]
    seeds: int
    lines: tuple[Mapping[str, Any], ...]

    @property
    def outcomes(self) -> Outcomes:
        """The figures by arm, in the order of arms and seeds, whichever ran first."""
        return _outcomes(self.arms, self.lines)

    @property
    def complete(self) -> bool:
        """Whether every arm has every seed."""
        return len(self.lines) == len(self.arms) * self.seeds


def _outcomes(arms: tuple[Arm, ...], lines: tuple[Mapping[str, Any], ...]) -> Outcomes:
    found: dict[str, list[Mapping[str, Any]]] = {arm.name: [] for arm in arms}
    for line in sorted(lines, key=lambda line: int(line["seed"])):
        found[line["arm"]].append(line["figures"])
    return Outcomes(found)


def stem(experiment: Experiment, size: Size, out: Path) -> Path:
    """The path of an experiment's files without their endings."""
    return out / (experiment.name if size == "full" else f"{experiment.name}.{size}")


def trials_path(experiment: Experiment, size: Size, out: Path) -> Path:
    """The file of an experiment's trials."""
    path = stem(experiment, size, out)
    return path.with_name(f"{path.name}.jsonl")


def has_trials(experiment: Experiment, size: Size, out: Path) -> bool:
    """Whether a folder has a trial of an experiment: a run that was stopped in its first leaves an empty file."""
    return bool(TrialLog(trials_path(experiment, size, out)).lines)


class TrialLog:
    """The trials in a file, one JSON object per line, each on the disk before the next trial ends.

    ``fields`` are what each line has to have, and of which kind.
    """

    def __init__(self, path: Path, fields: Mapping[str, type] | None = None) -> None:
        self.path = path
        self._fields = fields or {"arm": str, "setting": dict, "seed": int, "figures": dict}
        self.lines: list[dict[str, Any]] = []
        self._read()

    def _read(self) -> int:
        """Take the lines from the file; the bytes up to the end of the last whole line."""
        content = _files.read(self.path) or b""
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].split(b"\n")[:-1]
        self.lines = [_line(line, self._fields, self.path, number) for number, line in enumerate(lines, 1)]
        return whole

    def wanted(self, arms: tuple[Arm, ...], seeds: int) -> tuple[dict[str, Any], ...]:
        """The lines of these arms, as they are set now, and of the first seeds; the latest where one is twice."""
        settings = {arm.name: _plain(arm.setting) for arm in arms}
        found = {
            (line["arm"], line["seed"]): line
            for line in self.lines
            if line["seed"] < seeds and line["arm"] in settings and line["setting"] == settings[line["arm"]]
        }
        return tuple(found[arm.name, seed] for arm in arms for seed in range(seeds) if (arm.name, seed) in found)

    @contextmanager
    def writing(self, wait: bool = False) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Within the block this process alone adds lines; it gets the function that does.

        The lines are read again, since another process may have added some. ``wait`` for a process that is adding.
        """
        _files.make_folder(self.path.parent)
        lock = _files.lock(self.path, wait)
        try:
            whole = self._read()
            with _files.told(self.path):
                os.ftruncate(lock, whole)  # a torn last line
                os.lseek(lock, 0, os.SEEK_END)
            yield partial(self._add, lock)
        finally:
            _files.unlock(lock)

    def _add(self, file: int, line: dict[str, Any]) -> None:
        with _files.told(self.path):
            text = json.dumps(plain_values(line), allow_nan=False, ensure_ascii=False)
            left = memoryview(text.encode() + b"\n")
            while len(left):
                left = left[os.write(file, left) :]
            os.fsync(file)
        self.lines.append(json.loads(text))


def _line(text: bytes, fields: Mapping[str, type], path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(text)
        if all(isinstance(found.get(name), kind) for name, kind in fields.items()):
            return dict(found)
    except (ValueError, AttributeError, RecursionError):
        pass
    raise ReportError(f"{path}, line {number}, is no trial: remove that line, or choose another folder with --out")


def _plain(setting: Mapping[str, Any]) -> Any:
    """The setting as JSON gives it back: lists for tuples."""
    return json.loads(json.dumps(dict(setting), allow_nan=False))


def missing(experiment: Experiment, data: Path | None) -> str:
    """Which datasets an experiment lacks, with their files and where to put them; empty where all are there.

    >>> from dpgrad.papers.experiment import Experiment
    >>> missing(Experiment("toy", "", "", "", ("digits",), lambda size: (), lambda *_: {}, "x"), None)
    ''
    """
    said = []
    for name in experiment.needs:
        if files := lacks(name, data):
            where = folder_of_data(data) or "a folder that --data-dir or DPGRAD_DATA names"
            said.append(f"{name} (put {', '.join(f'{file.place} ({file.published})' for file in files)} into {where})")
    return "; ".join(said)


def lacks(name: str, data: Path | None) -> list[Source]:
    """The files of a dataset that are not in the data folder; none where its prepared form is (`papers.prepared`).

    >>> lacks("digits", None)
    []
    """
    folder = folder_of_data(data)
    if folder is not None and prepared.path(name, folder).exists():
        return []
    return [file for file in sources(name) if folder is None or not (folder / file.place).exists()]


def arms_of(experiment: Experiment, size: Size, out: Path) -> tuple[Arm, ...]:
    """The arms at a size, with what the searches before them chose (`papers.searching`)."""
    arms = experiment.arms(size)
    if experiment.settle is not None:
        earlier = {name: searching.outcomes(name, size, out) for name in experiment.after}
        arms = tuple(experiment.settle(arm, earlier) for arm in arms)
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise RunError(f"{experiment.name} has two arms of one name: {', '.join(names)}")
    return arms


def reproduce(
    experiment: Experiment,
    place: Place,
    out: Path,
    *,
    seeds: int | None = None,
    pool: ProcessPoolExecutor | None = None,
    show: _Show = lambda ran: None,
    run: bool = True,
) -> Done:
    """Run what is missing of an experiment, and return all of its trials.

    Trials run seed by seed, so what is there after an interruption compares all arms. ``pool`` comes from `processes`.
    A failed trial is reported when the others are done. Without ``run``, the trials that are there are returned and no
    data are needed.
    """
    if run and place.size != "tiny" and (absent := missing(experiment, place.data)):
        raise MissingFileError(f"{experiment.name} needs a dataset that is missing: {absent}")
    arms = arms_of(experiment, place.size, out)
    count = seeds or experiment.repeats(place.size)
    log = TrialLog(trials_path(experiment, place.size, out))
    if run and len(log.wanted(arms, count)) < len(arms) * count:
        trials = _in_turn if pool is None else partial(_at_once, pool=pool)
        began = time.monotonic()
        with log.writing() as add:
            there = {(line["arm"], line["seed"]) for line in log.wanted(arms, count)}
            left = [Job(arm, seed) for seed in range(count) for arm in arms if (arm.name, seed) not in there]
            failed: list[DpgradError] = []
            for number, (job, found) in enumerate(trials(experiment, left, place), 1):
                if isinstance(found, DpgradError):
                    failed.append(found)
                    continue
                add(_record(experiment, job, place, *found))
                rest = (time.monotonic() - began) / number * (len(left) - number)
                show(Ended(job, found[0], len(there) + number - len(failed), len(there) + len(left), rest))
        if failed:
            more = f"; {len(failed) - 1} more trials failed" if len(failed) > 1 else ""
            raise type(failed[0])(f"{failed[0]}{more}")
    return Done(experiment, place, arms, count, log.wanted(arms, count))


_Figures = tuple[dict[str, Any], float]  # of a trial, and its seconds
Finished = tuple[Job, _Figures | DpgradError]


def _in_turn(experiment: Experiment, jobs: list[Job], place: Place) -> Iterator[Finished]:
    for job in jobs:
        yield job, _tried(experiment, job, place)


def _tried(experiment: Experiment, job: Job, place: Place) -> _Figures | DpgradError:
    began = time.perf_counter()
    try:
        figures = experiment.trial(job.arm, job.seed, place)
    except DpgradError as error:
        return type(error)(f"{experiment.name}, {job.arm.name}: {error}")
    if used := sorted(prepared.taken() & {*experiment.needs}):
        figures = {**figures, "prepared": used}  # not the published files
    return figures, time.perf_counter() - began


def _at_once(experiment: Experiment, jobs: list[Job], place: Place, pool: ProcessPoolExecutor) -> Iterator[Finished]:
    """The same in the processes of a pool, each of which may hold a model on the same device."""
    try:
        waiting = {pool.submit(_elsewhere, experiment.name, job, place): job for job in jobs}
        while waiting:
            for future in sorted(wait(waiting, return_when=FIRST_COMPLETED).done, key=list(waiting).index):
                job = waiting.pop(future)
                yield job, future.result()
    except BrokenProcessPool:
        raise RunError(
            f"{experiment.name}: a process that ran trials has died, perhaps for want of memory: finished "
            "trials are kept; run the command again with fewer --processes"
        ) from None


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor | None]:
    """Within the block, so many processes for `reproduce`, which they share; None where one is enough.

    >>> with processes(1) as pool:
    ...     pool is None
    True
    """
    if count == 1:
        yield None
        return
    threads = max(1, (os.cpu_count() or 1) // count)
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _alone, (threads,))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():  # a trial may take minutes more
            process.terminate()
        raise
    pool.shutdown()


def _alone(threads: int) -> None:
    """Begin a process of the pool: it shares the cores, and leaves Ctrl-C to the process that started it."""
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _elsewhere(name: str, job: Job, place: Place) -> _Figures | DpgradError:
    from dpgrad.papers.catalogue import experiments

    return _tried(experiments()[name], job, place)


def _record(experiment: Experiment, job: Job, place: Place, figures: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "arm": job.arm.name, "setting": _plain(job.arm.setting), "seed": job.seed, "size": place.size,
        "figures": plain_values(figures), "seconds": round(seconds, 3), "date": environment.today(),
        "place": place.device, "device": _device(place.device), "versions": _versions(),
        "source": digest(experiment, job.arm),
    }  # fmt: skip


def digest(experiment: Experiment, arm: Arm) -> str:
    """The digest of the code that the trials of an arm depend on.

    >>> from dpgrad.papers.catalogue import experiments
    >>> figure = experiments()["huang-figure9"]
    >>> len(digest(figure, figure.arms("full")[0]))
    12
    """
    if experiment.source is not None:
        return experiment.source(arm)
    trial: Any = experiment.trial
    while isinstance(trial, partial):
        trial = trial.func
    try:
        return code.digest(trial.__module__, trial.__name__)
    except (DpgradError, AttributeError):  # a user's own experiment
        return "0" * 12


def _device(name: str) -> str:
    if name.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(name)
    return environment.processor()


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in ("numpy", "torch")}}
