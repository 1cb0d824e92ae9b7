"""Choosing among settings when only the winner is released, at its price (docs/tuning.md).

>>> from dpgrad import events, tuning
>>> shown = tuning.price(events.Repeat(events.Gaussian(30.0), 40), mean=10, delta=1e-5)
>>> [one.name for one in shown][:2]
['one trial', 'best of a random number, logarithmic']
"""

from typing import TYPE_CHECKING

from dpgrad.tuning.prices import Price, price

if TYPE_CHECKING:
    from dpgrad.tuning.planned import Configuration, SelectionPlan, plan
    from dpgrad.tuning.scores import PrivateScore, PublicScore
    from dpgrad.tuning.selecting import Selected, select

__all__ = [
    "Configuration",
    "Price",
    "PrivateScore",
    "PublicScore",
    "Selected",
    "SelectionPlan",
    "plan",
    "price",
    "select",
]

_HOMES = {
    **dict.fromkeys(("Configuration", "SelectionPlan", "plan"), "planned"),
    **dict.fromkeys(("PrivateScore", "PublicScore"), "scores"),
    **dict.fromkeys(("Selected", "select"), "selecting"),
}

if not TYPE_CHECKING:  # a type checker would take any misspelt name for an object

    def __getattr__(name: str) -> object:
        from importlib import import_module

        from dpgrad._submodules import attribute

        if name not in _HOMES:
            return attribute(__name__)(name)
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
