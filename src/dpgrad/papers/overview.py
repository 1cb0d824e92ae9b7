"""The page of a results folder: what of each paper has been run there, and what became of its claims."""

from pathlib import Path

from dpgrad import _files
from dpgrad.papers import catalogue, running, summary, tables
from dpgrad.papers.experiment import Experiment, Place
from dpgrad.reports import markdown

__all__ = ["NAME", "page", "write"]

NAME = "README.md"
_HEAD = ["experiment", "what", "trials", "claims that held", "did not hold", "cannot be told"]


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
        summary.table(out),
        "Means ± standard errors over trials with different seeds. At its settings: what the paper prints, with "
        "Poisson sampling and certified accounting; what it does not print was chosen as the experiment's page says. "
        "Our best: the same ε, δ and neighbours; tuning on held-out training rows is not charged, as in the papers.",
    ]
    for paper, rows in by_paper.items():
        parts += [f"## {paper}", markdown.table([_HEAD, *rows])]
    return "\n\n".join(parts) + "\n"


def _row(experiment: Experiment, out: Path) -> list[str]:
    if not running.trials_path(experiment, "full", out).exists():
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
