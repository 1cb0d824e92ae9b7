"""An experiment as a table: the paper's value next to ours with its standard error, and whether each claim held."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpgrad import _files
from dpgrad.papers.experiment import ArmKind
from dpgrad.papers.running import Done, digest
from dpgrad.reports import markdown

__all__ = [
    "ENDINGS",
    "HEADINGS",
    "claims",
    "command",
    "csv_text",
    "latex",
    "made",
    "number",
    "page",
    "rows",
    "setting",
    "summary",
    "verdict",
    "write",
]

ENDINGS = (".md", ".csv", ".tex")
_HELD = {True: "held", False: "did not hold", None: "cannot be told"}
_NOT_JUDGED = "not judged at this size"
HEADINGS: dict[ArmKind, str] = {
    "paper": "Claims of the paper",
    "ours": "Our aims and checks",
    "construction": "True by construction (a check of the code)",
}
_ROUNDING = 1e-9  # of a value: an error below it is that of floats, not of trials
_NONE = "–"
# what LaTeX reads as a command
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "ε": r"$\varepsilon$", "δ": r"$\delta$", "σ": r"$\sigma$",
    "±": r"$\pm$", "×": r"$\times$", "–": "--", "−": "$-$", "≈": r"$\approx$", "→": r"$\to$", "∞": r"$\infty$",
    "≤": r"$\le$", "≥": r"$\ge$", "·": r"$\cdot$", "√": r"$\surd$", "η": r"$\eta$", "γ": r"$\gamma$", "ν": r"$\nu$",
}  # fmt: skip


def number(value: float, error: float = math.nan) -> str:
    """A number with as many digits as its error leaves; four where none is known, and two decimals from 10 on.

    A whole number above 100 without an error is a count, and has no decimals.

    >>> number(97.3512, 0.043), number(97.3512), number(45220.0), number(0.000363), number(float("nan"))
    ('97.35 ± 0.04', '97.35', '45,220', '0.000363', '–')
    >>> number(2.99992, 3e-13)  # computed on two machines
    '3'
    """
    if math.isnan(value):
        return _NONE
    if math.isnan(error) or error <= _ROUNDING * abs(value):
        if abs(value) > 100 and _counts([(value, error)]):
            return f"{value:,.0f}"
        return f"{value:.2f}" if 10 <= abs(value) < 1e5 else f"{value:.4g}"
    if abs(value) >= 10 and error >= 0.005:
        return f"{value:.2f} ± {error:.2f}"
    digits = max(0, min(8, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _counts(figures: Iterable[tuple[float, float]]) -> bool:
    """Whether values with their errors are whole numbers without errors."""
    return all(value.is_integer() and abs(value) < 1e15 and not error > 0 for value, error in figures)


def _column(figures: Sequence[tuple[float, float]]) -> list[str]:
    """Values with their errors as the cells of a column: without decimals if all of them are whole numbers.

    >>> _column([(45220.0, 0.0), (2.0, 0.0), (math.nan, math.nan)]), _column([(97.5, math.nan), (97.0, math.nan)])
    (['45,220', '2', '–'], ['97.50', '97.00'])
    """
    counts = _counts(figure for figure in figures if not math.isnan(figure[0]))
    return [f"{value:,.0f}" if counts and not math.isnan(value) else number(value, error) for value, error in figures]


def rows(done: Done) -> list[list[str]]:
    """The table, its heading first: arm, the paper's value, ours, further figures, and how many trials."""
    experiment, outcomes = done.experiment, done.outcomes
    head = ["", "paper", f"ours: {_words(experiment.figure)}", *map(_words, experiment.also), "trials"]
    names = [arm.name for arm in done.arms]
    printed = [(experiment.printed.get(arm, math.nan), math.nan) for arm in names]
    figures = [
        [(outcomes.mean(arm, name), outcomes.error(arm, name)) for arm in names]
        for name in (experiment.figure, *experiment.also)
    ]
    together = _column([*printed, *figures[0]])  # the paper's values and ours alike
    cells = [together[: len(names)], together[len(names) :], *map(_column, figures[1:])]
    trials = [str(len(outcomes.of(arm))) for arm in names]
    return [head, *map(list, zip(names, *cells, trials, strict=True))]


def _words(name: str) -> str:
    return name.replace("_", " ")


def claims(done: Done, kind: ArmKind | None = None) -> list[tuple[str, bool | None]]:
    """Each claim, or each of one kind, and whether it held; of a small size, only those that hold at any size."""
    wanted = (claim for claim in done.experiment.claims if kind in (None, claim.kind))
    full = done.place.size == "full"
    return [(claim.text, claim.holds(done.outcomes) if full or claim.certain else None) for claim in wanted]


def verdict(done: Done, held: bool | None) -> str:
    """What is said of a claim."""
    return _NOT_JUDGED if held is None and done.place.size != "full" else _HELD[held]


def csv_text(done: Done) -> str:
    """The table with numbers in full, and the setting of each arm as JSON."""
    experiment, outcomes = done.experiment, done.outcomes
    names = (experiment.figure, *experiment.also)
    into = io.StringIO()
    writer = csv.writer(into, lineterminator="\n")
    heads = [part for name in names for part in (name, f"{name} standard error")]
    writer.writerow(["arm", "paper", *heads, "trials", "setting"])
    for arm in done.arms:
        figures = [each(arm.name, name) for name in names for each in (outcomes.mean, outcomes.error)]
        plain = json.dumps(dict(arm.setting), ensure_ascii=False)
        cells = [experiment.printed.get(arm.name, math.nan), *figures]
        writer.writerow(
            [arm.name, *("" if math.isnan(cell) else repr(float(cell)) for cell in cells), len(outcomes.of(arm.name)),
             plain]
        )  # fmt: skip
    return into.getvalue()


