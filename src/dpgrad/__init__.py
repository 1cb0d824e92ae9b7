"""Differentially private optimization: the object that configures a run is the object that is accounted.

Public names are imported when first used, so ``import dpgrad`` loads neither torch nor numpy.

>>> import dpgrad
>>> dpgrad.Relation("add-remove").name
'ADD_REMOVE'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpgrad import (
        accounting,
        calibrate,
        checkpoint,
        convex,
        data,
        events,
        features,
        grads,
        online,
        pca,
        plan,
        recipes,
        sampling,
        scaling,
        schedules,
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

# Public name -> the module that defines it; a module is its own home.
_HOMES = {
    "Group": "dpgrad.mechanism",
    "Guarantee": "dpgrad.guarantee",
    "Ledger": "dpgrad.ledger",
    "Mechanism": "dpgrad.mechanism",
    "PrivateGradient": "dpgrad.private",
    "Relation": "dpgrad.events",
    "accounting": "dpgrad.accounting",
    "calibrate": "dpgrad.calibrate",
    "checkpoint": "dpgrad.checkpoint",
    "convex": "dpgrad.convex",
    "data": "dpgrad.data",
    "events": "dpgrad.events",
    "features": "dpgrad.features",
    "fit": "dpgrad.train",
    "grads": "dpgrad.grads",
    "online": "dpgrad.online",
    "pca": "dpgrad.pca",
    "plan": "dpgrad.plan",
    "recipes": "dpgrad.recipes",
    "sampling": "dpgrad.sampling",
    "scaling": "dpgrad.scaling",
    "schedules": "dpgrad.schedules",
}

if not TYPE_CHECKING:  # a type checker would take any misspelt name for an object

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'dpgrad' has no attribute {name!r}")
        module = import_module(home)
        value: object = module if home == f"dpgrad.{name}" else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
