"""Settings that the papers do not print, found by a search on a split of the training rows.

A search is an experiment like any other: its arms are the candidates, grouped by the method they are for, and its
figure is measured on training rows that the fit did not see. `chosen` picks the best candidate of each method from the
trials in the output folder, or, where the search has not been run there, from ``chosen.json`` next to this file, which
``python -m benchmarks.chosen RESULTS`` writes. The choice is not charged to the privacy budget; tables say so.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpgrad.papers.experiment import Outcomes, Size

__all__ = ["COMMITTED", "NOT_CHARGED", "chosen", "committed", "outcomes", "told"]

COMMITTED = Path(__file__).with_name("chosen.json")
NOT_CHARGED = "tuning on a split of the training rows is not charged; what was searched is said beside each setting"


def outcomes(search: str, size: Size, out: Path) -> Outcomes:
    """The trials of a search in an output folder; none where it was not run there.

    >>> outcomes("nothing", "full", Path("absent")).arms
    ()
    """
    from dpgrad.papers.catalogue import experiments
    from dpgrad.papers.running import TrialLog, arms_of, trials_path

    if search not in experiments():
        return Outcomes({})
    experiment = experiments()[search]
    log = TrialLog(trials_path(experiment, size, out))
    arms = arms_of(experiment, size, out)
    found: dict[str, list[Mapping[str, Any]]] = {arm.name: [] for arm in arms}
    for line in log.wanted(arms, experiment.seeds):
        found[line["arm"]].append({**line["figures"], "setting": line["setting"]})
    return Outcomes(found)


def chosen(search: str, earlier: Outcomes, method: str, figure: str = "accuracy") -> dict[str, Any]:
    """The setting of the best candidate of a method: highest mean, then the first in the order of the arms.

    A candidate without a figure, since it failed or gave no number, is not chosen.

    >>> tried = [{"accuracy": 90.0, "setting": {"method": "psac", "learning_rate": 2.0}}]
    >>> chosen("toy", Outcomes({"psac 2": tried}), "psac")
    {'method': 'psac', 'learning_rate': 2.0}
    """
    of_method = {
        arm: dict(earlier.of(arm)[0]["setting"])
        for arm in earlier.arms
        if earlier.of(arm)[0]["setting"].get("method") == method and earlier.values(arm, figure)
    }
    if of_method:
        return of_method[max(of_method, key=lambda arm: earlier.mean(arm, figure))]
    return dict(committed().get(search, {}).get(method, {}))


def told(search: str, earlier: Outcomes, method: str, whole: int, otherwise: str, figure: str = "accuracy") -> str:
    """How `chosen` came to its setting: the best of how many of the ``whole``, or ``otherwise`` without a search.

    >>> told("toy", Outcomes({}), "psac", 4, "the middle of the grid")
    'not searched yet: the middle of the grid'
    """
    tried = sum(
        earlier.of(arm)[0]["setting"].get("method") == method and bool(earlier.values(arm, figure))
        for arm in earlier.arms
    )
    if tried:
        return f"best of {whole} settings" if tried >= whole else f"best of {tried} of {whole} settings so far"
    if method in committed().get(search, {}):
        return "the choice of an earlier search, which comes with dpgrad"
    return f"not searched yet: {otherwise}"


@functools.cache
def committed() -> dict[str, dict[str, dict[str, Any]]]:
    """What the committed searches chose: search, method, setting."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(COMMITTED.read_text("utf-8"))
    return found
