"""`python -m benchmarks.steps`: its table, its JSON, the files it writes, and refusals."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.steps.__main__ import main
from benchmarks.steps.engines import Prepared, ordinary
from benchmarks.steps.race import Failed, Settings
from benchmarks.steps.workloads import Workload

QUICK = "--device cpu --threads 1 --repeat 1 --no-memory --workloads mlp --batch-size 4"


def broken(workload: Workload, device: str) -> Prepared:
    raise RuntimeError("not today")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("peers_of_a_test")
    module.__dict__["__spec__"] = sys.__spec__
    module.__dict__["ENGINES"] = {"opacus hooks": broken}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """What goes to standard output; standard error tells how far it is."""

    def said(command: str) -> str:
        assert main(command.split()) == 0
        out, err = capsys.readouterr()
        assert all(line.startswith("benchmarks.steps: ") for line in err.splitlines())
        return out

    return said


class TestEngines:
    def test_one_table_with_the_reason_of_an_engine_that_fails(self, run: Callable[[str], str], peers: str) -> None:
        out = run(f"{QUICK} --peers {peers}")
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
        assert [line[1] for line in lines[2:6]] == ["non-private", "dpgrad", "dpgrad vmap", "opacus hooks"]
        assert lines[2][3] == "1.00"
        assert lines[5][2] == "RuntimeError: not today"
        assert out.endswith(
            "\n\nLeft out or cut short:\n\n- MLP, one hidden layer, opacus hooks: RuntimeError: not today\n"
        )

    def test_json_has_where_how_and_what(self, run: Callable[[str], str], peers: str, tmp_path: Path) -> None:
        file = tmp_path / "results.json"
        out = run(f"{QUICK} --peers {peers} --engines non-private dpgrad --no-tf32 --json --out {file}")
        assert out.count("\n") == 1
        found = json.loads(out)
        assert found == json.loads(file.read_text("utf-8"))
        assert {"date", "command", "processor", "versions"} <= found["environment"].keys()
        assert found["settings"] == {"device": "cpu", "repeat": 1, "threads": 1, "tf32": False, "limit": 60.0}
        assert [row["engine"] for row in found["engines"]] == ["non-private", "dpgrad"]
        assert found["left_out"] == []
        fields = {"workload", "batch_size", "engine", "seconds", "mebibytes", "apart", "reason"}
        assert all(row.keys() == fields and len(row["seconds"]) == 1 for row in found["engines"])
        text = file.with_suffix(".md").read_text("utf-8")
        assert "TF32 off" in text
        assert "Left out" not in text
        assert "| dpgrad" in text


class TestCurves:
    def test_measured_written_and_drawn(self, run: Callable[[str], str], tmp_path: Path) -> None:
        file = tmp_path / "curves.json"
        out = run(f"{QUICK} --peers none --scale batch --points 2 4 --out {file}")
        assert "exponent" in out
        (curve,) = json.loads(file.read_text("utf-8"))["curves"]
        assert curve["points"] == [2, 4]
        assert curve["seconds"].keys() == curve["exponents"].keys() == {"non-private", "dpgrad"}
        assert run(f"--plot-from {file}") == f"The curves are drawn in {tmp_path / 'curves.svg'}.\n"
        assert "<svg" in (tmp_path / "curves.svg").read_text("utf-8")

    def test_a_curve_that_is_left_out_is_recorded(
        self, run: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(settings: Settings, points: list[int], name: str) -> Failed:
            return Failed("the process ended with status -9")

        monkeypatch.setattr("benchmarks.steps.curves.curve", lost)
        file = tmp_path / "curves.json"
        said = "how cost grows with batch: the process ended with status -9"
        assert run(f"{QUICK} --peers none --scale batch --out {file}").endswith(f"- {said}\n")
        found = json.loads(file.read_text("utf-8"))
        assert (found["curves"], found["left_out"]) == ([], [said])
        assert f"Left out or cut short:\n\n- {said}\n" in file.with_suffix(".md").read_text("utf-8")

    def test_a_point_that_is_left_out_is_recorded(
        self, run: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def small_only(workload: Workload, device: str) -> Prepared:
            return broken(workload, device) if workload.batch_size > 2 else ordinary(workload, device)

        monkeypatch.setattr("benchmarks.steps.curves.ordinary", small_only)
        file = tmp_path / "curves.json"
        run(f"{QUICK} --peers none --scale batch --points 2 4 --out {file}")
        found = json.loads(file.read_text("utf-8"))
        assert found["left_out"] == ["batch size, non-private at 4: RuntimeError: not today"]
        assert found["left_out"][0] in file.with_suffix(".md").read_text("utf-8")
        assert found["curves"][0]["seconds"]["non-private"][1] is None

    def test_costs_and_poisson_in_one_run(self, run: Callable[[str], str]) -> None:
        found = json.loads(run(f"{QUICK} --peers none --costs --poisson --lots 2 --json"))
        assert found.keys() == {"environment", "settings", "rules", "additions", "poisson", "left_out"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            ("--workloads alexnet", "unknown workload 'alexnet': there are mlp, mnist-cnn"),
            ("--peers none --engines tape", "unknown engine 'tape': there are non-private"),
            ("--peers no.such.module", "--peers must be a module"),
            ("--repeat 0", "--repeat must be"),
            ("--limit -1", "--limit must be a positive number"),
            ("--threads many", "--threads must be a whole number"),
            ("--scale colour", "--scale"),
            ("--points 2 4", "--points are those of one --scale"),
            ("--scale batch width --points 2", "--points are those of one --scale"),
            ("--scale batch --points -2", "--points"),
            ("--out nowhere/results.json", "--out must be a .json file in a folder that exists"),
            ("--out results.txt", "--out must be a .json file"),
            ("--peers os", "--peers os cannot be used: AttributeError"),
            ("--peers ..", "--peers must be a module that can be imported"),
            ("--plot-from nowhere.json", "No such file"),
        ],
    )
    def test_bad_input_is_refused(self, capsys: pytest.CaptureFixture[str], command: str, said: str) -> None:
        with pytest.raises(SystemExit) as stop:
            main(command.split())
        out, err = capsys.readouterr()
        assert (stop.value.code, out) == (2, "")
        assert said in " ".join(err.split()).replace("argument --", "--").replace(": must", " must")
