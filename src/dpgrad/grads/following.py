"""Follow the rows of a batch through every operation of a pass, and refuse the first that may let them meet.

Where a pass is followed to its end, each example's loss is a function of that example's row alone, and which row an
element of a tensor belongs to is known by arithmetic on shapes. No value was looked at, so the same holds for every
batch of as many rows: the operations are the same. What a model's Python code does with values it cannot hide: reading
one (``item``, ``tolist``, ``numpy``) is refused as well. Where the code may do other things in the next pass, because
it reads random numbers, weights or buffers, the pass `varies`, and the next one has to be followed too.
"""

import gc
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dpgrad.grads.axes import Layout, same_for_rows
from dpgrad.grads.batch import leaves
from dpgrad.grads.calls import Call, FoundAt, KeptError, MixedError, Where
from dpgrad.grads.failures import UNWRITTEN, are_torchs, saving_hooks
from dpgrad.grads.kept import is_earlier, note_earlier, still_held
from dpgrad.grads.layers.unrolled import Unrolled
from dpgrad.grads.operations import OF_CONSTANTS, RULES, FollowRule, rule_of
from dpgrad.grads.sums import Batch

__all__ = ["Following", "keeps", "own_functions"]

_Key = tuple[object, ...]
# Ways out of the reach of torch, and into its backward pass.
_READING: set[Callable[..., Any]] = {
    Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.numpy, Tensor.tolist, Tensor.untyped_storage,
    Tensor.storage, Tensor.register_hook, Tensor.is_shared, Tensor.share_memory_, Tensor.__reduce_ex__,
    Tensor.__deepcopy__, Tensor.apply_, Tensor.map_, Tensor.__repr__,
    Tensor.grad_fn.__get__,  # type: ignore[union-attr]
}  # fmt: skip
# What writes to all of a tensor, whatever it held.
_FILLING = {
    "bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal", "normal", "random",
    "rrelu_with_noise", "uniform", "zero",
}  # fmt: skip
_IGNORED = {"_assert_async", "_assert_tensor_metadata", "_assert_scalar", "record_stream", "_version"}


class Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The place of the rows in every tensor of a pass over ``rows`` rows.

    >>> x = torch.ones(3, 2)
    >>> with Following(3).of(x) as following:
    ...     y = (x @ torch.ones(2, 4)).flatten()
    >>> following.place(y)
    Layout(dim=0, outer=1, inner=4)
    """

    supports_higher_order_operators = True

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.varies = False  # whether the next pass may do other things
        self._operations, self._arithmetic = 0, 0  # of torch, and the additions and multiplications in its products
        self._seed = 0  # of torch's own random numbers
        self._hooks: object = None  # on saved tensors, of the caller
        self._fixed: set[int] = set()  # storages made of sizes and of numbers in the code alone
        self.refused: MixedError | KeptError | None = None  # kept: a model may catch exceptions
        self._places: dict[_Key, Where] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # held, so no address comes again
        self._carrying: set[int] = set()  # storages that hold rows
        self._fresh: dict[int, set[_Key]] = {}  # storages that were made in this pass, and what is known of them
        self._unwritten: set[int] = set()  # storages that hold what was in memory before

    @contextmanager
    def of(self, batch: Batch) -> Iterator["Following"]:
        """Follow what is done within the block."""
        still_held()
        given = leaves(batch)
        for leaf in given:
            self._note(leaf, Layout(0))
        own = {self._key(leaf)[0] for leaf in given}
        self._seed, self._hooks, before = torch.initial_seed(), saving_hooks(), _random_states()
        try:
            with _Reading(self), self:
                yield self
        finally:
            self.varies |= _random_states() != before
            note_earlier({each: self._storages[each] for each in self._carrying - own})
            if self.refused is not None:  # also where the model made another error of it, as TorchScript does
                raise self.refused

    def place(self, tensor: Tensor) -> Where:
        """Where the rows stand in a tensor, or its periods where it does not descend from the batch."""
        storage, key = self._key(tensor)
        found = self._places.get(key)
        if found is not None:
            return found
        if storage in self._carrying:
            raise self._refuse("the model has a view of a tensor that could not be followed")
        if is_earlier(storage):
            raise self._refuse(KeptError())
        return tuple(
            1 if length == 1 or not stride else length
            for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )

    @property
    def density(self) -> float:
        """The additions and multiplications in products of one row, per operation of torch."""
        return self._arithmetic / max(1, self._operations * self.rows)

    def agrees(self, tensor: Tensor, layout: Layout | None) -> None:
        """Refuse a tensor whose rows do not stand where ``layout`` says; None says that it has no rows."""
        place = self.place(tensor)
        if isinstance(place, Layout):
            known = layout is not None and layout.fits(tensor.shape, self.rows) and place == layout
        else:
            known = layout is None or (
                layout.fits(tensor.shape, self.rows) and same_for_rows(place, tensor.shape, layout)
            )
        if not known:
            raise self._refuse("a parameter is combined with the batch in a dimension that changes with its size")

    def carries(self, tensor: Tensor) -> bool:
        """Whether a tensor descends from the batch."""
        return self._key(tensor)[0] in self._carrying

    def read(self, tensor: Tensor) -> None:
        """Note that the model has read values that do not descend from the batch."""
        self.varies |= self._key(tensor)[0] not in self._fixed

    def _refuse(self, why: str | MixedError | KeptError) -> MixedError | KeptError:
        error = MixedError(why) if isinstance(why, str) else why
        self.refused = self.refused or error
        return error

    def _key(self, tensor: Tensor) -> tuple[int, _Key]:
        with torch._C.DisableTorchFunction():
            if tensor.layout is not torch.strided or tensor.is_nested:
                raise self._refuse("the model uses sparse or nested tensors")
            storage = tensor.untyped_storage()._cdata
            return storage, (storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _note(self, tensor: Tensor, place: Where) -> None:
        storage, key = self._key(tensor)
        with torch._C.DisableTorchFunction():
            self._storages.setdefault(storage, StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        self._places[key] = place
        self._fresh.get(storage, set()).add(key)
        if isinstance(place, Layout):
            self._carrying.add(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise self._refuse(f"{func} has no rule that keeps examples apart")
        name = func.overloadpacket.__name__
        if name in _IGNORED:
            return func(*args, **kwargs)
        arguments = _bound(func, args, kwargs)
        call = Call(name.removesuffix("_"), arguments, None, self.place, self.rows)
        try:
            carrying = [tensor for tensor in call.tensors if isinstance(self.place(tensor), Layout)]
            if carrying and name == "_local_scalar_dense":
                raise MixedError("the model reads a value of the batch")
            written = [
                arguments[each.name]
                for each in func._schema.arguments
                if each.alias_info is not None and each.alias_info.is_write
            ]
            if types:  # of tensors with a ``__torch_dispatch__`` of their own
                raise MixedError("the model uses a class of tensors whose operations cannot be followed")
            self._refuse_unwritten(func, call)
            if torch.Tag.inplace_view in func.tags and carrying:
                raise MixedError(f"{name} changes the shape of a tensor in place")
            if saving_hooks() not in (self._hooks, None) and not are_torchs(saving_hooks()):
                raise MixedError("the model sets hooks on saved tensors")
            if carrying and any(map(self._is_kept, written)):  # before it is done: it would stay
                raise MixedError(f"{name} writes the batch in place into a tensor that was there before")
            before = [self.place(tensor) for tensor in written if isinstance(tensor, Tensor)]
        except MixedError as mixed:
            raise self._refuse(mixed) from None
        call.result = func(*args, **kwargs)
        self._operations += 1
        self._arithmetic += _arithmetic(func, args, kwargs, call.result)
        self._note_values(func, call, written)
        self._note_written(call, written)
        try:
            self._after(func, call, bool(carrying), written, before)
        except MixedError as mixed:
            raise self._refuse(mixed) from None
        return call.result

    def _refuse_unwritten(self, func: Any, call: Call) -> None:
        """Refuse to read memory that nothing was written to: other examples may have left values there."""
        if not self._unwritten or rule_of(func) is RULES["zeros"]:  # which reads shapes alone
            return
        for each in func._schema.arguments:
            fills = each.alias_info is not None and (
                not each.alias_info.is_write or each.is_out or call.name in _FILLING  # a view, or all of it
            )
            given = call[each.name]
            for tensor in given if isinstance(given, list | tuple) else [given]:
                if isinstance(tensor, Tensor) and not fills and self._key(tensor)[0] in self._unwritten:
                    raise MixedError(f"{call.name} reads memory that nothing was written to")

    def _note_written(self, call: Call, written: list[Any]) -> None:
        """Note which memory holds what was there before."""
        if call.name in UNWRITTEN and call.result.numel():
            self._unwritten.add(self._key(call.result)[0])
        for target in written if self._unwritten else ():
            if isinstance(target, Tensor) and _is_whole(target):
                self._unwritten.discard(self._key(target)[0])

    def _is_kept(self, target: object) -> bool:
        """Whether what is written to was there before the pass, and is nothing of the batch."""
        if not isinstance(target, Tensor):
            return False
        storage, _ = self._key(target)
        return storage not in self._carrying and storage not in self._fresh

    def _note_values(self, func: Any, call: Call, written: list[Any]) -> None:
        """Note what was read in Python, or by way of a shape, and what is the same in every pass."""
        fixed = torch.Tag.nondeterministic_seeded not in func.tags
        fixed = fixed and (call.name == "lift_fresh" or {self._key(each)[0] for each in call.tensors} <= self._fixed)
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
            self.varies |= not fixed
        results = call.result if isinstance(call.result, list | tuple) else [call.result]
        for tensor in (*results, *written):
            if isinstance(tensor, Tensor) and fixed:
                self._fixed.add(self._key(tensor)[0])
            elif isinstance(tensor, Tensor):
                self._fixed.discard(self._key(tensor)[0])

    def _by_place(self, func: Any, call: Call) -> bool:
        """Whether random numbers are drawn from a generator that a model has seeded: the same at every place."""
        given = call["generator"] not in (None, torch.default_generator)
        return given or (torch.Tag.nondeterministic_seeded in func.tags and torch.initial_seed() != self._seed)

    def _after(self, func: Any, call: Call, carrying: bool, written: list[Any], before: list[Where]) -> None:
        rule = rule_of(func)
        if carrying and rule is None:
            raise MixedError(f"{call.name} has no rule that keeps examples apart")
        found: FoundAt = None
        if self._by_place(func, call):
            if carrying:
                raise MixedError(f"{call.name} draws from a generator of the model's own")
        elif rule is not None and (call.tensors or rule is RULES["zeros"]):
            found = _ruled(rule, call) if carrying or rule in OF_CONSTANTS else _constant(rule, call)
        if written:
            target = written[0]
            if len(written) > 1 or not isinstance(target, Tensor) or target is not call["self"]:
                if carrying:
                    raise MixedError(f"{call.name} writes to tensors that were given to it")
                for tensor in written:
                    self._forget(tensor)
                return
            self._overwritten(call, target, before[0], found[0] if isinstance(found, list) else found)
            return
        results = call.result if isinstance(call.result, list | tuple) else [call.result]
        places = found if isinstance(found, list) else [found] * len(results)
        for tensor, place in zip(results, places, strict=False):
            if isinstance(tensor, Tensor):
                self._made(call, tensor, place, carrying)

    def _made(self, call: Call, tensor: Tensor, place: Any, carrying: bool) -> None:
        """Note a result; one that has no place among the results of the batch may not be used."""
        storage, _ = self._key(tensor)
        if storage not in self._storages and all(self._key(given)[0] != storage for given in call.tensors):
            self._fresh[storage] = set()  # elsewhere a view of what was there before
        known = not isinstance(place, Layout) or place.fits(tensor.shape, self.rows)
        if place is not None and known:
            self._note(tensor, place)
        elif carrying:
            self._note(tensor, Layout(0))
            self._carrying.add(storage)
            del self._places[self._key(tensor)[1]]  # a use of it is refused

    def _overwritten(self, call: Call, target: Tensor, before: Where, found: FoundAt) -> None:
        """Keep what is known of a tensor that was written to, or refuse where rows would come into other views."""
        if isinstance(before, Layout):
            same = found == before
            if not same and isinstance(found, tuple):
                same = same_for_rows(found, target.shape, before)
            if not same:
                raise MixedError(f"{call.name} writes other examples' values in place")
            return
        storage, key = self._key(target)
        whole = self._fresh.get(storage, set()) <= {key} and storage in self._fresh
        whole = whole and _is_whole(target)
        if isinstance(found, Layout) and not whole:
            raise MixedError(f"{call.name} writes the batch in place into a part of another tensor")
        self._forget(target)
        if whole and found is not None:
            self._note(target, found)  # type: ignore[arg-type]

    def _forget(self, tensor: Tensor) -> None:
        storage, _ = self._key(tensor)
        for key in [key for key in self._places if key[0] == storage]:
            del self._places[key]
        self._fresh.get(storage, set()).clear()


class _Reading(TorchFunctionMode):
    """Notes where the model takes values of the batch out of torch, or puts itself into the backward pass."""

    def __init__(self, following: Following) -> None:
        super().__init__()
        self.following = following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING and isinstance(args[0], Tensor):
            if self.following.carries(args[0]):
                raise self.following._refuse(
                    f"the model takes values of the batch out of torch, or sets hooks, by {func.__name__}"
                )
            self.following.read(args[0])
        return func(*args, **(kwargs or {}))


def _is_whole(target: Tensor) -> bool:
    """Whether a tensor is all that its memory holds, each value once."""
    size = target.element_size()
    for stride, length in sorted(zip(target.stride(), target.shape, strict=True)):
        if length != 1 and stride * target.element_size() != size:
            return False
        size *= length
    return bool(size == target.untyped_storage().nbytes())


def keeps(following: Following) -> bool:
    """Whether the model keeps anything of a pass that is over, whose results are gone."""
    if still_held() & following._carrying:
        gc.collect()  # cycles are nobody's
    return bool(still_held() & following._carrying)


def _arithmetic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The additions and multiplications in a product; 0 where torch has no formula, or one that does not fit."""
    count = flop_registry.get(func.overloadpacket)
    try:
        return 0 if count is None else int(count(*args, **kwargs, out_val=result))
    except Exception:  # some formulas assert shapes, such as those of attention with fewer key heads in older torch
        return 0


