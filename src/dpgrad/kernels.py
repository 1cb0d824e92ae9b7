"""Triton kernels for what plain torch does in many small launches; each equals a plain path, bit for bit.

Triton comes with torch for CUDA devices. Where it is missing, callers take the plain path.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

if find_spec("triton") is None:
    available = False
else:
    import triton
    import triton.language as tl

    available = torch.cuda.is_available()

    # Triton reads annotations: none but its own are allowed.
    @triton.jit  # type: ignore[untyped-decorator]
    def _philox_below(out, words, steps, lasts, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Whether each of four words of Philox4x64-10 a counter is at most the step's last; counters begin at 1."""
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        which = tl.program_id(1)
        k0 = tl.load(words + 0).to(tl.uint64, bitcast=True)
        k1 = tl.load(words + 1).to(tl.uint64, bitcast=True)
        m0 = tl.load(words + 2).to(tl.uint64, bitcast=True)
        m1 = tl.load(words + 3).to(tl.uint64, bitcast=True)
        w0 = tl.load(words + 4).to(tl.uint64, bitcast=True)
        w1 = tl.load(words + 5).to(tl.uint64, bitcast=True)
        last = tl.load(lasts + which).to(tl.uint64, bitcast=True)
        step = tl.load(steps + which).to(tl.uint64, bitcast=True)
        c0 = (place + 1).to(tl.uint64)
        c1 = c0 * 0
        c2 = c1 + step
        c3 = c1
        for _ in tl.static_range(10):
            high0 = tl.umulhi(c0, m0)
            low0 = c0 * m0
            high2 = tl.umulhi(c2, m1)
            low2 = c2 * m1
            c0 = high2 ^ c1 ^ k0
            c1 = low2
            c2 = high0 ^ c3 ^ k1
            c3 = low0
            k0 += w0
            k1 += w1
        row = place.to(tl.int64) * 4
        line = out + which.to(tl.int64) * rows
        tl.store(line + row, c0 <= last, mask=row < rows)
        tl.store(line + row + 1, c1 <= last, mask=row + 1 < rows)
        tl.store(line + row + 2, c2 <= last, mask=row + 2 < rows)
        tl.store(line + row + 3, c3 <= last, mask=row + 3 < rows)


def philox_below(words: Tensor, steps: Tensor, lasts: Tensor, rows: int) -> Tensor:
    """Whether the word of each row at each step is at most the step's last, (steps, rows) bool.

    ``words`` are the two words of the key, the two multipliers and the two Weyl constants of Philox4x64-10, as signed
    integers of the same bits, as are ``lasts``.
    """
    out = torch.empty(len(steps), rows, dtype=torch.bool, device=steps.device)
    block = 256
    _philox_below[(-(-rows // (4 * block)), len(steps))](out, words, steps, lasts, rows, BLOCK=block)
    return out
