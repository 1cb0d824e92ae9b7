"""Rows of many tensors set to zero in one launch, which costs next to nothing where there is none to set."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from dpgrad._triton import on_its_device

__all__ = ["AT_ONCE", "zeroed"]

AT_ONCE = 8  # tensors of one launch
_UNIT = 2  # bytes of the least type


@triton.jit
def _set(address, start, length, BLOCK: tl.constexpr):
    place = address.to(tl.pointer_type(tl.int16)) + start
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(place + at, tl.zeros((BLOCK,), dtype=tl.int16), mask=at < length)


_NUMBERS = [f"{kind}{place}" for place in range(AT_ONCE) for kind in "aln"]


@triton.jit(do_not_specialize=_NUMBERS)
def _zeroed(
    keep,
    a0, l0, n0, a1, l1, n1, a2, l2, n2, a3, l3, n3, a4, l4, n4, a5, l5, n5, a6, l6, n6, a7, l7, n7,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the row of this program to zero in every tensor unless it is kept: address, length and distance of rows."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(keep + row) == 0:
        _set(a0, row * n0, l0, BLOCK)
        _set(a1, row * n1, l1, BLOCK)
        _set(a2, row * n2, l2, BLOCK)
        _set(a3, row * n3, l3, BLOCK)
        _set(a4, row * n4, l4, BLOCK)
        _set(a5, row * n5, l5, BLOCK)
        _set(a6, row * n6, l6, BLOCK)
        _set(a7, row * n7, l7, BLOCK)


@on_its_device
def zeroed(keep: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set the rows of ``tensors`` outside ``keep``, (rows,) int8, to zero; a row lies in one piece of memory."""
    for start in range(0, len(tensors), AT_ONCE):
        few = list(tensors[start : start + AT_ONCE])
        few += few[-1:] * (AT_ONCE - len(few))
        numbers = [number for tensor in few for number in _place(tensor)]
        _zeroed[(len(keep),)](keep, *numbers, BLOCK=1024, num_warps=4)


def _place(tensor: Tensor) -> tuple[int, int, int]:
    size = tensor.element_size() // _UNIT
    return tensor.data_ptr(), tensor[0].numel() * size, tensor.stride(0) * size
