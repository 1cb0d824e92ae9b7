"""The page of a results folder: what of each paper has been run there, and what became of its claims.

Its first table is one of accuracies: the papers', ours at the papers' settings, and our best at the same budgets.
"""

from dataclasses import dataclass
from pathlib import Path

from dpgrad import _files
from dpgrad.papers import best, catalogue, running, tables
from dpgrad.papers.experiment import Experiment, Place
from dpgrad.reports import markdown

__all__ = ["LINES", "NAME", "Listed", "cell", "page", "table", "write"]

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
    if found is None or not running.has_trials(found, "full", out):
        return _NOT_RUN
    done = running.reproduce(found, Place(), out, run=False)
    outcomes = done.outcomes
    trials = len(outcomes.values(arm, "accuracy"))
    if not trials:
        return _NOT_RUN
    told = tables.number(outcomes.mean(arm, "accuracy"), outcomes.error(arm, "accuracy"))
    return told if trials == done.seeds else f"{told} ({trials} of {done.seeds} trials)"


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


NAME = "README.md"
_COLUMNS = ["experiment", "what", "trials", "claims that held", "did not hold", "cannot be told"]


def page(out: Path) -> str:
    """A table for each paper, with a link to the page of every experiment that has trials in the folder.

    >>> import tempfile
    >>> "huang-figure9" in page(Path(tempfile.mkdtemp()))
    True
    """
    by_paper: dict[str, list[list[str]]] = {}
    for experiment in catalogue.experiments().values():
        by_paper.setdefault(experiment.paper, []).append(_row(experiment, out))
    parts = [
        "# Results",
        "What `dpgrad reproduce` has run so far, at the papers' size. Each page has the paper's values beside ours, "
        "the claims, the settings and the command. Only claims of the papers are counted: our own aims, and what holds "
        "by construction, are on the pages. An experiment without trials has not been run.",
    ]
    parts += [
        "## In short",
        table(out),
        "Means ± standard errors over trials with different seeds. At its settings: what the paper prints, with "
        "Poisson sampling and certified accounting; what it does not print was chosen as the experiment's page says. "
        "Our best: the same ε, δ and neighbours; tuning on held-out training rows is not charged, as in the papers.",
    ]
    for paper, rows in by_paper.items():
        parts += [f"## {paper}", markdown.table([_COLUMNS, *rows])]
    return "\n\n".join(parts) + "\n"


def _row(experiment: Experiment, out: Path) -> list[str]:
    if not running.has_trials(experiment, "full", out):
        return [experiment.name, experiment.item, "0", "", "", ""]
    done = running.reproduce(experiment, Place(), out, run=False)
    whole = len(done.arms) * done.seeds
    trials = str(whole) if done.complete else f"{len(done.lines)} of {whole}"
    found = [held for _, held in tables.claims(done, "paper")]
    told = f"{found.count(True)} of {len(found)}" if found else ""
    return [
        f"[{experiment.name}]({experiment.name}.md)", experiment.item, trials, told,
        *(str(found.count(answer)) if answer in found else "" for answer in (False, None)),
    ]  # fmt: skip


def write(out: Path) -> Path:
    """Write the page into the folder."""
    _files.replace(out / NAME, page(out).encode())
    return out / NAME
