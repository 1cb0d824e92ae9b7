"""The papers' diagnostics of a run, over its last epochs. Outside the guarantee: off by default, kept in ``private/``.

What is recorded is computed from the private data without noise. It is for whoever may see the data, and it is never
part of what is released. A run with diagnostics makes the same weights as one without.

>>> Diagnostics(last_epochs=10).first_step(steps=2343, steps_per_epoch=117.1875)
1171
>>> LABEL
'outside the guarantee: computed from the private data without noise, not to be released'
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpgrad import _files, _validate
from dpgrad.errors import OptionError, ResumeError
from dpgrad.grads import ENGINES, clipped_sum
from dpgrad.grads.sums import Loss, trainable
from dpgrad.reports.kinds import plain_values
from dpgrad.training import source
from dpgrad.training.private import Observed

__all__ = ["DEFINITIONS", "FILE", "LABEL", "Diagnostics", "Recorder", "similarity"]

LABEL = "outside the guarantee: computed from the private data without noise, not to be released"
FILE = "diagnostics.json"

# What each column holds for step k; g are gradients of single examples at w_k.
DEFINITIONS = {
    "mean_norm": "mean norm of what was scaled: of the gradients of the batch, or of their inner momentum",
    "weight": "mean factor of the batch's gradients: the paper's weight where clip is its sensitivity (C/s for PSASC)",
    "noise_relative_weight": "mean of factor/clip: weights as seen against noise of the same noise multiplier",
    "gradient_similarity": "cosine of the noisy mean gradient and the mean of the gradients, all parameters flattened",
    "parameter_similarity": "cosine of w_k - lr * noisy mean and w_k - lr * mean: one plain step with and without "
    "privacy from the same weights (Figure 7 of Huang et al., which does not define it, is read so)",
    "tau_squared": "mean over the probe of |g - mean g|^2, unbiased: the least tau^2 of Assumption 1 at w_k",
    "share_fell": "share of the probe with |g(w_k)| <= |g(w_k-1)| (Assumption 2)",
}


@dataclass(frozen=True)
class Diagnostics:
    """What to record: the steps of the ``last_epochs`` (infinity: of all), histograms of ``bins`` uniform intervals.

    ``probe`` examples, evenly spaced among the rows and the same at every step, give τ² and the share of examples whose
    norm fell, which need one example at two iterates: one more pass over them per step. The batch itself is passed once
    more, for its mean gradient.

    >>> Diagnostics(last_epochs=0)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: last_epochs must be positive and finite, got 0: or math.inf for the whole run
    """

    last_epochs: float = 10
    bins: int = 20
    probe: int = 256

    def __post_init__(self) -> None:
        if self.last_epochs != math.inf:
            try:
                _validate.positive(last_epochs=self.last_epochs)
            except ValueError as error:
                raise OptionError(f"{error}: or math.inf for the whole run") from None
        _validate.whole(least=1, bins=self.bins)
        _validate.whole(least=2, probe=self.probe)

    def first_step(self, steps: int, steps_per_epoch: float) -> int:
        """The first step of the window.

        >>> Diagnostics(last_epochs=math.inf).first_step(steps=100, steps_per_epoch=10)
        0
        """
        _validate.positive(steps_per_epoch=steps_per_epoch)
        return 0 if self.last_epochs == math.inf else max(0, steps - math.ceil(self.last_epochs * steps_per_epoch))


class Recorder:
    """What `dpgrad.training.private.PrivateGradient` shows to its ``observe``, step by step. Private.

    ``data`` are those of the run: the probe is taken from them. ``learning_rate`` is that of the step to come; without
    it there is no parameter similarity.

    >>> from dpgrad import Mechanism, PrivateGradient, sampling
    >>> model, rows = nn.Linear(2, 1), torch.randn(50, 2)
    >>> def loss(model, rows):
    ...     return model(rows)[:, 0].square()
    >>> recorder = Recorder(Diagnostics(), model, loss, rows)
    >>> run = Mechanism(sampling.FullBatch(), steps=1, noise_multiplier=1.0, batch_size=50)
    >>> private = PrivateGradient(model, loss, run, observe=recorder)
    >>> private.step(rows)
    >>> recorder.report()["label"] == LABEL
    True
    """

    def __init__(
        self,
        diagnostics: Diagnostics,
        model: nn.Module,
        loss: Loss,
        data: Any,
        *,
        engine: str = "bookkeeping",
        several_rows: bool = False,
        collate: source.Collate = default_collate,
    ) -> None:
        self.diagnostics = diagnostics
        self.learning_rate: float | None = None
        self._model, self._loss, self._engine, self._several_rows = model, loss, ENGINES[engine], several_rows
        rows = source.rows(data)
        indices = torch.linspace(0, max(rows - 1, 0), min(rows, diagnostics.probe)).long()
        self._probe = source.gathered(data, indices, self._device(), collate) if rows else None
        self._columns: dict[str, list[float]] = {"step": [], **{name: [] for name in DEFINITIONS}}
        self._norms: list[Tensor] = []
        self._weights = torch.zeros(3, dtype=torch.float64)  # sums of factors, of factors/clip, and how many
        self._before: tuple[int, Tensor] | None = None  # a step, and the norms of the probe there

    def __repr__(self) -> str:
        return f"Recorder({len(self._columns['step'])} steps, private)"

    def __call__(self, observed: Observed) -> None:
        """Record one step; the model holds the weights at which its gradients were taken."""
        norms = observed.norms.detach().double().square().sum(0).sqrt().cpu()  # of an example over all its groups
        finite = norms.isfinite()
        factors = observed.factors.detach().double().cpu()[:, finite]
        relative = factors / torch.as_tensor(observed.clip, dtype=torch.float64).cpu()
        self._norms.append(norms[finite].float())
        self._weights += torch.tensor([factors.sum(), relative.sum(), factors.numel()], dtype=torch.float64)
        found = {
            "step": float(observed.step),
            "mean_norm": float(norms[finite].mean()),
            "weight": float(factors.mean()),
            "noise_relative_weight": float(relative.mean()),
            "gradient_similarity": similarity(observed.noisy, observed.raw),
            "parameter_similarity": self._parameter_similarity(observed),
            **self._on_probe(observed.step),
        }
        for name, values in self._columns.items():
            values.append(found[name])

    def _parameter_similarity(self, observed: Observed) -> float:
        if self.learning_rate is None:
            return math.nan
        weights = {name: parameter.detach() for name, parameter in trainable(self._model).items()}
        noisy, raw = (
            {name: weight - self.learning_rate * mean[name] for name, weight in weights.items()}
            for mean in (observed.noisy, observed.raw)
        )
        return similarity(noisy, raw)

    def _on_probe(self, step: int) -> dict[str, float]:
        """τ² and the share of norms that fell since the step before."""
        if self._probe is None:
            return {"tau_squared": math.nan, "share_fell": math.nan}
        norms, total = self._measured()
        finite, before = norms.isfinite(), self._before
        self._before = step, norms
        count = int(finite.sum())
        square = sum(float((value / max(count, 1)).double().square().sum()) for value in total.values())
        spread = float(norms[finite].square().sum()) - count * square
        fell = math.nan
        if before is not None and before[0] == step - 1:
            both = finite & before[1].isfinite()
            fell = float((norms <= before[1])[both].double().mean())
        return {"tau_squared": spread / (count - 1) if count > 1 else math.nan, "share_fell": fell}

    def _measured(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The norms of the probe's gradients, (examples,), and the sum of those that are finite."""
        seen: list[Tensor] = []

        def kept(norms: Tensor) -> Tensor:
            seen.append(norms)
            return torch.ones_like(norms)

        device = self._device()
        # The masks of dropout are the same at every step, and drawing them moves no generator.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            found = clipped_sum(
                self._model, self._loss, self._probe, kept, self._engine, several_rows=self._several_rows
            )
        return torch.cat(seen, 1)[0].double().cpu(), found.sums

    def _device(self) -> torch.device:
        return next(iter(trainable(self._model).values())).device

    def state(self) -> dict[str, Any]:
        """What was recorded so far, as plain values and tensors, for a checkpoint. Private."""
        return {
            "columns": {name: list(values) for name, values in self._columns.items()},
            "norms": torch.cat(self._norms) if self._norms else torch.zeros(0),
            "weights": self._weights.clone(),
            "before": None if self._before is None else list(self._before),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        if set(state["columns"]) != set(self._columns):
            raise ResumeError("the recorded diagnostics are of another version: record them from the start")
        self._columns = {name: list(values) for name, values in state["columns"].items()}
        self._norms, self._weights = [state["norms"]], state["weights"].clone()
        before = state["before"]
        self._before = None if before is None else (int(before[0]), before[1])

    def report(self) -> dict[str, Any]:
        """Everything recorded, for JSON, the label first; what could not be computed is None."""
        columns = {name: np.array(values) for name, values in self._columns.items()}
        norms = torch.cat(self._norms).double().numpy() if self._norms else np.zeros(0)
        bins, last = self.diagnostics.bins, self.diagnostics.last_epochs
        mean_weight, mean_relative = (self._weights[:2] / self._weights[2]).tolist()
        summary = {
            "gradient_norm": {
                **_summary(norms),
                "quantiles": {str(q): _quantile(norms, q) for q in (0.1, 0.5, 0.9, 0.99)},
                "trend_per_step": _slope(columns["step"], columns["mean_norm"]),
                "histogram": _histogram(norms, bins, low=0.0),
            },
            "weight": {"mean": mean_weight},
            "noise_relative_weight": {"mean": mean_relative},
            **{
                name: {**_summary(columns[name]), "histogram": _histogram(columns[name], bins)}
                for name in ("gradient_similarity", "parameter_similarity")
            },
            **{name: _summary(columns[name]) for name in ("tau_squared", "share_fell")},
        }
        window = {"last_epochs": None if last == math.inf else last, "probe": self.diagnostics.probe}
        steps = {**self._columns, "step": [int(step) for step in self._columns["step"]]}
        found = {"label": LABEL, "window": window, "definitions": DEFINITIONS, **summary, "steps": steps}
        plain: dict[str, Any] = plain_values(found)
        return plain

    def write(self, folder: Path) -> Path:
        """Write the report to ``private/`` in the folder of a run, readable to its owner alone, and nowhere else."""
        path = Path(folder) / "private" / FILE
        _files.make_folder(path.parent, 0o700)
        _files.replace(path, json.dumps(self.report(), allow_nan=False, indent=1).encode())
        return path


def similarity(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The cosine of two lists of tensors, each flattened to one vector; NaN where one of them is zero.

    >>> round(similarity({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "b": torch.zeros(1)}), 4)
    0.7071
    """
    pairs = [(value.double(), other[name].double()) for name, value in one.items()]
    product = sum(float((a * b).sum()) for a, b in pairs)
    lengths = [math.sqrt(sum(float(pair[i].square().sum()) for pair in pairs)) for i in range(2)]
    return product / (lengths[0] * lengths[1]) if all(lengths) else math.nan


def _summary(values: np.ndarray[Any, Any]) -> dict[str, float]:
    known = values[np.isfinite(values)]
    if not known.size:
        return {"mean": math.nan, "least": math.nan, "most": math.nan}
    return {"mean": float(known.mean()), "least": float(known.min()), "most": float(known.max())}


def _quantile(values: np.ndarray[Any, Any], share: float) -> float:
    return float(np.quantile(values, share)) if values.size else math.nan


def _slope(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """The slope of the least-squares line, NaN where there are not two points."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 2:
        return math.nan
    centred = x - x.mean()
    return float(centred @ y / (centred @ centred))


def _histogram(values: np.ndarray[Any, Any], bins: int, low: float | None = None) -> dict[str, list[float]]:
    """The share of values in each of ``bins`` uniform intervals of the range obtained (from ``low``)."""
    known = values[np.isfinite(values)]
    if not known.size:
        return {"edges": [], "share": []}
    least, most = float(known.min()) if low is None else low, float(known.max())
    counts, edges = np.histogram(known, bins, (least, most if most > least else least + 1))
    return {"edges": edges.tolist(), "share": (counts / known.size).tolist()}
