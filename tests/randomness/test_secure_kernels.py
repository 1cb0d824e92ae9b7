"""The kernels of the secure source give the bits of the plain path.

They run on a CUDA device with Triton, and on a CPU by Triton's interpreter, where the package triton is installed:
``TRITON_INTERPRET=1 python -m pytest tests/randomness/test_secure_kernels.py``.
"""

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from dpgrad import _triton
from dpgrad.mechanism import chacha, secure
from dpgrad.mechanism.keys import Key
from dpgrad.randomness import secure_noise
from dpgrad.randomness.device_noise import Segment

interpreted = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    not (interpreted or _triton.available), reason="needs a CUDA device and Triton, or Triton's interpreter"
)
DEVICE = "cuda" if _triton.available and not interpreted else "cpu"
KEY = Key.from_seed(7)
SIZES = {"weight": 700, "bias": 5, "other": 256}
STARTS = torch.tensor([0, 700, 705, 961])


def drawn(skipped: int = 0) -> torch.Tensor:
    found = [secure_noise.drawn(KEY, 3, name, size, start=skipped) for name, size in SIZES.items()]
    return torch.cat(found)


def by_kernel(out: torch.Tensor, *given: torch.Tensor, skipped: int = 0) -> torch.Tensor:
    from dpgrad.randomness import secure_kernels

    keys = secure_kernels.keys([secure.stream(KEY, "noise", name, "3") for name in SIZES])
    placed = [each.to(DEVICE) for each in given]
    table = secure_kernels.tables(DEVICE)
    secure_kernels.noisy(out, keys.to(DEVICE), STARTS.to(DEVICE), 700, table, *placed, skipped=skipped)
    return out.cpu()


@pytest.mark.parametrize("skipped", [0, 1, 2, 7, 2**33 - 100])
def test_noise_has_the_same_bits(skipped: int) -> None:
    out = torch.empty(961, dtype=torch.float64, device=DEVICE)
    assert torch.equal(by_kernel(out, skipped=skipped), drawn(skipped))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("each", [False, True])
def test_noisy_means_have_the_same_bits(dtype: torch.dtype, each: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    unit = (torch.rand(961, generator=generator).double() + 0.1) * 1e-8
    unit = unit if each else unit[0].clone()
    # Sums near halves of the grid, where rounding is decided, and those that cannot be rounded.
    total = torch.randint(-(10**6), 10**6, (961,), generator=generator) * 0.5 * unit
    total[:5] = torch.tensor([np.nan, np.inf, -np.inf, 1e30, -1e30])
    total = total.to(dtype)
    divisor = torch.tensor(50.0, dtype=torch.float64)
    expected = (secure_noise.added(total, drawn(), unit) / divisor).to(dtype)
    assert torch.equal(by_kernel(torch.empty(961, dtype=dtype, device=DEVICE), total, unit, divisor), expected)


def test_a_long_stream() -> None:
    from dpgrad.randomness import secure_kernels

    count = 3000 if DEVICE == "cpu" else 3_000_001
    out = torch.empty(count, dtype=torch.float64, device=DEVICE)
    keys = secure_kernels.keys([bytes(range(32))]).to(DEVICE)
    starts = torch.tensor([0, count], device=DEVICE)
    secure_kernels.noisy(out, keys, starts, count, secure_kernels.tables(DEVICE))
    words = chacha.words(bytes(range(32)), 0, -(-count // 2)).reshape(-1, 4)[:count]
    assert torch.equal(out.cpu(), torch.from_numpy(secure.numbers(words)).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_stream_by_kernels_and_on_the_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two segments, at any step, as often as it is asked for."""
    likes = {name: torch.zeros(size) for name, size in SIZES.items()}
    segments = [Segment(("bias", "other"), 261, 0), Segment(("weight",), 700, 0)]
    plain = secure_noise.SecureStream(likes, segments, KEY, "cpu")
    monkeypatch.setattr(_triton, "runs_on", lambda *_: True)
    stream = secure_noise.SecureStream(likes, segments, KEY, DEVICE)
    divisor = torch.tensor(50.0, dtype=torch.float64)
    for step in (3, 10**6, 3):
        plain.at(step)
        stream.at(step)
        for segment in segments:
            total = torch.randn(segment.values).float()
            for unit in (torch.tensor(2.0**-28).double(), torch.full((segment.values,), 2.0**-27).double()):
                expected, out = torch.empty(segment.values, dtype=dtype), torch.empty(segment.values, dtype=dtype)
                plain.write(segment, expected, unit, total, divisor)
                placed = out.to(DEVICE)
                stream.write(segment, placed, unit.to(DEVICE), total.to(DEVICE), divisor.to(DEVICE))
                assert torch.equal(placed.cpu(), expected)
