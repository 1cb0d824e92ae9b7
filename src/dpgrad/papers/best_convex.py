"""Our best convex runs: `dpgrad.convex.auto`, which has nothing to tune, on features that suit clipped rows.

A feature is a fixed function of one row. Which functions are used is a choice like a learning rate: it was made on
held-out training rows and is not charged.

>>> person(np.eye(2, 104), {"race": 0}).shape
(2, 99)
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PEOPLE", "digit", "person"]

Array = NDArray[Any]
# The columns of Adult as Iyengar et al. prepare it ("yu2020"): how many each part has.
PEOPLE = {
    "workclass": 7, "education": 16, "marital": 7, "occupation": 14, "relationship": 6, "race": 5, "sex": 2,
    "country": 41, "age": 1, "weight": 1, "schooling": 1, "gain": 1, "loss": 1, "hours": 1,
}  # fmt: skip


def person(rows: Array, setting: Mapping[str, Any]) -> Array:
    """People with each part multiplied by its entry of ``setting``, 1 without one; parts times 0 are left out.

    Numbers that are small for nearly everybody are multiplied and then cut at 1: ``gain_by`` and ``loss_by``,
    ``age_by`` and ``hours_by``. So they weigh as much as a category where they matter.
    """
    edges = np.cumsum([0, *PEOPLE.values()])
    found = []
    for name, (start, end) in zip(PEOPLE, pairwise(edges), strict=True):
        part = np.minimum(1.0, rows[:, start:end] * setting.get(f"{name}_by", 1.0))
        if setting.get(name, 1.0):
            found.append(setting.get(name, 1.0) * part)
    return np.concatenate(found, axis=1)


def digit(rows: Array, setting: Mapping[str, Any]) -> Array:
    """Images of pixels in [0, 1] as oriented gradients, or blurred, averaged over ``pool``² pixels, to a ``power``."""
    side = round(rows.shape[1] ** 0.5)
    images = rows.reshape(len(rows), 1, side, side).astype(np.float32)
    if setting["features"] == "oriented":
        import torch

        from dpgrad.training.models import OrientedGradients

        extract = OrientedGradients(bins=setting["bins"], cell=setting["cell"])
        with torch.no_grad():
            found: Array = np.concatenate([extract(few).numpy() for few in torch.split(torch.from_numpy(images), 2048)])
        return found
    if setting["blur"]:
        from scipy.ndimage import gaussian_filter

        images = gaussian_filter(images, (0, 0, setting["blur"], setting["blur"]))  # each image by itself
    pool = setting["pool"]
    small: Array = images.reshape(len(rows), side // pool, pool, side // pool, pool).mean(axis=(2, 4))
    made: Array = np.power(small.reshape(len(rows), -1), setting["power"])
    return made
