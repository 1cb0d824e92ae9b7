"""Graphs without a device: a replay is the same body called again on the same buffers, all of it but the capture."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpgrad.training import private
from dpgrad.training.step import graphed
from dpgrad.training.step.graphed import Graphed
from dpgrad.training.step.pieces import Called

_MADE = Graphed._made


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on steps on a CPU are replayed."""

    def captured(self: Graphed, form: Any) -> Any:
        return Called(partial(self._bodies.accumulate, form))

    _as_graphs(monkeypatch)
    monkeypatch.setattr(Graphed, "_made", captured)


def warmed_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and before its first replay each body is called as it is on a device before its capture."""
    _as_graphs(monkeypatch)
    monkeypatch.setattr(Graphed, "_made", _MADE)
    monkeypatch.setattr(Graphed, "_capture", lambda self, body: Called(body))
    monkeypatch.setattr(Graphed, "_on_stream", lambda self: nullcontext())
    monkeypatch.setattr(graphed, "_as_if_capturing", nullcontext)
    monkeypatch.setattr(torch.cuda, "default_generators", {None: SimpleNamespace(get_offset=lambda: 0)})


def _as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "_refusal", lambda work, rows: "")
    monkeypatch.setattr(Graphed, "_open_device", lambda self: None)
    monkeypatch.setattr(private, "FEWEST_STEPS", 1)
    monkeypatch.setattr(private, "Straight", Graphed)
