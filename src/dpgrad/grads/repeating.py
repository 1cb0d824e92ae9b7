"""Is a pass the same as one that was followed? Its operations are compared, one by one, with those that were noted.

What a model's Python code does in the next pass cannot be known: it may read settings, clocks and random numbers, catch
errors, or be exchanged while a run goes on. What it does with tensors is seen. A pass of the same operations, in the
same order, on the same tensors and numbers keeps examples apart as the one before did.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dpgrad.grads.batch import leaves
from dpgrad.grads.calls import MixedError
from dpgrad.grads.failures import are_torchs, failing, saving_hooks
from dpgrad.grads.sums import Batch

__all__ = ["DivergedError", "Script"]

_LIFTED = torch.ops.aten.lift_fresh.default  # of a tensor that is made from numbers
_FEW = 64  # of them, that are compared
_OTHERWISE = "a checkpointed block does other things when it runs again for the backward pass"
# Makes no memory and changes no row's place. torch calls it for a result that another mode holds as well.
_DETACHING = torch.ops.aten.detach.default


# The arguments that may be the number of rows, or a multiple, since all they say is what shape a result has.
_SHAPING: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("empty", "full", "ones", "rand", "randn", "zeros"), (0,)),
    **dict.fromkeys(("expand", "repeat", "reshape", "split", "split_with_sizes", "view", "_unsafe_view"), (1,)),
    **dict.fromkeys(
        ("new_empty", "new_full", "new_ones", "new_zeros", "unsafe_split", "unsafe_split_with_sizes"), (1,)
    ),
    "arange": (0, 1),
    "convolution": (8,),  # as many groups, or more
    "narrow": (2, 3),
    "native_group_norm": (3,),
    "slice": (2, 3),
    "unflatten": (2,),
}


class DivergedError(Exception):
    """A pass that does other things than the one it is compared with."""


class _Given(NamedTuple):
    """A tensor as an argument."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    hooked: bool


class _Used(NamedTuple):
    """Memory that two passes use, and whether the tensors have the number of rows in their shape."""

    memory: int
    rows: bool


class _Line(NamedTuple):
    """An operation with its arguments and the part of torch's state on which it depends."""

    func: Any
    arguments: list[object]
    differentiated: bool
    hooks: bool


