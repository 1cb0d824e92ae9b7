"""`python -m benchmarks.steps`: its table, its JSON, the files it writes, and refusals."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.steps.__main__ import main
from benchmarks.steps.engines import Prepared, ordinary
from benchmarks.steps.race import Row
from benchmarks.steps.workloads import Workload

QUICK = "--device cpu --repeat 1 --only mlp --batch-size 4"


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
        assert [line[1] for line in lines[2:5]] == ["non-private", "dpgrad", "opacus hooks"]
        assert lines[2][3] == "1.00"
        assert lines[4][2] == "RuntimeError: not today"
        assert out.endswith("\n\nLeft out:\n\n- mlp, opacus hooks: RuntimeError: not today\n")

    def test_json_has_where_how_and_what(self, run: Callable[[str], str], peers: str, tmp_path: Path) -> None:
        file = tmp_path / "results.json"
        out = run(f"{QUICK} --peers {peers} --engines non-private dpgrad --no-tf32 --json --out {file}")
        assert out.count("\n") == 1
        found = json.loads(out)
        assert found == json.loads(file.read_text("utf-8"))
        assert {"date", "command", "processor", "versions", "commit", "source"} <= found["environment"].keys()
        assert found["settings"]["device"] == "cpu"
        assert found["settings"]["tf32"] is False
        assert [row["engine"] for row in found["rows"]] == ["non-private", "dpgrad"]
        fields = {
            "name",
            "workload",
            "batch_size",
            "engine",
            "seconds",
            "setup",
            "mebibytes",
            "form",
            "apart",
            "reason",
        }
        stamps = {"date", "command", "commit", "source"}
        assert all(row.keys() == fields | stamps and len(row["seconds"]) == 1 for row in found["rows"])
        text = file.with_suffix(".md").read_text("utf-8")
        assert "Left out" not in text
        assert "| dpgrad" in text

    def test_another_run_adds_its_rows(self, run: Callable[[str], str], tmp_path: Path) -> None:
        file = tmp_path / "results.json"
        run(f"{QUICK} --peers none --out {file}")
        run(f"{QUICK.replace('mlp', 'lstm')} --peers none --engines non-private --out {file}")
        rows = json.loads(file.read_text("utf-8"))["rows"]
        found = [(row["name"], row["engine"]) for row in rows]
        assert found == [("mlp", "non-private"), ("mlp", "dpgrad"), ("lstm", "non-private")]
        assert rows[0]["command"] != rows[2]["command"]

    def test_a_row_without_its_library_is_skipped(
        self, run: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("benchmarks.steps.hugging_face.installed", lambda: False)
        out = run("--device cpu --repeat 1 --only gpt2 --peers none")
        assert out.endswith("- gpt2, dpgrad: transformers is not installed\n")

    def test_a_run_that_is_cut_keeps_its_rows(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def rows(name: str, workload: Workload, *arguments: object) -> Iterator[Row]:
            yield Row(name, workload.title, 4, "non-private", [1.0])
            raise SystemExit("cut off")

        monkeypatch.setattr("benchmarks.steps.race.measured", rows)
        file = tmp_path / "results.json"
        with pytest.raises(SystemExit, match="cut off"):
            main(f"{QUICK} --peers none --out {file}".split())
        assert "non-private | 1000 |" in capsys.readouterr().err
        assert [row["seconds"] for row in json.loads(file.read_text("utf-8"))["rows"]] == [[1.0]]

    def test_peers_stay_out_of_rows_that_are_not_theirs(self, run: Callable[[str], str], peers: str) -> None:
        found = json.loads(run(f"{QUICK.replace('mlp', 'mnist-cnn-host')} --peers {peers} --json"))
        assert [row["engine"] for row in found["rows"]] == ["non-private", "dpgrad"]

    def test_names_are_listed(self, run: Callable[[str], str], peers: str) -> None:
        names = run(f"--device cpu --list --peers {peers}").split("\n")
        assert names[0] == "mnist-cnn"
        assert names[-2] == "opacus hooks"


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

    def test_a_point_that_is_left_out_is_recorded(
        self, run: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def small_only(workload: Workload, device: str) -> Prepared:
            return broken(workload, device) if workload.batch_size > 2 else ordinary(workload, device)

        monkeypatch.setattr("benchmarks.steps.curves.ordinary", small_only)
        file = tmp_path / "curves.json"
        run(f"{QUICK} --peers none --scale batch --points 2 4 --out {file}")
        (curve,) = json.loads(file.read_text("utf-8"))["curves"]
        assert curve["reasons"] == ["non-private at 4: RuntimeError: not today"]
        assert f"lot size, {curve['reasons'][0]}" in file.with_suffix(".md").read_text("utf-8")
        assert curve["seconds"]["non-private"][1] is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            ("--only alexnet", "unknown row 'alexnet': there are mnist-cnn, resnet9"),
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
