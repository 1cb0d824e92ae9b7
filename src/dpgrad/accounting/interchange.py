"""Events of Google's dp-accounting, as trees of plain values, to ours and back. dp-accounting itself is not needed.

A tree is a dictionary with ``class_name`` and the fields of that class, as `DpEvent.to_named_tuple` names them; inner
events are such trees too. Named tuples are accepted as well, so `from_dp_accounting(event.to_named_tuple())` reads any
event of dp-accounting, and a tree that went through JSON can be read where dp-accounting is not installed.

| dp-accounting | dpgrad |
|---|---|
| NoOpDpEvent | `Compose(())` |
| GaussianDpEvent | `Gaussian` |
| LaplaceDpEvent | `Laplace` |
| RandomizedResponseDpEvent | `RandomizedResponse` |
| PoissonSampledDpEvent of a Gaussian | `Poisson` |
| SampledWithoutReplacementDpEvent of a Gaussian | `FixedSize` |
| TruncatedSubsampledGaussianDpEvent | `TruncatedPoisson` |
| SelfComposedDpEvent, ComposedDpEvent | `Repeat`, `Compose` |
| RepeatAndSelectDpEvent | `Selection` of one event |

Everything else is refused by name. Both libraries define the noise multiplier as noise over the bound on one
row's contribution, under every neighbouring relation. dp-accounting's PLD accountant reads it so. Its Rényi accountant
takes noise over the distance of neighbours under REPLACE_ONE, twice as far: there, give it half the multiplier, or it
understates ε.

>>> tree = to_dp_accounting(Repeat(Poisson(0.01, Gaussian(1.0)), 1000))
>>> tree["class_name"], tree["count"], tree["event"]["class_name"]
('SelfComposedDpEvent', 1000, 'PoissonSampledDpEvent')
>>> from_dp_accounting(tree) == Repeat(Poisson(0.01, Gaussian(1.0)), 1000)
True
"""

import math
from collections.abc import Mapping
from typing import Any

from dpgrad import _validate
from dpgrad.accounting.events import (
    NOTHING,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    Laplace,
    Poisson,
    RandomizedResponse,
    Relation,
    Repeat,
    Selection,
    TruncatedPoisson,
)
from dpgrad.accounting.trials import NegativeBinomial, PoissonTrials, Trials
from dpgrad.errors import AccountingError

__all__ = ["MODULE", "RELATIONS", "from_dp_accounting", "relation_of", "to_dp_accounting"]

MODULE = "dp_accounting.dp_event"
_HEAD = ("module_name", "class_name")
_MORE = 1 + 1e-11  # of the mean of a law that is found from below, by a part in 10¹²

RELATIONS = {
    "ADD_OR_REMOVE_ONE": Relation.ADD_REMOVE,
    "REPLACE_SPECIAL": Relation.ZERO_OUT,
    "REPLACE_ONE": Relation.REPLACE_ONE,
}

_FIELDS = {
    "NoOpDpEvent": (),
    "GaussianDpEvent": ("noise_multiplier",),
    "LaplaceDpEvent": ("noise_multiplier",),
    "RandomizedResponseDpEvent": ("noise_parameter", "num_buckets"),
    "PoissonSampledDpEvent": ("sampling_probability", "event"),
    "SampledWithoutReplacementDpEvent": ("source_dataset_size", "sample_size", "event"),
    "TruncatedSubsampledGaussianDpEvent": (
        "dataset_size", "sampling_probability", "truncated_batch_size", "noise_multiplier",
    ),
    "SelfComposedDpEvent": ("event", "count"),
    "RepeatAndSelectDpEvent": ("event", "mean", "shape"),
    "ComposedDpEvent": ("events",),
}  # fmt: skip


def relation_of(name: str) -> Relation:
    """The relation that dp-accounting calls ``name``; REPLACE_SPECIAL replaces a row by one that adds nothing.

    >>> relation_of("REPLACE_SPECIAL").value
    'zero-out'
    """
    _validate.one_of(RELATIONS, relation=name)
    return RELATIONS[name]


def from_dp_accounting(tree: object) -> Event:
    """Return the event of a tree of dp-accounting; refuse by name what has no counterpart here.

    >>> from_dp_accounting({"class_name": "ZCDpEvent", "rho": 0.1, "xi": 0.0})
    Traceback (most recent call last):
    dpgrad.errors.AccountingError: ZCDpEvent of dp-accounting has no event here: known are NoOpDpEvent, ...
    """
    try:
        return _read(tree)
    except RecursionError:
        raise AccountingError("the tree of dp-accounting is nested too deeply: compose it of fewer levels") from None


