"""Memory for the gradients of single examples on a CPU, kept from one step to the next.

The C library returns large blocks to the system as soon as they are free. Every step would get them anew, page by page,
which takes up to half as long as the products that are written there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import torch
from torch import Tensor

__all__ = ["Scratch", "room"]

_MOST = 1 << 26  # values that are kept
_ALIGNED = 16  # values


class Scratch:
    """Memory for at most so many values, from which `room` takes tensors within `opened`.

    No tensor taken in a block may be used after it.

    >>> scratch = Scratch()
    >>> for _ in range(2):
    ...     with scratch.opened():
    ...         print(room([3], like=torch.zeros(1)) is None, len(scratch.memory))
    True 0
    False 32
    """

    def __init__(self, most: int = _MOST) -> None:
        self.memory = torch.empty(0, device="cpu", dtype=torch.float32)
        self._most = most
        self._taken = 0  # values, in this block

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within the block `room` takes tensors from here. After it there is room for as many and more."""
        self._taken = 0
        token = _open.set(self)
        try:
            yield
        finally:
            _open.reset(token)
            if len(self.memory) < min(self._taken, self._most):
                wanted = min(2 * self._taken, self._most)  # the system hands out pages that are written to, no others
                with suppress(RuntimeError):  # without it every tensor has memory of its own
                    self.memory = torch.empty(wanted, device="cpu", dtype=torch.float32)

    def take(self, shape: Sequence[int]) -> Tensor | None:
        """A tensor of float32 that no other of this block overlaps; None where there is no room."""
        values = torch.Size(shape).numel()
        start = self._taken
        self._taken += -(-values // _ALIGNED) * _ALIGNED
        return self.memory[start : start + values].view(shape) if self._taken <= len(self.memory) else None


_open: ContextVar[Scratch | None] = ContextVar("_open", default=None)


def room(shape: Sequence[int], like: Tensor) -> Tensor | None:
    """A tensor without values of the type and on the device of ``like``, in the memory of the block around.

    None where there is no such block, or no room in it.
    """
    scratch = _open.get()
    if scratch is None or like.dtype != torch.float32 or like.device.type != "cpu":
        return None
    return scratch.take(shape)