class Script(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a pass: noted in the first one within `of`, compared in every one after it.

    Memory is known by the order in which it comes up: that of rows and parameters is given, that of results is new, and
    any other must be the same memory as in the first pass.

    >>> script, factor = Script(), 2.0
    >>> def double(x):
    ...     with script.of(x, {}):
    ...         return script.ended(factor * x)
    >>> double(torch.ones(3)), double(torch.zeros(3))
    (tensor([2., 2., 2.]), tensor([0., 0., 0.]))
    >>> factor = 3.0
    >>> double(torch.ones(3))
    Traceback (most recent call last):
    dpgrad.grads.repeating.DivergedError: operation 1 is a different one
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines: list[_Line] = []
        self._shapes: list[list[tuple[int, ...]]] = []  # of the results
        self._made: list[list[int]] = []  # the numbers of the results' memory, 0 for none
        self.blocks: list[int] = []  # the first lines of what runs again in the backward pass
        self._noted = False  # whether there was a first pass
        self._rests = False
        self._own: Mapping[int, int] = {}  # numbers of memory of a block that runs again
        self._others: dict[int, tuple[int, StorageWeakRef]] = {}  # held, or an address could be reused
        self._begin()

    def _begin(self) -> None:
        self._at = 0
        self._failed = ""
        self._numbers: dict[int, int] = {}  # of memory, by its address
        self._many = 0
        self._starts: dict[int, int] = {}  # of rows within their memory
        self._held: dict[int, StorageWeakRef] = {}  # the memory of results by their numbers
        self._more: list[StorageWeakRef] = []  # of blocks that run again
        self.of_caller = saving_hooks()  # on saved tensors
        self._hooks: list[Any] = []  # those that the model has set

    @contextmanager
    def of(self, batch: Batch, parameters: Mapping[str, Tensor]) -> Iterator["Script"]:
        """Note or compare what is done within the block, which has to come to `ended`."""
        self._begin()
        with torch._C.DisableTorchFunction():
            for each in leaves(batch):  # which may be parts of larger ones
                self._starts.setdefault(self._memory(each), int(each.storage_offset()))
            for each in (*leaves(batch), *parameters.values()):
                self._number(self._memory(each))
        with self:
            yield self
        self._noted = True

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Within the block operations are no part of the pass."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    @contextmanager
    def again(self) -> Iterator[None]:
        """Compare the blocks of a checkpoint, which run again within the block, with the pass that has `ended`."""
        try:
            if self.blocks:
                with _Again(self) as again:
                    yield
                    if again.differs:  # also where the model caught the error
                        raise MixedError(_OTHERWISE)
            else:
                yield
        finally:
            self._begin()

    def line_of(
        self, at: int, own: Mapping[int, int], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int | None:
        """The line from ``at`` on that an operation is, past those whose results are kept; ``own`` numbers memory."""
        self._own = own
        try:
            with torch._C.DisableTorchFunction():
                line = self._told(func, args, kwargs)[0]
        except DivergedError:
            return None
        finally:
            self._own = {}
        for place in range(at, len(self._made)):
            if self._lines[place] == line:
                return place
            if not self._is_there(place):
                return None
        return None

    def _is_there(self, place: int) -> bool:
        """Whether all that the operation of a line made is still there, so it need not run again."""
        func, refs = self._lines[place].func, [self._held.get(number) for number in self._made[place] if number]
        writes = not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable
        return not writes and all(ref is not None and not ref.expired() for ref in refs)  # type: ignore[no-untyped-call]

    def made_again(self, at: int, result: Any) -> dict[int, int]:
        """The memory of the results of a line under the numbers that they had the first time."""
        with torch._C.DisableTorchFunction():
            made = [(self._memory(each), each.untyped_storage()) for each in _tensors(result)]
        self._more += [StorageWeakRef(storage) for _, storage in made]  # type: ignore[no-untyped-call]
        return {memory: number for (memory, _), number in zip(made, self._made[at], strict=True) if number}

    def ended(self, result: Tensor) -> Tensor:
        """The result of the pass, which must be the same one too."""
        with torch._C.DisableTorchFunction():
            self._line(_Line("ended", [self._token(result, [])], True, False))
        if self._failed:  # also where the model caught the error
            raise DivergedError(self._failed)
        if self._noted and self._at != len(self._lines):
            raise self._diverged("there are fewer operations")
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DETACHING or self._rests:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            line, given = self._told(func, args, kwargs)
            self._line(line)
        try:
            result = func(*args, **kwargs)
        except Exception:  # an error may depend on values, and the model may catch it
            self._diverged(failing(func))
            raise
        with torch._C.DisableTorchFunction():
            made = _tensors(result)
            numbers = [self._keep(each, given) for each in made]
            if not self._noted:
                self._shapes.append([tuple(each.shape) for each in made])
                self._made.append(numbers)
        return result

    def _told(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Line, list[int]]:
        """What is compared of an operation, and the memory of the tensors that it is given."""
        given: list[int] = []
        told = [_content(args[0])] if func is _LIFTED else [self._token(each, given) for each in args]
        told += [(name, self._token(each, given)) for name, each in kwargs.items()]
        hooks = saving_hooks()
        if hooks not in (None, self.of_caller) and not are_torchs(hooks):
            raise self._diverged("hooks are set on saved tensors")
        return _Line(func, told, torch.is_grad_enabled(), hooks is not None), given

    def alike(self, rows: int, other: "Script", of_other: int) -> bool:
        """Whether a pass over ``rows`` rows and another over ``of_other`` do the same to each.

        Operations are the same and have the same arguments, but for shapes, in which the number of rows may stand
        once. None leads from tensors with such a dimension to one without: it would count the rows.
        """
        if len(self._lines) != len(other._lines):
            return False
        sizes = (rows, of_other)
        looked: set[int] = set()  # memory of which a row was selected
        shapes = [*zip(self._shapes, other._shapes, strict=True), ([], [])]  # the end has no results
        for one, two, (of_one, of_two) in zip(self._lines, other._lines, shapes, strict=True):
            if one.func is not two.func or one[2:] != two[2:]:
                return False
            given: list[_Used] = []
            name = getattr(one.func, "_opname", "")
            places, most = _SHAPING.get(name, ()), 2 if name == "diagonal" else 1
            for place, pair in enumerate(zip_longest(one.arguments, two.arguments, fillvalue=None)):
                if not _alike(*pair, sizes, place in places, most, given):
                    return False
            if any(each.memory in looked and not each.rows for each in given):
                return False
            if any(each.rows for each in given) and of_one and of_one == of_two:
                if name != "select":
                    return False
                looked.add(given[0].memory)  # torch's vmap looks at a row for its type, and uses no value of it
        return True

    def _line(self, line: _Line) -> None:
        if not self._noted:
            hooks = saving_hooks()
            if hooks not in (None, self.of_caller, *self._hooks):
                self._hooks.append(hooks)
                self.blocks.append(len(self._lines))
            self._lines.append(line)
        elif self._at >= len(self._lines) or self._lines[self._at] != line:
            raise self._diverged(f"operation {self._at + 1} is a different one")
        self._at += 1

    def _diverged(self, why: str) -> DivergedError:
        self._failed = self._failed or why
        return DivergedError(why)

    def _token(self, value: Any, given: list[int]) -> object:
        """What stands for an argument; the memory of tensors is added to ``given``."""
        if isinstance(value, Tensor):
            memory = self._memory(value)
            if not memory:
                return object()
            given.append(memory)
            number = self._own.get(memory, self._numbers.get(memory))
            if number is None:
                number = self._number_of_other(memory, value)
            hooked = value._backward_hooks is not None
            offset = int(value.storage_offset()) - self._starts.get(memory, 0)
            return _Given(number, offset, value.shape, value.stride(), hooked)
        if isinstance(value, list | tuple):
            return [self._token(each, given) for each in value]
        return value

    def _memory(self, tensor: Tensor) -> int:
        """The address of the memory of a tensor; of a sparse or nested one, which is followed no further, 0."""
        plain = tensor.layout is torch.strided and not tensor.is_nested
        return int(tensor.untyped_storage()._cdata) if plain else 0

    def _number_of_other(self, memory: int, tensor: Tensor) -> int:
        """The number of memory that was there before the pass, or was made by other means than an operation."""
        if memory not in self._others:
            if self._noted:
                raise self._diverged("other memory is used")
            self._others[memory] = -1 - len(self._others), StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return self._others[memory][0]

    def _keep(self, made: Tensor, given: list[int]) -> int:
        """The number of a result, or 0 of a view of what was given."""
        memory = self._memory(made)
        if not memory or memory in given:
            return 0
        number = self._number(memory)
        self._held[number] = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]
        return number

    def _number(self, memory: int) -> int:
        self._many += 1
        self._numbers[memory] = self._many
        return self._many


class _Again(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compares the operations of blocks that run again with those of the first time.

    A block runs again under hooks of its own, from its first operation to the last one that is needed. What it makes
    then stands for what it made before. Operations whose results were kept, which a checkpoint may choose, do not run.
    """

    def __init__(self, script: Script) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.differs = False
        self._script, self._hooks = script, script.of_caller
        self._ways: list[tuple[int, dict[int, int]]] = []  # the line that may come next, and numbers of memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, script, hooks = kwargs or {}, self._script, saving_hooks()
        if hooks in (None, script.of_caller) or func is _DETACHING:  # of the backward pass itself
            return func(*args, **kwargs)
        ways = self._ways
        if hooks != self._hooks:
            known = ways[0][1] if ways else {}
            ways, self._hooks = [*ways, *((line, known) for line in script.blocks)], hooks
        self._ways = [
            (line, own) for at, own in ways if (line := script.line_of(at, own, func, args, kwargs)) is not None
        ]
        if not self._ways:
            self.differs = True
            raise MixedError(_OTHERWISE)
        result = func(*args, **kwargs)
        self._ways = [(at + 1, own | script.made_again(at, result)) for at, own in self._ways]
        return result


def _tensors(result: Any) -> list[Tensor]:
    """The tensors among the results of an operation."""
    return [each for each in (result if isinstance(result, list | tuple) else (result,)) if isinstance(each, Tensor)]


def _content(made: Tensor) -> object:
    """The numbers that a tensor was made from, where they are few and can be seen; another object where they cannot."""
    if made.device.type != "cpu":  # reading there would wait, and what is read of a batch comes by an operation
        return made.shape, made.dtype
    return (made.shape, made.dtype, made.tolist()) if made.numel() <= _FEW else object()


def _alike(one: Any, two: Any, sizes: tuple[int, int], shaping: bool, most: int, given: list[_Used]) -> bool:
    """Whether an argument is the same for as many rows each; tensors are noted in ``given``.

    ``shaping``: whole numbers may be those of rows. A tensor may have ``most`` dimensions of as many entries.
    """
    if isinstance(one, _Given) and isinstance(two, _Given):
        if (one.memory, one.hooked, len(one.shape)) != (two.memory, two.hooked, len(two.shape)):
            return False
        apart = [pair for pair in zip(one.shape, two.shape, strict=True) if pair[0] != pair[1]]
        given.append(_Used(one.memory, bool(apart)))
        numbers = (*apart, (one.offset, two.offset), *zip(one.stride, two.stride, strict=True))
        return len(apart) <= most and all(_multiples(pair, sizes) for pair in numbers)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        pairs = zip_longest(one, two, fillvalue=None)
        return all(_alike(*pair, sizes, shaping, most, given) for pair in pairs)
    whole = isinstance(one, int) and isinstance(two, int)
    return bool(one == two) or (whole and shaping and _multiples((one, two), sizes))


def _multiples(pair: tuple[int, int], sizes: tuple[int, int]) -> bool:
    """Whether two numbers are equal, or the same multiple of the numbers of rows."""
    return pair[0] == pair[1] or pair[0] * sizes[1] == pair[1] * sizes[0]
