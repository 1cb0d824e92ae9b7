"""Differentially private optimization: the object that configures a run is the object that is accounted.

Public names and submodules are imported when first used, so ``import dpgrad`` loads neither torch nor numpy.

>>> import dpgrad
>>> dpgrad.Relation("add-remove").name
'ADD_REMOVE'
"""

# ruff: noqa: F401 (modules that type checkers are to see as well)

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if TYPE_CHECKING:
    from dpgrad import (
        accounting,
        admission,
        augment,
        averaging,
        calibrate,
        checkpoint,
        cli,
        convex,
        curves,
        data,
        device_noise,
        diagnostics,
        draw,
        events,
        features,
        grads,
        graph,
        guarantee,
        kernels,
        keys,
        lab,
        lanes,
        ledger,
        losses,
        mechanism,
        noise,
        online,
        pca,
        philox,
        plan,
        prepare,
        private,
        processes,
        recipes,
        replay,
        sampling,
        scaling,
        schedules,
        snapshot,
        source,
        train,
        weights,
        writeahead,
    )
    from dpgrad.events import Relation
    from dpgrad.guarantee import Guarantee
    from dpgrad.ledger import Ledger
    from dpgrad.mechanism import Group, Mechanism
    from dpgrad.private import PrivateGradient
    from dpgrad.train import fit

__version__ = "0.1.0"

__all__ = [
    "Group",
    "Guarantee",
    "Ledger",
    "Mechanism",
    "PrivateGradient",
    "Relation",
    "__version__",
    "accounting",
    "calibrate",
    "checkpoint",
    "convex",
    "data",
    "events",
    "features",
    "fit",
    "grads",
    "online",
    "pca",
    "plan",
    "recipes",
    "sampling",
    "scaling",
    "schedules",
]

# Public name -> the module that defines it. Modules are found by their own names, the public ones not in __all__ too.
_HOMES = {
    "Group": "dpgrad.mechanism",
    "Guarantee": "dpgrad.guarantee",
    "Ledger": "dpgrad.ledger",
    "Mechanism": "dpgrad.mechanism",
    "PrivateGradient": "dpgrad.private",
    "Relation": "dpgrad.events",
    "fit": "dpgrad.train",
}

if not TYPE_CHECKING:  # a type checker would take any misspelt name for an object

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            return attribute(__name__)(name)
        value: object = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    modules = (found.name for found in iter_modules(__path__))
    return sorted({*globals(), *__all__, *(name for name in modules if not name.startswith("_"))})
