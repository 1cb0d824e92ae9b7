"""Parameters that see how they are used.

During a forward pass every trainable parameter is a `Shared` tensor: it has the parameter's values, and each torch
function called with it is passed to a `Tape`. Where a layer's rule knows the function, the tape notes the input and the
place in the graph where the gradient of the output will arrive; nothing else is computed. Anything else a model may do
with a parameter is followed too: as long as it meets only constants the result stays shared, and where it meets the
batch it is replaced by its *twin*, one copy per row, through `torch.func.vmap` of that one function. The gradient of a
twin is the gradient of each row.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads import recurrences
from dpgrad.grads.axes import Layout
from dpgrad.grads.calls import UnfollowedError
from dpgrad.grads.following import Following
from dpgrad.grads.layers import ANY_RANK, REWRITES, RULES, Rule
from dpgrad.grads.layers.recurrent import run_layer
from dpgrad.grads.layout import AmbiguousError, Layouts, by_shape
from dpgrad.grads.repeating import Script
from dpgrad.grads.shared import Record, Shared, names_of, plain_of
from dpgrad.grads.uses import Dense, Outer, Use

__all__ = ["Record", "Shared", "Tape", "UnseenError"]

_BATCH_FIRST = Layout(0)
_FLIPS = (torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]


_AUGMENTED = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_CHANGING = {"__setitem__", "__set__", *(f"__i{operator}__" for operator in _AUGMENTED.split())}  # in place
_PARAMETERS = {func: [*inspect.signature(rule).parameters.values()][1:] for func, rule in RULES.items()}
_DEFAULTS = {func: {each.name: each.default for each in parameters} for func, parameters in _PARAMETERS.items()}
_POSITIONAL = {
    func: [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    for func, parameters in _PARAMETERS.items()
}


class UnseenError(Exception):
    """A parameter is used in a way that the known layouts do not cover."""


def _bound(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments by the names that the rule of ``func`` has for them; None where it has others."""
    positional = dict(zip(_POSITIONAL[func], args, strict=False))
    bound = {**_DEFAULTS[func], **positional, **kwargs}
    fits = len(positional) == len(args) and len(bound) == len(_DEFAULTS[func]) and positional.keys().isdisjoint(kwargs)
    return bound if fits and all(value is not inspect.Parameter.empty for value in bound.values()) else None


