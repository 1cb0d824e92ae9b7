"""The rows of the table of `python -m benchmarks.steps`, and what is asked of dpgrad in each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.steps import hugging_face
from benchmarks.steps.workloads import DATASET, HOST, TRANSFORMERS, WORKLOADS, Workload
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.scaling import Psasc
from dpgrad.training.augment import Shifts
from dpgrad.training.diagnostics import Diagnostics

SETUP = 5.0  # seconds that dpgrad may take until its steps are steady, in every row
ELSEWHERE = 1.05  # times the time, where data are on the host or in a Dataset
ABSENT = "is not installed"
_VIEWS, _PAST = 4, 2


@dataclass(frozen=True)
class Case:
    """One row: what is trained, and the most time and memory of a private step, in those of a non-private one.

    Time and memory are asked on a CUDA device, beside the captured non-private step; ``cpu`` is asked on a CPU.
    Everywhere dpgrad's uncaptured step must take no longer than the fastest mode of Opacus.
    """

    workload: Workload
    time: float | None = None
    memory: float | None = None
    cpu: float | None = None
    passes: int = 1  # forward and backward passes of a private step for each of a non-private one
    alone: str = ""  # why no peer takes part

    @property
    def most(self) -> float | None:
        """The most time, in non-private steps."""
        return None if self.time is None else self.passes * self.time


def _changed(name: str, how: str, **changes: Any) -> Workload:
    """The workload of that name trained in another way."""
    workload = WORKLOADS[name]
    small = workload.small and replace(workload.small, title=f"{workload.small.title}, {how}")
    return replace(workload, **{"title": f"{workload.title}, {how}", "small": small, **changes})


def _lot(size: int, piece: int) -> Workload:
    few = replace(WORKLOADS["wrn-16-4"], title="WRN-16-4, lot of 8 by 2", microbatch=2)
    how = f"lot of {size:,} by {piece:,}"
    return _changed("wrn-16-4", how, batch_size=size, batch_size_cpu=8, microbatch=piece, small=few)


def _elsewhere(name: str, place: str, time: float) -> Case:
    how = "data on the host" if place == HOST else "a Dataset with workers"
    return Case(_changed(name, how, place=place), ELSEWHERE * time, alone="data are elsewhere")


_CNN_TIME, _WRN_TIME = 1.10, 1.12
_MOMENTUM = {"rule": Psasc(s=0.7), "inner_momentum": InnerMomentum(0.5, _PAST)}

CASES: Mapping[str, Case] = {
    "mnist-cnn": Case(WORKLOADS["mnist-cnn"], _CNN_TIME, 1.2),
    "resnet9": Case(WORKLOADS["resnet9"], 1.12, 1.2),
    "bert": Case(WORKLOADS["bert"], 1.08, 1.2),
    "wrn-16-4": Case(WORKLOADS["wrn-16-4"], _WRN_TIME, 1.25),
    "wrn-16-4-augmented": Case(
        _changed("wrn-16-4", f"K={_VIEWS} views", views=_VIEWS, batch_size_cpu=2, options={"augment": Shifts(_VIEWS)}),
        _WRN_TIME, 1.25, alone="peers have no such step",
    ),
    "vit-s16": Case(WORKLOADS["vit-s16"], 1.12, 1.25),
    "gpt2": Case(WORKLOADS["gpt2"], 1.12, 1.25),
    "gpt2-bf16": Case(_changed("gpt2", "bf16", autocast=True), 1.12, 1.25),
    "gpt2-lora": Case(WORKLOADS["gpt2-lora"], 1.05, 1.1),
    "llama": Case(WORKLOADS["llama"], 1.12, 1.25),
    "llama-bf16": Case(_changed("llama", "bf16", autocast=True), 1.12, 1.25),
    "char-lstm": Case(WORKLOADS["char-lstm"], 1.5, 1.3),
    "stack-32": Case(WORKLOADS["stack-32"], 1.4, 1.3),
    "wrn-16-4-lot": Case(_lot(16_384, 1_024), 1.15, 1.25),
    "mnist-cnn-momentum": Case(
        _changed("mnist-cnn", f"PSASC, K₀={_PAST}", options=_MOMENTUM),
        1.15, 1.3, passes=_PAST + 1, alone="peers have no such step",
    ),
    "mnist-cnn-diagnostics": Case(
        _changed("mnist-cnn", "diagnostics", options={"diagnostics": Diagnostics(last_epochs=float("inf"))}),
        alone="peers have no such step",
    ),
    "mnist-cnn-host": _elsewhere("mnist-cnn", HOST, _CNN_TIME),
    "mnist-cnn-dataset": _elsewhere("mnist-cnn", DATASET, _CNN_TIME),
    "wrn-16-4-host": _elsewhere("wrn-16-4", HOST, _WRN_TIME),
    "wrn-16-4-dataset": _elsewhere("wrn-16-4", DATASET, _WRN_TIME),
    "mlp": Case(WORKLOADS["mlp"]),
    "mlp-50": Case(WORKLOADS["mlp-50"], cpu=1.6),
    "transformer": Case(WORKLOADS["transformer"]),
    "lstm": Case(WORKLOADS["lstm"]),
}  # fmt: skip


def usual(device: str) -> list[str]:
    """The rows measured where none is named: all on a CPU, on CUDA those of which something is asked."""
    return [name for name, case in CASES.items() if device == "cpu" or case.time is not None]


def missing(name: str) -> str:
    """Why a row cannot be measured here; nothing where it can."""
    needs = any(name.startswith(network) for network in TRANSFORMERS)
    return f"transformers {ABSENT}" if needs and not hugging_face.installed() else ""
