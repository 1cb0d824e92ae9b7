"""Differentially private optimization: the object that configures a run is the object that is accounted.

Names and modules are imported when first used, so ``import dpgrad`` loads neither torch nor numpy.

>>> import dpgrad
>>> dpgrad.Relation("add-remove").name
'ADD_REMOVE'
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if TYPE_CHECKING:
    from dpgrad import (
        accounting,
        audit,
        cli,
        convex,
        data,
        distributed,
        errors,
        grads,
        integrations,
        mechanism,
        papers,
        randomness,
        reports,
        runs,
        training,
        tuning,
    )
    from dpgrad.accounting import calibrate, events, online
    from dpgrad.accounting.guarantee import Guarantee
    from dpgrad.accounting.ledger import Ledger
    from dpgrad.accounting.relation import Relation
    from dpgrad.errors import DpgradError
    from dpgrad.grads import scaling
    from dpgrad.mechanism import sampling, schedules
    from dpgrad.mechanism.mechanism import Group, Mechanism
    from dpgrad.reports.report import report
    from dpgrad.runs import checkpoint
    from dpgrad.training import augment, features, pca, plan, recipes
    from dpgrad.training.callbacks import CSVLog
    from dpgrad.training.fit import Fitted, fit
    from dpgrad.training.options import Computing, HeldOut, Privacy, RunFolder
    from dpgrad.training.private import PrivateGradient
    from dpgrad.training.recipes import Recipe

__version__ = "0.2.0"

__all__ = [
    "CSVLog",
    "Computing",
    "DpgradError",
    "Fitted",
    "Group",
    "Guarantee",
    "HeldOut",
    "Ledger",
    "Mechanism",
    "Privacy",
    "PrivateGradient",
    "Recipe",
    "Relation",
    "RunFolder",
    "__version__",
    "accounting",
    "audit",
    "augment",
    "calibrate",
    "checkpoint",
    "cli",
    "convex",
    "data",
    "distributed",
    "errors",
    "events",
    "features",
    "fit",
    "grads",
    "integrations",
    "mechanism",
    "online",
    "papers",
    "pca",
    "plan",
    "randomness",
    "recipes",
    "report",
    "reports",
    "runs",
    "sampling",
    "scaling",
    "schedules",
    "training",
    "tuning",
]

# Where a name of the façade is defined. Rooms are found by their own names.
_HOMES = {
    **dict.fromkeys(("Group", "Mechanism"), "mechanism.mechanism"),
    **dict.fromkeys(("calibrate", "events", "online"), "accounting"),
    **dict.fromkeys(("sampling", "schedules"), "mechanism"),
    **dict.fromkeys(("augment", "features", "pca", "plan", "recipes"), "training"),
    **dict.fromkeys(("Computing", "HeldOut", "Privacy", "RunFolder"), "training.options"),
    **dict.fromkeys(("Fitted", "fit"), "training.fit"),
    "CSVLog": "training.callbacks",
    "DpgradError": "errors",
    "Guarantee": "accounting.guarantee",
    "Ledger": "accounting.ledger",
    "PrivateGradient": "training.private",
    "Recipe": "training.recipes",
    "Relation": "accounting.relation",
    "checkpoint": "runs",
    "report": "reports.report",
    "scaling": "grads",
}

if not TYPE_CHECKING:  # a type checker would take any misspelt name for an object

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            return attribute(__name__)(name)
        value: object = getattr(import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
