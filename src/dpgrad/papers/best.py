"""Our best at the papers' budgets: the same ε, δ and neighbours, Poisson sampling, certified accounting.

Each task has one setting (`dpgrad.papers.best_tasks`), chosen by ``benchmarks.best_search`` on a split of the training
rows where it has been run, and by hand before that; the choice is not charged, as it is not in the papers. The test
rows are judged once for each seed. Features are fixed functions of one row: wavelets, histograms, products with
constants. Which ones are used was found by hand, on held-out training rows. A network pretrained on ImageNet is not
used for Imagenette, whose images and labels are part of ImageNet.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from dpgrad.papers import best_tasks, best_training
from dpgrad.papers.best_tasks import TASKS, BestTask
from dpgrad.papers.experiment import Arm, Claim, Experiment, Outcomes, Place, Size

__all__ = ["EXPERIMENTS", "OURS", "trial"]

OURS = "our best"
PROBE = "the same features without privacy"
PLAIN = "DP-SGD at the paper's settings, 20 epochs (not printed)"
CONVEX = "softmax regression, nothing tuned"
_NOT_CHARGED = (
    "Kinds of features, of models and the setting that a search starts from were found by hand on held-out training "
    "rows; tuning is not charged."
)


def trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """One run on all training rows, judged on the test rows."""
    setting = best_training.smaller(arm.setting, place.size)
    task = TASKS[setting.pop("task")]
    return best_training.run(task, setting, "final", place.size, place.data, place.device, seed)


def _arms(task: BestTask, size: Size) -> tuple[Arm, ...]:
    ours = Arm(OURS, {"task": task.name, **best_tasks.setting_of(task)}, best_tasks.how_chosen(task))
    others = [Arm(name, {"task": task.name, **setting}) for name, setting in _OTHERS.get(task.name, ())]
    return (ours, *others)


# What our best is compared with on the same rows, where the paper prints no figure for them.
_OTHERS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "cifar10-features": ((PROBE, {"method": "non-private", "norm": "none"}),),
    "covertype": (
        (PLAIN, {
            "model": "mlp", "widths": [100, 100], "norm": "none", "rule": "hard", "clip": 8.0, "reach": 0.8,
            "momentum": 0.0, "schedule": "constant", "averaging": None, "share": 0.001, "steps": 20_000,
        }),
        (CONVEX, {"method": "auto", "features": "rows"}),
    ),
}  # fmt: skip


def _at_least(task: BestTask, value: float, word: str) -> Claim:
    def holds(outcomes: Outcomes) -> bool | None:
        found = outcomes.mean(OURS, "accuracy")
        return None if found != found else found >= value

    return Claim(f"{word} {value:g} %", holds, kind="ours")


def _claims(task: BestTask) -> tuple[Claim, ...]:
    if task.name == "cifar10-features":
        return tuple(
            Claim(
                f"at most {gap:g} points below the same features without privacy", partial(_near, gap=gap), kind="ours"
            )
            for gap in (1.0, 0.5)
        )
    if task.name == "covertype":
        above = Claim(
            "above DP-SGD at the paper's settings, with 20 epochs, by more than two standard errors",
            lambda outcomes: outcomes.above(OURS, PLAIN, "accuracy"),
            kind="ours",
        )
        far = Claim("three points above the best convex model", partial(_over, other=CONVEX, gap=3.0), kind="ours")
        return above, far
    found = [
        _at_least(task, value, word) for value, word in ((task.least, "at least"), (task.aim, "the aim of")) if value
    ]
    if task.printed is not None:
        found.insert(0, _at_least(task, task.printed, "the paper's"))
    return tuple(found)


def _near(outcomes: Outcomes, gap: float) -> bool | None:
    return _over(outcomes, PROBE, -gap)


def _over(outcomes: Outcomes, other: str, gap: float) -> bool | None:
    apart = outcomes.mean(OURS, "accuracy") - outcomes.mean(other, "accuracy")
    return None if apart != apart else apart >= gap


def _about(task: BestTask) -> str:
    delta = "1/n²" if task.delta is None else f"{task.delta:g}"
    return f"ε = {task.epsilon:g}, δ = {delta}, {task.relation} neighbours. {task.note}{_NOT_CHARGED}"


def _experiment(task: BestTask) -> Experiment:
    arms: Callable[[Size], tuple[Arm, ...]] = partial(_arms, task)
    return Experiment(
        name=f"best-{task.name}", paper=f"ours, beside {task.paper}", item=f"{task.title}, ε = {task.epsilon:g}",
        about=_about(task), needs=(task.dataset,), arms=arms, trial=trial, figure="accuracy",
        printed={} if task.printed is None else {OURS: task.printed}, claims=_claims(task),
    )  # fmt: skip


EXPERIMENTS = tuple(_experiment(task) for task in TASKS.values())
