"""Digests of code: they change with what a result depends on, and with nothing else."""

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import convex_log
from dpgrad.papers import catalogue, convex, sources

stale = importlib.import_module("benchmarks.stale")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "src" / "dpgrad"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("", "utf-8")
    (root / "outer.py").write_text(
        '"""Says."""\nfrom dpgrad import inner\n\n\ndef one():\n    return inner.VALUE\n', "utf-8"
    )
    (root / "inner.py").write_text("VALUE = 1\n", "utf-8")
    (root / "apart.py").write_text("VALUE = 1\n", "utf-8")
    monkeypatch.setattr(sources, "PACKAGE", root)
    sources.digest.cache_clear()
    yield root
    sources.digest.cache_clear()


def digest(module: str) -> str:
    sources.digest.cache_clear()
    return sources.digest(module)


def test_code_that_is_imported_counts_and_other_code_does_not(package: Path) -> None:
    before = digest("dpgrad.outer")
    (package / "apart.py").write_text("VALUE = 2\n", "utf-8")
    assert digest("dpgrad.outer") == before
    (package / "inner.py").write_text("VALUE = 2\n", "utf-8")
    assert digest("dpgrad.outer") != before


def test_comments_docstrings_and_layout_do_not_count(package: Path) -> None:
    before = digest("dpgrad.outer")
    (package / "outer.py").write_text(
        '"""Says something else."""\nfrom dpgrad import inner\ndef one():\n'
        '    """One."""  \n    # why\n    return inner.VALUE\n',
        "utf-8",
    )
    assert digest("dpgrad.outer") == before


def test_of_a_function_only_what_it_needs_counts(package: Path) -> None:
    """Claims and figures of an experiment stand in the module of its trials, and compute nothing."""
    source = (
        "from dpgrad import inner, apart\nSIZE = 3\ndef helper(x):\n    return x * SIZE\n"
        "def trial(x):\n    model = helper(inner.VALUE)\n    return model\nCLAIM = 'better'\n"
        "def draw():\n    return apart.VALUE\nALL = [draw() + len(CLAIM) for model in range(3)]\n"
    )

    def found(text: str) -> str:
        (package / "outer.py").write_text(text, "utf-8")
        sources.digest.cache_clear()
        return sources.digest("dpgrad.outer", "trial")

    before = found(source)
    assert found(source.replace("better", "worse").replace("apart.VALUE", "apart.OTHER")) == before
    for text, other in (("SIZE = 3", "SIZE = 4"), ("x * SIZE", "x + SIZE"), ("helper(inner", "1 + helper(inner")):
        assert found(source.replace(text, other)) != before
    (package / "inner.py").write_text("VALUE = 2\n", "utf-8")
    assert found(source) != before
    assert sources.digest("dpgrad.outer", "absent") == sources.digest("dpgrad.outer")


def test_what_runs_and_shows_trials_is_not_what_computes_them() -> None:
    around = {"dpgrad.papers.running", "dpgrad.papers.tables", "dpgrad.papers.figures", "dpgrad.papers.experiment"}
    trials = set()
    for experiment in catalogue.experiments().values():
        trial: Any = experiment.trial
        while isinstance(trial, partial):
            trial = trial.func
        trials.add((trial.__module__, trial.__name__))
    for module, name in trials:
        needed = sources.closure(module, name)
        assert not around & needed
        assert len(needed) > 1, name  # it computes by something of dpgrad


def test_every_version_of_python_gives_the_same_digest(package: Path) -> None:
    """Results are made on one machine and looked at on another: trees of newer versions have more, empty, fields."""
    source = "def one(x, *rest, y=None, **more): return f'{x!r:>{y}}', {**more, 'z': ...}, b'', 1j, lambda: None"
    (package / "inner.py").write_text(source, "utf-8")
    assert digest("dpgrad.inner") == "87c1a7a52c6a"


def test_unknown_modules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^there is no module dpgrad\.nothing of dpgrad or benchmarks$"):
        digest("dpgrad.nothing")


def test_a_trial_depends_on_its_solver_and_on_what_that_imports() -> None:
    assert {"dpgrad.convex.solvers.amp", "dpgrad.convex.solvers.perturbed", "dpgrad.convex.design"} <= sources.closure(
        "dpgrad.convex.solvers.amp"
    )
    assert "dpgrad.convex.solvers.output" not in sources.closure("dpgrad.convex.solvers.amp")
    assert all(len(convex.source_of(solver)) == 12 for solver in convex.SOLVERS)


def test_an_outcome_keeps_the_digest_of_its_code(tmp_path: Path) -> None:
    log, task = convex_log.ScoreLog(tmp_path / "convex_digits.json"), convex.task("digits")
    list(convex_log.repeated(task, log, convex.FitTrial("digits", "auto", 1.0), 1))
    (line,) = json.loads(log.file.read_text("utf-8"))
    assert line["source"] == convex.source_of("auto")
    assert stale.of_trial(line) == "current"
    assert next(iter(convex_log.ScoreLog(log.file).outcomes.values())).source == line["source"]


@pytest.mark.parametrize(
    ("source", "status"), [(None, "unknown"), ("0" * 12, "stale"), ("now", "current")], ids=lambda value: str(value)
)
def test_stale_results_are_found(source: str | None, status: str, tmp_path: Path) -> None:
    def kept(now: str) -> dict[str, Any]:
        return {} if source is None else {"source": now if source == "now" else source}

    trial = {"solver": "amp", **kept(convex.source_of("amp"))}
    (tmp_path / "convex_adult.json").write_text(json.dumps([trial, trial, {"solver": "diffprivlib"}]), "utf-8")
    ran = {"command": "python -m benchmarks.steps --write", **kept(sources.digest("benchmarks.steps.__main__"))}
    (tmp_path / "engines.json").write_text(json.dumps({"environment": ran}), "utf-8")
    (tmp_path / "other").mkdir()
    fresh = {**ran, "source": sources.digest("benchmarks.steps.__main__")}
    parts = {"one": {"environment": fresh, "rows": []}, "two": {"environment": ran, "rows": []}}
    (tmp_path / "other" / "audit.json").write_text(json.dumps(parts), "utf-8")
    found = sorted(stale.statuses(tmp_path, tmp_path / "other"))
    assert found == sorted(
        [
            ("convex_adult.json", "peer", 1),
            ("convex_adult.json", status, 2),
            ("engines.json", status, 1),
            ("audit.json", status, 1),
        ]
    )
    assert stale.forget({"amp"}, tmp_path) == (0 if status == "current" else 2)


def test_every_committed_result_names_its_command_date_and_hardware() -> None:
    for file in sorted(stale.environment.RESULTS.glob("*.json")):
        content = json.loads(file.read_text("utf-8"))
        if isinstance(content, dict):
            assert {"command", "date", "processor"} <= set(content["environment"]), file.name
