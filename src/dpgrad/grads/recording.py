"""The operations that one call of a function makes, as a list of calls of torch on numbered tensors.

A tensor is known by its memory and by its shape in it, not as an object: two views that look alike are one number, and
operations that only make another view leave no trace but the view itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CannotTraceError", "Operation", "Recording", "Ref", "Value", "recording", "references", "writes"]

_KEPT = 1 << 20  # bytes of a tensor of sizes alone, such as a mask, that is kept instead of made at each call
_VIEWING = {"as_strided_", "detach_", "squeeze_", "t_", "transpose_", "unsqueeze_"}  # in place, and change no value
_MASKS = (torch.bool, torch.uint8)
_READING: set[Callable[..., Any]] = {
    Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__repr__, Tensor.apply_,
    Tensor.data_ptr, Tensor.map_, Tensor.numpy, Tensor.tolist,
}  # fmt: skip
_Key = tuple[object, ...]


class CannotTraceError(Exception):
    """A function that does other things in its next call, or in which a trace would keep a value of this one."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Value:
    """Where a tensor lies: its memory and its shape in it."""

    root: int  # the memory
    base: int  # the number of the tensor that was made with the memory or given; its own where it is that
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from the beginning of the base


@dataclass(frozen=True, slots=True)
class Operation:
    """One call. ``made`` is None where the result has no tensor that was not there before."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: int | tuple[int | None, ...] | None

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """The numbers of what was made, in order."""
        return self.made if isinstance(self.made, tuple) else (self.made,)


@dataclass
class Recording:
    """What a call did."""

    operations: list[Operation] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    given: list[int] = field(default_factory=list)  # the inputs
    state: list[int] = field(default_factory=list)  # parameters and buffers
    held: dict[int, Tensor] = field(default_factory=dict)  # tensors that were neither given nor made
    fixed: dict[int, Tensor] = field(default_factory=dict)  # made of sizes and numbers in the code alone
    written: set[int] = field(default_factory=set)  # memory that is changed in place
    results: list[int] = field(default_factory=list)


@cache
def writes(func: Any) -> list[tuple[int, str]]:
    """The arguments that an operation changes in place, by place and name."""
    return [
        (place, each.name)
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]


@contextmanager
def recording(given: Sequence[Tensor], state: Sequence[Tensor]) -> Iterator["_Recorder"]:
    """Within the block every operation is recorded; the memory of ``given`` and ``state`` must not be changed."""
    recorder = _Recorder(given, state)
    try:
        with _Reading(recorder), recorder:
            yield recorder
    finally:
        if recorder.refused is not None:  # also where the model made another error of it, or none
            raise recorder.refused


class _Reading(TorchFunctionMode):
    """Refuses what takes values out of torch."""

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING:
            raise self._recorder.refuse(f"values are read in Python ({func.__name__})")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers the tensors of a call and notes its operations."""

    def __init__(self, given: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Recording()
        self.refused: CannotTraceError | None = None
        self._numbers: dict[_Key, int] = {}
        self._roots: dict[int, int] = {}  # memory by the address of its storage,
        self._storages: list[StorageWeakRef] = []  # which stays taken as long as it is held
        self._fixed: set[int] = set()  # memory that holds nothing but what sizes and numbers in the code say
        self._offsets: dict[int, int] = {}  # of bases, from the beginning of their memory
        self.found.state = [self._outside(tensor) for tensor in state]
        outer = set(self._roots.values())
        self.found.given = [self._outside(tensor) for tensor in given]
        inner = [self.found.values[number].root for number in self.found.given]
        if len(set(inner)) < len(inner) or outer & set(inner):
            raise CannotTraceError("inputs share memory with each other or with the model")
        self._untouched = outer | set(inner)
        self._lifted: set[int] = set()  # memory that the code has made of numbers in Python

    def refuse(self, why: str) -> CannotTraceError:
        """The error to raise, which is kept: a model may catch it."""
        self.refused = self.refused or CannotTraceError(why)
        return self.refused

    def results(self, tensors: Sequence[Tensor]) -> Recording:
        """What was recorded, with these tensors as the results. Call it within the block."""
        with torch._C.DisableTorchFunction():
            self.found.results = [self._number(tensor) for tensor in tensors]
        return self.found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if not isinstance(func, torch._ops.OpOverload):
                raise self.refuse(f"{func} is no operation of torch alone")
            numbered = self._numbered(args), {name: self._numbered(value) for name, value in kwargs.items()}
            read = list(references(numbered))
            if func is torch.ops.aten.lift_fresh.default:
                self._lifted |= {self.found.values[number].root for number in read}
            changed = self._changed(func, *numbered)
            fixed = all(self.found.values[number].root in self._fixed for number in read)
            random = torch.Tag.nondeterministic_seeded in func.tags
            if not fixed:
                self._refuse_values(func, args)
            result = func(*args, **kwargs)
            leaves = result if isinstance(result, tuple | list) else [result]
            if not all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
                if not fixed or random:
                    raise self.refuse(f"values are read in Python ({func})")
                return result
            before = len(self.found.values)
            made = [None if leaf is None else self._made(leaf, read) for leaf in leaves]
            fresh = [number if number is not None and number >= before else None for number in made]
            own = [None if n is None or self.found.values[n].base != n else n for n in fresh]
            if any(number is not None for number in own) or changed or random:
                self._note(func, numbered, tuple(own) if isinstance(result, tuple | list) else own[0])
            self._note_fixed(leaves, own, changed, fixed and not random)
        return result

    def _refuse_values(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse an operation whose result is no tensor, or one whose shape depends on values."""
        shaped = torch.Tag.dynamic_output_shape in func.tags
        if shaped and func.overloadpacket.__name__ in ("index", "_unsafe_index"):
            shaped = any(isinstance(index, Tensor) and index.dtype in _MASKS for index in args[1])
        if shaped or torch.Tag.data_dependent_output in func.tags:
            raise self.refuse(f"shapes or numbers in Python depend on values ({func})")

    def _changed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """The memory that an operation changes in place."""
        if torch.Tag.inplace_view in func.tags:
            if func.overloadpacket.__name__ not in _VIEWING:
                raise self.refuse(f"memory is exchanged in place ({func})")
            return set()
        given = [args[place] if place < len(args) else kwargs.get(name) for place, name in writes(func)]
        changed = {self.found.values[number].root for number in references(given)}
        if changed & self._untouched:
            raise self.refuse(f"an input, a parameter or a buffer is changed in place ({func})")
        for number in [n for n in self.found.held if self.found.values[n].root in changed - self.found.written]:
            if self.found.values[number].root not in self._lifted:
                raise self.refuse(f"a tensor that the function did not make is changed in place ({func})")
            self.found.held[number] = self.found.held[number].clone()  # as it was before
        self.found.written |= changed
        return changed

    def _note(self, func: Any, numbered: tuple[Any, dict[str, Any]], made: Any) -> None:
        args, kwargs = numbered
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise self.refuse(f"random numbers come from a generator of the model's own ({func})")
        self.found.operations.append(Operation(func, args, kwargs, made))

    def _note_fixed(self, leaves: Sequence[Any], own: Sequence[int | None], changed: set[int], fixed: bool) -> None:
        for leaf, number in zip(leaves, own, strict=True):
            if number is not None and fixed:
                self._fixed.add(self.found.values[number].root)
                if leaf.untyped_storage().nbytes() <= _KEPT:
                    self.found.fixed[number] = leaf
        if not fixed:
            self._fixed -= changed

    def _numbered(self, value: Any) -> Any:
        """The argument with its tensors replaced by their numbers."""
        if isinstance(value, Tensor):
            return Ref(self._number(value))
        if isinstance(value, tuple | list):
            return tuple(map(self._numbered, value))
        return "nan" if isinstance(value, float) and math.isnan(value) else value

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor that is given to an operation; it may be one that nothing recorded has made."""
        storage, key = self._key(tensor)
        if key in self._numbers:
            return self._numbers[key]
        if storage not in self._roots:
            number = self._new(tensor, storage, key)
            self.found.held[number] = tensor
            return number
        root = self._roots[storage]
        bases = [number for number in self._offsets if self.found.values[number].root == root]
        if len(bases) > 1:
            raise self.refuse("the model has a view of memory that several of its tensors share")
        return self._view(tensor, key, bases[0])

    def _outside(self, tensor: Tensor) -> int:
        """The number of an input, a parameter or a buffer."""
        storage, key = self._key(tensor)
        return self._numbers[key] if key in self._numbers else self._new(tensor, storage, key)

    def _made(self, tensor: Tensor, read: Sequence[int]) -> int:
        """The number of a result; a view of what was read where it lies in the same memory."""
        storage, key = self._key(tensor)
        if key in self._numbers:
            return self._numbers[key]
        if storage not in self._roots:
            return self._new(tensor, storage, key)
        root = self._roots[storage]
        source = next((number for number in read if self.found.values[number].root == root), None)
        if source is None:
            raise self.refuse("a result lies in memory that was not given to its operation")
        return self._view(tensor, key, self.found.values[source].base)

    def _view(self, tensor: Tensor, key: _Key, base: int) -> int:
        value = self.found.values[base]
        if tensor.dtype != value.dtype:
            raise self.refuse("memory is seen as another type")
        offset = int(tensor.storage_offset()) - self._offsets[base]
        return self._add(key, Value(value.root, base, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset))

    def _new(self, tensor: Tensor, storage: int, key: _Key) -> int:
        """The number of a tensor in memory of its own, or of an input, a parameter or a buffer."""
        root = self._roots.setdefault(storage, len(self._roots))
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        number = len(self.found.values)
        self._offsets[number] = int(tensor.storage_offset())
        return self._add(key, Value(root, number, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0))

    def _add(self, key: _Key, value: Value) -> int:
        self._numbers[key] = len(self.found.values)
        self.found.values.append(value)
        return self._numbers[key]

    def _key(self, tensor: Tensor) -> tuple[int, _Key]:
        plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        if not plain or tensor.device.type != "cpu":
            raise self.refuse("tensors are not plain ones on the CPU")
        storage = tensor.untyped_storage()._cdata
        return storage, (storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def references(value: Any) -> Iterator[int]:
    """The numbers in an argument."""
    if isinstance(value, Ref):
        yield value.number
    elif isinstance(value, dict):
        for each in value.values():
            yield from references(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from references(each)
