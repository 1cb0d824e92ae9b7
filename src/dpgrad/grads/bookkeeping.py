"""The fast engine: one forward pass, one backward pass for the gradients of activations only, one weighted product.

The gradient of a layer's weight is made of the layer's input and its output's gradient. Both are there after an
ordinary backward pass that skips the weights; norms are computed from them layer by layer, and the weighted sum is one
product. (Book-keeping: Bu et al., 2023; ghost norms: Goodfellow, 2015, Li et al., 2022.)
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from dpgrad.grads import lanes
from dpgrad.grads.axes import Layout
from dpgrad.grads.batch import leaves, row_losses, size
from dpgrad.grads.calls import MixedError, UnfollowedError
from dpgrad.grads.clip import PerExample
from dpgrad.grads.failures import CAUGHT
from dpgrad.grads.following import Following, keeps, own_functions
from dpgrad.grads.kept import still_held
from dpgrad.grads.layers.recurrent import known_inputs
from dpgrad.grads.layout import AmbiguousError, Layouts, telling_sizes
from dpgrad.grads.precision import own_products
from dpgrad.grads.repeating import DivergedError, Script
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.swap import swapped
from dpgrad.grads.tape import Record, Tape, UnseenError
from dpgrad.grads.uses import Dense, Use, combined
from dpgrad.grads.watch import remembered

__all__ = ["Certify", "backward", "copies", "find_layouts", "finished", "gradients", "recorded", "watched"]

Certify = Callable[[Tensor, Tape, Sequence[Record], Sequence[Tensor | None]], None]  # losses, uses, their gradients


def gradients(
    model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1, layouts: Layouts | None = None
) -> PerExample:
    """The gradient of every example, as `dpgrad.grads.vmap.gradients` defines it.

    ``layouts``, from `find_layouts`, says where the batch stands in the tensors that parameters meet; it is found anew
    where it is not given. The first pass over a batch of new shapes is followed operation by operation.

    Guarantee: which example a gradient belongs to follows from the operations of the pass, whatever the values.
    `MixedError` is raised for a pass in which it does not.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> found = gradients(model, lambda model, x: model(x)[:, 0], torch.tensor([[2.0], [3.0]]), torch.ones(2))
    >>> found.uses["weight"].per_example().flatten()
    tensor([2., 3.])
    """
    known = find_layouts(model, loss, batch, rows) if layouts is None else layouts
    if len(weights) == 1:  # a shape would not tell the row from other dimensions of one entry
        two = pytree.tree_map(lambda leaf: torch.cat([leaf, leaf]), batch)
        found = gradients(model, loss, two, torch.cat([weights, torch.zeros_like(weights)]), rows, known)
        return PerExample({name: use.part(slice(0, 1)) for name, use in found.uses.items()})
    shapes = tuple(leaf.shape for leaf in leaves(batch))
    if shapes in known.proven and not still_held():  # what a model keeps of a pass may enter this one
        before = torch.get_rng_state()
        with suppress(DivergedError, UnseenError):
            return recorded(model, loss, batch, weights, rows, known, script=known.proven[shapes])
        torch.set_rng_state(before)
    known.proven.pop(shapes, None)
    try:
        found, script = _followed(model, loss, batch, weights, rows, known)
    except UnseenError:
        known.update(find_layouts(model, loss, batch, rows))  # another path through the model than before
        try:
            found, script = _followed(model, loss, batch, weights, rows, known)
        except UnseenError as unseen:
            raise MixedError(f"the model uses {unseen} differently from pass to pass") from None
    if not (known.varies or known.keeps):
        _refuse_by_number(model, loss, batch, rows, known, script)
        known.proven[shapes] = script
    return found


def _refuse_by_number(model: nn.Module, loss: Loss, batch: Batch, rows: int, known: Layouts, script: Script) -> None:
    """Refuse a pass that does to each row what a pass over another number of rows does not do."""
    key, count = tuple(leaf.shape[1:] for leaf in leaves(batch)), size(batch)
    first = known.first.setdefault(key, (count, script))
    if script.alike(count, first[1], first[0]):
        return
    few = 2 if count != 2 * rows else 3  # examples; the model may do other things by now than when the first pass ran
    device = leaves(batch)[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        alone = copies(batch, few, rows)
        known.first[key] = first = (
            few * rows,
            _followed(model, loss, alone, torch.ones(few * rows, device=device), rows, known)[1],
        )
    if not script.alike(count, first[1], first[0]):
        raise MixedError("the operations on one example depend on the number of examples")


def _followed(
    model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int, known: Layouts
) -> tuple[PerExample, Script]:
    """The gradients of a pass that is followed, and what others are compared with."""
    script = Script()
    try:
        return recorded(model, loss, batch, weights, rows, known, Following(len(weights)), script=script), script
    except DivergedError as failed:
        raise MixedError(CAUGHT.format(failed)) from None


def recorded(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    weights: Tensor,
    rows: int,
    layouts: Layouts,
    following: Following | None = None,
    certify: Certify | None = None,
    script: Script | None = None,
) -> PerExample:
    """The gradients of one pass whose layouts are known: followed, compared with a ``script`` of one, or certified."""
    parameters = trainable(model)
    tape = Tape(parameters, len(weights), len(weights) // rows, layouts, following, script)
    followed = nullcontext() if following is None else following.of(batch)
    scripted = nullcontext() if script is None else script.of(batch, {n: each.plain for n, each in tape.shared.items()})
    with torch.enable_grad(), watched(model, tape):
        before = [] if following is None else remembered(model, loss)
        with followed, scripted:
            losses = row_losses(loss, model, batch, len(weights))
            if script is not None:
                script.ended(losses)
        if following is not None:
            layouts.varies = following.varies or remembered(model, loss) != before
            _refuse_unknown(losses, following)
        with nullcontext() if script is None else script.again():
            found = finished(losses, weights, tape, parameters, layouts.every, certify)
    if found is None:
        layouts.every = True
        del tape, losses
        again = following and Following(len(weights))
        return recorded(model, loss, batch, weights, rows, layouts, again, certify, script)
    return found


def finished(
    losses: Tensor,
    weights: Tensor,
    tape: Tape,
    parameters: dict[str, nn.Parameter],
    every: bool,
    certify: Certify | None = None,
) -> PerExample | None:
    """The gradients of the examples from a forward pass on the tape. It must still be watched.

    None if the backward pass did not reach a record: no loss depends on it, or it leads to no parameter of
    the model. Run the pass again with ``every``.
    """
    examples = tape.examples
    tape.recording = False  # a checkpointed block runs again during the backward pass
    # By number; each is freed as soon as its uses are found, with what they were found from.
    records = dict(enumerate(tape.records))
    tape.records.clear()
    names = [record.names for record in records.values()]
    found: dict[int, Sequence[Use]] = {}
    with _arriving(records, found, every or certify is not None) as awaited:
        asked = {number: record for number, record in records.items() if number not in awaited}
        arrived = backward(losses, weights, tape, parameters, list(asked.values()), keep=certify is not None)
    if certify is not None:
        certify(losses, tape, list(asked.values()), arrived)
    del losses
    _forget(tape)
    if awaited - found.keys():
        return None
    lanes.join()
    with torch.no_grad(), own_products():
        for (number, record), g in zip(asked.items(), arrived, strict=True):
            found[number] = [] if g is None else record.uses(g)
        uses: dict[str, list[Use]] = defaultdict(list)
        for number, of_record in enumerate(names):
            for name, use in zip(of_record, found.pop(number), strict=False):
                uses[name].append(use)
        # What a form was made of is freed as soon as the form is found.
        for noted in (records, asked, arrived):
            noted.clear()
        return PerExample(
            {
                name: combined(uses.pop(name)).settled() if name in uses else Dense.zero(parameter, examples)
                for name, parameter in parameters.items()
            }
        )


def _refuse_unknown(losses: Tensor, following: Following) -> None:
    """Refuse losses that are not those of the rows in order, and derivatives of the model's own."""
    following.agrees(losses, Layout(0))
    functions = own_functions(losses)
    if functions:
        raise MixedError(f"the model has an autograd.Function of its own ({functions[0]})")


