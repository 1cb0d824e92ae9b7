"""A function of tensors as straight-line code: what one call of it did, without what torch and Python did around it.

The code calls the same kernels on the same shapes in the same order, so results are equal bit by bit. Nothing in
it depends on the values of the call that was recorded: where the function reads values in Python, or does other things
in a second call on other values, it is refused.
"""

import math
import pickle
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpgrad.grads.precision import precision_settings
from dpgrad.grads.recording import CannotTraceError, Operation, Recording, Ref, Value, recording, references, writes
from dpgrad.grads.watch import remembered

__all__ = ["CannotTraceError", "Traced"]

Body = Callable[..., tuple[Tensor, ...]]
_Bindings = Callable[[Any], Callable[..., Any]]  # an operation -> what is called for it

_OF_CPU = slice(3, None)  # of the settings of precision
_LONGEST = 200_000  # operations of code that Python still compiles in reasonable time
_HOMES = (torch._C._VariableFunctions, torch._C._nn, torch._C._linalg, torch._C.TensorBase)  # type: ignore[attr-defined]


class Traced:
    """A function of tensors as the list of operations that one call of it made; parameters are read where they lie.

    ``body`` must be a function of its inputs, of the parameters and buffers of ``model`` and of torch's default
    generator. Parameters and buffers may change in place, or move, from call to call. Any other tensor that the body
    reads is read where it lies, too: one that is exchanged for another must be an input. Trace anew when modules, hooks
    or training flags of the model change. The results are tensors of their own. `CannotTraceError` is raised for a
    body that does more, and by a call on other shapes, types or settings of torch than those of the first.

    >>> model = nn.Linear(2, 1)
    >>> twice = Traced(lambda x: (2 * model(x),), [torch.ones(3, 2)], model)
    >>> with torch.no_grad():
    ...     changed = model.bias.add_(1), model.weight.zero_()
    >>> bool((twice(torch.ones(3, 2))[0] == 2 * model.bias).all())
    True
    """

    def __init__(self, body: Body, inputs: Sequence[Tensor], model: nn.Module) -> None:
        self._settings = _settings()
        _refuse_precision()
        self._inputs = [_geometry(given) for given in inputs]
        self._state = [*model.parameters(), *model.buffers()]
        state, remembered = torch.get_rng_state(), _remembered(model)
        try:
            found, expected = _recorded(body, inputs, self._state)
            drawn = torch.get_rng_state()
            _refuse_changed(found, _recorded(body, _others(inputs), self._state)[0])
            if _remembered(model) != remembered:
                raise CannotTraceError("the model changes numbers that it keeps in Python, or draws some there")
            self._build(found, inputs, expected, (state, drawn))
        finally:
            torch.set_rng_state(state)

    def _build(
        self, found: Recording, inputs: Sequence[Tensor], expected: Sequence[Tensor], states: tuple[Tensor, Tensor]
    ) -> None:
        """Compile the code and see that it gives the results of the call that was recorded.

        It must also draw as many random numbers, from the first of two states of the generator to the second: a
        checkpointed block draws the same ones twice, which code would not.
        """
        why: object = "results differ from those of the function"
        for bindings in (_binding, _overload):
            self._code = _Code(_distinct(found), self._state, bindings)
            torch.set_rng_state(states[0])
            try:
                again = self(*inputs)
            except Exception as error:  # such as a binding that takes other arguments than its operation
                why = error
                continue
            if all(map(_same, again, expected)) and torch.equal(torch.get_rng_state(), states[1]):
                return
        raise CannotTraceError(f"the code that was made does not run as the function does: {why}")

    def takes(self, *inputs: Tensor) -> bool:
        """Whether the code stands for a call on these inputs, under torch's settings as they are."""
        fits = len(inputs) == len(self._inputs) and all(map(_fits, inputs, self._inputs))
        return fits and _settings() == self._settings and self._code.bound()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.called(*inputs)
        if found is None:
            raise CannotTraceError("shapes, types or settings of torch are not those of the call that was recorded")
        return found

    def called(self, *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """The results; None where the code does not stand for a call on these inputs."""
        if not self.takes(*inputs):
            return None
        plainly = torch.autocast("cpu", enabled=False) if self._settings[0] else nullcontext()
        with torch.no_grad(), plainly:
            return self._code.run(*inputs)


def _settings() -> tuple[object, ...]:
    """The state besides the arguments that decides which operations run and how precisely."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        *(setting.fp32_precision for setting in precision_settings()[_OF_CPU]),
    )


def _refuse_precision() -> None:
    """Products of our own are formed exactly, whatever torch's settings: code could not switch between them."""
    lower = {setting.fp32_precision for setting in precision_settings()[_OF_CPU]} - {"ieee", "none"}
    if lower:
        raise CannotTraceError(f"torch forms products of float32 in lower precision ({', '.join(sorted(lower))})")


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _fits(tensor: Tensor, known: tuple[object, ...]) -> bool:
    return _geometry(tensor) == known


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN and the sign of zero included."""
    if _geometry(one) != _geometry(other):
        return False
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.element_size(), torch.uint8)
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def _remembered(model: nn.Module) -> list[object]:
    """What the next call may depend on that lies in Python, its random numbers among it."""
    return [remembered(model), random.getstate(), pickle.dumps(np.random.get_state())]


def _recorded(body: Body, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Recording, list[Tensor]]:
    """What a call did, and its results."""
    torch.clear_autocast_cache()  # of casts that were made outside the recording
    try:
        with recording(inputs, state) as recorder:
            results = list(body(*inputs))
            found = recorder.results(results)
    except (CannotTraceError, MemoryError):
        raise
    except Exception as error:
        raise CannotTraceError(f"the function fails where it is recorded: {error}") from error
    if len(found.operations) > _LONGEST:
        raise CannotTraceError(f"the function makes {len(found.operations):,} operations, more than {_LONGEST:,}")
    return found, [result.detach() for result in results]


def _others(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Inputs of the same shapes with the rows in another order."""
    others = []
    for given in inputs:
        if torch._debug_has_internal_overlap(given):  # such as one that is expanded
            others.append(given)
            continue
        other = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
        others.append(other.copy_(given.roll(1, 0) if given.ndim else given))
    return others


def _refuse_changed(one: Recording, other: Recording) -> None:
    """Refuse a function that did different things with other values, or that brought other constants into them."""
    alike = one.operations == other.operations and one.values == other.values and one.results == other.results
    if not alike or one.held.keys() != other.held.keys():
        raise CannotTraceError("the function runs other operations when it is called again on other values")
    for number, tensor in one.held.items():
        again = other.held[number]
        shared = tensor.untyped_storage()._cdata == again.untyped_storage()._cdata
        if not shared and not _same(tensor, again):
            raise CannotTraceError("a tensor that the function makes of numbers in Python is not always the same")


def _overload(func: Any) -> Callable[..., Any]:
    """The operation itself."""
    found: Callable[..., Any] = func._op
    return found


def _binding(func: Any) -> Callable[..., Any]:
    """Python's own binding of the same operation, which is faster to call; the operation where there is none."""
    name = func.overloadpacket.__name__
    tensors = func._schema.arguments and "Tensor" in str(func._schema.arguments[0].type)
    if func.namespace == "aten" and tensors:  # bindings of functions that make tensors choose types of their own
        for home in _HOMES:
            found: Callable[..., Any] | None = getattr(home, name, None)
            if found is not None:
                return found
    return _overload(func)


class _Code:
    """The operations as a Python function whose local names are the tensors, each freed after its last use."""

    def __init__(self, found: Recording, state: Sequence[Tensor], bindings: _Bindings) -> None:
        self._found, self._bindings = found, bindings
        self._names = {number: f"i{place}" for place, number in enumerate(found.given)}  # of what lies outside
        self._space: dict[str, Any] = {**_BUILTIN}
        self._held: dict[object, str] = {}  # functions and arguments that have no literal, by what they are
        self._lines: list[_Line] = []
        self._parameters = [
            (number, tensor) for number, tensor in zip(found.state, state, strict=True) if number not in self._names
        ]
        self._names.update({number: f"s{number}" for number, _ in self._parameters})
        self._views: dict[str, tuple[str, Value]] = {}  # of parameters and buffers
        self._addresses: list[int] = []
        self._constants()
        for operation in _needed(found, [each for each in found.operations if not self._is_constant(each)]):
            self._add(operation)
        self._return()
        self.source = _source(len(found.given), self._lines)
        assert self._bind()
        exec(compile(self.source, "<traced>", "exec"), self._space)
        self.run: Callable[..., tuple[Tensor, ...]] = self._space["run"]

    def _constants(self) -> None:
        """Name tensors that are always the same; one that is changed in place is copied at each call."""
        found = self._found
        for number, tensor in (*found.held.items(), *found.fixed.items()):
            if found.values[number].root not in found.written:
                self._names[number] = f"c{number}"
                self._space[f"c{number}"] = tensor.detach()
            elif number in found.held:
                self._space[f"c{number}"] = tensor.detach()
                self._lines.append(_Line(f"v{number} = clone(c{number})", (), (f"v{number}",)))
                self._names[number] = f"v{number}"

    def _is_constant(self, operation: Operation) -> bool:
        made = [number for number in operation.numbers if number is not None]
        return bool(made) and all(number in self._names for number in made)

    def _add(self, operation: Operation) -> None:
        """Write the call, after views that it is the first to use."""
        func, kwargs = self._bindings(operation.func), operation.kwargs
        args = [self._written(each) for each in operation.args]
        if operation.func is torch.ops.aten._to_copy.default and kwargs.keys() == {"dtype"}:
            func = torch._C.TensorBase.to
            args.append(self._written(kwargs["dtype"]))
        else:
            args += [f"{name}={self._written(value)}" for name, value in kwargs.items()]
        read = tuple(self._name(number) for number in references((operation.args, kwargs)))
        made = operation.made
        several = isinstance(made, tuple)
        names = tuple(f"u{place}" if number is None else f"v{number}" for place, number in enumerate(operation.numbers))
        self._names.update({n: f"v{n}" for n in operation.numbers if n is not None})
        left = f"({', '.join(names)},)" if several else names[0]
        self._lines.append(_Line(f"{left} = {self._constant('f', func)}({', '.join(args)})", read, names))

    def _written(self, value: Any) -> str:
        """An argument as it stands in the code."""
        if isinstance(value, Ref):
            return self._name(value.number)
        if isinstance(value, tuple):
            return f"[{', '.join(map(self._written, value))}]"
        if value is None or isinstance(value, bool | int | float):
            return repr(value)
        return "nan" if value == "nan" else self._constant("k", value)

    def _constant(self, kind: str, value: Any) -> str:
        name = self._held.setdefault((kind, value), f"{kind}{len(self._held)}")
        self._space[name] = value
        return name

    def _name(self, number: int) -> str:
        """The name of a tensor; a view that has none yet is made."""
        if number in self._names:
            return self._names[number]
        value = self._found.values[number]
        base = self._names[value.base]
        name = self._names[number] = f"v{number}"
        if base[0] == "s":
            self._views[name] = base, value
        elif base[0] == "c":
            self._space[name] = _strided(self._space[base], value)
        else:
            start = f", {base}.storage_offset() + {value.offset}" if value.offset else ""
            self._lines.append(
                _Line(f"{name} = as_strided({base}, {value.shape}, {value.stride}{start})", (base,), (name,))
            )
        return name

    def _return(self) -> None:
        """Return the results, each in memory of its own."""
        names, seen = [], {self._found.values[number].root for number, name in self._names.items() if name[0] != "v"}
        for number in self._found.results:
            root, name = self._found.values[number].root, self._name(number)
            names.append((f"clone({name})" if root in seen else name, name))
            seen.add(root)
        text = ", ".join(shown for shown, _ in names)
        self._lines.append(_Line(f"return ({text}{',' if names else ''})", tuple(name for _, name in names), ()))

    def bound(self) -> bool:
        """Whether parameters and buffers lie where they lay, or could be found where they lie now."""
        return [tensor.data_ptr() for _, tensor in self._parameters] == self._addresses or self._bind()

    def _bind(self) -> bool:
        values = self._found.values
        roots = [values[number].root for number, _ in self._parameters]
        moved = bool(self._addresses)
        if moved and (
            len(set(roots)) < len(roots)
            or not all(
                tensor.dtype == values[n].dtype
                and tensor.shape == values[n].shape
                and tensor.stride() == values[n].stride
                for n, tensor in self._parameters
            )
        ):
            return False
        plain = {f"s{number}": tensor.detach() for number, tensor in self._parameters}
        self._space.update(plain)
        self._space.update({name: _strided(plain[base], value) for name, (base, value) in self._views.items()})
        self._addresses = [tensor.data_ptr() for _, tensor in self._parameters]
        return True


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of code, the names that it reads and those that it gives."""

    text: str
    read: tuple[str, ...]
    made: tuple[str, ...]


_BUILTIN = {
    "as_strided": torch._C._VariableFunctions.as_strided,
    "clone": torch._C._VariableFunctions.clone,
    "inf": math.inf,
    "nan": math.nan,
}


def _strided(base: Tensor, value: Value) -> Tensor:
    return base.as_strided(value.shape, value.stride, base.storage_offset() + value.offset)


def _source(inputs: int, lines: Sequence[_Line]) -> str:
    """The function; a local name is deleted after the last line that reads it."""
    last = {name: place for place, line in enumerate(lines) for name in (*line.read, *line.made) if name[0] in "uv"}
    local = {name for line in lines for name in line.made}
    ending: dict[int, list[str]] = defaultdict(list)
    for name, place in last.items():
        if name in local:
            ending[place].append(name)
    written = [f"def run({', '.join(f'i{place}' for place in range(inputs))}):"]
    for place, line in enumerate(lines):
        written.append(f"    {line.text}")
        if place in ending and place < len(lines) - 1:
            written.append(f"    del {', '.join(ending[place])}")
    return "\n".join(written)


def _distinct(found: Recording) -> Recording:
    """The same without operations that were done before on the same tensors, where the result is short to keep."""
    values, same, known = list(found.values), dict[int, int](), dict[object, Operation]()
    operations = []
    for given in found.operations:
        operation = replace(given, args=_renumbered(given.args, same), kwargs=_renumbered(given.kwargs, same))
        read = [*references((operation.args, operation.kwargs))]
        made = [number for number in operation.numbers if number is not None]
        longest = max((math.prod(values[number].shape) for number in read), default=0)
        short = all(4 * math.prod(values[number].shape) <= longest for number in made)
        changed = any(values[number].root in found.written for number in (*read, *made))
        if not made or not short or changed or torch.Tag.nondeterministic_seeded in operation.func.tags:
            operations.append(operation)
            continue
        before = known.setdefault((operation.func, operation.args, str(operation.kwargs)), operation)
        if before is operation:
            operations.append(operation)
        else:
            pairs = zip(operation.numbers, before.numbers, strict=True)
            same |= {one: other for one, other in pairs if one is not None and other is not None}
    for number, value in enumerate(values):
        if value.base in same:
            base = same[value.base]
            values[number] = replace(value, base=base, root=values[base].root)
    results = [same.get(number, number) for number in found.results]
    return replace(found, operations=operations, values=values, results=results)


def _renumbered(value: Any, same: Mapping[int, int]) -> Any:
    """An argument with tensors replaced by those that are the same."""
    if isinstance(value, Ref):
        return Ref(same[value.number]) if value.number in same else value
    if isinstance(value, dict):
        return {name: _renumbered(each, same) for name, each in value.items()}
    return tuple(_renumbered(each, same) for each in value) if isinstance(value, tuple) else value


def _needed(found: Recording, operations: Sequence[Operation]) -> list[Operation]:
    """The operations without those that nothing depends on."""
    needed = {found.values[number].root for number in found.results}
    kept = []
    for operation in reversed(operations):
        changed = [
            operation.args[place] if place < len(operation.args) else operation.kwargs.get(name)
            for place, name in writes(operation.func)
        ]
        touched = [number for number in operation.numbers if number is not None] + [*references(changed)]
        drawn = torch.Tag.nondeterministic_seeded in operation.func.tags
        if drawn or any(found.values[number].root in needed for number in touched):
            kept.append(operation)
            needed |= {found.values[n].root for n in references((operation.args, operation.kwargs))}
    return kept[::-1]
