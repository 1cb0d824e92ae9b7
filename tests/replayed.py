"""Graphs without a device: a replay is the same body called again on the same buffers, all of it but the capture."""

from functools import partial
from typing import Any

import pytest

from dpgrad.training import private
from dpgrad.training.step import graphed
from dpgrad.training.step.graphed import Graphed
from dpgrad.training.step.pieces import Called


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on steps on a CPU are replayed."""

    def captured(self: Graphed, form: Any) -> Any:
        return Called(partial(self._bodies.accumulate, form))

    monkeypatch.setattr(graphed, "_refusal", lambda work, rows: "")
    monkeypatch.setattr(Graphed, "_open_device", lambda self: None)
    monkeypatch.setattr(Graphed, "_made", captured)
    monkeypatch.setattr(private, "FEWEST_STEPS", 1)
    monkeypatch.setattr(private, "Straight", Graphed)
