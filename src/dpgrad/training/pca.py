"""Differentially private principal directions, charged with training in one guarantee (DP-PCA, Abadi et al., 2016).

The second moment Σ x xᵀ of the rows, each scaled to norm 1, gets Gaussian noise, and its leading eigenvectors are the
directions. It is neither divided by the number of rows, which would not change its eigenvectors and which is not public
for add/remove neighbours, nor centred: a mean of the rows would be one more release.

>>> from dpgrad import sampling
>>> from dpgrad.accounting.events import Compose
>>> run = Mechanism(sampling.Poisson(0.01), steps=1000, noise_multiplier=1.0)
>>> event, run = calibrated(run, epsilon=2.0, delta=1e-5, share=0.2)
>>> rows = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
>>> projection = principal_directions(rows, directions=3, noise_multiplier=event.noise_multiplier)
>>> projection(rows).shape
torch.Size([500, 3])
>>> run.guarantee(1e-5, also_released=projection.event).epsilon <= 2.0
True
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from dpgrad import _processes, _validate
from dpgrad.accounting import account, calibrate
from dpgrad.accounting.events import Gaussian, Inexact, Relation
from dpgrad.accounting.guarantee import ORDINARY, SECURE, SOURCES, Guarantee
from dpgrad.accounting.ledger import Ledger
from dpgrad.errors import DataError
from dpgrad.mechanism import chacha, secure
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import secure_noise
from dpgrad.randomness.noise import gaussian
from dpgrad.reports.report import Report, report
from dpgrad.training import source

__all__ = ["Projection", "calibrated", "principal_directions"]

_HELD = 1 << 23  # float64 values of rows that are worked on at a time
_WHOLE = 1 << 24  # up to here float32 holds every whole number


@dataclass(frozen=True, eq=False)
class Projection:
    """The map of a row x to its coordinates along ``components`` (directions, features), which are orthonormal.

    It was paid for by ``event`` and may be released and applied to any rows. ``reproducible`` says that a seed gave the
    noise: such a projection is not for release.

    Guarantee: ``components`` has the privacy profile of ``event`` under ``relation``.

    >>> first_two = Projection(torch.eye(3)[:2], Gaussian(1.0), Relation.ADD_REMOVE, reproducible=False)
    >>> first_two(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 2.]])
    """

    components: Tensor
    event: Gaussian | Inexact
    relation: Relation
    reproducible: bool
    title: ClassVar[str] = "principal directions (DP-PCA)"

    def __repr__(self) -> str:
        directions, features = self.components.shape
        return f"Projection({features} features to {directions}, {self.event}, {self.relation})"

    @overload
    def __call__(self, rows: Tensor) -> Tensor: ...
    @overload
    def __call__(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]: ...
    def __call__(self, rows: source.Values) -> source.Values:
        """The coordinates of each row, (rows, directions), as an array or tensor like ``rows``, by blocks.

        Rows are taken as they are: not scaled to norm 1, as they were for finding the directions. Sums run in float64
        whatever the type of the rows, which one of them may decide.
        """
        features = self.components.shape[1]
        if _features(rows) != features:
            raise DataError(f"rows must have {features} features, as the projection was made for, got {_shape(rows)}")
        wide = self.components.double()
        kept = torch.float64 if str(rows.dtype).endswith("float64") else torch.float32
        coordinates = [(few @ wide.to(few.device).T).to(kept) for few in _double(rows, max(1, _HELD // features))]
        found = torch.cat(coordinates) if coordinates else self.components.new_zeros(0, len(self.components))
        return found if isinstance(rows, Tensor) else found.numpy()

    def layer(self) -> nn.Linear:
        """The same map as a frozen layer: a model that begins with it takes rows that are not projected.

        >>> first_two = Projection(torch.eye(3)[:2], Gaussian(1.0), Relation.ADD_REMOVE, reproducible=False)
        >>> first_two.layer()(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[1., 2.]])
        """
        directions, features = self.components.shape
        made = nn.Linear(features, directions, bias=False, device=self.components.device).requires_grad_(False)
        made.weight.copy_(self.components)
        return made

    def guarantee(self, delta: float, accountant: str = "pld") -> Guarantee:
        """The (ε, δ) of the directions alone; with training, use ``mechanism.guarantee(delta, also_released=event)``.

        >>> one = Projection(torch.eye(3)[:2], Gaussian(4.0), Relation.ADD_REMOVE, reproducible=False)
        >>> print(one.guarantee(1e-5))
        ε = 0.92635 at δ = 1e-05 for datasets that differ by the presence of one row (full batch, pld accountant)
        """
        return Guarantee.of(account(self.event, self.relation, accountant), delta)

    def report(self, delta: float) -> Report:
        """The privacy report of the directions alone, in the format of docs/report.md."""
        return report(self, delta=delta)


def principal_directions(
    rows: source.Values,
    directions: int,
    noise_multiplier: float,
    *,
    relation: Relation = Relation.ADD_REMOVE,
    ledger: Ledger | None = None,
    seed: int | None = None,
    noise: str = ORDINARY,
) -> Projection:
    """The leading eigenvectors of Σ x xᵀ + noise, over rows x scaled to norm 1; more than one dimension is flattened.

    A row of zeros, and one with a value that is not finite, adds nothing. Tensors are worked on where they are; arrays,
    also memory-mapped ones larger than memory, on the CPU, a block of rows at a time. The noise is
    (G + Gᵀ)/2 with independent N(0, noise_multiplier²) entries of G: of variance z² on the diagonal, z²/2 off it.
    ``ledger`` is charged before anything is computed. ``seed`` makes the directions reproducible and therefore not for
    release. ``noise`` "secure" adds whole numbers from a cryptographic stream to the rounded sum, on the CPU, and δ
    pays for their distance from a Gaussian (docs/secure_noise.md).

    Guarantee: one row adds x xᵀ, of Frobenius norm ‖x‖² ≤ 1. Σ x xᵀ + G is therefore one full-batch Gaussian release
    at clip 1 and noise multiplier z; making it symmetric, and what follows, is post-processing. The event is
    ``Gaussian(z)`` under every relation, and the relation sets its price. For add/remove and zero-out neighbours the
    price, distance 1/z, is exact. For replace-one the accountant takes distance 2/z, that of opposite contributions,
    where ‖x xᵀ − y yᵀ‖ = √(2 − 2(x·y)²) ≤ √2: there the price is valid and conservative, by √2 of noise. Rounding is
    on the safe side: rows are shortened by what float64 may add to their norm. Charged is one application on one
    dataset: choosing among several is not covered.

    >>> rows = torch.tensor([[3.0, 0.0], [0.0, 1.0]]).repeat_interleave(torch.tensor([900, 100]), dim=0)
    >>> found = principal_directions(rows, directions=1, noise_multiplier=1.0)
    >>> bool(found.components[0, 0] > 0.99), found.event
    (True, Gaussian(noise_multiplier=1.0))
    """
    _processes.refuse_several()
    _validate.one_of(SOURCES, noise=noise)
    relation = Relation(relation)
    features = _features(rows)
    event: Gaussian | Inexact = Gaussian(noise_multiplier)
    if noise == SECURE:
        chacha.refuse_missing()
        unit = secure.grid(noise_multiplier, 1.0, features**2)
        event = Inexact(Gaussian(noise_multiplier), secure.inexact(features**2))
    _validate.whole(least=1, most=features, directions=directions)
    key = Key.fresh() if seed is None else Key.from_seed(seed)
    own = key.child("pca")  # noise of a training run with the same seed has other names
    if ledger is not None:
        ledger.add(event, relation, "principal directions")
    total = _second_moment(rows, features)
    if noise == SECURE:
        own, moment = own.secured(), {"second moment": total}
        noisy = secure_noise.noisy_means(moment, {"second moment": unit}, own, 0, 1.0)["second moment"]
    else:
        noisy = total + gaussian(total, noise_multiplier, own, 0, "second moment")
    vectors = torch.linalg.eigh((noisy + noisy.T) / 2).eigenvectors  # in order of growing eigenvalues
    components = vectors[:, -directions:].flip(1).T.contiguous()
    return Projection(_upright(components), event, relation, key.reproducible)


def calibrated(
    mechanism: Mechanism, epsilon: float, delta: float, share: float = 0.1, accountant: str = "pld"
) -> tuple[Gaussian, Mechanism]:
    """The event of a PCA and the training that follows it, together within (ε, δ), before any row is read.

    The PCA alone costs share·ε at δ; training gets the least noise with which both together stay within ε.

    Guarantee: ``mechanism.guarantee(delta, also_released=event)`` of what is returned was computed and is at most
    ``epsilon``.

    >>> from dpgrad import sampling
    >>> event, run = calibrated(Mechanism(sampling.FullBatch(), 8, 1.0), epsilon=1.0, delta=1e-5, share=0.25)
    >>> round(event.noise_multiplier, 2), round(run.noise_multiplier, 2)
    (13.29, 10.99)
    """
    _validate.open_unit(share=share)
    _validate.positive(epsilon=epsilon)
    found = calibrate.noise_multiplier(Gaussian, share * epsilon, delta, mechanism.relation, accountant)
    event = Gaussian(found)
    return event, mechanism.calibrated(epsilon, delta, accountant, also_released=event)


def _second_moment(rows: source.Values, features: int) -> Tensor:
    """Σ x xᵀ over the rows, each of norm 1 or a little less, in float64. Private."""
    device = rows.device if isinstance(rows, Tensor) else torch.device("cpu")
    total = torch.zeros(features, features, dtype=torch.float64, device=device)
    for few in _double(rows, max(1, _HELD // features)):
        unit = _unit(few)
        total.addmm_(unit.T, unit)
    return total


def _double(rows: source.Values, held: int) -> Iterator[Tensor]:
    """Blocks of rows, flattened, in float64.

    Guarantee: how a row is read does not depend on the others. Where one is not whole, numpy makes all of them float64,
    as is done here. Torch makes them float32: whole numbers in a tensor that it would round are refused.
    """
    for few in source.blocks(rows, held):
        found = few.flatten(1).double()
        whole = isinstance(rows, Tensor) and not few.is_floating_point()
        if whole and bool((found.abs() > _WHOLE).any()):
            raise DataError(
                "rows must hold whole numbers of at most 2^24, which every type holds: convert all of them to one type "
                "that you choose, such as rows.double()"
            )
        yield found


def _unit(rows: Tensor) -> Tensor:
    """Each row at norm 1 less what rounding may have added; zeros for a row without a finite, non-zero norm."""
    largest = rows.abs().amax(1, keepdim=True)  # squares of what is divided by it neither overflow nor vanish
    usable = largest.isfinite() & (largest > 0)
    scaled = torch.where(usable, rows / largest, 0)
    norms = torch.where(usable, scaled.norm(dim=1, keepdim=True), 1)
    return scaled * ((1 - (rows.shape[1] + 8) * torch.finfo(rows.dtype).eps) / norms)


def _upright(components: Tensor) -> Tensor:
    """The same directions, each with its largest entry positive: an eigenvector is defined up to its sign."""
    largest = components.abs().argmax(1, keepdim=True)
    return components * components.gather(1, largest).sign()


def _features(rows: source.Values) -> int:
    """The number of values in a row; what does not hold rows of real numbers is refused."""
    given: object = rows  # a caller may ignore types
    if not isinstance(given, Tensor | np.ndarray) or given.ndim < 2 or not math.prod(given.shape[1:]):
        raise DataError(f"rows must be an array or tensor of shape (rows, features), got {_shape(given)}")
    real = not given.is_complex() if isinstance(given, Tensor) else given.dtype.kind in "fiub"
    if not real:
        raise DataError(f"rows must hold real numbers, got {given.dtype}")
    if isinstance(given, np.ndarray):
        source.refuse_type("rows", given.dtype)
    return math.prod(given.shape[1:])


def _shape(given: object) -> str:
    return f"shape {tuple(given.shape)}" if isinstance(given, Tensor | np.ndarray) else f"a {type(given).__name__}"
