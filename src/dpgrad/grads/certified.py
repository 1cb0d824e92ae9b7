"""The batched pass with a proof for each batch, for models that can neither be followed nor lifted.

Where the batch stands in what parameters meet is guessed from shapes, and then shown, for every batch:

- *Certificate*. The backward pass is linear in the weights of the losses, and a power of two rounds nothing. So a
  second backward pass, with each example's weight times a power of two of its own, must find the gradient at each of
  that example's places larger by exactly that power. A place that another example's loss reaches fails.
- *Halves*. An example could still act on another without any gradient between them: through a statistic of labels, or
  of what was saved for the backward pass. So the losses of half the batch, taken at random and by the values of each
  column, and the lengths and the directions of its gradients must be those in the whole batch.

Guarantee: on a batch that passes, every gradient belongs to the example whose loss it comes from, up to the tolerances.
A batch that does not is refused before anything of it is released.
"""

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad.grads.batch import leaves, row_losses, size
from dpgrad.grads.bookkeeping import backward, copies, recorded, watched
from dpgrad.grads.clip import PerExample
from dpgrad.grads.kept import guarded
from dpgrad.grads.layout import AmbiguousError, Layouts, telling_sizes
from dpgrad.grads.precision import TF32, own_products, tf32_is_allowed
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.swap import without_dropout
from dpgrad.grads.tape import Record, Tape, UnseenError
from dpgrad.grads.uses import Use, wide

__all__ = ["COST", "Certificate", "MetError", "RefusedError", "gradients", "guessed"]

_POWERS = 8  # weights of examples are scaled by 2^-8 to 2^8
COST = "a second backward pass and, for each column of the batch and twice more, a whole pass at every step"


class RefusedError(Exception):
    """A batch, or a model, whose gradients could not be shown to belong to single examples."""


class MetError(RefusedError):
    """A batch in which one example was seen to act on another."""


def gradients(
    model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1, layouts: Layouts | None = None
) -> PerExample:
    """The gradient of every example, as `dpgrad.grads.vmap.gradients` defines it, or `RefusedError`.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> found = gradients(model, lambda model, x: model(x)[:, 0], torch.tensor([[2.0], [3.0]]), torch.ones(2))
    >>> found.uses["weight"].per_example().flatten()
    tensor([2., 3.])
    """
    loss = guarded(loss)
    known = guessed(model, loss, batch, rows) if layouts is None else layouts
    tries = [known, known.apart()] if known.flat else [known]
    for number, tried in enumerate(tries):
        certificate = Certificate(model, weights, rows)
        try:
            _compare_halves(model, loss, batch, rows, tried)
            return recorded(model, loss, batch, weights, rows, tried, certify=certificate)
        except UnseenError as unseen:
            raise RefusedError(f"the model uses {unseen} differently from pass to pass") from None
        except MetError:
            raise
        except RefusedError:
            if number + 1 == len(tries):
                raise
    raise AssertionError("unreachable")


def guessed(model: nn.Module, loss: Loss, batch: Batch, rows: int = 1) -> Layouts:
    """Where the batch seems to stand: what has it grows with the number of rows, and nothing else does."""
    device = leaves(batch)[0].device
    seen: list[tuple[Layouts, object]] = []
    reason = ""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for examples in telling_sizes(model, batch):
            tape = Tape(trainable(model), examples * rows, examples)
            try:
                with torch.no_grad(), watched(model, tape):
                    row_losses(loss, model, copies(batch, examples, rows), tape.rows)
            except AmbiguousError as unclear:
                reason = str(unclear)
                continue
            if (tape.layouts, tape.shapes) in seen:
                return tape.layouts
            seen.append((tape.layouts, tape.shapes))
    raise RefusedError("the model uses its parameters differently from pass to pass" if len(seen) > 1 else reason)


class Certificate:
    """Asks for the gradients again with other weights, and refuses a place that does not follow its example's."""

    def __init__(self, model: nn.Module, weights: Tensor, rows: int) -> None:
        self.parameters, self.weights, self.rows = trainable(model), weights, rows

    def __call__(self, losses: Tensor, tape: Tape, asked: Sequence[Record], arrived: Sequence[Tensor | None]) -> None:
        random = torch.Generator().manual_seed(secrets.randbits(63))
        powers = torch.randint(-_POWERS, _POWERS + 1, (tape.examples,), generator=random, device="cpu")
        powers = powers.to(self.weights)
        factors = 2.0**powers
        weights = self.weights * factors.repeat_interleave(self.rows)
        again = backward(losses, weights, tape, self.parameters, asked)
        with torch.no_grad():
            for record, g, grown in zip(asked, arrived, again, strict=True):
                if g is None or grown is None:
                    continue
                one, many = (wide(record.layout.folded(x, tape.rows, tape.examples)) for x in (g, grown))
                apart = many / factors.to(many).view(-1, *[1] * (many.ndim - 1)) - one
                off, length = (x.reshape(len(x), -1).nan_to_num().norm(dim=1) for x in (apart, one))
                if bool((off > _tolerance(g.dtype) * length + torch.finfo(one.dtype).tiny).any()):
                    raise RefusedError(
                        f"the loss of one example reaches {record.names[0]} in the place of another: the model changes "
                        "the order of the batch, or examples act on each other"
                    )