@contextmanager
def _arriving(records: dict[int, Record], found: dict[int, Sequence[Use]], every: bool) -> Iterator[set[int]]:
    """Within the block, find uses as the backward pass reaches them; yield the numbers of the records still awaited.

    What was needed for them can then be freed: a record that has arrived is taken out of ``records``. A place that the
    pass leaves behind on its way to others need not be asked for. Uses of a parameter that has several are put together
    first. Hooks are removed at the end: a node and its hook would keep each other alive.
    """
    times = Counter(name for record in records.values() for name in record.names)

    def wait_for(number: int, place: GradientEdge) -> RemovableHandle:
        output = place.output_nr

        def arrive(gradients: Sequence[Tensor | None]) -> None:
            g, record = gradients[output], records.pop(number)
            with torch.no_grad(), own_products(), lanes.on_lane(number, g, record):
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
def watched(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Within the block the model's parameters are on the tape, which forgets the pass at its end."""
    try:
        with known_inputs(model), swapped(model, tape.shared):
            yield
    finally:
        _forget(tape)


def _forget(tape: Tape) -> None:
    tape.let_go()
    torch.clear_autocast_cache()  # of parameters that were this pass's own; an outer block would keep every pass's


def backward(
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
            raise UnfollowedError(
                f"parameter {name} is used where it cannot be followed (a custom autograd function, or a reference "
                "kept outside its module)"
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


def find_layouts(model: nn.Module, loss: Loss, batch: Batch, rows: int = 1) -> Layouts:
    """Where the batch stands in the tensors that parameters meet, from one forward pass that is followed.

    The pass is over copies of one example. Their number divides no size of model and batch, so a shape tells
    whether a tensor that every row has alike (a parameter expanded to the batch) has a place for each row.
    `MixedError` is raised where an operation cannot be followed.
    """
    device = leaves(batch)[0].device
    reason = "the dimensions of the batch and of the model cannot be told apart"
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for examples in telling_sizes(model, batch):
            alike = copies(batch, examples, rows)
            following = Following(examples * rows)
            tape = Tape(trainable(model), examples * rows, examples, following=following)
            try:
                with torch.no_grad(), watched(model, tape), following.of(alike):
                    row_losses(loss, model, alike, tape.rows)
            except AmbiguousError as unclear:
                reason = str(unclear)
                continue
            del alike
            tape.layouts.keeps, tape.layouts.density = keeps(following), rows * following.density
            return tape.layouts
    raise MixedError(reason)


def copies(batch: Batch, examples: int, rows: int) -> Batch:
    """So many copies of the first example, of ``rows`` rows each."""
    return pytree.tree_map(lambda leaf: torch.cat([leaf[:rows]] * examples), batch)
