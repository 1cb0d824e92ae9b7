"""The fast engine: one forward pass, one backward pass for the gradients of activations only, one weighted product.

The gradient of a layer's weight is made of the layer's input and its output's gradient. Both are there after an
ordinary backward pass that skips the weights; norms are computed from them layer by layer, and the weighted sum is one
product. (Book-keeping: Bu et al., 2023; ghost norms: Goodfellow, 2015, Li et al., 2022.)
"""

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from dpgrad import lanes
from dpgrad.grads.batch import leaves, row_losses, size
from dpgrad.grads.clip import PerExample
from dpgrad.grads.layers.recurrent import known_inputs
from dpgrad.grads.layout import AmbiguousError, Layouts, telling_sizes
from dpgrad.grads.precision import own_products
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.swap import swapped
from dpgrad.grads.tape import Record, Tape, UnseenError
from dpgrad.grads.uses import Dense, Use, combined, wide

_COMPARED = 7  # rows whose order is looked at


def gradients(
    model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1, layouts: Layouts | None = None
) -> PerExample:
    """The gradient of every example, as `dpgrad.grads.vmap.gradients` defines it.

    ``layouts``, from `find_layouts`, says where the batch stands in the tensors that parameters meet; it does not
    depend on the batch and is found anew where it is not given.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> found = gradients(model, lambda model, x: model(x)[:, 0], torch.tensor([[2.0], [3.0]]), torch.ones(2))
    >>> found.uses["weight"].per_example().flatten()
    tensor([2., 3.])
    """
    known = find_layouts(model, loss, batch, rows) if layouts is None else layouts
    try:
        return _gradients(model, loss, batch, weights, rows, known)
    except UnseenError:
        known.update(find_layouts(model, loss, batch, rows))  # another path through the model than before
    try:
        return _gradients(model, loss, batch, weights, rows, known)
    except UnseenError as unseen:
        raise ValueError(f"the model uses {unseen} differently from pass to pass: use engine='vmap'") from None


def _gradients(model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int, layouts: Layouts) -> PerExample:
    parameters = trainable(model)
    examples = len(weights) // rows
    tape = Tape(parameters, len(weights), examples, layouts)
    with torch.enable_grad(), _watched(model, tape):
        losses = row_losses(loss, model, batch, len(weights))
        tape.recording = False  # a checkpointed block runs again during the backward pass
        # By number; each is let go as soon as its uses are found, with what they were found from.
        records = dict(enumerate(tape.records))
        tape.records.clear()
        names = [record.names for record in records.values()]
        found: dict[int, Sequence[Use]] = {}
        with _arriving(records, found, layouts.every) as awaited:
            asked = {number: record for number, record in records.items() if number not in awaited}
            arrived = _backward(losses, weights, tape, parameters, list(asked.values()))
    del losses
    if awaited - found.keys():
        # The pass did not come by: no loss reaches the place, or what it leads to is no parameter of the model.
        layouts.every = True
        del tape, records, found, asked, arrived
        return _gradients(model, loss, batch, weights, rows, layouts)
    lanes.join()
    with torch.no_grad(), own_products():
        for (number, record), g in zip(asked.items(), arrived, strict=True):
            found[number] = [] if g is None else record.uses(g)
        uses: dict[str, list[Use]] = defaultdict(list)
        for number, of_record in enumerate(names):
            for name, use in zip(of_record, found.pop(number), strict=False):
                uses[name].append(use)
        # What a form was made of is let go as soon as the form is found.
        for noted in (records, asked, arrived):
            noted.clear()
        return PerExample(
            {
                name: combined(uses.pop(name)).settled() if name in uses else Dense.zero(parameter, examples)
                for name, parameter in parameters.items()
            }
        )


