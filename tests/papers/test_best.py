"""Our best runs: what is theirs alone; that each trains in its tiny form is tested with all other experiments."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from benchmarks.best_search import SearchLog, SearchTrial

from benchmarks import best_search
from dpgrad import data
from dpgrad.errors import ReportError
from dpgrad.papers import best, best_models, best_tasks, best_training, best_views
from dpgrad.papers.best_tasks import TASKS


class TestChosenSettings:
    def test_file_names_tasks_and_values_of_the_search(self) -> None:
        found = best_tasks.chosen()
        assert found.keys() <= TASKS.keys()
        for name, one in found.items():
            assert one["settings_tried"] >= 1
            begun = [TASKS[name].start, *TASKS[name].others]  # a linear model keeps a width that it does not use
            for option, values in best_search.SPACES[name].items():
                if option in one["setting"]:
                    tried = [*values, *(start.get(option) for start in begun)]
                    assert one["setting"][option] in tried, f"{name}: {option} was never tried"

    def test_experiments_read_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "best.json"
        other = {**TASKS["mnist"].start, "reach": 0.123}
        file.write_text(json.dumps({"mnist": {"setting": other, "settings_tried": 4}}), "utf-8")
        monkeypatch.setattr(best_tasks, "CHOSEN", file)
        best_tasks.chosen.cache_clear()
        try:
            arms = {experiment.name: experiment.arms("full")[0] for experiment in best.EXPERIMENTS}
        finally:
            best_tasks.chosen.cache_clear()
        assert arms["best-mnist"].setting == {"task": "mnist", **other}
        assert arms["best-mnist"].choice == "best of 4 settings, on held-out training rows"
        assert arms["best-covertype"].choice.startswith("not searched yet")
        start = TASKS["fashion-mnist-9"].start
        assert arms["best-fashion-mnist-9"].setting == {"task": "fashion-mnist-9", **start}  # not searched

    @pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
    def test_start_lies_in_the_space(self, task: best_tasks.BestTask) -> None:
        for one in (task.start, *task.others):
            assert list(best_search.neighbours(one, best_search.SPACES[task.name]))


class TestSearchRows:
    def test_no_test_row_is_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Known:
            x_train, y_train = np.arange(120, dtype=np.float32).reshape(60, 2), np.arange(60) % 3
            classes = ("a", "b", "c")

            def __getattr__(self, name: str) -> NoReturn:
                raise AssertionError(f"a search read {name}")

        monkeypatch.setattr(data, "load", lambda *_, **__: Known())
        best_training._arrays.cache_clear()
        best_training._rows.cache_clear()
        task = TASKS["cifar10-features"]
        try:
            rows = best_training.rows_of(task, {"norm": "none"}, "search", "full", Path("nowhere"), "cpu")
            with pytest.raises(AssertionError, match="x_test"):
                best_training.rows_of(task, {"norm": "none"}, "final", "full", Path("nowhere"), "cpu")
        finally:
            best_training._arrays.cache_clear()
            best_training._rows.cache_clear()
        both = torch.cat([rows.x, rows.x_judged])[:, 0].sort().values
        assert both.tolist() == Known.x_train[:, 0].tolist()  # every training row once, on one side
        assert len(rows.x_judged) == 10


class TestSearch:
    def test_rounds_go_on_where_they_stopped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(best_tasks, "CHOSEN", tmp_path / "best.json")
        task, file = TASKS["cifar10-features"], tmp_path / "log.jsonl"

        def search(trials: SearchLog) -> None:
            with ThreadPoolExecutor(1) as pool:
                best_search.searched(
                    task, trials, pool, processes=1, seconds=600.0, counts=(2, 1), where=("cpu", None, "tiny")
                )

        first = SearchLog(file)
        search(first)
        lines = file.read_text("utf-8").splitlines()
        assert {json.loads(line)["seed"] for line in lines} == {0, 1}
        file.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20], "utf-8")  # torn
        again = SearchLog(file)
        assert len(again.found) == len(lines) - 1
        search(again)
        assert again.found.keys() == first.found.keys()
        assert best_search.chosen(again, task.name) == best_search.chosen(first, task.name)

    def test_two_searches_add_to_one_file_and_a_damaged_line_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "log.jsonl"
        one, other = SearchLog(file), SearchLog(file)
        one.add(SearchTrial("mnist", {"reach": 1.0}, 0), {"accuracy": 1.0})
        other.add(SearchTrial("mnist", {"reach": 2.0}, 0), {"accuracy": float("nan")})
        assert [json.loads(line)["accuracy"] for line in file.read_text("utf-8").splitlines()] == [1.0, None]
        file.write_text("nonsense\n", "utf-8")
        with pytest.raises(ReportError, match=r"log\.jsonl, line 1, is no trial"):
            SearchLog(file)

    def test_a_setting_that_fails_is_kept_and_not_chosen(self, tmp_path: Path) -> None:
        bad = {**TASKS["cifar10-features"].start, "momentum": 2.0}
        figures = best_search._scored(SearchTrial("cifar10-features", bad, 0), "cpu", None, "tiny")
        assert figures["accuracy"] is None
        assert "momentum" in figures["failed"]
        trials = SearchLog(tmp_path / "log.jsonl")
        trials.add(SearchTrial("cifar10-features", bad, 0), figures)
        assert best_search.chosen(trials, "cifar10-features") is None

    def test_the_surest_wins(self, tmp_path: Path) -> None:
        trials = SearchLog(tmp_path / "log.jsonl")
        for reach, accuracies in ((1.0, [99.0]), (2.0, [95.0, 97.0]), (3.0, [94.0, 97.0])):
            for seed, accuracy in enumerate(accuracies):
                trials.add(SearchTrial("mnist", {"reach": reach}, seed), {"accuracy": accuracy})
        found = best_search.chosen(trials, "mnist")
        assert found == {"setting": {"reach": 2.0}, "held_out_accuracy": 96.0, "seeds": 2, "settings_tried": 3}


class TestFeatures:
    @pytest.mark.parametrize("norm", best_views.NORMALIZATIONS)
    def test_of_a_row_do_not_depend_on_others(self, norm: str) -> None:
        images = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8), dtype=np.uint8)
        views = best_views.views("mirror-6")
        made: dict[str, Any] = {"scales": 2, "angles": 8, "norm": norm, "device": "cpu"}
        together = best_views.scattered(images, "few", views, **made)
        alone = torch.cat([best_views.scattered(images[row : row + 1], "few", views, **made) for row in range(6)])
        assert together.shape[:2] == (6, 6)
        torch.testing.assert_close(together.float(), alone.float(), rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize("view", [(0, 0, False), (1, -1, False), (-2, 3, True)])
    def test_moved_images(self, view: best_views.View) -> None:
        image = np.arange(1.0, 31.0).reshape(5, 6)
        expected = np.zeros_like(image)
        for row, column in np.ndindex(5, 6):
            if 0 <= row - view[0] < 5 and 0 <= column - view[1] < 6:
                expected[row, column] = image[row - view[0], column - view[1]]
        found = best_views.moved(torch.from_numpy(image)[None, None], view)[0, 0].numpy()
        np.testing.assert_array_equal(found, expected[:, ::-1] if view[2] else expected)

    def test_cached_features_are_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        images = np.random.default_rng(1).integers(0, 256, (5, 1, 8, 8), dtype=np.uint8)
        made: dict[str, Any] = {"scales": 2, "angles": 4, "norm": "paths", "device": "cpu"}
        plain = best_views.scattered(images, "few", best_views.views("mirror"), **made)
        monkeypatch.setenv(best_views.CACHE, str(tmp_path))
        for _ in range(2):  # written, then read
            assert torch.equal(best_views.scattered(images, "few", best_views.views("mirror"), **made), plain)
        assert len(list(tmp_path.iterdir())) == 2

    def test_hats_interpolate(self) -> None:
        places, heights = torch.linspace(0, 1, 41)[:, None], np.random.default_rng(0).standard_normal(5)
        found = best_views.hats(places, 1, 5).numpy() @ heights
        np.testing.assert_allclose(found, np.interp(places[:, 0].numpy(), np.linspace(0, 1, 5), heights), atol=1e-5)

    def test_parts_of_a_person(self) -> None:
        rows = np.random.default_rng(0).random((3, sum(best_models.PEOPLE.values())))
        found = best_models.person(rows, {"marital": 2.0, "country": 0, "gain_by": 5.0})
        assert found.shape[1] == rows.shape[1] - best_models.PEOPLE["country"]
        np.testing.assert_allclose(found[:, 23:30], 2 * rows[:, 23:30])
        np.testing.assert_allclose(found[:, -3], np.minimum(1, 5 * rows[:, -3]))

    @pytest.mark.parametrize("task", ["mnist-convex", "mnist-convex-pixels"])
    def test_a_digit_alone_and_among_others(self, task: str) -> None:
        rows, setting = np.random.default_rng(0).random((4, 64)), TASKS[task].start
        together = best_models.digit(rows, setting)
        alone = np.concatenate([best_models.digit(rows[at : at + 1], setting) for at in range(4)])
        np.testing.assert_allclose(together, alone, atol=1e-6)

    def test_averaged_pixels(self) -> None:
        rows = np.random.default_rng(0).random((2, 16)).astype(np.float32)
        found = best_models.digit(rows, {"features": "pixels", "blur": 0.0, "pool": 2, "power": 2.0})
        squares = rows.reshape(2, 4, 4)
        expected = [[image[i : i + 2, j : j + 2].mean() ** 2 for i in (0, 2) for j in (0, 2)] for image in squares]
        np.testing.assert_allclose(found, expected, rtol=1e-5)

    def test_standardized_filters(self) -> None:
        layer = best_models.Standardized(3, 4, 3, bias=False)
        impulses = torch.eye(27).view(27, 3, 3, 3)  # their outputs are the filters themselves
        filters = layer(impulses).view(27, 4).T
        torch.testing.assert_close(filters.mean(1), torch.zeros(4), atol=1e-6, rtol=0)
        torch.testing.assert_close(filters.norm(dim=1), torch.ones(4), atol=1e-4, rtol=0)


def test_runs_stay_within_their_budgets() -> None:
    for task in TASKS.values():
        setting = best_training.smaller(best_tasks.setting_of(task), "tiny")
        found = best_training.run(task, setting, "final", "tiny", None, "cpu", 0)
        assert found["epsilon"] <= task.epsilon
        assert found["delta"] == task.delta_for(best_training.LIMITS["tiny"][0])
