"""How exactly norms and sums are computed, and by how much factors are shortened for it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from dpgrad import _triton

__all__ = [
    "MEASURED_ERROR", "SUMMED_AT_ONCE", "TF32", "allows_tf32", "exact_products", "in_tf32", "norm_error",
    "own_products", "precision_settings", "tf32_is_allowed", "tf32_margins",
]  # fmt: skip

# How far, relatively, a measured norm may lie below the true one: rounding of the factors, of the norms of many layers
# added up, and of their squares. Far above what was measured.
MEASURED_ERROR = {torch.float32: 2.0**-13, torch.float64: 2.0**-40}
SUMMED_AT_ONCE = 128  # examples whose terms are added in float32; such sums are added in float64


def norm_error(dtype: torch.dtype) -> float:
    """τ: by how much, relatively, an example's share of the sum may exceed what its measured norm allows.

    Two parts: rounding in norms and factors, and rounding in the sum. Of m terms that are at most clip long the k-th
    partial sum is at most k·clip long and rounds by u·k·clip, so a sum errs by m²/2·u·clip, and the difference of
    two sums, with one example and without, by twice that. At most `SUMMED_AT_ONCE` terms are added so; the sums of more
    are added in float64. One τ holds for every precision of the model: what TF32 adds is added to the norms of the
    layers where it is used (`tf32_margins`), and all else is formed in ``dtype`` (float32 for bfloat16).

    A term here is an example, and the two sums have the same number of rows: so it is for neighbours by zero-out and by
    replace-one. Not covered, in any precision:

    - sums over the T positions of each example as well. Their T·m roundings are within τ as long as they average out;
      for data made against the order in which a device adds they do not, nor on tensor cores, which round towards
      zero: then they grow with T.
    - neighbours by add-remove. With one row more, those behind it move to other short sums, each of which may round by
      its share, and a library may choose a kernel that rounds the gradients of all rows differently: by some units of
      rounding (2^-24 in float32, 2^-11 in TF32, 2^-9 in bfloat16), and by more where a ReLU or a maximum turns.

    Guarantee: τ does not depend on how many examples were drawn. If it did, one example more or less would change the
    factors of all others.

    >>> norm_error(torch.float32) < 1.2e-3, norm_error(torch.float64) < 1e-11
    (True, True)
    """
    return MEASURED_ERROR[dtype] + SUMMED_AT_ONCE**2 * torch.finfo(dtype).eps / 2


@cache
def precision_settings() -> tuple[Any, ...]:
    """Where torch keeps how exactly products of float32 tensors are computed."""
    backends: Any = torch.backends
    return (
        backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn,
        backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn,
    )  # fmt: skip


@contextmanager
def exact_products() -> Iterator[tuple[bool, bool]]:
    """Matrix products and convolutions in the precision of their operands: no TF32, no bfloat16, no autocast.

    Yields whether products of matrices and of convolutions were formed in TF32 before.
    """
    with _set("ieee", precision_settings()) as (matrices, convolutions, *_), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield matrices == "tf32", convolutions == "tf32"


_alone = RLock()

# Whether products of matrices and of convolutions may be formed in TF32.
_allowed: ContextVar[tuple[bool, bool]] = ContextVar("allowed", default=(False, False))


@contextmanager
def own_products() -> Iterator[None]:
    """`exact_products`, but where `in_tf32` is entered; which applies if torch's settings allow it now.

    torch's settings are those of the process: a second thread that forms products of its own waits for the first.
    """
    # No backward pass is begun within the block, whose thread would wait for this one.
    with _alone, exact_products() as before:
        token = _allowed.set(before)
        try:
            yield
        finally:
            _allowed.reset(token)


def allows_tf32(a: Tensor, g: Tensor, convolution: bool = False) -> bool:
    """Whether the product of these factors may be formed in TF32: kernels are there, and the settings allow it.

    bfloat16 and float16 keep no more bits than TF32: their products are exact in it, whatever the settings.
    """
    half = (torch.bfloat16, torch.float16)
    single = torch.float32 in (a.dtype, g.dtype)
    known = all(factor.dtype in (*half, torch.float32) for factor in (a, g))
    return known and _triton.runs_on(a, g) and (not single or _allowed.get()[convolution])


def tf32_is_allowed(device: torch.device) -> bool:
    """Whether products are formed in TF32 on the device under the settings as they are.

    >>> tf32_is_allowed(torch.device("cpu"))
    False
    """
    return (
        device.type == "cuda"
        and _triton.available
        and any(s.fp32_precision == "tf32" for s in precision_settings()[:2])
    )


@contextmanager
def in_tf32() -> Iterator[None]:
    """Products of float32 matrices and convolutions on a CUDA device are formed in TF32."""
    with _set("tf32", precision_settings()[:2]):
        yield


@contextmanager
def _set(precision: str, settings: Sequence[Any]) -> Iterator[list[str]]:
    """Within the block settings that have another value have this one; yields the values before."""
    before = [setting.fp32_precision for setting in settings]
    changed = [(setting, value) for setting, value in zip(settings, before, strict=True) if value != precision]
    try:
        for setting, _ in changed:
            setting.fp32_precision = precision
        yield before
    finally:
        for setting, value in changed:
            setting.fp32_precision = value


# Cutting off or rounding to TF32 changes a value by less than this, relatively.
TF32 = 2.0**-10


def tf32_margins(d: int, p: int, positions: int, exact: bool) -> tuple[float, float]:
    """γ and σ: a norm n that was found from rounded factors stands for at most √(n² + γ·mass²) + σ·mass.

    mass = Σ_t ‖a_t‖‖g_t‖ is what the norm of Σ_t g_t a_tᵀ would be without cancelling. γ: tensor cores add eight exact
    products at a time, with an error below 2⁻²² of the sum of their magnitudes (Fasi et al., "Numerical behavior of
    NVIDIA tensor cores", 2021), and entries of two such tables are multiplied and added in float32. σ: the norm is
    found from factors that are cut, the sum is made of a that is rounded in a way that is not known (unless a is
    ``exact``) and of g that is cut, multiplied by the factor and rounded to nearest.

    >>> tf32_margins(768, 768, 256, exact=False)[1] < 1.6e-3
    True
    """
    blocks = -(-positions // 128)  # whose tables are added up, one pair after another
    gamma = ((d + p + 16) / 8 * 4 + 256 + blocks * blocks) * 2.0**-24
    return gamma, 1.01 * (TF32 / 2 + (0 if exact else TF32))
