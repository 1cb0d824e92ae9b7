"""Every option of a run, declared once: its name, default, check and one line of help.

Each record is frozen and checks its values when it is made. `dpgrad.fit` takes these records, and the command line and
its TOML files are made from their fields; hence this module does without torch.

>>> Privacy(noise_multiplier=-1.0)
Traceback (most recent call last):
dpgrad.errors.OptionError: noise_multiplier must be positive and finite, got -1.0
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args, runtime_checkable

from dpgrad import _validate
from dpgrad._processes import RANK_TIMEOUT
from dpgrad.accounting import ACCOUNTANTS
from dpgrad.accounting.events import NOTHING, Event, Relation
from dpgrad.accounting.guarantee import ORDINARY, SECURE, SOURCES, UNIT
from dpgrad.errors import OptionError

if TYPE_CHECKING:
    from dpgrad.data import Dataset

__all__ = [
    "Budget", "Computing", "HeldOut", "Privacy", "Released", "RunFolder", "check", "given", "option", "parted",
    "written",
]  # fmt: skip

READINGS = ("less-noise", "more-steps")
UNIT_RULES = ("hash", "first")
ROWS_ON_RANK = ("all", "part")
PERSON, ROWS_PER_UNIT = "person", 4
SCORE_SHARE, SCORE_STD = 0.1, 5.0  # of a private score of `dpgrad.tuning`
T = TypeVar("T")

# How a value is checked, by the kind of option; the command line reads text of each kind (`dpgrad.cli`).
CHECKS: dict[str, Callable[..., None]] = {
    "positive": _validate.positive,
    "epochs": _validate.positive,
    "size": _validate.positive,
    "number": _validate.number,
    "delta": _validate.open_unit,
    "share": _validate.open_unit,
    "count": lambda **named: _validate.whole(least=1, **named),
    "steps": _validate.step_count,
    "text": lambda **named: _text(**named),
    "name": lambda **named: None,  # or a function: its user checks it
    "flag": lambda **named: _flag(**named),
    "choice": lambda **named: None,
}


def option(
    default: Any, help: str = "", *, kind: str = "", metavar: str | None = None, choices: tuple[str, ...] = (),
    first: bool = False,
) -> Any:  # fmt: skip
    """A field of a record of options; without ``kind`` it is not on the command line.

    ``first``: `--help` shows it where a command has too many options to show all; `--help-all` shows the others.
    """
    metadata = {"help": help, "kind": kind or None, "metavar": metavar, "choices": choices, "first": first}
    return dataclasses.field(default=default, metadata=metadata)


def check(record: Any) -> None:
    """Refuse a value that the declaration of its field does not allow. None and functions are checked elsewhere."""
    for field in dataclasses.fields(record):
        value, kind = getattr(record, field.name), field.metadata.get("kind")
        if value is None or kind is None or callable(value):
            continue
        CHECKS[kind](**{field.name: value})
        if field.metadata["choices"]:
            _validate.one_of(field.metadata["choices"], **{field.name: value})


def given(kind: type[T], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that are fields of a record and not None.

    >>> given(Privacy, {"noise_multiplier": 2.0, "accountant": None, "seed": 3})
    {'noise_multiplier': 2.0}
    """
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return {name: value for name, value in options.items() if name in names and value is not None}


def parted(options: Mapping[str, Any]) -> "tuple[Budget, Privacy, dict[str, Any]]":
    """Sort options by name into a budget, details of privacy, and the rest: fields of a recipe.

    >>> parted({"epsilon": 2.0, "delta": 1e-5, "accountant": "rdp", "clip": 1.0})[2]
    {'clip': 1.0}
    """
    budget, privacy = given(Budget, options), given(Privacy, options)
    left = {name: value for name, value in options.items() if value is not None and name not in {**budget, **privacy}}
    return Budget(**budget), Privacy(**privacy), left


