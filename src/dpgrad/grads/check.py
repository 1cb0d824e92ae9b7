"""Before the first private step: examples must not act on each other, and the engine must see every parameter.

A few examples are passed through the model: as they are, with other companions, and alone. What an example's loss and
gradient are must not change with the company, what a pass leaves in the model must not depend on the batch, and the
engine must return the gradients that ordinary automatic differentiation returns.

The examples are private. What leaves is whether the model was accepted; messages name modules and parameters and hold
no number computed from data.
"""

import math
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad._validate import one_of, warn
from dpgrad.errors import DataError, UnsupportedModelError
from dpgrad.grads.accumulate import ENGINES, Engine, row_weights
from dpgrad.grads.batch import as_rows, leaves, of_one_row, on_device_of, size
from dpgrad.grads.precision import TF32, exact_products, own_products, tf32_is_allowed
from dpgrad.grads.probe import COPIED, FEW, Own, Probe, length
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.swap import refuse_modules, unwrapped, without_dropout
from dpgrad.grads.unquoted import chosen, of_torch, place
from dpgrad.grads.ways import Attributed, Way, gradients

__all__ = ["PROBED", "check", "compare", "prepared"]

_ALONE = 12  # examples whose losses are computed alone
PROBED = 64  # examples that are looked at where examples may meet
_NOT_ONE = (
    "the model or the loss fails with one example but not with several: make it accept any number, such as by "
    "squeeze(-1) in place of squeeze()"
)
_MOST = 1024  # examples of a batch that are passed through the engine once


def check(model: nn.Module, loss: Loss, batch: Batch, engine: str = "bookkeeping", several_rows: bool = False) -> Way:
    """Refuse a model whose examples act on each other, or whose gradients the engine does not get right.

    Returns the way in which gradients are computed, and why in that one (`dpgrad.grads.ways`).

    A few examples from all over ``batch`` are used: four, and up to 64 where examples could meet. The model, its
    buffers and torch's random state are left as they were, unless the forward pass itself writes to a parameter.
    Refused, each by name:

    - a layer or a loss that mixes examples (BatchNorm in training mode, a mean or a softmax over the
      batch): clipping one example would not bound what it does to the others;
    - a pass that leaves something of the batch in the model (running statistics): it would be released without noise;
    - a parameter that is trained and that the loss does not depend on;
    - a gradient that differs from the gradient of the example's own loss, computed alone by `torch.autograd`. Dropout
      is turned off for this comparison; where a model still draws random numbers, both sides draw the same ones, in
      one pass over all examples (which inside vmap cannot be done: there it is only seen that it runs).

    Guarantee: what is accepted was seen to be right on these examples and at these parameters, to the rounding of the
    coarsest type that the model computes in. That each gradient belongs to its example does not rest on this test but
    on the way it is computed.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    >>> check(model, lambda model, x: model(x)[:, 0].square(), torch.randn(8, 2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpgrad.errors.UnsupportedModelError: BatchNorm '1' mixes examples: replace it by GroupNorm with ...
    >>> model[1] = nn.GroupNorm(1, 3)
    >>> print(check(model, lambda model, x: model(x)[:, 0].square(), torch.randn(8, 2)))
    batched (no operation depends on values)
    """
    return prepared(model, loss, batch, engine, several_rows)[1]


