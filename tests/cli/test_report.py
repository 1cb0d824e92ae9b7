"""`dpgrad report`: one page over runs, from what they released."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpgrad.accounting import account, events
from dpgrad.accounting.events import Compose, Relation
from dpgrad.accounting.guarantee import up


def test_one_page_over_all(answer: Callable[[str], Any], trained: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = answer(f"report {trained.folder} --out {page}")
    assert found["page"] == str(page)
    assert set(found["runs"]) == {"dpsgd", "psasc"}
    text = page.read_text("utf-8")
    assert text.count("<svg") == 7  # five charts, and the trade-off of each run
    assert "non-private" in text
    alone = answer(f"report {trained.folder / 'dpsgd'} --out {page}")
    assert set(alone["runs"]) == {"dpsgd"}
    assert "non-private" not in page.read_text("utf-8")


def test_the_way_is_on_the_page_and_old_reports_do_without(
    answer: Callable[[str], Any], trained: Any, tmp_path: Path
) -> None:
    page, way = tmp_path / "page.html", "batched: no operation depends on values"
    answer(f"report {trained.folder} --out {page}")
    assert page.read_text("utf-8").count(way) == 2
    shared = shutil.copytree(trained.folder / "dpsgd" / "release", tmp_path / "old")
    old = json.loads((shared / "report.json").read_text("utf-8"))
    for name in (
        "way",
        "kind",
        "plain",
        "values",
        "releases",
        "notes",
        "date",
        "environment",
        "schema",
        "preprocessing",
    ):
        del old[name]
    (shared / "report.json").write_text(json.dumps({**old, "format": "dpgrad privacy report 1"}), "utf-8")
    answer(f"report {shared} --out {page}")
    assert way not in page.read_text("utf-8")


def test_runs_of_one_name(answer: Callable[[str], Any], trained: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(trained.folder / "dpsgd" / "release", tmp_path / name / "dpsgd" / "release")
    found = answer(f"report {tmp_path / 'a'} {tmp_path / 'b' / 'dpsgd'}")
    assert set(found["runs"]) == {str(tmp_path / "a" / "dpsgd"), str(tmp_path / "b" / "dpsgd")}
    assert found["page"] == str(tmp_path / "a" / "report.html")


def test_words(told: Callable[[str], str], trained: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    said = told(f"report {trained.folder} --out {page}")
    together = "Each guarantee is for one run alone. If the runs used the same rows, together they have ε = "
    assert said.startswith(f"2 runs on {page} {together}")
    assert told(f"report {trained.folder / 'dpsgd'} --out {page}") == f"1 run on {page}"


def test_what_all_runs_cost_together(answer: Callable[[str], Any], trained: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = answer(f"report {trained.folder} --out {page}")
    reports = [json.loads((trained.folder / n / "release" / "report.json").read_text("utf-8")) for n in found["runs"]]
    both = Compose(tuple(events.from_dict(report["event"]) for report in reports))
    delta, relation = reports[0]["guarantee"]["delta"], Relation(reports[0]["guarantee"]["relation"])
    epsilon = account(both, relation, "pld").epsilon(delta)
    assert epsilon > max(promise["epsilon"] for promise in found["runs"].values())
    assert f"ε = {up(epsilon)} at δ" in found["together"]
    assert found["together"] in page.read_text("utf-8").replace("&#x27;", "'")


def test_what_was_shared_of_a_run(answer: Callable[[str], Any], trained: Any, tmp_path: Path) -> None:
    shared = shutil.copytree(trained.folder / "dpsgd" / "release", tmp_path / "got")
    assert set(answer(f"report {shared}")["runs"]) == {"got"}


class TestRefused:
    def test_no_folder(self, refused: Callable[..., str]) -> None:
        assert "absent is not a folder" in refused("report absent")

    def test_no_run(self, refused: Callable[..., str], tmp_path: Path) -> None:
        assert "holds no finished run" in refused(f"report {tmp_path}")

    def test_kind(self, refused: Callable[..., str], trained: Any) -> None:
        assert "--out must end in .html" in refused(f"report {trained.folder} --out page.pdf")

    def test_out_that_cannot_be_written(self, refused: Callable[..., str], trained: Any, tmp_path: Path) -> None:
        assert "absent" in refused(f"report {trained.folder} --out {tmp_path / 'absent' / 'page.html'}")

    @pytest.mark.parametrize("content", ["{", json.dumps({"metric": "accuracy"})], ids=["torn", "short"])
    def test_a_damaged_figure(self, refused: Callable[..., str], trained: Any, tmp_path: Path, content: str) -> None:
        shutil.copytree(trained.folder / "dpsgd" / "release", tmp_path / "dpsgd" / "release")
        (tmp_path / "non-private.json").write_text(content, "utf-8")
        assert "is damaged: remove it" in refused(f"report {tmp_path}")


def test_runs_that_protect_different_units_are_not_added_up(
    answer: Callable[[str], Any], trained: Any, tmp_path: Path
) -> None:
    runs = shutil.copytree(trained.folder, tmp_path / "runs")
    path = runs / "dpsgd" / "release" / "report.json"
    found = json.loads(path.read_text("utf-8"))
    found["guarantee"]["privacy_unit"] = "one person"
    path.write_text(json.dumps(found), "utf-8")
    assert "since they protect different units" in answer(f"report {runs}")["together"]