def _random_states() -> tuple[object, ...]:
    """Of the random numbers that are not torch's, which a model can only use in Python."""
    return random.getstate(), pickle.dumps(np.random.get_state())


def _ruled(rule: FollowRule, call: Call) -> FoundAt:
    try:
        return rule(call)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Arguments that the rule does not know, in another release of torch.
        raise MixedError(f"{call.name} could not be followed") from error


def _constant(rule: FollowRule, call: Call) -> FoundAt:
    """What is known of the results of tensors that do not descend from the batch.

    An argument that is even along a dimension could have rows there that are all alike. Where the operation would keep
    them apart, the result has rows that are all alike, too.
    """
    results = call.result if isinstance(call.result, list | tuple) else [call.result]
    periods = [list(each.shape) if isinstance(each, Tensor) else [] for each in results]
    for tensor in call.tensors:
        place = call.place(tensor)
        for dim, length in enumerate(tensor.shape):
            if isinstance(place, Layout) or place[dim] != 1 or length == 1:
                continue
            pretended = call.pretending(tensor, Layout(dim), length)
            with suppress(MixedError):
                found = _ruled(rule, pretended)
                for one, known in zip(found if isinstance(found, list) else [found], periods, strict=False):
                    if isinstance(one, Layout) and not one.flat:
                        known[one.dim] = 1
    return [tuple(known) for known in periods]


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults included."""
    schema = func._schema.arguments
    found = {each.name: each.default_value for each in schema if each.has_default_value()}
    found.update(zip((each.name for each in schema), args, strict=False))
    return {**found, **kwargs}


def own_functions(losses: Tensor) -> list[str]:
    """The functions of the model's own in the backward pass; none where torch knows every derivative."""
    found: list[str] = []
    waiting: list[Any] = [losses.grad_fn]
    known: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        if own and type(node)._forward_cls is not Unrolled:
            found.append(type(node).__name__.removesuffix("Backward"))
        waiting += [following for following, _ in node.next_functions]
    return found