def prepared(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    engine: str = "bookkeeping",
    several_rows: bool = False,
    most: int = _MOST,
    sketched: bool = False,
) -> tuple[Engine, Way]:
    """The engine to use for a model that passes `check`, and the way that it takes; ``most`` examples at a time.

    ``sketched``: a large parameter's gradient is compared by a random projection, so that no gradient of the whole
    model is held, for models whose parameters are only there while they are used.
    """
    model = unwrapped(model)
    one_of(ENGINES, engine=engine)
    refuse_modules(model)
    on_device_of(model, batch)
    if not size(batch):
        raise DataError("batch must hold an example to check the model on, got none")
    rows = row_weights(model, batch, None, several_rows).shape[1]
    compute: Engine = Attributed() if ENGINES[engine] is gradients else ENGINES[engine]
    wide = _spread(batch, PROBED)
    if several_rows:
        wide = as_rows(wide)
    probe = Probe(model, loss, wide, rows, sketched=sketched)
    kind = leaves(batch)[0].device.type
    mixed = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
    with torch.enable_grad(), exact_products(), mixed:
        probe.find_precision()
        probe.find_examples()
        unused = _refuse_company(probe)
        takes_one = _refuse_number(probe)
        if probe.count > 1 and not (takes_one or isinstance(compute, Attributed)):
            raise UnsupportedModelError(_NOT_ONE)
        with without_dropout(model):
            _refuse_engine(probe, engine, compute)
            way = compute.way if isinstance(compute, Attributed) else Way(engine)  # type: ignore[arg-type]
            if way.name in ("batched", "vmap"):
                _refuse_unused(unused)
            elif unused:
                warn(f"no loss of the few examples that were tried depends on {', '.join(unused[:5])}")
            if way.name != "batched" and not takes_one:
                raise UnsupportedModelError(_NOT_ONE)
            if way.name != "batched":
                _refuse_statistics(Probe(model, loss, wide, rows, probe.eps, sketched=sketched))
    if tf32_is_allowed(leaves(batch)[0].device):  # the engine takes other ways then
        probe.eps = max(probe.eps, TF32)
        with torch.enable_grad(), mixed, without_dropout(model):
            _refuse_engine(probe, engine, compute)
    if isinstance(compute, Attributed):
        if size(batch) > FEW:  # a model may do other things with larger batches
            _try(compute, model, loss, _spread(batch, min(most, _MOST)), several_rows)
        compute.decided()
        way = compute.way  # of batches as large as these
    return compute, way


def _try(engine: Engine, model: nn.Module, loss: Loss, batch: Batch, several_rows: bool) -> None:
    """One pass of the engine over a whole batch; what it finds out is kept in it."""
    weights = row_weights(model, batch, None, several_rows)
    probe = Probe(model, loss, as_rows(batch) if several_rows else batch, weights.shape[1])
    with probe.apart():
        engine(model, loss, probe.batch, weights.flatten(), probe.rows)


def compare(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    engine: Engine,
    name: str,
    several_rows: bool = False,
    sketched: bool = False,
) -> None:
    """Refuse where the engine no longer returns the gradients of the examples of ``batch``, at the present weights."""
    rows = row_weights(model, batch, None, several_rows).shape[1]
    probe = Probe(model, loss, as_rows(batch) if several_rows else batch, rows, look=False, sketched=sketched)
    kind = leaves(batch)[0].device.type
    mixed = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
    with torch.enable_grad(), exact_products(), mixed, without_dropout(model):
        probe.eps = torch.finfo(next(iter(trainable(model).values())).dtype).eps
        alone = {i: probe.alone(i) for i in range(probe.count)}
        finite = [i for i, own in alone.items() if math.isfinite(own.norm)]
        if not finite:
            return
        probe.keep(finite)
        own = [alone[i] for i in finite]
        with suppress(ValueError):
            _refuse_engine(probe, name, engine, own)
            return
        probe.find_precision()  # it takes a pass of its own, and only coarser types than the parameters' need it
        try:
            _refuse_engine(probe, name, engine, own)
        except ValueError:
            if _difference(own[0], probe.alone(0), probe.eps) is None:
                raise
            # A loss that is another one at every call cannot be compared.


def _spread(batch: Batch, most: int) -> Batch:
    """At most so many examples, from all over the batch."""
    count = size(batch)
    if count <= most:
        return batch
    places = torch.linspace(0, count - 1, most, dtype=torch.float64).round().long()
    return pytree.tree_map(lambda leaf: leaf[places.to(leaf.device)], batch)


def _refuse_company(probe: Probe) -> list[str]:
    """Refuse examples whose loss or gradient changes with the others; returns the parameters that none depends on."""
    used: set[str] = set()
    for i in range(probe.count):
        own = probe.own(probe.batch, i)
        other = probe.own(probe.copies(i), i)  # in the same place of a batch of the same shape: the same dropout
        what = _difference(own, other, probe.eps) or (None if i else _difference_far(probe, own, i))
        if what is not None:
            raise UnsupportedModelError(
                f"examples act on each other: {what} of one changes with the others in its batch: make each output "
                "depend only on its own row, and draw random numbers from torch's default generators"
            )
        used |= own.used
    return [name for name in trainable(probe.model) if name not in used]


def _refuse_unused(names: Sequence[str]) -> None:
    """Refuse parameters that no loss depends on. Where paths depend on values, other examples may need them."""
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise UnsupportedModelError(
            f"the loss does not depend on {shown}: freeze unused parameters with requires_grad_(False), or use them"
        )


