"""What the four small tables of Yu et al. (2020), Table 2, have in common: public scaling or the paper's min-max."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._dataset import CHOSEN_BOUNDS, OUTSIDE, ROW_COUNTS, Dataset
from dpgrad.data._prepare import ALL_ROWS, SPLIT_80_20, min_max, split_80_20, to_unit

MIN_MAX = OUTSIDE + "least and greatest value of each column read from all private rows"
UNPRINTED_TARGET = "the paper does not print a scaling of the target: it stays in the file's units"


def prepare(
    name: str,
    x: NDArray[np.float64],
    y: NDArray[Any],
    preprocessing: str,
    *,
    bounds: Sequence[tuple[float, float]],
    target_bounds: tuple[float, float] | None,
    classes: tuple[str, ...] | None = None,
    facts: tuple[str, ...] = (),
) -> Dataset:
    """Columns and target mapped to [0, 1] by public bounds, split 80/20; for "yu2020..." min-max and all rows.

    Table 2's curvatures are those of min-max scaled columns over all rows, without an intercept.
    """
    public = (ROW_COUNTS, *facts)
    if preprocessing.startswith("yu2020"):
        notes = (MIN_MAX,) if classes else (MIN_MAX, UNPRINTED_TARGET)
        parts = (min_max(x), y, np.empty((0, x.shape[1])), y[:0])
        return Dataset(name, *parts, classes, preprocessing, ALL_ROWS, (*public, *notes))
    public += (CHOSEN_BOUNDS,)
    if target_bounds is not None:
        y = to_unit(y[:, None], [target_bounds])[:, 0]
        public += (f"bounds {target_bounds[0]:g} and {target_bounds[1]:g} of the target, mapped to [0, 1]",)
    return Dataset(name, *split_80_20(to_unit(x, bounds), y), classes, preprocessing, SPLIT_80_20, public)
