"""What each choice adds to a private step: rules, history, diagnostics; and Poisson batches beside fixed ones."""

import math
from functools import partial

from benchmarks.steps.engines import GRAPH, ORDINARY, Engine, ordinary, ordinary_graph, ours
from benchmarks.steps.race import WARM_UP, Row, Settings, raced
from benchmarks.steps.workloads import Workload
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.scaling import Automatic, Hard, Psac, Psasc
from dpgrad.training.diagnostics import Diagnostics

RULES = {"Hard": Hard(), "Automatic": Automatic(), "Psac": Psac(), "Psasc": Psasc(s=0.7)}
PLAIN = "Hard"  # the rule of the plain private step, which other rows of a table are compared with
FIXED, POISSON = "fixed batches", "Poisson batches"
_LENGTHS = (1, 4)
_POISSON_BLOCK = 16  # steps timed together, so that a figure is that of an average batch


def rules(settings: Settings, workload: Workload) -> list[Row]:
    """The private step with each rule, captured where it can be."""
    captured = settings.device == "cuda"
    forms: dict[str, Engine] = {name: partial(ours, captured=captured, rule=rule) for name, rule in RULES.items()}
    return raced(workload, forms, settings)


def additions(settings: Settings, workload: Workload) -> list[Row]:
    """The uncaptured private step with inner momentum, with averages of examples, observed, and with diagnostics."""
    observed = partial(ours, captured=False, observe=_ignored)
    forms: dict[str, Engine] = {
        PLAIN: partial(ours, captured=False),
        **{
            f"inner momentum, K₀ = {length}": partial(ours, captured=False, inner_momentum=InnerMomentum(0.5, length))
            for length in _LENGTHS
        },
        "average of each example": partial(ours, captured=False, average=0.5),
        "observed, nothing recorded": observed,
        "diagnostics of every step": partial(ours, captured=False, diagnostics=Diagnostics(last_epochs=math.inf)),
    }
    return raced(workload, forms, settings, warm_up=WARM_UP + max(_LENGTHS))


def _ignored(observed: object) -> None:
    pass


def poisson(settings: Settings, lots: int, workload: Workload) -> list[Row]:
    """The step without privacy, the private step on fixed batches, and on Poisson batches from ``lots`` times as many.

    Per expected example: all three rows have the same expected batch size.
    """
    captured = settings.device == "cuda"
    forms: dict[str, Engine] = {
        GRAPH if captured else ORDINARY: ordinary_graph if captured else ordinary,
        FIXED: partial(ours, captured=captured),
        POISSON: partial(ours, captured=captured, rows=lots * workload.batch_size),
    }
    return raced(workload, forms, settings, block=_POISSON_BLOCK if captured else 1)
