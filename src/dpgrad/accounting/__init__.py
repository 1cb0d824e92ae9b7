"""Accountants: functions from an event and a neighbouring relation to a privacy profile.

>>> from dpgrad.accounting.events import Gaussian, Poisson, Repeat
>>> profile = account(Repeat(Poisson(0.01, Gaussian(4.0)), 10_000), accountant="rdp")
>>> round(profile.epsilon(1e-5), 6)
1.035384
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dpgrad import _validate
from dpgrad._submodules import attribute
from dpgrad.accounting.events import Event, Relation
from dpgrad.accounting.guarantee import Profile
from dpgrad.accounting.inexact import InexactProfile, parted

__all__ = ["ACCOUNTANTS", "account"]

# accountant -> module and function; what is not a guarantee comes last
ACCOUNTANTS = {
    "pld": ("pld", "account"),
    "rdp": ("rdp", "account"),
    "moments": ("moments", "account"),
    "exact": ("exact", "account"),
    "strong": ("historical", "account"),
    "rdp-classic": ("rdp", "classic"),
    "moments-closed": ("moments", "closed"),
    "moments-asymptotic": ("moments", "asymptotic"),
    "strong-printed": ("historical", "printed"),
}


def account(event: Event, relation: Relation = Relation.ADD_REMOVE, accountant: str = "pld") -> Profile:
    """Return the privacy profile of ``event`` under ``relation``, by the accountant of that name."""
    _validate.one_of(ACCOUNTANTS, accountant=accountant)
    module, function = ACCOUNTANTS[accountant]
    exact, distance = parted(event)
    profile: Profile = getattr(import_module(f"dpgrad.accounting.{module}"), function)(exact, Relation(relation))
    return InexactProfile(profile, event, distance) if distance else profile


if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