@contextmanager
def _arriving(records: dict[int, Record], found: dict[int, Sequence[Use]], every: bool) -> Iterator[set[int]]:
    """Within the block uses are found when the backward pass comes by; yields the numbers of the records it awaits.

    What was needed for them can then be let go: a record that has arrived is taken out of ``records``. A place that the
    pass leaves behind on its way to others need not be asked for. Uses of a parameter that has several are put together
    first. Hooks are removed at the end: a node and its hook would keep each other alive.
    """
    times = Counter(name for record in records.values() for name in record.names)

    def wait_for(number: int, place: GradientEdge) -> RemovableHandle:
        output = place.output_nr

        def arrive(gradients: Sequence[Tensor | None]) -> None:
            g, record = gradients[output], records.pop(number)
            with torch.no_grad(), own_products(), lanes.beside(number, g, record):
                uses = [] if g is None else record.uses(g.reshape(record.shape))
                alone = zip(record.names, uses, strict=False)
                found[number] = [use.settled() if times[name] == 1 else use for name, use in alone]

        return place.node.register_prehook(arrive)

    hooks = {
        number: wait_for(number, record.place)
        for number, record in records.items()
        if record.passed and not every and isinstance(record.place, GradientEdge)
    }
    try:
        yield set(hooks)
    finally:
        for hook in hooks.values():
            hook.remove()


