"""How trials are compared: on rows that are not protected, or by a noisy count on rows that are.

Guarantee: a `PublicScore` reads no protected row, which its user declares. A `PrivateScore` is part of the event of
every trial.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, Subset, default_collate

from dpgrad import _validate
from dpgrad.accounting.events import NOTHING, Event, Gaussian
from dpgrad.errors import OptionError
from dpgrad.grads.sums import Loss
from dpgrad.mechanism.keys import Key
from dpgrad.randomness import noise
from dpgrad.training import source
from dpgrad.training.curves import evaluate, refuse_held_out
from dpgrad.training.losses import metric_named
from dpgrad.training.options import SCORE_SHARE, SCORE_STD

__all__ = ["PrivateScore", "PublicScore", "Score", "parted"]


@dataclass(frozen=True)
class PublicScore:
    """A score on ``rows`` that are public or need no protection; higher is better.

    Without a ``metric`` it is the accuracy of a classifier, and minus the loss of anything else. ``function`` is your
    own score of a model, in place of rows; it must not read the protected rows. ``units`` names the owners of the rows
    where those of the protected rows are named (`Privacy`): nobody may own rows of both kinds.

    >>> PublicScore(function=lambda model: 1.0).event == NOTHING
    True
    """

    rows: Any = None
    metric: str | None = None
    function: Callable[[nn.Module], float] | None = None
    units: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.function is None):
            raise OptionError("a public score needs rows that are not protected, or a function of the model: give one")
        if self.rows is None and self.units is not None:
            raise OptionError("units names the owners of the rows of a public score, and it has none: leave it out")

    @property
    def event(self) -> Event:
        """The cost for the protected rows: nothing."""
        return NOTHING

    def of(
        self, model: nn.Module, loss: Loss, key: Key, trial: int, scored: Any, collate: source.Collate = default_collate
    ) -> float:
        """The score of a model."""
        if self.function is not None:
            with torch.no_grad():
                return float(self.function(model))
        metric = metric_named(self.metric, loss)
        found = evaluate(model, metric, self.rows, collate)
        return found if metric.name == "accuracy" else -found

    def refuse(self, data: Any) -> None:
        """Refuse rows that are rows of the protected ``data``."""
        if self.rows is not None:
            refuse_held_out(self.rows, data)

    def __str__(self) -> str:
        where = "on rows that are not protected" if self.function is None else "by a function that reads none"
        return f"scored {where}, as declared"


@dataclass(frozen=True)
class PrivateScore:
    """A noisy count of correct rows, on a ``share`` of the protected rows that is kept out of training.

    ``std`` is the standard deviation of the noise on the count. A row adds between −½ and ½, so the count is a Gaussian
    release of noise multiplier 2·std. For classifiers.

    >>> PrivateScore(share=0.2, std=4.0).event
    Gaussian(noise_multiplier=8.0)
    """

    share: float = SCORE_SHARE
    std: float = SCORE_STD

    def __post_init__(self) -> None:
        _validate.open_unit(**{"share of a private score": self.share})
        _validate.positive(**{"std of a private score": self.std})

    @property
    def event(self) -> Event:
        """The cost: one Gaussian release."""
        return Gaussian(2 * self.std)

    def of(
        self, model: nn.Module, loss: Loss, key: Key, trial: int, scored: Any, collate: source.Collate = default_collate
    ) -> float:
        """The noisy count of a trial; its noise is a function of (key, trial).

        Of several labels of a row a share may be right. The sum of shares is not rounded: that could double what one
        row moves, from 0.5 to 0 and from 1.5 to 2.
        """
        metric = metric_named("accuracy", loss)
        count = source.rows(scored)
        correct = evaluate(model, metric, scored, collate) * count
        zero = torch.zeros((), dtype=torch.float64)
        return correct - count / 2 + float(noise.gaussian(zero, self.std, key, trial, ".score"))

    def refuse(self, data: Any) -> None:
        """Nothing: the rows are taken from the data."""

    def __str__(self) -> str:
        return (
            f"scored by a count of correct rows among {100 * self.share:g} % of the protected rows, with noise of "
            f"standard deviation {self.std:g}"
        )


Score = PublicScore | PrivateScore


def parted(data: Any, share: float, key: Key) -> tuple[Any, Any]:
    """The data in two parts by a random permutation of positions: for training, and a ``share`` to be scored.

    >>> train, scored = parted((torch.arange(10.0),), 0.2, Key.from_seed(0))
    >>> len(train[0]), len(scored[0])
    (8, 2)
    """
    rows = source.rows(data)
    kept = round(share * rows)
    if not 0 < kept < rows:
        raise OptionError(f"share = {share:g} of {rows:,} rows leaves no row to score, or none to train on")
    seed = int.from_bytes(key.derive("score rows", size=8), "little")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return _taken(data, order[kept:].sort().values), _taken(data, order[:kept].sort().values)


def _taken(data: Any, chosen: Tensor) -> Any:
    if isinstance(data, Dataset):
        return Subset(data, chosen.tolist())
    return pytree.tree_map(
        lambda leaf: leaf[chosen.to(leaf.device)] if isinstance(leaf, Tensor) else leaf[chosen.numpy()], data
    )


def zeros_like(data: Any, count: int, collate: source.Collate = default_collate) -> Any:
    """Rows of zeros in the shape of the first row."""
    first = source.gathered(data, torch.zeros(count, dtype=torch.int64), torch.device("cpu"), collate)
    return pytree.tree_map(torch.zeros_like, first)
