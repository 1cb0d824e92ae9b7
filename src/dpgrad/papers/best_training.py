"""One private run of a setting on the rows of a task, and its accuracy on rows it did not see."""

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad import data
from dpgrad.papers import best_models, best_views, prepared, tasks
from dpgrad.papers.best_tasks import TASKS, BestTask
from dpgrad.training import recipes
from dpgrad.training.fit import fit
from dpgrad.training.options import HeldOut, Privacy

__all__ = ["HELD_OUT", "LIMITS", "Features", "features", "rows_of", "run", "smaller", "split", "trained"]

_Part = Literal["search", "final"]
HELD_OUT = 6  # one training row in so many is held out in a search
LIMITS = {"quick": (6000, 2000), "tiny": (240, 120)}  # training and test rows
# What a smaller run changes in a setting: the least of the two numbers, or the value itself.
_SMALLER: dict[str, dict[str, Any]] = {
    "quick": {"steps": 60, "views": "one"},
    "tiny": {
        "steps": 4, "share": 0.5, "width": 4, "widths": [8], "knots": 4, "scales": 2, "angles": 2, "norm": "unit",
        "views": "mirror", "features": "rows",
    },
}  # fmt: skip
_FEATURES = ("scales", "angles", "norm", "views", "knots")
_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Features:
    """Features and labels: those trained on, and those that are judged. Views are the second dimension, if any."""

    x: Tensor
    y: Tensor
    x_judged: Tensor
    y_judged: Tensor
    classes: int
    views: int


