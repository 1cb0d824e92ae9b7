"""`dpgrad curvature`: Table 2's figures, Figure 1, what they mean, and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from dpgrad.cli import curvature as curvature_command
from dpgrad.convex import curvature

Answer = dict[str, Any]


@pytest.fixture(autouse=True)
def data(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPGRAD_DATA", str(data_dir))


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sign of life on standard error, however slow the machine."""
    import contextlib

    monkeypatch.setattr("dpgrad.cli._options.patience", lambda _: contextlib.nullcontext())


class TestTable2:
    def test_graduate_admission_is_as_published(self, answer: Callable[[str], Answer]) -> None:
        found = answer("curvature graduate-admission")
        assert round(found["minimum"], 5) == 0.00668
        assert round(found["average"], 2) == 0.40
        assert found["loss"] == "squared"

    @pytest.mark.parametrize(
        ("name", "minimum", "average"),
        [("sonar", 4.00e-4, 0.190), ("boston-housing", 4.89e-3, 0.266), ("swedish-motor-insurance", 2.17e-4, 0.241)],
    )
    def test_the_others_differ_and_say_why(
        self, answer: Callable[[str], Answer], name: str, minimum: float, average: float
    ) -> None:
        found = answer(f"curvature {name}")
        assert found["minimum"] == pytest.approx(minimum, rel=2e-3)
        assert found["average"] == pytest.approx(average, rel=2e-3)
        assert found["paper"]["difference"] == curvature.TABLE_2[name].difference

    def test_the_printed_minimum_of_swedish_motor_has_the_target_among_the_columns(
        self, answer: Callable[[str], Answer]
    ) -> None:
        found = answer("curvature swedish-motor-insurance --preprocessing yu2020-with-target")
        assert found["minimum"] == pytest.approx(9.07e-6, rel=2e-3)


class TestFigure1:
    def test_expected_curvature_tends_to_the_average(self, answer: Callable[[str], Answer]) -> None:
        found = answer("curvature sonar")
        values = [point["curvature"] for point in found["expected"]]
        assert values == sorted(values)
        assert found["minimum"] < values[0] < values[-1] < found["average"]
        assert values[-1] == pytest.approx(found["average"], rel=0.01)

    def test_plot_is_drawn(self, answer: Callable[[str], Answer], tmp_path: Path) -> None:
        file = tmp_path / "figure.svg"
        assert answer(f"curvature graduate-admission --plot {file}")["plot"] == str(file)
        text = file.read_text("utf-8")
        assert text.startswith("<?xml")
        again = file.read_bytes()
        answer(f"curvature graduate-admission --plot {file}")
        assert file.read_bytes() == again


class TestWords:
    def test_says_what_to_choose_and_that_it_is_not_private(self, told: Callable[[str], str]) -> None:
        text = told("curvature graduate-admission")
        for word in ("Learning rate: up to 1/", "Steps: of 50, 200, 800", "Solver:", "outside the guarantee"):
            assert word in text

    def test_json_is_labelled(self, answer: Callable[[str], Answer]) -> None:
        found = answer("curvature digits --l2 0.01")
        assert found["guarantee"] is False
        assert found["outside_guarantee"].startswith("outside the guarantee")
        assert found["loss"] == "softmax"
        assert found["minimum"] == 0.01
        assert "paper" not in found

    def test_a_part_of_many_rows_is_measured_and_said(
        self, answer: Callable[[str], Answer], told: Callable[[str], str]
    ) -> None:
        found = answer("curvature sonar --rows 100")
        assert (found["rows"], found["rows_measured"]) == (208, 100)
        assert found["delta"] == pytest.approx(208**-2)
        assert "208 rows (the first 100 were measured)" in told("curvature sonar --rows 100")

    def test_fewer_rows_are_measured_where_a_row_is_long(self) -> None:
        assert curvature_command._most(np.empty((10**4, 54)), 7) == 10_000
        assert curvature_command._most(np.empty((10**4, 784)), 10) == 2551
        assert curvature_command._most(sparse.csr_array((10**5, 10**5)), 1) == 10_000


class TestRefusals:
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            ("curvature sonr", "did you mean sonar?"),
            ("curvature", "DATASET"),
            ("curvature sonar --epsilon -1", "--epsilon must be positive"),
            ("curvature sonar --epsilon many", "--epsilon must be a number"),
            ("curvature sonar --l2 -1", "--l2 must be"),
            ("curvature sonar --rows 0", "--rows must be"),
            ("curvature sonar --loss cubic", "--loss"),
            ("curvature graduate-admission --loss logistic", "needs classes"),
            ("curvature digits --loss squared", "needs numbers or two classes"),
            ("curvature digits --loss logistic", "needs two classes, got 10"),
            ("curvature sonar --preprocessing raw", "preprocessing of sonar must be one of"),
            ("curvature sonar --plot nowhere/figure.svg", "cannot write"),
            ("curvature sonar --data-dir nowhere", "sonar"),
        ],
    )
    def test_bad_input_is_one_line(self, refused: Callable[..., str], command: str, said: str) -> None:
        assert said in refused(command)
