"""Book-keeping inside `torch.func.vmap`: the forward pass is that of one example, written once for all of them.

One example cannot see another, because the model is only ever given one. Where a parameter meets the data, the tensor
that holds all examples is known together with the dimension they stand in: no shape is read, no order is trusted.
Functions of a batch run on all examples at once (`dpgrad.grads.fold`), with the kernels of a batched pass. Where the
model reads a value in Python, examples that differ there are worked on separately (`dpgrad.grads.forks`).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads import recurrences
from dpgrad.grads.axes import Layout
from dpgrad.grads.batch import row_losses
from dpgrad.grads.bookkeeping import finished, watched
from dpgrad.grads.calls import KeptError
from dpgrad.grads.clip import PerExample
from dpgrad.grads.failures import CAUGHT, Failures
from dpgrad.grads.fold import FOLDED, folding, has_own_rule, is_batched, layer_folding, physical, wrapped
from dpgrad.grads.forks import Fork, Joined, Questions, RunAgain, Seen, by_path
from dpgrad.grads.kept import WrittenError, flat, guarded
from dpgrad.grads.layers import ANY_RANK, REWRITES, RULES
from dpgrad.grads.layers.normalization import refuse_training
from dpgrad.grads.layers.recurrent import DATA, OneLayer, composed, run_layer
from dpgrad.grads.layout import Layouts
from dpgrad.grads.reasons import HOOKS, ITEM, PICKS, WRITING, reason
from dpgrad.grads.shared import Shared, names_of, plain_of
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.swap import swapped
from dpgrad.grads.tape import Tape, _bound, _changes, _name

__all__ = ["CannotLiftError", "gradients", "losses"]

_C: Any = torch._C._functorch
_EXAMPLES_FIRST = Layout(0)

# What reads a value in Python, and the tensor whose value it reads.
_ASKING: dict[Callable[..., Any], Callable[..., Tensor] | None] = {
    **dict.fromkeys(
        (Tensor.__bool__, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__,
         Tensor.tolist, torch.is_nonzero, Tensor.is_nonzero)
    ),
    **dict.fromkeys(
        (torch.equal, Tensor.equal), lambda a, b: a.eq(b).all() if a.shape == b.shape else torch.tensor(False)
    ),
    **dict.fromkeys((torch.allclose, Tensor.allclose), lambda *args, **kwargs: torch.isclose(*args, **kwargs).all()),
    Tensor.__contains__: lambda tensor, element: (tensor == element).any(),
}  # fmt: skip
# What makes tensors that a model writes to later.
_FACTORIES = {
    getattr(place, name)
    for place, names in (
        (torch, "zeros ones empty full zeros_like ones_like empty_like full_like clone"),
        (Tensor, "new_zeros new_ones new_empty new_full clone"),
    )
    for name in names.split()
}
_COMMON = {*_FACTORIES, Tensor.new_tensor}  # whose results may hold no example
# Whose rules for vmap exchange the memory of all examples for one in another shape, or for none.
_MEMORY = {Tensor.resize_, Tensor.resize_as_, torch.resize_as_, Tensor.as_strided_, torch.as_strided_}
_OTHERS = "vmap gives examples the memory of others ({})"
# Functions that vmap lets examples meet in, and those that do the same.
_PLAINER: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._is_all_true: torch.all, torch._is_any_true: torch.any,
    Tensor._is_all_true: torch.all, Tensor._is_any_true: torch.any,
}  # fmt: skip
# The arguments whose values say how many entries the result has. vmap refuses most, or fails on some data only.
_COUNTING: dict[Callable[..., Any], int] = {
    **{
        getattr(place, name): argument
        for place in (torch, Tensor)
        for argument, names in enumerate(
            ("nonzero argwhere unique unique_consecutive bincount", "masked_select repeat_interleave")
        )
        for name in names.split()
    },
    torch.where: 0,
    torch._VF._pack_padded_sequence: 1,
}
_PREPARED = {Tensor.__getitem__, Tensor.__setitem__, *_COUNTING}


class CannotLiftError(Exception):
    """The model does something that cannot be said of one example alone inside vmap. The message says what."""


class _RefusedError(UnsupportedModelError):
    """The model does something that no way of running it would make private."""


class _UnclearError(Exception):
    """The model failed inside vmap, for a reason that may be its own."""


class _Lifting(TorchFunctionMode):
    """Every torch function that the model calls inside vmap, with parameters or without."""

    def __init__(self, tape: Tape, questions: Questions, spread: bool) -> None:
        super().__init__()
        self.tape, self.questions, self.spread = tape, questions, spread
        self.level = 0
        self.made: list[weakref.ref[Tensor]] = []  # what the model was given
        self.raised: Fork | RunAgain | None = None  # kept: a model may catch it

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, inside vmap, functions are followed."""
        self.level = _C.maybe_current_level()
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.questions.seen.refuse_kept(flat((*args, *kwargs.values())))
        result = self._called(func, args, kwargs, Shared in types)
        self.made += map(weakref.ref, filter(is_batched, flat([result])))
        return result

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of ``func``, one of whose arguments is a parameter; its use is recorded on the tape."""
        return self._called(func, args, kwargs, shared=True)

    def _called(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], shared: bool) -> Any:
        func, answered = _PLAINER.get(func, func), len(self.questions.given)
        try:
            result = self._done(func, args, kwargs, shared)
        except (Fork, RunAgain) as raised:
            self.raised = self.raised or raised
            raise
        common = _is_common(result) and len(self.questions.given) == answered and func not in _COMMON
        if common and args and is_batched(args[0]):
            raise CannotLiftError(f"vmap computes one result for all examples ({_name(func)})")
        return result

    def _done(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], shared: bool) -> Any:
        _refuse_meeting(func, args, kwargs)
        if _C.maybe_current_level() != self.level:
            return self._deeper(func, args, kwargs) if shared else func(*args, **kwargs)
        if func in REWRITES:
            with self:
                return REWRITES[func](*args, **kwargs)
        if func is run_layer:
            return self._layer(args[0])
        if func in _ASKING:
            return self._asked(func, args, kwargs)
        if shared:
            return self._with_parameters(func, args, kwargs)
        return self._on_data(func, args, kwargs)

    def batched(self, value: Tensor) -> Tensor:
        """The tensor as all examples have it."""
        if not isinstance(value, Shared):
            return value
        with enable_inplace_requires_grad(True):
            return wrapped(value.make_twin(), self.level)

    def _deeper(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A function of parameters inside a vmap or grad of the model's own: shapes and types may be read."""
        values, spec = pytree.tree_flatten((tuple(args), kwargs))
        result = self.tape._plainly(func, values, spec)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            raise CannotLiftError(
                f"parameter {names_of(values)[0]} is used inside a vmap or grad of the model's own ({_name(func)})"
            )
        return result

    # Values that are read in Python

    def _asked(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        value_of = _ASKING[func]
        given = [plain_of(value) for value in args]
        if not any(map(is_batched, given)):
            return func(*given, **kwargs)
        if value_of is None:
            return func(self._answer(func, given[0]), *given[1:], **kwargs)
        return bool(self._answer(func, value_of(*given, **kwargs)))

    def _answer(self, func: Callable[..., Any], value: Tensor) -> Tensor:
        """What the examples have here, where they agree."""
        if not is_batched(value):
            return value
        with torch._C._DisableFuncTorch():
            return self.questions.answer(_name(func), physical(value))

    def _number(self, func: Callable[..., Any], value: Any) -> Any:
        """A value that a function needs in Python: the examples' where it is one number."""
        if not is_batched(value) or value.numel() != 1 or physical(value).requires_grad:
            return value
        return self._answer(func, value).item()

    def _index(self, func: Callable[..., Any], index: Any) -> Any:
        """An index whose slices begin and end at numbers."""
        if isinstance(index, slice):
            return slice(*(self._number(func, end) for end in (index.start, index.stop, index.step)))
        return tuple(self._index(func, each) for each in index) if isinstance(index, tuple) else index

    # Data without parameters

    def _on_data(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in FOLDED:
            result = self._folded(func, args, kwargs)
            if result is not None:
                return result
        elif func in _PREPARED:
            func, args = self._prepared(func, args)
        elif self.spread and func in _FACTORIES:
            return self._spread(func(*args, **kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if ITEM.search(str(error)):
                numbers = [self._number(func, value) for value in args]
                named = {name: self._number(func, value) for name, value in kwargs.items()}
                return func(*numbers, **named)
            if not WRITING.search(str(error)) or self.spread:
                raise
        raise self._again()

    def _prepared(self, func: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The function and arguments by which vmap does what ``func`` does."""
        given = list(args)
        if func in _COUNTING:
            place = _COUNTING[func]
            if len(given) > place and not (func is torch.where and len(given) > 1):
                given[place] = self._shape(func, given[place])
            return func, given
        index = self._index(func, given[1])
        if func is Tensor.__setitem__ and _is_mask(index) and not (isinstance(given[2], Tensor) and given[2].ndim):
            return Tensor.masked_fill_, [given[0], index[(..., *[None] * (given[0].ndim - index.ndim))], given[2]]
        several = isinstance(index, tuple)
        masks = [self._shape(func, each) if _is_mask(each) else each for each in (index if several else [index])]
        given[1] = tuple(masks) if several else masks[0]
        return func, given

    def _shape(self, func: Callable[..., Any], value: Any) -> Any:
        """A value that says how many entries the result of ``func`` has: each example's own, where that is wanted."""
        if not is_batched(value):
            return value
        if not self.questions.seen.masks:
            raise CannotLiftError(PICKS.format(_name(func)))
        return self._answer(func, value)

    def _spread(self, made: Tensor) -> Tensor:
        """A tensor that examples are written to: one for each of them."""
        if is_batched(made):
            return made
        with torch._C._DisableFuncTorch():
            own = made.expand(self.tape.examples, *made.shape).clone()
        return wrapped(own, self.level)

    def _again(self) -> RunAgain:
        """The model writes examples into a tensor that has none: every example needs its own."""
        self.questions.seen.spread = True
        return RunAgain()

    def _folded(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A function of the batch on all examples at once; None where it has to be left to vmap."""
        if func is F.batch_norm:
            _refuse_batch_norm(args, kwargs)
        with torch._C._DisableFuncTorch():
            fold = folding(func, args, kwargs, self.tape.examples)
            result = None if fold is None else self._on_folded(func, fold.args, fold.kwargs)
            if fold is None or result is None:
                return None
            return fold.closed(result, self.level)

    def _on_folded(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A function of tensors whose first dimension holds all examples; None where no rule says what it does."""
        if not any(isinstance(value, Shared) for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        arguments = self.tape._arguments(func, args, kwargs)
        return arguments and self.tape._by_rule(func, args, kwargs, arguments, _EXAMPLES_FIRST)

    def _layer(self, layer: OneLayer) -> Any:
        """One layer of a recurrent network, on all examples at once where it can be."""
        data: dict[str, Any] = {
            name: self.batched(each) for name in DATA if isinstance(each := getattr(layer, name), Shared)
        }
        layer = layer._replace(**data)
        with torch._C._DisableFuncTorch():
            fold = layer_folding(layer, self.tape.examples) if recurrences.fits(layer) else None
            if fold is not None:
                with temporarily_clear_interpreter_stack():  # an autograd.Function is called
                    state = recurrences.recorded(self.tape, fold.args[0], _EXAMPLES_FIRST)
                return fold.closed(state, self.level)
        with self:
            return composed(layer)

    # Parameters

    def _with_parameters(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in RULES:
            result = self._folded(func, args, kwargs)
            result = self._by_constant(func, args, kwargs) if result is None else result
        else:
            result = self.tape._flipped(func, args)
        return self._followed(func, args, kwargs) if result is None else result

    def _by_constant(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        """A layer applied to a tensor that no example is in, such as positions; None where no rule says how."""
        arguments = self.tape._arguments(func, args, kwargs) if RULES[func] in ANY_RANK else None
        if arguments is None or arguments["input"].requires_grad:
            return None
        if any(map(is_batched, arguments.values())):
            return None
        with torch._C._DisableFuncTorch(), enable_inplace_requires_grad(True):
            made = self.tape._by_rule(func, args, kwargs, arguments, None)
        return self.batched(made).clone() if self.spread else made

    def _followed(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``func`` on parameters: shared again, or by one twin per example where it meets the examples."""
        values, spec = pytree.tree_flatten((tuple(args), kwargs))
        if _changes(func) and not is_batched(values[0]):
            if self.spread or self._is_parameter(values[0]):
                raise CannotLiftError(f"{_name(func)} changes in place a tensor that no example is in")
            raise self._again()
        if any(map(is_batched, values)):
            return self._on_twins(func, values, spec)
        kept = [value for value in values if isinstance(value, Tensor) and not isinstance(value, Shared)]
        if any(value.requires_grad for value in kept):
            raise _RefusedError(
                f"{_name(func)} combines {names_of(values)[0]} with a tensor that needs a gradient and belongs to no "
                "example, such as a parameter kept outside its module"
            )
        result = self.tape._plainly(func, values, spec)
        leaves, shape = pytree.tree_flatten(result)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return result
        if any(is_batched(leaf) or (self.spread and not self._is_parameter(leaf)) for leaf in leaves):
            return self._on_twins(func, values, spec)  # of random numbers, or to be written to, each example's own
        recorded = torch.is_grad_enabled()

        def made(leaf: Any, which: int) -> Any:
            def twin() -> Tensor:
                with torch.set_grad_enabled(recorded):
                    found: Tensor = pytree.tree_leaves(self._on_twins(func, values, spec))[which]
                return physical(found)

            if not isinstance(leaf, Tensor):
                return leaf
            same = [value for value in values if isinstance(value, Shared) and value.plain is leaf]
            return same[0] if same else self.tape._shared(leaf.detach(), names_of(values), twin)

        return pytree.tree_unflatten([made(leaf, which) for which, leaf in enumerate(leaves)], shape)

    def _is_parameter(self, value: object) -> bool:
        """Whether a value is no tensor, or has the memory of a parameter: nothing to give each example a copy of."""
        if not isinstance(value, Tensor):
            return True
        memory = {shared.plain.untyped_storage().data_ptr() for shared in self.tape.shared.values()}
        return plain_of(value).untyped_storage().data_ptr() in memory

    def _on_twins(self, func: Callable[..., Any], values: list[Any], spec: Any) -> Any:
        twins = [self.batched(value) if isinstance(value, Shared) else value for value in values]
        args, kwargs = pytree.tree_unflatten(twins, spec)
        return self._on_data(func, args, kwargs)


def _refuse_meeting(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse what lets examples meet inside vmap, or inside a vmap of the model's own within it."""
    if has_own_rule(func, args):
        raise CannotLiftError(f"{_name(args[0] if isinstance(args[0], type) else func)} has its own rule for vmap")
    if func in _MEMORY and is_batched(args[0]):
        raise CannotLiftError(_OTHERS.format(_name(func)))
    if func is Tensor.__repr__ and is_batched(args[0]):
        raise CannotLiftError("it prints values of all examples")
    if kwargs.get("generator") not in (None, torch.default_generator):
        raise _RefusedError(
            f"{_name(func)} draws from a generator of the model's own, which gives examples numbers by their place "
            "in the batch: draw from torch's default generators"
        )


def _is_common(result: object) -> bool:
    """Whether a result is a tensor in which no example is, or the first of several is."""
    first = result[0] if isinstance(result, list | tuple) and result else result
    return isinstance(first, Tensor) and not isinstance(first, Shared) and not is_batched(first)


def _is_mask(value: object) -> bool:
    return isinstance(value, Tensor) and is_batched(value) and value.dtype in (torch.bool, torch.uint8)


def _refuse_batch_norm(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    given = _bound(F.batch_norm, args, kwargs) or {"training": True, "running_mean": None, "running_var": None}
    try:
        refuse_training(given["training"], given["running_mean"], given["running_var"])
    except ValueError as error:
        raise _RefusedError(str(error)) from None


def gradients(
    model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1, seen: Seen | None = None
) -> PerExample:
    """The gradient of every example, as `dpgrad.grads.vmap.gradients` defines it.

    ``seen`` is told how many paths the examples took. Raises `CannotLiftError` where vmap cannot take the model.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> found = gradients(model, lambda model, x: model(x)[:, 0], torch.tensor([[2.0], [3.0]]), torch.ones(2))
    >>> found.uses["weight"].per_example().flatten()
    tensor([2., 3.])
    """
    seen = Seen() if seen is None else seen
    examples = len(weights) // rows

    def run(few: Tensor | None, questions: Questions) -> PerExample:
        own, of_own = (batch, weights) if few is None else _chosen((batch, weights), few, rows)
        with _own_errors(model, loss, own, rows):
            return _gradients(model, loss, own, of_own, rows, questions)

    paths = by_path(examples, seen, run)
    if len(paths) == 1:
        return paths[0][1]
    return PerExample(
        {name: Joined(tuple((few, found.uses[name]) for few, found in paths), examples) for name in paths[0][1].uses}
    )


def losses(model: nn.Module, loss: Loss, batch: Batch, rows: int = 1, seen: Seen | None = None) -> Tensor:
    """The loss of each row, where the model sees one example at a time.

    >>> losses(nn.Identity(), lambda model, x: model(x)[:, 0] / len(x), torch.tensor([[2.0], [3.0]]))
    tensor([2., 3.])
    """
    seen = Seen() if seen is None else seen
    count = len(pytree.tree_leaves(batch)[0])

    def run(few: Tensor | None, questions: Questions) -> Tensor:
        own = batch if few is None else _chosen(batch, few, rows)
        tape = _tape(trainable(model), own, rows)
        with _own_errors(model, loss, own, rows), torch.no_grad(), watched(model, tape):
            return _forward(model, loss, own, rows, tape, questions).view(-1, rows)

    paths = by_path(count // rows, seen, run)
    order = torch.cat([few for few, _ in paths]).argsort()
    return torch.cat([found for _, found in paths])[order].flatten()


def _chosen(batch: Batch, few: Tensor, rows: int) -> Batch:
    """The rows of some examples."""
    indices = (few[:, None] * rows + torch.arange(rows, device=few.device)).flatten()
    return pytree.tree_map(lambda leaf: leaf[indices.to(leaf.device)], batch)


def _gradients(
    model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int, questions: Questions
) -> PerExample:
    parameters, seen = trainable(model), questions.seen
    tape = _tape(parameters, batch, rows)
    with torch.enable_grad(), watched(model, tape):
        values = _forward(model, loss, batch, rows, tape, questions)
        found = finished(values, weights, tape, parameters, seen.every)
    if found is None:
        seen.every = True
        raise RunAgain
    return found


def _tape(parameters: dict[str, nn.Parameter], batch: Batch, rows: int) -> Tape:
    examples = len(pytree.tree_leaves(batch)[0]) // rows
    return Tape(parameters, examples, examples, Layouts())


def _forward(model: nn.Module, loss: Loss, batch: Batch, rows: int, tape: Tape, questions: Questions) -> Tensor:
    """The loss of each row from a pass inside vmap; the model is watched by the tape."""
    grouped = pytree.tree_map(lambda leaf: leaf.unflatten(0, (tape.examples, rows)), batch)
    lifting = _Lifting(tape, questions, questions.seen.spread)
    tape.lifted = lifting.call

    def one(example: Batch) -> Tensor:
        lifting.made += map(weakref.ref, pytree.tree_leaves(example))
        with lifting.entered():
            found = lifting.batched(row_losses(loss, model, example, rows))
        if lifting.raised is not None:
            raise lifting.raised
        return found

    try:
        with _without_hooks(), _quiet_fallback(), Failures() as failures:
            values: Tensor = torch.func.vmap(one, randomness="different")(grouped)
        if failures.exchanged or failures.first:  # set_ is no torch function, but an operation
            raise CannotLiftError(_OTHERS.format("set_") if failures.exchanged else CAUGHT.format(failures.first))
        questions.seen.keep(lifting.made)
        return values.reshape(-1)
    except (CannotLiftError, _RefusedError, KeptError):
        raise
    except Exception as error:
        why, known = reason(error)
    # Out of the handler, so the error does not hold the tensors of the pass.
    raise CannotLiftError(why) if known else _UnclearError(why)


@contextmanager
def _own_errors(model: nn.Module, loss: Loss, batch: Batch, rows: int) -> Iterator[None]:
    """Tell an error that the model has anyway from one that it has inside vmap alone, by running it without vmap."""
    try:
        yield
    except _UnclearError as unclear:
        why = str(unclear)
    else:
        return
    with torch.no_grad(), swapped(model, {}), suppress(WrittenError):
        row_losses(guarded(loss), model, batch, len(pytree.tree_leaves(batch)[0]))
    raise CannotLiftError(why)


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Refuse hooks on saved tensors: a checkpointed block would run again after vmap has ended."""
    with ExitStack() as stack:
        with suppress(RuntimeError):  # the caller has some, around the whole pass: they see tensors of all examples
            stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(HOOKS))
        yield


@contextmanager
def _quiet_fallback() -> Iterator[None]:
    """No warning where vmap has no rule for a function and takes the examples one by one."""
    _C._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        _C._set_vmap_fallback_warning_enabled(True)