def split(rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The training rows of a search and those it holds out, both of the training rows: a fixed permutation.

    >>> kept, held_out = split(60)
    >>> len(kept), len(held_out), len(set(kept) | set(held_out))
    (50, 10, 60)
    """
    order = np.random.Generator(np.random.PCG64(18)).permutation(rows)
    few = rows // HELD_OUT
    return np.sort(order[few:]), np.sort(order[:few])


def smaller(setting: Mapping[str, Any], size: str) -> dict[str, Any]:
    """The setting at a size: fewer steps and views, and a narrower network, where the run is not the full one.

    >>> smaller({"model": "linear", "steps": 900}, "quick")
    {'model': 'linear', 'steps': 60}
    """
    changed = {name: value for name, value in _SMALLER.get(size, {}).items() if name in setting}
    if "steps" in changed:
        changed["steps"] = min(changed["steps"], setting["steps"])
    return {**setting, **changed}


@functools.lru_cache(maxsize=1)
def _arrays(dataset: str, recipe: str, folder: Path | None, part: _Part) -> tuple[Any, ...]:
    """(x, y, x judged, y judged, classes). A search does not look at the test rows of a dataset."""
    wanted = prepared.ARRAYS if part == "final" else ("x_train", "y_train")
    if recipe == "raw" and folder is not None and prepared.path(dataset, folder).exists():
        arrays = prepared.load(dataset, folder)
    else:
        found = data.load(dataset, folder, recipe)
        arrays = {each: np.asarray(getattr(found, each)) for each in wanted}
    x, y, *test = (arrays[each] for each in wanted)
    if part == "final":
        return x, y, *test, int(y.max()) + 1
    kept, held_out = split(len(y))
    return x[kept], y[kept], x[held_out], y[held_out], int(y.max()) + 1


def run(
    task: BestTask, setting: Mapping[str, Any], part: _Part, size: str, root: Path | None, device: str, seed: int
) -> dict[str, Any]:
    """One run of a setting: on all training rows and judged on test rows, or on the split of a search."""
    match setting.get("method"):
        case "auto":
            return _convex(task, setting, part, size, root, seed)
        case "non-private":
            return _without_privacy(rows_of(task, setting, part, size, root, device), seed)
    return trained(task, setting, rows_of(task, setting, part, size, root, device), seed)


def rows_of(
    task: BestTask, setting: Mapping[str, Any], part: _Part, size: str, root: Path | None, device: str
) -> Features:
    """The rows of a run. Those with the same features are kept, since one search has many such runs."""
    wanted = tuple((name, setting[name]) for name in _FEATURES if name in setting)
    return _rows(task.name, wanted, part, size, root, device)


def _some(task: BestTask, recipe: str | None, part: _Part, size: str, root: Path | None) -> tuple[Any, ...]:
    # In the tests, the 8×8 digits of scikit-learn stand in for every dataset.
    name = task.dataset
    if size == "tiny":
        name, recipe = "digits", "raw" if recipe == "raw" else "default"
    x, y, x_judged, y_judged, classes = _arrays(name, recipe or "default", data.data_folder(root), part)
    if size not in LIMITS:
        return x, y, x_judged, y_judged, classes
    some, few = (  # evenly spaced, since some files are sorted by class
        np.linspace(0, len(labels) - 1, min(limit, len(labels))).astype(int)
        for labels, limit in zip((y, y_judged), LIMITS[size], strict=True)
    )
    return x[some], y[some], x_judged[few], y_judged[few], classes


@functools.lru_cache(maxsize=1)
def _rows(
    name: str, wanted: tuple[tuple[str, Any], ...], part: _Part, size: str, root: Path | None, device: str
) -> Features:
    task, setting = TASKS[name], dict(wanted)
    x, y, x_judged, y_judged, classes = _some(task, "raw" if task.kind == "images" else None, part, size, root)
    label = f"{task.dataset}-{part}-{size}"
    inputs = features(task, setting, x, f"{label}-trained", device)
    judged = features(task, setting, x_judged, f"{label}-judged", device)
    labels, known = (torch.from_numpy(np.asarray(each, dtype=np.int64)).to(device) for each in (y, y_judged))
    return Features(inputs, labels, judged, known, classes, inputs.shape[1] if task.kind == "images" else 1)


def features(task: BestTask, setting: Mapping[str, Any], rows: NDArray[Any], name: str, device: str) -> Tensor:
    """The fixed features of rows: (rows, views, maps, height, width) of images, (rows, columns) of others."""
    if task.kind == "images":
        return best_views.scattered(
            rows, name, best_views.views(setting["views"]), scales=setting["scales"], angles=setting["angles"],
            norm=setting["norm"], device=device,
        )  # fmt: skip
    found = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32)).flatten(1).to(device)
    if "knots" in setting:
        found = best_views.hats(found, 10, setting["knots"])
    return F.normalize(found, dim=1) if setting["norm"] == "unit" else found


def trained(task: BestTask, setting: Mapping[str, Any], rows: Features, seed: int) -> dict[str, Any]:
    """Train with privacy, and judge; what is returned says what was spent."""
    began = time.perf_counter()
    count = len(rows.y)
    several = rows.views > 1
    x, y = rows.x, rows.y
    if several:
        y = y[:, None].expand(-1, rows.views).contiguous()
    elif task.kind == "images":
        x = x[:, 0]
    size = count if task.relation == "add-remove" else None  # declared
    with torch.random.fork_rng([]), tasks.fast_products():
        torch.manual_seed(seed)
        model = best_models.build(setting, x.shape[2:] if several else x.shape[1:], rows.classes).to(x.device)
        fitted = fit(
            model, (x, y), epsilon=task.epsilon, delta=task.delta_for(count), steps=setting["steps"],
            batch_size=max(1.0, setting["share"] * count), method=_recipe(setting), seed=seed,
            held_out=HeldOut(evaluate_every=setting["steps"]),
            privacy=Privacy(relation=task.relation, several_rows=several, dataset_size=size),
        )  # fmt: skip
        tasks.whole(fitted)
        accuracy = _accuracy(model, rows)
    return {
        "accuracy": 100 * accuracy, "epsilon": fitted.guarantee.epsilon, "delta": fitted.guarantee.delta,
        "noise_multiplier": fitted.plan.mechanism.noise_multiplier, "steps": fitted.plan.steps,
        "epochs": fitted.plan.epochs, "parameters": sum(p.numel() for p in model.parameters()),
        "train_seconds": round(time.perf_counter() - began, 2),
    }  # fmt: skip


def _convex(
    task: BestTask, setting: Mapping[str, Any], part: _Part, size: str, root: Path | None, seed: int
) -> dict[str, Any]:
    """A linear model by `dpgrad.convex.auto` on full batches."""
    from dpgrad.accounting import account
    from dpgrad.accounting.events import Relation
    from dpgrad.convex.losses import Logistic, RowLoss, Softmax
    from dpgrad.convex.solvers import auto

    recipe = "yu2020" if task.kind == "convex" else None
    x, y, x_judged, y_judged, classes = _some(task, recipe, part, size, root)
    change = {"person": best_models.person, "oriented": best_models.digit, "pixels": best_models.digit}
    made = change.get(setting["features"], lambda rows, _: rows)
    flat, judged = (made(rows.reshape(len(rows), -1), setting) for rows in (x, x_judged))
    loss: RowLoss = Logistic() if classes == 2 else Softmax(classes)
    delta = task.delta_for(len(y))
    found = auto.solve(
        flat, 2 * y - 1 if classes == 2 else y, loss, epsilon=task.epsilon, delta=delta,
        relation=Relation(task.relation), kappa=setting.get("kappa", 1.0), steps=setting.get("steps", 60), key=seed,
    )  # fmt: skip
    scores = found.scores(judged)
    guesses = (scores[:, 0] > 0).astype(int) if classes == 2 else scores.argmax(1)
    spent = account(found.event, found.relation, accountant="exact").epsilon(delta)
    return {"accuracy": 100 * float(np.mean(guesses == y_judged)), "epsilon": spent, "delta": delta}


def _without_privacy(rows: Features, seed: int) -> dict[str, Any]:
    """The same features in a linear model without privacy, to compare with."""
    from dpgrad.training.baseline import non_private

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = best_models.build({"model": "linear"}, rows.x.shape[1:], rows.classes).to(rows.x.device)
        found = non_private(model, (rows.x, rows.y), "cross-entropy", (rows.x_judged, rows.y_judged), epochs=10)
    return {"accuracy": 100 * found}


def _recipe(setting: Mapping[str, Any]) -> recipes.Recipe:
    """The method of a setting; ``reach`` is the learning rate times the clip bound, the most that one example moves."""
    common = {
        "momentum": setting["momentum"], "averaging": setting["averaging"],
        "learning_rate_schedule": setting["schedule"],
    }  # fmt: skip
    if setting["rule"] == "automatic":
        return recipes.autos(r=setting["clip"], learning_rate=setting["reach"], **common)
    return recipes.dpsgd(clip=setting["clip"], learning_rate=setting["reach"] / setting["clip"], **common)


@torch.no_grad()
def _accuracy(model: nn.Module, rows: Features) -> float:
    """The share of rows whose most likely class is theirs, by the mean of the log-chances of their views."""
    right = 0
    for x, y in zip(*(torch.split(each, _AT_ONCE) for each in (rows.x_judged, rows.y_judged)), strict=True):
        flat = x.flatten(0, 1) if rows.x.ndim == 5 else x
        chances = model(flat).log_softmax(1).view(len(y), -1, rows.classes).mean(1)
        right += int((chances.argmax(1) == y).sum())
    found = right / len(rows.y_judged)
    assert math.isfinite(found)
    return found