def _tolerance(dtype: torch.dtype) -> float:
    """Powers of two round nothing, but kernels that add in a random order differ by more where terms cancel."""
    return float(torch.finfo(dtype).eps ** 0.5)


def _compare_halves(model: nn.Module, loss: Loss, batch: Batch, rows: int, layouts: Layouts) -> None:
    """Refuse a batch in which the loss of an example, or the length of its gradient, changes with the others."""
    examples = size(batch) // rows
    if examples < 2:
        return
    device = leaves(batch)[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), without_dropout(model):
        before = _random_states(device)
        whole, uses, norms = _measured(model, loss, batch, rows, layouts)
        if not all(map(torch.equal, before, _random_states(device))):
            raise RefusedError("the model draws random numbers outside dropout layers: two passes cannot be compared")
        tolerance, eps = math.sqrt(torch.finfo(whole.dtype).eps), _coarsest(whole)
        typical = whole.abs().nan_to_num(posinf=0).mean()
        directions = _Directions(uses, norms, eps)
        del uses
        for order in _orders(batch, examples, rows, device):
            for few in order.tensor_split(2):
                own = (few[:, None] * rows + torch.arange(rows, device=device)).flatten()
                some = pytree.tree_map(lambda leaf, own=own: leaf[own], batch)
                found, own_uses, own_norms = _measured(model, loss, some, rows, layouts)
                off = (found - whole[few]).abs().nan_to_num(posinf=0)
                if bool((off > tolerance * (whole[few].abs().nan_to_num(posinf=0) + typical)).any()):
                    raise MetError("examples act on each other: the loss of one changes with the others in its batch")
                for name, norm in norms.items():
                    off = (own_norms[name] - norm[few]).abs().nan_to_num(posinf=0)
                    if bool((off > directions.allowed[name][few]).any()):
                        raise _changed(name)
                directions.add(few, own_uses)
            directions.compare()


class _Directions:
    """Sums of the gradients of all examples, each of length 1 and with a random sign, from the whole and from halves.

    Lengths alone would not show a gradient that is turned.
    """

    def __init__(self, uses: Mapping[str, Use], norms: Mapping[str, Tensor], eps: float) -> None:
        total = sum(norm.square() for norm in norms.values()) ** 0.5
        self.allowed = {name: eps**0.25 * norm + eps**0.75 * total for name, norm in norms.items()}
        generator = torch.Generator().manual_seed(secrets.randbits(63))
        self._factors = {}
        for name, norm in norms.items():
            signs = torch.randint(0, 2, norm.shape, generator=generator, device="cpu").to(norm) * 2 - 1
            usable = norm.isfinite() & (norm > self.allowed[name])
            self._factors[name] = torch.where(usable, signs / norm, 0)
        self._whole = {name: _sum(use, self._factors[name]) for name, use in uses.items()}
        self._parts: list[dict[str, Tensor]] = []

    def add(self, few: Tensor, uses: Mapping[str, Use]) -> None:
        """Note the sums of some examples."""
        self._parts.append({name: _sum(use, self._factors[name][few]) for name, use in uses.items()})

    def compare(self) -> None:
        """Refuse where the sums of the parts that were noted are not that of the whole."""
        for name, whole in self._whole.items():
            off = torch.linalg.vector_norm(whole - sum(part[name] for part in self._parts))
            if bool(off > (self._factors[name] * self.allowed[name]).nan_to_num().norm()):
                raise _changed(name)
        self._parts.clear()


def _sum(use: Use, factors: Tensor) -> Tensor:
    """The sum of the gradients that have a factor, times it."""
    with torch.no_grad(), own_products():
        return wide(use.kept(factors != 0).weighted_sum(factors))


def _changed(name: str) -> RefusedError:
    return RefusedError(
        f"the gradient of parameter {name} changes with the others in the batch, though the loss of the example does "
        "not"
    )


def _measured(
    model: nn.Module, loss: Loss, batch: Batch, rows: int, layouts: Layouts
) -> tuple[Tensor, dict[str, Use], dict[str, Tensor]]:
    """The losses, (examples, rows), each example's gradient, and its length, by parameters."""
    losses: list[Tensor] = []

    def noted(model: nn.Module, batch: Batch) -> Tensor:
        losses.append(loss(model, batch))
        return losses[-1]

    weights = torch.ones(size(batch), device=leaves(batch)[0].device)
    found = recorded(model, noted, batch, weights, rows, layouts)
    with torch.no_grad(), own_products():
        measured = {name: use.measured() for name, use in found.uses.items()}
    norms = {name: wide(norm).flatten() for name, (norm, _) in measured.items()}
    return losses[-1].detach().view(-1, rows), {name: use for name, (_, use) in measured.items()}, norms


def _coarsest(losses: Tensor) -> float:
    """The rounding of the coarsest type that is computed in."""
    kind = losses.device.type
    used = [losses.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    return max(*(torch.finfo(dtype).eps for dtype in used), TF32 if tf32_is_allowed(losses.device) else 0.0)


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a pass draws from by default."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _orders(batch: Batch, examples: int, rows: int, device: torch.device) -> Iterator[Tensor]:
    """The examples in orders that are to be halved: at random, and by the values of each column."""
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    yield torch.randperm(examples, generator=generator, device="cpu").to(device)
    for leaf in leaves(batch):
        yield leaf.reshape(examples, -1).double().nan_to_num().mean(1).argsort(stable=True)
