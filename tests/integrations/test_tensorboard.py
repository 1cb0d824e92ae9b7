"""The callback for TensorBoard: what it writes, and that nothing of it is private."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpgrad
from dpgrad.errors import OptionError
from dpgrad.integrations.tensorboard import TensorBoard
from dpgrad.training.curves import Point, Progress

PACKAGE = Path(dpgrad.__file__).parent


def scalars(folder: Path) -> dict[str, list[Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}


def test_what_a_run_shows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(30, 3)
    data = inputs[:20], (inputs[:20, 0] > 0).long()
    held_out = inputs[20:], (inputs[20:, 0] > 0).long()
    found = dpgrad.fit(
        nn.Linear(3, 2), data, delta=1e-2, steps=4, batch_size=5, callbacks=TensorBoard(tmp_path),
        held_out=dpgrad.HeldOut(held_out, evaluate_every=2),
        privacy=dpgrad.Privacy(noise_multiplier=2.0, accountant="rdp"),
    )  # fmt: skip
    shown = scalars(tmp_path)
    assert set(shown) == {
        "epsilon at delta 0.01", "learning_rate", "clip", "noise_multiplier", "outside the guarantee/held_out",
    }  # fmt: skip
    assert [one.step for one in shown["clip"]] == [1, 2, 3, 4]
    judged = [(one.step, one.value) for one in shown["outside the guarantee/held_out"]]
    assert judged == [(point.step, pytest.approx(point.held_out)) for point in found.curves]
    stamps = {one.wall_time == one.step for each in shown.values() for one in each}
    assert stamps == {True}, "the time that a step takes is private"


def test_a_resumed_run_hides_what_is_taken_again(tmp_path: Path) -> None:
    for start, resumed, steps in ((0, False, (1, 2, 3)), (1, True, (2, 3))):
        board = TensorBoard(tmp_path)
        board.at_start(Progress(start, 3, 0.0, None, 0.0, 0.0, resumed=resumed))
        for step in steps:
            board.after_step(Progress(step, 3, 0.1, None, 0.0, 0.0, 1e-5, 0.1, float(start), 1.0))
        board.after_evaluation(Point(3, 1.0, 0.1, 0.1, 1.0, 1.0, None))
        board.at_end(None)
    shown = scalars(tmp_path)["clip"]
    assert [(one.step, one.value) for one in shown] == [(1, 0.0), (2, 1.0), (3, 1.0)]


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OptionError, match=r"pip install dpgrad\[tensorboard\]"):
        TensorBoard("runs")


def test_no_other_room_imports_integrations() -> None:
    for path in PACKAGE.rglob("*.py"):
        if "integrations" in path.parts or path == PACKAGE / "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not any("integrations" in name.split(".") for name in named), path
