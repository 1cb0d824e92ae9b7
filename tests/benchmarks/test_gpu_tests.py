"""The command that runs the tests on a CUDA device: what it runs, what it refuses, and what it tells."""

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

gpu_tests = importlib.import_module("benchmarks.gpu_tests")


def report(test: str, outcome: str = "passed", when: str = "call", allocated: int = 0, **given: Any) -> Any:
    flags = {name: outcome == name for name in ("passed", "failed", "skipped")}
    properties = [(gpu_tests.ALLOCATED, -3), (gpu_tests.ALLOCATED, 3 + allocated)] if when == "teardown" else []
    return SimpleNamespace(nodeid=test, when=when, duration=0.5, user_properties=properties, **flags, **given)


def recorded() -> Any:
    recorder = gpu_tests.Recorder()
    for each in (
        report("tests/test_a.py::test_one[cuda]"),
        report("tests/test_a.py::test_one[cuda]", when="teardown", allocated=2),
        report("tests/test_a.py::test_one[cpu]"),
        report("tests/test_a.py::test_one[cpu]", when="teardown"),
        report("tests/test_a.py::test_two", "skipped", "setup", longrepr=("f", 1, "Skipped: no data")),
        report("tests/test_b.py::test_three", "failed", longrepr="def test():\nE   assert 1 == 2\nE    +  more"),
    ):
        recorder.pytest_runtest_logreport(each)
    return recorder


def test_files_of_the_engines_and_all_that_ask_for_a_device() -> None:
    found = gpu_tests.files()
    wanted = {
        "grads/test_engines.py",
        "grads/test_layers.py",
        "training/step/test_graphed.py",
        "training/test_private.py",
    }
    assert {f"tests/{name}" for name in wanted} <= set(found)
    assert "tests/benchmarks/test_steps_command.py" not in found  # it only says that there is none


def test_counts() -> None:
    table = gpu_tests.summary(recorded())
    assert table[1] == ["tests/test_a.py", "2", "0", "1", "1", "2.5", ""]
    assert table[2] == ["tests/test_b.py", "0", "1", "0", "0", "0.5", ""]
    assert table[3] == ["**all**", "2", "1", "1", "1", "3.0", ""]


def test_files_that_are_run_again_take_the_place_of_what_was_there() -> None:
    before = recorded()
    files = [here.fields(name) for name, here in before.files.items()]
    text = json.dumps({"environment": {"date": "monday"}, "failures": before.failures, "files": files})
    again = gpu_tests.Recorder()
    again.pytest_runtest_logreport(report("tests/test_b.py::test_three"))
    again.dated("tuesday")
    again.join(json.loads(text))
    assert again.failures == []
    assert gpu_tests.summary(again)[1:3] == [
        ["tests/test_a.py", "2", "0", "1", "1", "2.5", "monday"],
        ["tests/test_b.py", "1", "0", "0", "0", "0.5", "tuesday"],
    ]


def test_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "some device")
    text = "\n".join(gpu_tests.sections(recorded(), 12.0, 4))
    assert "some device" in text
    assert "| tests/test_b.py::test_three | assert 1 == 2 |" in text
    assert "no data" in text
    assert "| tests/test_a.py | test_one | 2     | 1             |" in text


def test_a_file_that_cannot_be_collected_has_failed() -> None:
    recorder = gpu_tests.Recorder()
    recorder.pytest_collectreport(report("tests/test_c.py", "failed", longrepr="E   ImportError: no"))
    assert recorder.failures == [{"test": "tests/test_c.py", "error": "ImportError: no"}]


def test_without_a_device_it_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_tests"])
    assert gpu_tests.main() == 2
    assert capsys.readouterr().err == ("error: no CUDA device is seen by torch: run this on a machine that has one\n")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_tests.refusal().startswith("these packages cannot be imported: pytest, hypothesis, cryptography: pip")