class Tape:
    """Notes every use of the parameters of one forward pass over ``rows`` rows that belong to ``examples`` examples.

    ``layouts`` says where the batch stands in the tensors that parameters meet; None finds out. Where the pass is
    followed operation by operation, ``following`` knows it and is asked: it refuses what the layouts get wrong.
    Without, layouts are found by shape, and are a guess. ``script`` notes the operations of the pass.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rows: int,
        examples: int,
        layouts: Layouts | None = None,
        following: Following | None = None,
        script: Script | None = None,
    ) -> None:
        self.rows, self.examples, self.following, self.script = rows, examples, following, script
        self.finding = layouts is None
        self.layouts = Layouts(guessed=following is None) if layouts is None else layouts
        self.shapes: set[tuple[object, ...]] = set()  # that layouts were found from, for one row
        self.recording = True
        self.records: list[Record] = []
        self.made: list[Shared] = []  # from parameters; what a gradient reaches there was not followed
        self.lifted: Callable[..., Any] | None = None  # called in place of `call` where the pass runs inside vmap
        self._twins: dict[str, Tensor] = {}
        self.shared = {name: self._parameter(name, parameter) for name, parameter in parameters.items()}

    def let_go(self) -> None:
        """Forget the pass: the tape and its tensors hold each other, and would until garbage is collected."""
        self.lifted = None
        for noted in (self.records, self.made, self.shared, self._twins):
            noted.clear()

    def _parameter(self, name: str, parameter: Tensor) -> Shared:
        plain = parameter.detach().requires_grad_()
        return self._shared(plain, (name,), lambda: self._twin(name, plain), whole=True)

    def _shared(
        self,
        plain: Tensor,
        names: tuple[str, ...],
        make_twin: Callable[[], Tensor],
        whole: bool = False,
        flipped: bool = False,
    ) -> Shared:
        made: Shared = Tensor._make_subclass(Shared, plain, plain.is_floating_point())
        made.tape, made.plain, made.names, made.whole, made.flipped = self, plain, names, whole, flipped
        made.make_twin = make_twin
        if self.recording and plain.is_floating_point():
            self.made.append(made)
        return made

    def _twin(self, name: str, plain: Tensor) -> Tensor:
        """One copy of a parameter per row, which takes no memory; its gradient is each row's own."""
        if name not in self._twins:
            twin = plain.detach().expand(self.rows, *plain.shape).requires_grad_()
            self._twins[name] = twin
            self._record(
                twin, twin.shape, _BATCH_FIRST, (name,), lambda g: [Dense(self._folded(g, _BATCH_FIRST).sum(1))]
            )
        return self._twins[name]

    def _folded(self, tensor: Tensor, layout: Layout) -> Tensor:
        return layout.folded(tensor, self.rows, self.examples)

    def _record(
        self,
        place: Tensor | GradientEdge,
        shape: torch.Size,
        layout: Layout,
        names: tuple[str, ...],
        uses: Callable[[Tensor], Sequence[Use]],
        passed: bool = False,
    ) -> None:
        if self.recording:
            self.records.append(Record(place, shape, layout, names, uses, passed))

    def layout(self, tensor: Tensor, *key: object) -> Layout | None:
        """Where the batch stands in ``tensor``."""
        place = (*key, tensor.ndim)
        inputs = self.layouts.inputs
        if self.finding:
            found = self._found(tensor)
            before = inputs.get(place, (found,))
            if {each and each.dim for each in before} != {found and found.dim}:
                raise AmbiguousError(f"{_name(key[1])} combines {key[0]} with the batch in different dimensions")
            inputs[place] = before if found in before else (*before, found)
            shape = [
                length // self.rows if found and dim == found.dim else length for dim, length in enumerate(tensor.shape)
            ]
            self.shapes.add((place, found, *shape))
            return found
        fitting = [each for each in inputs.get(place, ()) if each is None or each.fits(tensor.shape, self.rows)]
        if not fitting:
            raise UnseenError(f"{key[0]} in {_name(key[1])}")
        if self._followed_by is not None:
            self._followed_by.agrees(tensor, fitting[0])
        return fitting[0]

    @property
    def _followed_by(self) -> Following | None:
        """Who follows the pass; nobody when a checkpointed block runs again during the backward pass."""
        return self.following if self.recording else None

    def _found(self, tensor: Tensor) -> Layout | None:
        """Where the batch stands in ``tensor``: known, or, for what every row has alike, seen from its shape."""
        place = None if self.following is None else self.following.place(tensor)
        if isinstance(place, Layout):
            return place
        found = by_shape(tuple(tensor.shape), self.rows)
        if found is not None and self.following is not None:
            self.following.agrees(tensor, found)
        return found

    def _met(self, tensor: Tensor, names: tuple[str, ...], func: Callable[..., Any], place: object) -> Layout | None:
        """Where the batch stands in a tensor that parameters meet."""
        layout = self.layout(tensor, names, func, place)
        if layout is None and tensor.requires_grad:  # it came from the batch, and its own gradient would be lost
            raise UnfollowedError(
                f"{_name(func)} combines {names} with a tensor that was computed from the batch and has no batch "
                "dimension"
            )
        return layout

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of ``func``; what it does with parameters is noted."""
        if func in REWRITES:
            return REWRITES[func](*args, **kwargs)
        if func is run_layer:
            return recurrences.run(self, args[0])
        if func in RULES:
            arguments = self._arguments(func, args, kwargs)
            if arguments is not None:
                layout = self._met(arguments["input"], names_of(arguments.values()), func, "input")
                if RULES[func] in ANY_RANK or (layout is not None and not layout.dim):
                    return self._by_rule(func, args, kwargs, arguments, layout)
        flipped = self._flipped(func, args)
        return self._followed(func, args, kwargs) if flipped is None else flipped

    def _flipped(self, func: Callable[..., Any], args: Sequence[Any]) -> Shared | None:
        """A parameter transposed, which is whole as before; None for any other function."""
        if func not in _FLIPS or not args[0].whole or args[0].ndim != 2:
            return None
        it = args[0]
        twin = it.make_twin
        return self._shared(it.plain.t(), it.names, lambda: twin().mT, whole=True, flipped=not it.flipped)

    def _arguments(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The arguments of a rule, where the data are no parameter and the parameters are whole; None elsewhere."""
        bound = _bound(func, args, kwargs)
        if bound is None:
            return None
        data = bound["input"]
        others = [value for name, value in bound.items() if name != "input" and isinstance(value, Shared)]
        simple = isinstance(data, Tensor) and not isinstance(data, Shared) and all(other.whole for other in others)
        product = "other" not in bound or plain_of(bound["other"]).ndim <= 2  # not one of batches
        return bound if simple and product else None

    def _by_rule(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        arguments: dict[str, Any],
        layout: Layout | None,
    ) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            out: Tensor = func(*map(plain_of, args), **{name: plain_of(value) for name, value in kwargs.items()})
        parameters = {name: value for name, value in arguments.items() if isinstance(value, Shared)}
        names = tuple(value.names[0] for value in parameters.values())
        if layout is not None:
            if torch.is_grad_enabled() and self.recording:
                uses = self._rule_uses(func, arguments, parameters, layout, out)
                passed = arguments["input"].requires_grad
                self._record(get_gradient_edge(_origin(out)), out.shape, layout, names, uses, passed)
            return out
        # No row of the batch is in it yet: every row gets its own copy of the output.
        spread = {**arguments, "input": arguments["input"].expand(self.rows, *arguments["input"].shape)}
        tap = out.detach().expand(self.rows, *out.shape).requires_grad_(torch.is_grad_enabled())
        if torch.is_grad_enabled():
            uses = self._rule_uses(func, spread, parameters, _BATCH_FIRST, out)
            self._record(tap, tap.shape, _BATCH_FIRST, names, uses)
        return self._shared(out.detach(), names, lambda: tap)

    def _rule_uses(
        self,
        func: Callable[..., Any],
        arguments: dict[str, Any],
        parameters: dict[str, Shared],
        layout: Layout,
        out: Tensor,
    ) -> Callable[[Tensor], Sequence[Use]]:
        rule: Rule = RULES[func]
        data: Tensor = arguments["input"]
        version = data._version
        # Autocast computed with the input in the type of the output.
        noted = data.detach().to(out.dtype) if data.is_floating_point() else data
        others = {name: plain_of(value) for name, value in arguments.items() if name not in ("g", "input")}

        def uses(g: Tensor) -> list[Use]:
            if noted.untyped_storage() is data.untyped_storage() and data._version != version:
                raise UnsupportedModelError(
                    f"the input of {_name(func)} with parameter {parameters[next(iter(parameters))].names[0]} was "
                    "changed in place after it was used: use the function that is not in place"
                )
            given = {"input": self._folded(noted, layout), **others}
            found = rule(self._folded(g, layout), **given)
            return [_turned(found[name]) if value.flipped else found[name] for name, value in parameters.items()]

        return uses

    def _followed(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``func`` on shared tensors: shared again, or by one twin per row where it meets the batch."""
        values, spec = pytree.tree_flatten((tuple(args), kwargs))
        tensors = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        names = tuple(sorted(set(names_of(values))))
        layouts = {i: None if isinstance(values[i], Shared) else self._met(values[i], names, func, i) for i in tensors}
        if _changes(func):
            return self._changed(func, values, spec, layouts)
        met = any(layouts.values())
        if met and self.layouts.guessed and any(map(_counts, values)):
            # Row by row such an index may lie outside: an error on a CPU, the end of the process on a CUDA device.
            raise UnfollowedError(f"{_name(func)} combines {names} with whole numbers of the batch")
        said = [
            plain_of(value).ndim if isinstance(value, Tensor) else value
            for value in values
            if isinstance(value, Tensor | str)
        ]
        key = (names, func, *said)
        if met and not self.finding:
            if key not in self.layouts.results:
                raise UnseenError(f"{names} in {_name(func)}")
            self._agree(func, values, spec, self.layouts.results[key])
            return self._by_vmap(func, values, spec, layouts, self.layouts.results[key])
        result = self._plainly(func, values, spec)
        found, shape = pytree.tree_flatten(result)
        if not any(isinstance(leaf, Tensor) for leaf in found):
            return result
        outs = [
            self.layout(leaf, names, func, "result", j, *said) if isinstance(leaf, Tensor) else None
            for j, leaf in enumerate(found)
        ]
        if met:
            if not all(outs):
                raise AmbiguousError(f"{_name(func)} of {names} mixes the rows of the batch")
            self.layouts.results[key] = tuple(out for out in outs if out)
            return result
        return pytree.tree_unflatten(
            [
                self._result(leaf, names, func, values, spec, layout, j)
                for j, (leaf, layout) in enumerate(zip(found, outs, strict=True))
            ],
            shape,
        )

    def _agree(self, func: Callable[..., Any], values: list[Any], spec: Any, outs: Sequence[Layout]) -> None:
        """Where the pass is followed, see that ``func`` of the whole batch puts the rows where it did before."""
        if self._followed_by is None:
            return
        cuda = [value.device for value in values if isinstance(value, Tensor) and value.is_cuda]
        alone = nullcontext() if self.script is None else self.script.resting()  # later passes do not do it
        with torch.no_grad(), torch.random.fork_rng(cuda[:1]), alone:
            found = pytree.tree_leaves(self._plainly(func, values, spec))
        for leaf, out in zip(found, outs, strict=True):
            if not out.fits(leaf.shape, self.rows):
                raise UnseenError(f"{names_of(values)} in {_name(func)}")
            self._followed_by.agrees(leaf, out)

    def _plainly(self, func: Callable[..., Any], values: list[Any], spec: Any) -> Any:
        """``func`` on the values themselves. It must leave what parameters made as it is: a twin would not follow."""
        plain = [plain_of(value) for value in values]
        versions = [value._version if isinstance(value, Tensor) else 0 for value in plain]
        args, kwargs = pytree.tree_unflatten(plain, spec)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if any(isinstance(value, Tensor) and value._version != was for value, was in zip(plain, versions, strict=True)):
            raise self._fixed(func)
        return result

    def _fixed(self, func: Callable[..., Any]) -> UnfollowedError:
        return UnfollowedError(
            f"{_name(func)} changes in place a tensor that has no rows of the batch: use the function that is not in "
            "place"
        )

    def _changed(
        self, func: Callable[..., Any], values: list[Any], spec: Any, layouts: dict[int, Layout | None]
    ) -> Tensor | None:
        """The rows that ``func`` changed in place: changed in a copy, row by row, and written back."""
        rows, layout = values[0], layouts.get(0)
        if layout is None:
            raise self._fixed(func)
        if self.finding:
            args, kwargs = pytree.tree_unflatten([plain_of(value) for value in values], spec)
            with torch._C.DisableTorchFunctionSubclass():
                func(*args, **kwargs)
        else:

            def change(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                func(first, *args, **kwargs)
                return first

            rows.copy_(self._by_vmap(change, [rows.clone(), *values[1:]], spec, layouts, (layout,)))
        return None if func is Tensor.__setitem__ else rows

    def _result(
        self,
        leaf: Any,
        names: tuple[str, ...],
        func: Callable[..., Any],
        values: list[Any],
        spec: Any,
        layout: Layout | None,
        which: int,
    ) -> Any:
        """What ``func`` of shared tensors and constants gave: shared, or, where it was spread over the batch, rows."""
        if not isinstance(leaf, Tensor):
            return leaf
        same = [value for value in values if isinstance(value, Shared) and value.plain is leaf]
        if same:
            return same[0]
        recorded = torch.is_grad_enabled()

        def twin() -> Tensor:
            with torch.set_grad_enabled(recorded):
                everything = self._by_vmap(func, values, spec, {}, None)
            made: Tensor = pytree.tree_leaves(everything)[which]
            return made

        if layout is None:
            return self._shared(leaf.detach(), names, twin)
        if layout.flat:
            raise AmbiguousError(f"{names} is repeated within the batch by {_name(func)}")
        return twin().diagonal(dim1=0, dim2=layout.dim + 1).movedim(-1, layout.dim)  # each row its own copy

    def _by_vmap(
        self,
        func: Callable[..., Any],
        values: list[Any],
        spec: Any,
        layouts: dict[int, Layout | None],
        outs: Sequence[Layout] | None,
    ) -> Any:
        """``func`` row by row: twins for what is shared, rows of what has the batch, constants as they are."""
        batched: dict[int, Tensor] = {}
        for i, value in enumerate(values):
            layout = layouts.get(i)
            if isinstance(value, Shared):
                batched[i] = value.make_twin()
            elif layout is not None:
                batched[i] = layout.opened(value, self.rows)

        shape: list[Any] = []

        def one(*given: Tensor) -> tuple[Any, ...]:
            row = list(values)
            for i, tensor in zip(batched, given, strict=True):
                row[i] = tensor
            args, kwargs = pytree.tree_unflatten(row, spec)
            found, shape[:] = _split(func(*args, **kwargs))
            return found

        with warnings.catch_warnings():  # that a function has no batching rule of its own, and is slow
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found = torch.func.vmap(one, randomness="different")(*batched.values())
        if outs:
            found = tuple(out.closed(leaf) for leaf, out in zip(found, outs, strict=True))
        return pytree.tree_unflatten(found, shape[0])


def _origin(tensor: Tensor) -> Tensor:
    """What a tensor is another shape of: a view leaves the graph when it is changed in place, its origin stays."""
    base = tensor._base
    whole = base is not None and base.numel() == tensor.numel() and base.is_contiguous() and tensor.is_contiguous()
    return base if base is not None and whole else tensor


def _split(result: Any) -> tuple[tuple[Any, ...], list[Any]]:
    leaves, spec = pytree.tree_flatten(result)
    return tuple(leaves), [spec]


def _turned(use: Use) -> Use:
    if not isinstance(use, Outer):
        raise UnfollowedError("a transposed parameter is used other than in a product")
    return Outer(use.gradients, use.inputs)


def _changes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument in place."""
    return _name(func) in _CHANGING or (_name(func).endswith("_") and not _name(func).endswith("__"))


def _counts(value: Any) -> bool:
    """Whether a value is a tensor of whole numbers that may be indices."""
    whole = isinstance(value, Tensor) and not isinstance(value, Shared) and value.dtype != torch.bool
    return whole and not value.is_floating_point() and not value.is_complex()


def _name(func: object) -> str:
    return getattr(func, "__name__", str(func))
