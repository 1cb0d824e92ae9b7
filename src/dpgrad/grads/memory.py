"""How much memory a step takes and how much there is."""

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpgrad import _validate
from dpgrad.errors import OptionError
from dpgrad.grads.accumulate import Engine, clipped_sum
from dpgrad.grads.batch import part, size
from dpgrad.grads.sums import Batch, Loss

__all__ = ["Peak", "available", "fitting", "shown_bytes"]


def available(device: torch.device) -> int:
    """The free bytes of a device, as the system reports them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # a system that does not tell
        return 1 << 62


def shown_bytes(count: float) -> str:
    """A number of bytes as people write it.

    >>> shown_bytes(3_500_000)
    '3.5 MB'
    """
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that tensors made inside the block take, and the most there were at once.

    >>> with Peak() as peak:
    ...     _ = torch.ones(1000).sum()
    >>> peak.most >= 4000
    True
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, held = storage._cdata, storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.now += held
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, address, held)

    def _forget(self, address: int, held: int) -> None:
        self._known.discard(address)
        self.now -= held


def fitting(model: nn.Module, loss: Loss, batch: Batch, limit: int, engine: Engine, several_rows: bool = False) -> int:
    """The most examples whose clipped sum takes at most ``limit`` bytes, from sums over one and over two examples.

    What a sum takes grows linearly with its examples. One example is the least there is: where even that takes more
    than ``limit``, it is refused.
    """
    _validate.positive(limit=limit)
    if size(batch) < 2:
        return 1
    takes = []
    for examples in (1, 2):
        with Peak() as peak:
            clipped_sum(model, loss, part(batch, 0, examples), torch.zeros_like, engine, several_rows=several_rows)
        takes.append(peak.most)
    each = max(takes[1] - takes[0], 1)
    if takes[0] > limit:
        raise OptionError(
            f"memory limit must be at least {shown_bytes(takes[0])}, what one example takes, got {shown_bytes(limit)}"
        )
    return 1 + int((limit - takes[0]) // each)
