"""One table of accuracies: the papers', ours at the papers' settings, and our best at the same budgets."""

from dataclasses import dataclass
from pathlib import Path

from dpgrad.papers import best, catalogue, running, tables
from dpgrad.papers.experiment import Place
from dpgrad.reports import markdown

__all__ = ["LINES", "Listed", "cell", "table"]

_HEAD = ["test accuracy, %", "paper", "at its settings", "our best"]
_NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Listed:
    """A task, the paper's figure for it, and the experiments that have ours."""

    task: str
    printed: float | None
    same: tuple[str, str] | None  # an experiment at the paper's settings, and its arm
    best: str | None = None  # an experiment with our best


_PSASC = "DP-PSASC*"
# Each paper's best private figure, and the run with the settings that it was printed for.
LINES = (
    Listed("MNIST, ε = 3, δ = 1e-5", 98.65, ("huang-table3-mnist", _PSASC), "best-mnist"),
    Listed("Fashion-MNIST, ε = 9, δ = 1e-5", 87.22, ("huang-table3-fashion-mnist", _PSASC), "best-fashion-mnist-9"),
    Listed("Fashion-MNIST, ε = 3, δ = 1e-5", None, None, "best-fashion-mnist-3"),
    Listed("Imagenette, 64 pixels, ε = 8, δ = 1e-4", 66.79, ("huang-table3-imagenette", _PSASC), "best-imagenette"),
    Listed(
        "CIFAR-10, ε = 2, δ = 1e-5 (their features are SimCLRv2's, ours MobileNetV2's)", 93.36,
        ("huang-table3-cifar10", _PSASC), "best-cifar10-features",
    ),
    Listed(
        "MNIST, replace-one, ε = 0.5, δ = 1/n²", 91.5, ("yu2018-figure4-mnist", "CNN: amended, 10 epochs"),
        "best-mnist-replace-one",
    ),
    Listed(
        "Covertype network, replace-one, ε = 0.5, δ = 1/n²", None,
        ("yu2018-figure4-covertype", "amended, 5 epochs"), "best-covertype",
    ),
    Listed("MNIST with DP-PCA, ε = 0.5, δ = 1e-5", 90.0, ("abadi-mnist", "ε = 0.5, as published")),
    Listed("MNIST with DP-PCA, ε = 2, δ = 1e-5", 95.0, ("abadi-mnist", "ε = 2, as published")),
    Listed("MNIST with DP-PCA, ε = 8, δ = 1e-5", 97.0, ("abadi-mnist", "ε = 8, as published")),
    Listed("Adult, linear, replace-one, ε = 0.1", 80.9, ("yu2020-table4-adult", "DP-GD"), "best-adult-convex"),
    Listed(
        "MNIST, linear on pixels, replace-one, ε = 1", 88.6, ("yu2020-table4-mnist", "DP-GD"),
        "best-mnist-convex-pixels",
    ),
)  # fmt: skip


def cell(out: Path, experiment: str, arm: str) -> str:
    """The mean accuracy of an arm with its standard error, from the trials in a folder.

    >>> cell(Path("absent"), "best-mnist", "our best")
    'not run yet'
    """
    found = catalogue.experiments().get(experiment)
    if found is None or not running.trials_path(found, "full", out).exists():
        return _NOT_RUN
    done = running.reproduce(found, Place(), out, run=False)
    outcomes = done.outcomes
    if not outcomes.values(arm, "accuracy"):
        return _NOT_RUN
    return tables.number(outcomes.mean(arm, "accuracy"), outcomes.error(arm, "accuracy"))


def table(out: Path) -> str:
    """The table in Markdown, from the trials in a folder; a task of which nothing has been run is left out.

    >>> table(Path("absent")).count("\\n")
    1
    """
    rows = [
        [
            line.task,
            "–" if line.printed is None else f"{line.printed:.2f}",
            "–" if line.same is None else cell(out, *line.same),
            "–" if line.best is None else cell(out, line.best, best.OURS),
        ]
        for line in LINES
    ]
    return markdown.table([_HEAD, *(row for row in rows if not {*row[2:]} <= {_NOT_RUN, "–"})])
