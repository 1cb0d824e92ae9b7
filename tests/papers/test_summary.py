"""The table of the papers' figures beside ours: where its figures come from, and that the README shows it."""

import json
from pathlib import Path

import pytest

from dpgrad.papers import catalogue, summary
from dpgrad.papers.best import OURS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("line", summary.LINES, ids=lambda line: line.task)
def test_a_line_names_experiments_that_there_are(line: summary.Listed) -> None:
    known = catalogue.experiments()
    if line.same is not None:
        experiment, arm = line.same
        assert arm in [each.name for each in known[experiment].arms("full")]
        if (printed := known[experiment].printed.get(arm)) is not None:
            assert printed == line.printed
    if line.best is not None:
        assert OURS in [each.name for each in known[line.best].arms("full")]
        assert known[line.best].printed.get(OURS) == line.printed


def test_a_cell_is_the_mean_of_the_trials_that_are_there() -> None:
    """Read again from the file, without the code that the table is made by."""
    lines = [json.loads(text) for text in (ROOT / "results" / "best-mnist.jsonl").read_text("utf-8").splitlines()]
    found = [line["figures"]["accuracy"] for line in lines if line["arm"] == OURS and line["size"] == "full"]
    mean = sum(found) / len(found)
    assert summary.cell(ROOT / "results", "best-mnist", OURS).startswith(f"{mean:.2f} ± ")


def test_a_cell_of_fewer_trials_than_asked_for_says_so(tmp_path: Path) -> None:
    lines = (ROOT / "results" / "best-mnist.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "best-mnist.jsonl").write_text("".join(lines[:2]), "utf-8")
    assert summary.cell(tmp_path, "best-mnist", OURS).endswith(" (2 of 5 trials)")
    (tmp_path / "best-mnist.jsonl").write_text("", "utf-8")
    assert summary.cell(tmp_path, "best-mnist", OURS) == "not run yet"


def test_what_has_not_been_run_is_left_out(tmp_path: Path) -> None:
    assert len(summary.table(tmp_path).splitlines()) == 2


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_pages_show_the_table_of_the_results_that_are_there(page: str) -> None:
    assert summary.table(ROOT / "results") in (ROOT / page).read_text("utf-8")
