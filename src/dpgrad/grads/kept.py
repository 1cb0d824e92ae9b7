"""What a pass leaves behind: tensors of a batch that a model keeps, and values of it that are written elsewhere."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.batch import leaves
from dpgrad.grads.calls import KeptError
from dpgrad.grads.failures import cleared
from dpgrad.grads.sums import Batch, Loss

__all__ = ["Guarded", "WrittenError", "flat", "guarded", "is_earlier", "note_earlier", "refuse_earlier", "still_held"]

_EARLIER: dict[int, StorageWeakRef] = {}  # storages that held rows in a pass that is over, while a model keeps them


class WrittenError(UnsupportedModelError):
    """A pass that writes values of the batch to a tensor that was there before it; ``storages`` are its memory."""

    def __init__(self, storages: frozenset[int | None] = frozenset(), buffer: str = "") -> None:
        where = f"buffer {buffer}" if buffer else "a tensor that the model keeps"
        super().__init__(
            f"the forward pass writes values of the batch to {where}, which would be released without noise: take that "
            "out, or put its module in eval mode"
        )
        self.storages = storages

    def of(self, model: nn.Module) -> "WrittenError":
        """The same error, with the name of the buffer where it is one."""
        names = (name for name, buffer in model.named_buffers() if _storage(buffer) in self.storages)
        return WrittenError(self.storages, next(names, ""))


def note_earlier(storages: Mapping[int, StorageWeakRef]) -> None:
    """Remember memory that holds rows of a pass that is over."""
    _EARLIER.update(storages)


def is_earlier(storage: int) -> bool:
    """Whether memory holds rows of a pass that is over."""
    return storage in _EARLIER


def still_held() -> set[int]:
    """Memory of passes that are over that somebody keeps."""
    for storage in [each for each, ref in _EARLIER.items() if ref.expired()]:  # type: ignore[no-untyped-call]
        del _EARLIER[storage]
    return {*_EARLIER}


def flat(values: Iterable[Any]) -> list[Any]:
    """Values with those in lists and tuples.

    >>> flat([1, (2, [3])])
    [1, 2, 3]
    """
    found: list[Any] = []
    for each in values:
        found += flat(each) if isinstance(each, list | tuple) else [each]
    return found


def refuse_earlier(values: Iterable[Any]) -> None:
    """Refuse a tensor that holds rows of a pass that is over."""
    for each in values if _EARLIER else ():
        storage = _storage(each) if isinstance(each, Tensor) else None
        if storage is not None and is_earlier(storage):
            raise KeptError


class Guarded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which memory holds values of a batch; refuses what was kept of others, and writes to other memory.

    Memory that nothing was written to holds zeros.

    >>> kept = torch.zeros(2)
    >>> x = torch.ones(3, 2)
    >>> with Guarded().of(x):
    ...     _ = kept.add_(x.sum(0))
    Traceback (most recent call last):
    dpgrad.grads.kept.WrittenError: the forward pass writes values of the batch to a tensor that the model keeps, ...
    >>> kept
    tensor([0., 0.])
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refused: WrittenError | KeptError | None = None  # kept: a model may catch exceptions
        self._storages: dict[int, StorageWeakRef] = {}  # of this pass; held, or an address could be reused
        self._carrying: set[int] = set()

    @contextmanager
    def of(self, batch: Batch) -> Iterator["Guarded"]:
        """Follow what is done within the block."""
        still_held()
        given = [self._note(leaf, carrying=True) for leaf in leaves(batch)]
        try:
            with self:
                yield self
        finally:
            note_earlier({each: self._storages[each] for each in self._carrying - {*given}})
            if self._refused is not None:
                raise self._refused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        storages = [_storage(each) for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        carrying = any(each is None or each in self._carrying for each in storages)
        if any(each is not None and is_earlier(each) for each in storages):
            raise self._refuse(KeptError())
        written = _written(func, args, kwargs) if carrying else []
        elsewhere = frozenset(_storage(each) for each in written) - {*self._storages}
        if elsewhere:
            raise self._refuse(WrittenError(elsewhere))
        result = cleared(func, func(*args, **kwargs))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and _storage(tensor) not in storages:  # elsewhere it is a view
                self._note(tensor, carrying)
        self._carrying |= {storage for storage in map(_storage, written) if storage is not None}
        return result

    def _refuse(self, error: WrittenError | KeptError) -> WrittenError | KeptError:
        self._refused = self._refused or error
        return error

    def _note(self, tensor: Tensor, carrying: bool) -> int | None:
        """The memory of a tensor of this pass; None where it has none that can be seen."""
        storage = _storage(tensor)
        if storage is not None:
            self._storages.setdefault(storage, StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
            if carrying:
                self._carrying.add(storage)
        return storage


def guarded(loss: Loss) -> Loss:
    """The loss, as one that `Guarded` follows."""

    def followed(model: nn.Module, batch: Batch) -> Tensor:
        try:
            with Guarded().of(batch):
                return loss(model, batch)
        except WrittenError as error:
            raise error.of(model) from None

    return followed


def _storage(tensor: Tensor) -> int | None:
    """The memory of a tensor; None of a sparse or nested one."""
    with torch._C.DisableTorchFunction():
        plain = tensor.layout is torch.strided and not tensor.is_nested
        return int(tensor.untyped_storage()._cdata) if plain else None


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation changes in place."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    found = []
    for place, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            found += pytree.tree_leaves(args[place] if place < len(args) else kwargs.get(each.name))
    return [each for each in found if isinstance(each, Tensor)]