def latex(table: Sequence[Sequence[str]]) -> str:
    r"""The table as a LaTeX tabular that needs no package.

    >>> print(latex([["", "paper"], ["50 %", "1"]]))
    \begin{tabular}{lr}
    \hline
     & paper \\
    \hline
    50 \% & 1 \\
    \hline
    \end{tabular}
    """
    head, *body = [" & ".join("".join(_LATEX.get(c, c) for c in cell) for cell in row) + r" \\" for row in table]
    columns = "l" + "r" * (len(table[0]) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}"]
    return "\n".join(lines)


def summary(done: Done) -> str:
    """The table and the claims, as the command prints them."""
    experiment = done.experiment
    size = "" if done.place.size == "full" else f", {done.place.size} size"
    lines = [f"{experiment.name}: {experiment.paper}, {experiment.item}{size}", "", markdown.table(rows(done))]
    for kind, heading in HEADINGS.items():
        if found := claims(done, kind):
            lines += ["", f"{heading}:", *(f"{verdict(done, held)}: {text}" for text, held in found)]
    if not done.complete:
        lines += ["", f"partial: {len(done.lines)} of {len(done.arms) * done.seeds} trials are there"]
    return "\n".join(lines)


def command(done: Done) -> str:
    """The command that makes these files again."""
    words = ["dpgrad", "reproduce", done.experiment.name]
    if done.place.size != "full":
        words.append("--quick")
    if done.seeds != done.experiment.repeats(done.place.size):
        words += ["--seeds", str(done.seeds)]
    if places := sorted({str(line.get("place", "cpu")) for line in done.lines} - {"cpu"}):
        words += ["--device", places[0]]
    return " ".join(words)


def page(done: Done, drawn: bool) -> str:
    """The Markdown file: what was run, by which command, when and where, the table, the claims and the figure."""
    experiment = done.experiment
    size = {"quick": " Quick size: not the paper's settings.", "tiny": " Tiny size: a test."}.get(done.place.size, "")
    partial = "" if done.complete else f" Partial: {len(done.lines)} of {len(done.arms) * done.seeds} trials."
    parts = [
        f"# {experiment.paper}, {experiment.item}",
        f"`{command(done)}`",
        f"{experiment.about}{size}{partial}",
        markdown.table(rows(done)),
        "Mean ± standard error over trials with different seeds.",
    ]
    for kind, heading in HEADINGS.items():
        if found := claims(done, kind):
            parts.append(
                "\n".join([f"{heading}:", "", *(f"- **{verdict(done, held)}**: {text}" for text, held in found)])
            )
    if drawn:
        parts.append(f"![{experiment.item}]({_name(done)}.svg)")
    settings = [["", "setting", "how it was chosen"]]
    settings += [[arm.name, setting(arm.setting), arm.choice] for arm in done.arms]
    if not any(arm.choice for arm in done.arms):
        settings = [row[:2] for row in settings]
    parts += ["Settings:", markdown.table(settings), made(done)]
    return "\n\n".join(parts) + "\n"


def _name(done: Done) -> str:
    return done.experiment.name + ("" if done.place.size == "full" else f".{done.place.size}")


def setting(given: Mapping[str, Any]) -> str:
    """The setting of an arm in words.

    >>> setting({"clip": 0.3, "method": "dpsgd"})
    'clip = 0.3, method = dpsgd'
    """
    return ", ".join(f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}"
                     for name, value in given.items()) or _NONE  # fmt: skip


def made(done: Done) -> str:
    """When, where and with which code the trials were made."""
    if not done.lines:
        return "No trial has been run."
    known = [line for line in done.lines if line.get("date")]
    dates = sorted({line["date"] for line in known})
    devices = ", ".join(sorted({line["device"] for line in known}))
    versions = ", ".join(sorted({f"{name} {one}" for line in known for name, one in line["versions"].items()}))
    seconds = sum(line["seconds"] for line in done.lines)
    now = {arm.name: digest(done.experiment, arm) for arm in done.arms}
    other = sum(line["source"] != now[line["arm"]] for line in done.lines)
    said = [f"{seconds:.0f} s in all, seeds 0 to {done.seeds - 1}; every trial is a line of `{_name(done)}.jsonl`."]
    if known:
        said.insert(0, f"Trials made {' to '.join(dict.fromkeys((dates[0], dates[-1])))} on {devices} ({versions}),")
    if unknown := len(done.lines) - len(known):
        said.append(f"Of {unknown} trials it was not recorded when, where and with which code they were made.")
    if other > unknown:
        said.append(f"{other - unknown} of {len(done.lines)} trials were made with other code than there is now.")
    return " ".join(said)


def write(done: Done, stem: Path, drawn: bool) -> list[Path]:
    """Write the three tables next to the trials; each file is replaced as a whole."""
    texts = (page(done, drawn), csv_text(done), latex(rows(done)) + "\n")
    paths = [stem.with_name(stem.name + ending) for ending in ENDINGS]
    for path, text in zip(paths, texts, strict=True):
        _files.replace(path, text.encode())
    return paths