def written(name: str) -> str:
    """How an option in a record is given to `dpgrad.fit`, for messages; empty for one that is in none.

    >>> written("noise_multiplier"), written("resume"), written("epsilon")
    ('privacy=Privacy(noise_multiplier=...)', 'folder=RunFolder(path, resume=...)', '')
    """
    places = {"privacy": Privacy, "computing": Computing, "held_out": HeldOut, "folder": RunFolder}
    for parameter, record in places.items():
        names = [field.name for field in dataclasses.fields(record)]
        if name in names:
            first = f"{names[0]}, " if names[0] in ("rows", "path") and name != names[0] else ""
            return f"{parameter}={record.__name__}({first}{name}=...)"
    return ""


def _text(**named: object) -> None:
    for name, value in named.items():
        if not isinstance(value, str):
            raise OptionError(f"{name} must be a text, got {_validate.shown(value)}")


def _flag(**named: object) -> None:
    for name, value in named.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name} must be True or False, got {_validate.shown(value)}")


@runtime_checkable
class Released(Protocol):
    """Another release from the same data, such as a `dpgrad.pca.Projection`: its cost, and whether a seed made it."""

    @property
    def event(self) -> Event: ...
    @property
    def reproducible(self) -> bool: ...


@dataclass(frozen=True)
class Budget:
    """How much may be spent, and on what: the parameters of `dpgrad.fit` of the same names.

    >>> Budget(epsilon=3.0, delta=1e-5, epochs=20).batch_size is None
    True
    """

    epsilon: float | None = option(
        None, "The privacy budget ε: 1 is strong protection of one row, 10 is weak.",
        kind="positive", metavar="E", first=True,
    )  # fmt: skip
    delta: float | None = option(
        None, "The probability that the ε bound fails; choose it well below one over the number of rows.",
        kind="delta", metavar="D", first=True,
    )  # fmt: skip
    epochs: float | None = option(
        None, "The number of passes over the data. Method auto makes them in its own number of steps T, with batches "
        "of E·N/T; other methods take int(E·N/B) steps with batches of B.",
        kind="epochs", metavar="E", first=True,
    )  # fmt: skip
    steps: int | None = option(None, "The number of steps, instead of epochs.", kind="steps", metavar="T")
    batch_size: float | None = option(
        None, "The expected number of rows per step, which divides the noisy sum (Abadi's lot).",
        kind="size", metavar="B",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


_MOVED = "name a unit in the schema and split by fraction, or split by a column or a file, or "


@dataclass(frozen=True)
class Privacy:
    """Details of the guarantee: neighbours, accountant, declared size, noise, and other releases from the same data.

    ``dataset_size`` is the number of rows as a declared constant; neighbours may then differ by one row more or less.
    ``also_released``: another release from the same data, e.g. a DP-PCA projection. Its cost counts against the budget.
    It is not added to ``ledger``; record it there once, where it is released. ``several_rows``: an example has K rows,
    (examples, K, ...), and is the unit of privacy.

    ``noise`` is the source of noise and batches. The default is ``"ordinary"``: generators that are quick and not
    cryptographic, and floating-point noise. ``"secure"`` draws both from a cryptographic stream and adds whole numbers,
    and δ pays for the sampler's distance from a Gaussian (docs/secure_noise.md).

    ``units`` names the owner of each row, by whole numbers or texts: one person, with all of their rows, is then what
    is protected, and batch size, epochs and ``dataset_size`` count persons. ``rows_per_unit``, ``unit_rule`` and
    ``unit_name`` set how many and which rows of each person are used, and the word for a person. They do not change ε:
    the mean gradient of a person's rows is clipped once (`dpgrad.training.units`).

    >>> Privacy(dataset_size=60_000).relation is None  # add-remove follows from the declared size
    True
    >>> Privacy(units=[1, 1, 2], unit_name="patient").unit
    'patient'
    """

    relation: str | Relation | None = option(
        None, "How neighbouring datasets differ: one row added or removed (add-remove), the contribution of one row "
        "set to zero (zero-out), or one row replaced (replace-one).",
        kind="choice", choices=tuple(relation.value for relation in Relation),
    )  # fmt: skip
    accountant: str = option(
        "pld",
        "The accountant that computes ε; pld is the tightest, others are for comparison.",
        kind="choice",
        choices=tuple(ACCOUNTANTS),
    )
    dataset_size: int | None = option(
        None, "The number of rows as a declared constant; neighbours are then add-remove, otherwise zero-out.",
        kind="count", metavar="N",
    )  # fmt: skip
    noise_multiplier: float | None = option(
        None, "The standard deviation of the noise divided by the clip bound; more noise hides more.",
        kind="positive", metavar="Z",
    )  # fmt: skip
    noise: str = option(
        ORDINARY, "Where noise and batches come from: ordinary generators, or the secure source for release: ChaCha20 "
        "and whole numbers, which do not leak through floating point; needs dpgrad[secure].",
        kind="choice", choices=SOURCES,
    )  # fmt: skip
    reading: str | None = option(
        None, "What a shrinking clip bound buys, less noise or more steps.", kind="choice", choices=READINGS
    )
    also_released: Event | Released = NOTHING
    several_rows: bool = False
    units: Any = dataclasses.field(default=None, compare=False, repr=False)  # private
    rows_per_unit: int | None = option(
        None, f"The most rows used of one person; default: {ROWS_PER_UNIT} if the data name persons.",
        kind="count", metavar="K",
    )  # fmt: skip
    unit_rule: str | None = option(
        None, "Which rows to use of a person who has more: by a hash of their positions (the default), or the first.",
        kind="choice", choices=UNIT_RULES,
    )  # fmt: skip
    unit_name: str | None = option(
        None, "The word for the owner of rows in reports, such as patient; default: person.",
        kind="text", metavar="NAME",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        _flag(several_rows=self.several_rows)
        self._check_units()
        given: object = self.also_released  # a caller may ignore types
        if not isinstance(given, get_args(Event)) and not isinstance(given, Released):
            raise OptionError(
                "also_released must be an event of dpgrad.events or a release, such as a dpgrad.pca.Projection, got "
                f"{_validate.shown(given)}"
            )

    def _check_units(self) -> None:
        if self.unit_name is not None and not self.unit_name.strip():
            raise OptionError("unit_name must not be empty: what one owner of rows is called, such as patient")
        if self.units is None:
            return
        if self.several_rows:
            raise OptionError("units and several_rows both say which rows make an example: give one of them")
        if self.also_released != NOTHING:
            raise OptionError(
                f"also_released was priced for one row, and with units one {self.unit} may own many: prepare the data "
                "without it, or leave out units"
            )

    def of_data(self, data: "Dataset") -> "Privacy":
        """The same with the owners of rows that a dataset names, and as many rows of each as its schema says.

        A split by position is refused under add-remove: one more row would move other rows between its parts.
        """
        added = self.relation is None and self.dataset_size is not None
        if data.by_position and (added or self.relation == Relation.ADD_REMOVE):
            raise OptionError(
                f"{data.name} is split by the position of its rows, and under add-remove a row more or less moves "
                f"others between the parts: {'' if data.schema is None else _MOVED}use relation zero-out or replace-one"
            )
        if self.units is not None or data.units is None:
            return self
        most = None if data.schema is None else data.schema.rows_per_unit
        return dataclasses.replace(self, units=data.units, rows_per_unit=self.rows_per_unit or most)

    def secure_values(self, parameters: int | None, counts: int = 0) -> int:
        """How many values get secure noise at each step: ``parameters`` that a model trains, and noisy ``counts``.

        >>> Privacy().secure_values(10), Privacy(noise="secure").secure_values(10)
        (0, 10)
        """
        if self.noise != SECURE:
            return 0
        from dpgrad.mechanism import chacha  # loads numpy, which the help of a command does not need

        chacha.refuse_missing()
        if not parameters:
            raise OptionError("noise secure adds to delta for each trained value: give parameters, or a model")
        return parameters + counts

    def refuse_without_units(self) -> None:
        """Refuse details of units where nothing names the units."""
        for name in ("rows_per_unit", "unit_rule", "unit_name"):
            if self.units is None and getattr(self, name) is not None:
                raise OptionError(
                    f"{name} is about rows of the same person, and the data name none: name the owner of each row, as "
                    "unit in the schema of the data or as units of dpgrad.Privacy"
                )

    @property
    def unit(self) -> str:
        """The protected unit, in words."""
        return UNIT if self.units is None else self.unit_name or PERSON

    @property
    def other_event(self) -> Event:
        """The event of the other release."""
        return self.also_released.event if isinstance(self.also_released, Released) else self.also_released

    @property
    def other_seeded(self) -> bool:
        """Whether a seed made the noise of the other release."""
        return isinstance(self.also_released, Released) and self.also_released.reproducible


@dataclass(frozen=True)
class Computing:
    """How a run is computed; none of it changes the guarantee.

    ``capture``: on a CUDA device, None captures the step as a graph if possible, True requires it and False turns it
    off. ``collate`` makes a batch from examples of a Dataset; the default is torch's ``default_collate``. ``workers``
    processes read the examples; 0 reads them in a thread.

    On several ranks of torch.distributed (docs/several_processes.md) ``group`` is a process group other than
    the default. ``rows_on_rank``: "all" gives every rank all rows, "part" gives each its own; no row may be on two.
    If a rank sends no heartbeat for ``rank_timeout`` seconds while another waits for it, the run ends on all ranks.

    >>> Computing(microbatch=0)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: microbatch must be a whole number of at least 1, got 0
    """

    engine: str = option(
        "bookkeeping", "How per-example gradients are computed; bookkeeping is the fastest.",
        kind="choice", choices=("bookkeeping", "vmap", "single"),
    )  # fmt: skip
    microbatch: int | None = option(None, "The most rows computed at a time.", kind="count", metavar="N")
    memory_limit: int | None = option(None, "The most memory that a step may use.", kind="count", metavar="BYTES")
    capture: bool | None = None
    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    group: Any = dataclasses.field(default=None, compare=False, repr=False)
    rows_on_rank: str = "all"
    rank_timeout: float = option(
        RANK_TIMEOUT, "On several ranks, stop the run when a rank sends no heartbeat for this long. Slow ranks send "
        "heartbeats too.",
        kind="positive", metavar="SECONDS",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        _validate.whole(workers=self.workers)
        _validate.one_of(ROWS_ON_RANK, rows_on_rank=self.rows_on_rank)
        if self.capture is not None:
            _flag(capture=self.capture)
        if self.collate is not None and not callable(self.collate):
            raise OptionError(f"collate must be a function of a list of examples, got {_validate.shown(self.collate)}")


@dataclass(frozen=True)
class HeldOut:
    """Rows to evaluate the model on, the metric, and the number of steps between evaluations.

    Evaluation costs the training rows no privacy; the held-out rows are not protected. Without rows, ``evaluate_every``
    is the number of steps between points of the run's curve. ``held_out_units`` names their owners, who must have no
    training rows.

    >>> HeldOut(evaluate_every=5).metric is None  # the one that suits the loss
    True
    """

    rows: Any = None
    metric: Any = None
    evaluate_every: int | None = option(None, "Steps between evaluations on held-out rows.", kind="steps", metavar="T")
    held_out_units: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.rows, bool | int | float | str):
            raise OptionError(
                "held_out must be rows, such as (inputs, targets), or HeldOut(rows, ...), got "
                f"{_validate.shown(self.rows)}: keep rows apart before training, e.g. with "
                "torch.utils.data.random_split(dataset, [0.8, 0.2])"
            )


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run that can be resumed.

    Every step is recorded as spent before it is computed. With ``resume``, a run that died continues: with the same key
    if everything is the same, else with a new key, and both attempts are charged. ``release(folder, fitted)`` writes
    what is shared besides the weights; without it, that is the report.

    >>> RunFolder("runs/mine").resume
    False
    """

    path: str | PathLike[str]
    resume: bool = option(False, "Resume the run in this folder.", kind="flag", first=True)
    keep_private: bool = option(False, "Keep private/ (key and checkpoints) after the run.", kind="flag")
    checkpoint_every: int | None = option(None, "Steps between checkpoints.", kind="steps", metavar="T")
    release: Callable[[Path, Any], None] | None = None

    def __post_init__(self) -> None:
        check(self)
        given: object = self.path  # a caller may ignore types
        if not isinstance(given, str | PathLike):
            raise OptionError(f"folder must be a path or a RunFolder, got {_validate.shown(given)}")
