"""How exactly norms and sums are computed, and by how much factors are shortened for it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

# Rounding of the factors, of the norms of many layers added up, and of their squares: far above what was measured.
_RELATIVE = {torch.float32: 2.0**-13, torch.float64: 2.0**-40}
SUMMED_AT_ONCE = 128  # examples whose terms are added in float32; such sums are added in float64


def measured_error(dtype: torch.dtype) -> float:
    """By how much, relatively, a measured norm may be below what it measures.

    >>> measured_error(torch.float32) < 2e-4
    True
    """
    return _RELATIVE[dtype]


def norm_error(dtype: torch.dtype) -> float:
    """τ: by how much, relatively, an example's share of the sum may exceed what its measured norm allows.

    Two parts: rounding in norms and factors, and rounding in the sum. Of m terms that are at most clip long the k-th
    partial sum is at most k·clip long and rounds by u·k·clip, so that a sum errs by m²/2·u·clip, and the difference of
    two sums, with one example and without, by twice that. At most `SUMMED_AT_ONCE` terms are added so; the sums of more
    are added in float64. Norms and sums are formed in ``dtype`` whatever the model computes in (float32 for TF32 and
    bfloat16), so that one τ holds for every precision of the model.

    Guarantee: τ does not depend on how many examples were drawn. If it did, one example more or less would change the
    factors of all others.

    >>> norm_error(torch.float32) < 1.2e-3, norm_error(torch.float64) < 1e-11
    (True, True)
    """
    return _RELATIVE[dtype] + SUMMED_AT_ONCE**2 * torch.finfo(dtype).eps / 2


def _settings() -> list[Any]:
    """Where torch keeps how exactly products of float32 tensors are computed."""
    backends: Any = torch.backends
    return [
        backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn,
        backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn,
    ]  # fmt: skip


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products and convolutions in the precision of their operands: no TF32, no bfloat16, no autocast."""
    settings = _settings()
    before = [setting.fp32_precision for setting in settings]
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