def _read(tree: object) -> Event:
    name, given = _opened(tree)
    match name:
        case "NoOpDpEvent":
            return NOTHING
        case "GaussianDpEvent":
            return Gaussian(given["noise_multiplier"])
        case "LaplaceDpEvent":
            return Laplace(given["noise_multiplier"])
        case "RandomizedResponseDpEvent":
            return RandomizedResponse(given["noise_parameter"], given["num_buckets"])
        case "PoissonSampledDpEvent":
            return Poisson(given["sampling_probability"], _gaussian(name, given["event"]))
        case "SampledWithoutReplacementDpEvent":
            return FixedSize(given["source_dataset_size"], given["sample_size"], _gaussian(name, given["event"]))
        case "TruncatedSubsampledGaussianDpEvent":
            sizes = given["dataset_size"], given["truncated_batch_size"]
            return TruncatedPoisson(given["sampling_probability"], *sizes, Gaussian(given["noise_multiplier"]))
        case "SelfComposedDpEvent":
            return Repeat(_read(given["event"]), given["count"])
        case "RepeatAndSelectDpEvent":
            return Selection((_read(given["event"]),), _law(given["mean"], given["shape"]))
        case _:
            if not isinstance(given["events"], list | tuple):
                raise AccountingError(f"events of {name} must be a list, got {_validate.shown(given['events'])}")
            return Compose(tuple(_read(one) for one in given["events"]))


def _opened(tree: object) -> tuple[str, Mapping[str, Any]]:
    """The name of a class and its fields, as they should be."""
    if isinstance(tree, tuple):
        tree = dict(zip(getattr(tree, "_fields", ()), tree, strict=False))
    if not isinstance(tree, Mapping) or not isinstance(tree.get("class_name"), str):
        raise AccountingError(
            f"not an event of dp-accounting: {_validate.shown(tree)}; expected a class_name and its fields"
        )
    name = tree["class_name"]
    if name not in _FIELDS:
        raise AccountingError(
            f"{_validate.shown(name)[1:-1]} of dp-accounting has no event here: known are {', '.join(_FIELDS)}"
        )
    given = {field: value for field, value in tree.items() if field not in _HEAD}
    if given.keys() != set(_FIELDS[name]):
        shown = _validate.shown(sorted(map(str, given)))
        raise AccountingError(f"{name} must have fields {sorted(_FIELDS[name])}, got {shown}")
    return name, given


def _gaussian(name: str, tree: object) -> Gaussian:
    inner = _read(tree)
    if not isinstance(inner, Gaussian):
        raise AccountingError(f"{name} has a price for a GaussianDpEvent only, got {_validate.shown(inner)}")
    return inner


def _law(mean: object, shape: object) -> Trials:
    """The law of a number of trials; of a truncated negative binomial one with that mean or a little more."""
    _validate.number(shape=shape if shape != math.inf else 0.0, mean=mean)
    if shape == math.inf:
        return PoissonTrials(float(mean))  # type: ignore[arg-type]
    return NegativeBinomial.of_mean(float(mean) * _MORE, float(shape))  # type: ignore[arg-type]


def to_dp_accounting(event: Event) -> dict[str, Any]:
    """Return the event as a tree of dp-accounting; refuse by name what dp-accounting has no event for.

    ``dp_accounting.dp_event`` has a class for each ``class_name``, whose arguments are the other fields.
    """
    match event:
        case Gaussian(z):
            return _tree("GaussianDpEvent", z)
        case Laplace(z):
            return _tree("LaplaceDpEvent", z)
        case RandomizedResponse(noise, categories):
            return _tree("RandomizedResponseDpEvent", noise, categories)
        case Poisson(sampling_rate, inner):
            return _tree("PoissonSampledDpEvent", sampling_rate, to_dp_accounting(inner))
        case FixedSize(rows, size, inner):
            return _tree("SampledWithoutReplacementDpEvent", rows, size, to_dp_accounting(inner))
        case TruncatedPoisson(sampling_rate, rows, size, Gaussian(z)):
            return _tree("TruncatedSubsampledGaussianDpEvent", rows, sampling_rate, size, z)
        case Selection((inner,), law):
            shape = math.inf if isinstance(law, PoissonTrials) else law.eta
            return _tree("RepeatAndSelectDpEvent", to_dp_accounting(inner), law.mean, shape)
        case Repeat(inner, count):
            return _tree("SelfComposedDpEvent", to_dp_accounting(inner), count)
        case Compose(()):
            return _tree("NoOpDpEvent")
        case Compose(events):
            return _tree("ComposedDpEvent", [to_dp_accounting(one) for one in events])
        case _:
            raise AccountingError(
                f"{type(event).__name__} has no event in dp-accounting: export Gaussian, Laplace, RandomizedResponse, "
                "Poisson, FixedSize and TruncatedPoisson, compositions of them, and selections with a single event"
            )


def _tree(name: str, *values: Any) -> dict[str, Any]:
    return {"module_name": MODULE, "class_name": name, **dict(zip(_FIELDS[name], values, strict=True))}
