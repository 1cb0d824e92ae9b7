"""Every experiment by name: the tables and figures of the papers, their searches, and our best at their budgets."""

import functools
import importlib
import importlib.util
import sys

from dpgrad import _validate
from dpgrad.errors import OptionError
from dpgrad.papers.experiment import Experiment

__all__ = ["MODULES", "aliases", "experiments", "named"]

# in the order of the list; each has a tuple EXPERIMENTS
MODULES = ("abadi", "yu2018", "huang", "huang_figures", "yu2020", "best")


@functools.cache
def experiments() -> dict[str, Experiment]:
    """All of them, in the order in which they are best run: a search comes before what reads it.

    >>> all(name == experiment.name for name, experiment in experiments().items())
    True
    """
    found: dict[str, Experiment] = {}
    for module in MODULES:
        if importlib.util.find_spec(f"dpgrad.papers.{module}") is None:
            continue
        for experiment in importlib.import_module(f"dpgrad.papers.{module}").EXPERIMENTS:
            assert experiment.name not in found, f"two experiments are called {experiment.name}"
            found[experiment.name] = experiment
    return found


@functools.cache
def aliases() -> dict[str, tuple[str, ...]]:
    """Figures that several experiments draw together: ``ALIASES`` of the modules.

    >>> aliases()["huang-figure2"]
    ('huang-figure3', 'huang-figure6')
    """
    experiments()
    loaded = [sys.modules.get(f"dpgrad.papers.{module}") for module in MODULES]
    return {name: found for module in loaded for name, found in getattr(module, "ALIASES", {}).items()}


def named(word: str) -> tuple[list[Experiment], bool]:
    """The experiments of a word, and whether it names one: its name, the beginning of several names, or "all".

    >>> named("all")[1]
    False
    >>> named("huang-figre9")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: there is no experiment 'huang-figre9': did you mean huang-figure9?
    """
    known = experiments()
    if word in known:
        return [known[word]], True
    if word in aliases():
        return [known[name] for name in aliases()[word]], False
    found = [one for name, one in known.items() if word == "all" or name.startswith(f"{word}-")]
    if not found:
        groups = {"-".join(name.split("-")[:count]) for name in known for count in range(1, name.count("-") + 1)}
        near = _validate.meant(word, [*known, *aliases(), *sorted(groups), "all"])
        raise OptionError(f"there is no experiment {word!r:.60}{near or ': dpgrad reproduce --list names them'}")
    return found, False
