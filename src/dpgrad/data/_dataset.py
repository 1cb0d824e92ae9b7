"""The dataset that a loader returns."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpgrad import _validate
from dpgrad.errors import DataError

if TYPE_CHECKING:
    from dpgrad.data._schema import Schema

OUTSIDE = "outside the guarantee: "
ROW_COUNTS = "the number of rows"
# Said as it is: no row is read at run time, but whoever wrote the constants down was not blind to the published file.
CHOSEN_BOUNDS = (
    "bounds of the columns, values clipped: documented ranges, else round constants fixed in the code by authors who "
    "knew the published file"
)

# A numpy array, or a scipy CSR array for Reuters; `| Any` keeps scipy out of this module's imports.
Inputs: TypeAlias = NDArray[Any] | Any


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Training and test rows with the record of how they were made.

    `y` holds class indices 0..K-1 into `classes`, or real targets where `classes` is None. `public` lists every fact
    taken as public; entries that start with "outside the guarantee" were read from the private rows. Images are (n,
    channels, height, width); `flat` gives one vector per row. The representation shows shapes, never rows. `kind` is
    "table", "image" or "text", whose rows are whole numbers. A user's own data carry the `schema` they were read by
    and, where it names a unit, `units` and `test_units`: a number for each training and each test row, equal for rows
    of one person, and nobody is in both. `by_position` says that a row's part follows from its place in the file:
    leaving out a row may move others.

    >>> import numpy as np
    >>> rows, labels = np.zeros((3, 2)), np.array([0, 1, 1])
    >>> Dataset("toy", rows, labels, rows, labels, ("no", "yes"), "default", "none", ())
    Dataset('toy', train=(3, 2), test=(3, 2), classes=2, preprocessing='default')
    """

    name: str
    x_train: Inputs
    y_train: NDArray[Any]
    x_test: Inputs
    y_test: NDArray[Any]
    classes: tuple[str, ...] | None
    preprocessing: str
    split: str
    public: tuple[str, ...]
    schema: "Schema | None" = None
    units: NDArray[np.int64] | None = None
    kind: str = ""
    by_position: bool = False
    test_units: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", "image" if len(self.x_train.shape) == 4 else "table")
        for name, units, labels in (("units", self.units, self.y_train), ("test_units", self.test_units, self.y_test)):
            if units is not None and units.shape != labels.shape[:1]:
                raise DataError(f"{self.name}: {name} must have one entry for each of {labels.shape[0]} rows")
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if x.shape[0] != y.shape[0]:
                raise DataError(f"{self.name} {part}: {x.shape[0]} rows but {y.shape[0]} labels")
            if self.classes is not None and y.size and not 0 <= int(y.min()) <= int(y.max()) < len(self.classes):
                raise DataError(f"{self.name} {part}: a label lies outside 0..{len(self.classes) - 1}")

    @property
    def outside_guarantee(self) -> tuple[str, ...]:
        """Everything read from private rows without a charge: empty for every default preprocessing."""
        return tuple(entry for entry in self.public if entry.startswith(OUTSIDE))

    def flat(self) -> "Dataset":
        """The same rows with each image laid out as one vector."""
        kind = "table" if self.kind == "image" else self.kind
        return replace(self, x_train=_flat(self.x_train), x_test=_flat(self.x_test), kind=kind)

    def __repr__(self) -> str:
        classes = None if self.classes is None else len(self.classes)
        return (
            f"Dataset({self.name!r}, train={self.x_train.shape}, test={self.x_test.shape}, classes={classes}, "
            f"preprocessing={self.preprocessing!r})"
        )


def _flat(x: Inputs) -> Inputs:
    if isinstance(x, np.ndarray):
        return x.reshape(x.shape[0], int(np.prod(x.shape[1:])))
    return x


def check_preprocessing(name: str, preprocessing: str, offered: tuple[str, ...]) -> None:
    """Refuse a recipe the dataset does not offer."""
    _validate.one_of(offered, error=DataError, **{f"preprocessing of {name}": preprocessing})