@contextmanager
def _watched(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Within the block the model's parameters are on the tape, which forgets the pass at its end."""
    try:
        with known_inputs(model), swapped(model, tape.shared):
            yield
    finally:
        tape.let_go()
        torch.clear_autocast_cache()  # of parameters that were this pass's own; an outer block would keep every pass's


def _backward(
    losses: Tensor,
    weights: Tensor,
    tape: Tape,
    parameters: dict[str, nn.Parameter],
    asked: Sequence[Record],
    keep: bool = False,
) -> list[Tensor | None]:
    """The gradient at each place that is asked for; a use of a parameter that the tape did not see is refused."""
    places = [record.place for record in asked]
    if not losses.requires_grad:
        return [None] * len(places)
    names = [*(made.names[0] for made in tape.made), *parameters]
    found = _grad(losses, [*places, *tape.made, *parameters.values()], weights, keep)
    for name, g in zip(names, found[len(places) :], strict=True):
        if g is not None:
            raise ValueError(
                f"parameter {name} is used where it cannot be followed (a custom autograd function, or a reference "
                "kept outside its module): use engine='vmap', which holds one gradient of the model per example"
            )
    arrived = zip(asked, found, strict=False)
    return [None if g is None else g.reshape(record.shape) for record, g in arrived]


def _grad(losses: Tensor, places: list[Tensor | GradientEdge], weights: Tensor, keep: bool) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` without its turn to ``__torch_function__``: tensors on the tape are places like others.

    It cannot be turned off around the pass instead: a checkpointed block calls torch functions again.
    """
    create, unused = False, True
    return _engine_run_backward(
        (losses,), (weights.to(losses.dtype),), keep, create, tuple(places), unused, accumulate_grad=False
    )


class _Picked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes functions whose result has as many entries as the values of a tensor say, or that sort the batch."""

    _COUNTING = ("nonzero", "masked_select", "unique", "_pack_padded_sequence")
    _SORTING = ("sort", "topk", "argsort", "msort", "kthvalue")

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows  # a number that no other dimension has
        self.by = ""
        self.sorts = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = (
            [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)] if name == "index" else []
        )
        if masks or name.lstrip("_").startswith(self._COUNTING) or name in self._COUNTING:
            self.by = name
        if name in self._SORTING and self._along_batch(name, args, kwargs or {}):
            # Packing sequences sorts them too, and is followed in the order of the batch.
            self.sorts |= all(frame.function != "pack_padded_sequence" for frame in inspect.stack(context=0))
        return func(*args, **(kwargs or {}))

    def _along_batch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether one of the sorting functions works along the batch."""
        place = 2 if name in ("topk", "kthvalue") else 1  # their first number is a count
        dim = kwargs.get("dim", args[place] if len(args) > place else -1)
        shape = args[0].shape
        return bool(shape) and shape[0 if name == "msort" else dim] == self.rows


def find_layouts(model: nn.Module, loss: Loss, batch: Batch, rows: int = 1) -> Layouts:
    """Where the batch stands in the tensors that parameters meet, seen from their shapes.

    Two forward passes over copies of one example, of ``rows`` rows, must agree: what has the batch in it grows with the
    number of rows, and nothing else does. That the rows are in the order of the batch is seen from gradients, in a
    third pass.
    """
    device = leaves(batch)[0].device
    seen: list[tuple[Layouts, object]] = []
    reason = ""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for examples in telling_sizes(model, batch):
            tape = Tape(trainable(model), examples * rows, examples)
            picked = _Picked(examples * rows)
            try:
                with torch.no_grad(), _watched(model, tape), picked:
                    row_losses(loss, model, _chosen(batch, [0] * examples, rows), tape.rows)
            except AmbiguousError as unclear:
                reason = str(unclear)
                continue
            if picked.sorts:
                raise ValueError("the model changes the order of the batch by sorting its rows: use engine='vmap'")
            if picked.by and tape.layouts.flat:
                raise ValueError(
                    f"the model picks entries of the batch by their values ({picked.by}), differently from pass to "
                    "pass, and a parameter meets rows that are flattened: keep all entries and multiply by a mask"
                )
            if (tape.layouts, tape.shapes) in seen:
                return _in_order(model, loss, batch, rows, tape.layouts)
            seen.append((tape.layouts, tape.shapes))
    if len(seen) > 1:
        reason = "the model uses its parameters differently from pass to pass"
    raise ValueError(f"{reason}: use engine='vmap'")


def _chosen(batch: Batch, examples: list[int], rows: int) -> Batch:
    indices = [example * rows + row for example in examples for row in range(rows)]
    return pytree.tree_map(lambda leaf: leaf[indices], batch)


def _in_order(model: nn.Module, loss: Loss, batch: Batch, rows: int, layouts: Layouts) -> Layouts:
    """The layouts in which every place belongs to the example whose loss reaches it.

    A shape does not tell whether flattened rows are neighbours or apart, nor whether they were sorted. The first
    example comes again at the end, so that sorting moves it unless all are alike.
    """
    examples = [*range(min(size(batch) // rows, _COMPARED)), 0]
    try:
        for tried in [layouts, layouts.apart()] if layouts.flat else [layouts]:
            if _separates(model, loss, _chosen(batch, examples, rows), rows, len(examples), tried):
                return tried
    except UnseenError as unseen:
        raise ValueError(f"the model uses {unseen} differently from pass to pass: use engine='vmap'") from None
    raise ValueError(
        "the loss of one example reaches another: examples act on each other, or the model changes the order of the "
        "batch: use engine='vmap'"
    )


def _separates(model: nn.Module, loss: Loss, batch: Batch, rows: int, examples: int, layouts: Layouts) -> bool:
    """Whether the gradients at each example's places grow with the weight of that example's loss alone.

    Parameters are moved a little, so that gradients are seen behind a layer that begins at zero.
    """
    parameters = trainable(model)
    near = {name: parameter.detach() + 0.02 * torch.randn_like(parameter) for name, parameter in parameters.items()}
    tape = Tape(near, examples * rows, examples, layouts)
    once = torch.ones(tape.rows, device=leaves(batch)[0].device)
    weights = 2.0 ** torch.arange(examples, device=once.device)
    with torch.enable_grad(), _watched(model, tape):
        losses = row_losses(loss, model, batch, tape.rows)
        tape.recording = False
        before = _backward(losses, once, tape, parameters, tape.records, keep=True)
        after = _backward(losses, weights.repeat_interleave(rows), tape, parameters, tape.records)
        for record, g, grown in zip(tape.records, before, after, strict=True):
            if g is not None and grown is not None:
                record.uses(g)  # refuses by name what has no gradient of its own for each example
                one, many = (wide(record.layout.folded(gradient, tape.rows, examples)) for gradient in (g, grown))
                apart = many / weights.to(many).view(-1, *[1] * (many.ndim - 1)) - one
                off, size = (x.reshape(*x.shape[:2], -1).norm(dim=2) for x in (apart, one))  # (examples, entries)
                # Another example's weight is another power of two; TF32 and bfloat16 round by less than a hundredth.
                if bool((off > 0.1 * size + 1e-3 * size.max()).any()):
                    return False
    return True