def _difference_far(probe: Probe, own: Own, i: int) -> str | None:
    """What differs when the others are far larger: rounding hides a share of one part in a thousand, not of all."""
    try:
        if leaves(probe.batch)[0].is_cuda:  # where an index out of its range would end the process
            if sum(parameter.numel() for parameter in probe.model.parameters()) > COPIED:
                return None
            probe = probe.on_cpu()
            own = probe.own(probe.batch, i)
        far = probe.own(probe.stretched(i), i)
    except (RuntimeError, IndexError, TypeError, AssertionError):  # it does not take such numbers, or cannot be copied
        return None
    # An overflow of the others, times the zero that is their weight, is NaN in gradients that are not theirs.
    return _difference(own, far, probe.eps) if math.isfinite(far.norm) else None


def _difference(one: Own, other: Own, eps: float) -> str | None:
    """What differs between two passes over one example that compute it in the same way."""
    bound = math.sqrt(eps)
    for name, gradient in one.gradients.items():
        if not _close(other.gradients[name], gradient, one.norm, bound, eps):
            return f"the gradient of parameter {name}"
    return None if math.isclose(one.loss, other.loss, rel_tol=bound, abs_tol=bound) else "the loss"


def _refuse_number(probe: Probe) -> bool:
    """Refuse a model in which a pass leaves the number of examples; returns whether it takes one example alone."""
    try:
        probe.own(probe.example(0), 0)
    except Exception as error:
        if of_one_row(error):
            return False
        raise
    return True


def _refuse_statistics(probe: Probe) -> None:
    """Refuse a loss that changes with the other examples, tried with several batch sizes and extreme values.

    A pass inside vmap cannot tell: there a statistic of the batch is one of a single row.
    """
    first = [round(place) for place in torch.linspace(0, probe.count - 1, min(_ALONE, probe.count)).tolist()]
    every = [*first, *(i for i in range(probe.count) if i not in first)]
    alone = []
    for i in first:
        found, drew = probe.losses([i])
        if drew:
            return
        alone.append(found)
    own = torch.cat(alone)
    companies = [[*first, *every[len(first) : most]] for most in (len(first), 4 * len(first), len(every))]
    companies += [[*first, *[i] * len(first)] for i in _extremes(probe)]
    companies += [[i, first[0]] for i in first[1:3]]
    bound = math.sqrt(probe.eps)
    for company in companies:
        found = probe.losses(company)[0]
        wanted = own if company[: len(first)] == first else own[[first.index(i) for i in company]]
        off = (found[: len(wanted)] - wanted).abs()
        typical = wanted.abs().nan_to_num(posinf=0).mean()
        if bool((off > bound * (wanted.abs() + typical)).any()):
            raise UnsupportedModelError(
                "examples act on each other: the loss of one changes with the others in its batch, or with their "
                "number: make each output depend only on its own row, not on a statistic of the batch or its size"
            )


def _extremes(probe: Probe) -> list[int]:
    """The examples with the smallest and the largest values, column by column."""
    found: list[int] = []
    for leaf in leaves(probe.batch):
        sizes = leaf.reshape(probe.count, -1).double().nan_to_num().mean(1)
        found += [int(sizes.argmin()), int(sizes.argmax())]
    return list(dict.fromkeys(found))


def _refuse_engine(probe: Probe, engine: str, compute: Engine, alone: Sequence[Own] = ()) -> None:
    """Refuse where the engine's gradients are not those of each example's own loss, or its norms are below theirs.

    ``alone``: what the passes over single examples gave, where they were taken already.
    """
    weights = row_weights(probe.model, probe.batch, None, several_rows=False).flatten() / probe.rows
    try:
        with probe.apart():
            found = compute(probe.model, probe.loss, probe.batch, weights, probe.rows)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if chosen(error):
            raise
        told = of_torch(error) or "vmap" in str(error)  # other words may hold values of rows
        reason = str(error).partition("\n")[0] if told else f"{place(error) or 'it'} raised {type(error).__name__}"
        remedy = "look at the model" if engine == "single" else "use engine='single', which passes one at a time"
        raise UnsupportedModelError(f"engine {engine!r} cannot take this model or loss ({reason}): {remedy}") from None
    with torch.no_grad(), own_products():
        norms = {name: use.measured()[0] for name, use in found.uses.items()}
    # The engine and a pass over one example round differently, and units at the bend of an activation fall on different
    # sides of it: a share of about the rounding error, which moves the gradient by about its root.
    bound = math.pow(probe.eps, 0.25)
    for i in range(probe.count):
        own = alone[i] if alone else probe.alone(i)
        if own.drew:
            if not (isinstance(compute, Attributed) and compute.way.name != "lifted"):
                return
            own = probe.own(probe.batch, i)
        only = torch.arange(probe.count, device=weights.device) == i
        agreed: bool | None = None  # in float64, where that was tried
        for name, wanted in own.gradients.items():
            with torch.no_grad(), own_products():
                gradient = probe.held(name, found.uses[name].kept(only).weighted_sum(only.to(norms[name].dtype)))
            short = float(norms[name][i]) + _allowed(wanted, own.norm, bound, probe.eps) < length(wanted)
            if short or not _close(gradient, wanted, own.norm, bound, probe.eps):
                measured = float(norms[name][i]) + _allowed(gradient, own.norm, bound, probe.eps) >= length(gradient)
                few = length(gradient - wanted) <= bound * own.norm  # of the gradient of all parameters
                if measured and few and agreed is None:
                    agreed = _agree(probe, compute, i, own.used)
                if measured and few and agreed:
                    continue  # units at a bend, which float64 tells apart
                raise UnsupportedModelError(_fault(probe, engine, name, i, bound))


def _agree(coarse: Probe, compute: Engine, i: int, used: frozenset[str]) -> bool:
    """Whether in float64 the engine's gradient of every parameter is that of example ``i`` alone.

    Not where either fails, nor where the copy in float64 does not use the parameters that are ``used``: a loss that
    refers to the model itself passes through none of the copy's, and all of their gradients are 0.
    """
    probe = coarse.in_double()
    if probe is None:
        return False
    # What an engine learns from this batch is discarded.
    compute = Attributed() if isinstance(compute, Attributed) else compute
    weights = row_weights(probe.model, probe.batch, None, several_rows=False).flatten() / probe.rows
    kind = leaves(probe.batch)[0].device.type
    try:
        with torch.autocast(kind, enabled=False), torch.enable_grad():
            own = probe.alone(i)
            with probe.apart():
                found = compute(probe.model, probe.loss, probe.batch, weights, probe.rows)
    except (RuntimeError, TypeError, ValueError):  # such as constants of float32 in the model
        return False
    if own.used != used:
        return False
    only = torch.arange(probe.count, device=weights.device) == i
    bound = math.pow(probe.eps, 0.25)
    with torch.no_grad():
        got = {name: use.kept(only).weighted_sum(only.to(weights.dtype)) for name, use in found.uses.items()}
    return all(_close(got[name], wanted, own.norm, bound, probe.eps) for name, wanted in own.gradients.items())


def _fault(probe: Probe, engine: str, name: str, i: int, bound: float) -> str:
    """Why an engine's gradient of a parameter may differ from that of the example's own loss."""
    alone, together = probe.alone(i), probe.own(probe.batch, i)
    if not alone.drew and not _close(together.gradients[name], alone.gradients[name], alone.norm, bound, probe.eps):
        return (
            f"the gradient of parameter {name} changes with the number of examples in the batch: let the loss return "
            "each example's own value, not divided by the size of the batch"
        )
    remedy = (
        "use engine='single'"
        if engine != "single"
        else "let the loss use it through the model's modules, not by a reference kept elsewhere"
    )
    return f"engine {engine!r} does not get the gradient of parameter {name} right: {remedy}"


def _allowed(wanted: Tensor, whole: float, bound: float, eps: float) -> float:
    """By how much one parameter's gradient may be off, ``whole`` being the norm of the gradient of all parameters.

    The second term is for parameters whose gradient is zero but for rounding, such as a bias before a normalization;
    the third for values whose squares are below the least float, which norms may lose (`dpgrad.grads.uses`): those of
    an example that is classified beyond doubt.
    """
    lost = math.sqrt(wanted.numel() * torch.finfo(wanted.dtype).tiny)
    return bound * length(wanted) + math.pow(eps, 0.75) * whole + lost


def _close(found: Tensor, wanted: Tensor, whole: float, bound: float, eps: float) -> bool:
    return length(found - wanted) <= _allowed(wanted, whole, bound, eps)  # never where there is a NaN
