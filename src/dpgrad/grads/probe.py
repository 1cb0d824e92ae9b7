"""Passes over a few examples, with nothing of them left behind: what the check before the first step compares."""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpgrad.errors import DataError, UnsupportedModelError
from dpgrad.grads.batch import leaves, of_one_row, part, row_losses, size
from dpgrad.grads.following import own_functions
from dpgrad.grads.sums import Batch, Loss, sum_dtype, trainable
from dpgrad.grads.swap import swapped

__all__ = ["COPIED", "FEW", "Own", "Probe", "length"]

COPIED = 1 << 24  # parameters of a model that is copied at most, to the CPU or in float64
FEW = 4  # examples: enough to be of different company, few enough to cost nothing
_STRETCH = 1e3  # how much larger than the examples their companions are made
_SKETCH = 1 << 16  # values of a gradient that is compared by a projection
_SEED = 0x6D0DE1_5EED  # that no model gives: one that seeds random numbers itself is refused


class Own(NamedTuple):
    """One example's loss and gradient."""

    loss: float
    gradients: dict[str, Tensor]
    used: frozenset[str]  # the parameters that the loss depends on
    norm: float
    drew: bool  # whether the pass drew random numbers


class _Coarsest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The rounding of the coarsest floating-point type that is computed inside the block."""

    eps = 0.0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return result


@dataclass
class Probe:
    """Passes over examples. Each starts from the same buffers and the same random state, and leaves both alone."""

    model: nn.Module
    loss: Loss
    batch: Batch
    rows: int  # of each example
    eps: float = 0.0
    look: bool = True  # whether to look for what a pass leaves in the model
    left: dict[str, Tensor] | None = None  # what the first pass wrote to buffers
    sketched: bool = False  # whether parameters are there while they are used alone: nothing as large as all is held

    @property
    def count(self) -> int:
        return size(self.batch) // self.rows

    def example(self, i: int) -> Batch:
        """The rows of one example."""
        return part(self.batch, i * self.rows, (i + 1) * self.rows)

    def copies(self, i: int) -> Batch:
        """As many examples as there are, all of them example ``i``."""
        return pytree.tree_map(lambda leaf: torch.cat([leaf] * self.count), self.example(i))

    def stretched(self, i: int) -> Batch:
        """The examples as they are, all but example ``i`` enlarged: however little they act on it, it shows."""
        own = torch.arange(self.count, device=leaves(self.batch)[0].device).repeat_interleave(self.rows) == i

        def enlarged(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            return torch.where(own.to(leaf.device).view(-1, *[1] * (leaf.ndim - 1)), leaf, _STRETCH * leaf)

        return pytree.tree_map(enlarged, self.batch)

    def on_cpu(self) -> "Probe":
        """The same examples and a copy of the model on the CPU."""
        rows = pytree.tree_map(lambda leaf: leaf.cpu(), self.batch)
        return Probe(copy.deepcopy(self.model).cpu(), self.loss, rows, self.rows, self.eps)

    def in_double(self) -> "Probe | None":
        """The same examples and a copy of the model in float64; None for a coarser or a large one."""
        numbers = sum(parameter.numel() for parameter in self.model.parameters())
        if (
            self.sketched
            or numbers > COPIED
            or not torch.finfo(torch.float64).eps < self.eps <= torch.finfo(torch.float32).eps
        ):
            return None
        rows = pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, self.batch)
        model = copy.deepcopy(self.model).double()
        return Probe(model, self.loss, rows, self.rows, torch.finfo(torch.float64).eps, look=False)

    def find_precision(self) -> None:
        """Note how coarsely a pass computes."""
        with _Coarsest() as coarsest:  # type: ignore[no-untyped-call]
            self.own(part(self.batch, 0, min(self.count, FEW) * self.rows), 0)
        self.eps = coarsest.eps

    def find_examples(self) -> None:
        """Keep a few examples with a finite gradient: the others are left out of every sum. Those kept must differ."""
        given = self.batch
        few = max(1, -(-self.count // FEW))
        for start in range(few):  # from all over, and others where none of them is finite
            self.batch = given
            self.keep(range(start, self.count, few))
            self.keep_finite()
            if self.count:
                break
        self._refuse_none()
        if not self._vary():
            altered = pytree.tree_map(_altered, self.example(0))
            self.batch = pytree.tree_map(lambda *leaves: torch.cat(leaves), self.example(0), altered)
            self.keep_finite()
            self._refuse_none()
        if not self._vary():
            raise DataError(
                "batch must hold examples that differ, or the check cannot see whether they act on each other: give "
                "other examples"
            )

    def _refuse_none(self) -> None:
        if not self.count:
            raise UnsupportedModelError(
                "no example that was tried has a finite gradient: look for NaN and inf in model and loss"
            )

    def keep_finite(self) -> None:
        """Keep the examples with a finite gradient."""
        self.keep([i for i in range(self.count) if math.isfinite(self.own(self.copies(i), i).norm)])

    def keep(self, examples: Sequence[int]) -> None:
        """Keep these examples."""
        places = [example * self.rows + row for example in examples for row in range(self.rows)]
        self.batch = pytree.tree_map(lambda leaf: leaf[torch.tensor(places, dtype=torch.int64)], self.batch)

    def losses(self, examples: Sequence[int]) -> tuple[Tensor, bool]:
        """The loss of each of these examples in one pass, and whether it drew random numbers."""
        few = pytree.tree_map(lambda *leaves: torch.cat(leaves), *map(self.example, examples))
        with self.apart(), torch.no_grad():
            before = self._random_states()
            found = row_losses(self.loss, self.model, few, size(few)).view(-1, self.rows).mean(1)
            return found, not all(map(torch.equal, before, self._random_states()))

    def _vary(self) -> bool:
        return not all(map(torch.equal, leaves(self.batch), leaves(self.copies(0))))

    def alone(self, i: int) -> Own:
        """The loss and the gradient of example ``i`` in its own pass, with copies of itself if a batch is needed."""
        try:
            return self.own(self.example(i), 0)
        except Exception as error:
            if not of_one_row(error):
                raise
            copies = self.copies(i)
            if self.count == 1:
                copies = pytree.tree_map(lambda leaf: torch.cat([leaf, leaf]), copies)
            return self.own(copies, i)

    def own(self, batch: Batch, i: int) -> Own:
        """The loss and the gradient of example ``i``, from one ordinary pass over a batch."""
        parameters = trainable(self.model)
        buffers = dict(self.model.named_buffers())
        kept = [(name, tensor, tensor.detach().clone()) for name, tensor in self._kept() if self.look]
        with self.apart():
            before = self._random_states()
            losses = row_losses(self.loss, self.model, batch, size(batch))
            drew = not all(map(torch.equal, before, self._random_states()))
            _refuse_reentrant(losses)
            loss = losses.view(-1, self.rows)[i].mean()
            found = self._gradients(loss, parameters) if loss.requires_grad else {}
            if self.look:
                self._refuse_left(buffers, kept)
        gradients = {name: self._none(each) for name, each in parameters.items() if name not in found} | found
        used = frozenset(found)
        return Own(float(loss.detach()), gradients, used, math.hypot(*map(length, gradients.values())), drew)

    def _gradients(self, loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """The gradients of the parameters that a loss depends on, as `held`."""
        if not self.sketched:
            every: Sequence[Tensor | None] = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            return {name: self.held(name, g) for name, g in zip(parameters, every, strict=True) if g is not None}
        found: dict[str, Tensor] = {}

        def arrived(name: str, parameter: Tensor) -> None:
            assert parameter.grad is not None
            found[name], parameter.grad = self.held(name, parameter.grad), None

        hooks = [
            each.register_post_accumulate_grad_hook(partial(arrived, name))  # type: ignore[no-untyped-call]
            for name, each in parameters.items()
        ]
        try:
            loss.backward(inputs=list(parameters.values()))  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def held(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient as it is measured and compared."""
        found = gradient.detach().to_dense().to(sum_dtype(gradient.dtype))
        return _sketch(name, found.reshape(-1)) if self.sketched and found.numel() > _SKETCH else found

    def _none(self, parameter: Tensor) -> Tensor:
        """The zeros that stand for a gradient that there is not."""
        large = self.sketched and parameter.numel() > _SKETCH
        shape = torch.Size([_SKETCH]) if large else parameter.shape
        return torch.zeros(shape, dtype=sum_dtype(parameter.dtype), device=parameter.device)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within the block a pass works on copies of the buffers, and draws random numbers that will be drawn again."""
        copies = {id(buffer): buffer.clone() for buffer in self.model.buffers()}
        with swapped(self.model, {}), torch.random.fork_rng(self._cuda()):
            torch.default_generator.manual_seed(_SEED)
            for module in self.model.modules():
                for slot, buffer in module._buffers.items():
                    module._buffers[slot] = copies.get(id(buffer))
            yield

    def _cuda(self) -> list[torch.device]:
        return list({tensor.device for tensor in (*leaves(self.batch), *self.model.parameters()) if tensor.is_cuda})

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda())]

    def _kept(self) -> Iterator[tuple[str, Tensor]]:
        """What a pass may change in place: parameters, and tensors that modules hold without registering them."""
        if not self.sketched:  # else what is changed is gone when the memory is
            yield from self.model.named_parameters()
        for path, module in self.model.named_modules():
            for slot, value in module.__dict__.items():
                if isinstance(value, Tensor):
                    yield f"{path}.{slot}".lstrip("."), value

    def _refuse_left(self, buffers: dict[str, Tensor], kept: list[tuple[str, Tensor, Tensor]]) -> None:
        """Refuse what a pass left in the model, unless every pass leaves the same buffers, whatever the batch.

        Values are compared, not versions: a write through ``.data`` does not count as a new version.
        """
        for name, tensor, before in kept:
            if not _equal(tensor.detach(), before):
                what = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
                tensor.data = before
                raise UnsupportedModelError(
                    f"the forward pass changes {what} {name} in place, without noise: remove that"
                )
        left = {
            name: buffer
            for name, buffer in self.model.named_buffers()
            if name not in buffers or not _equal(buffer, buffers[name])
        }
        first = self.left = left if self.left is None else self.left
        for name in sorted(left.keys() | first.keys()):
            if name not in left or name not in first or not _equal(left[name], first[name]):
                raise UnsupportedModelError(
                    f"the forward pass writes values of the batch to buffer {name}, which would be released without "
                    "noise: put its module in eval mode, or turn its running statistics off (for normalization "
                    "layers dpgrad.grads.convert(model) does)"
                )


def _refuse_reentrant(losses: Tensor) -> None:
    """Refuse a checkpoint that runs a backward pass of its own: what it adds to .grad nobody sees, or clips."""
    if "CheckpointFunction" in own_functions(losses):
        raise UnsupportedModelError(
            "torch.utils.checkpoint with use_reentrant=True writes gradients to .grad without clipping or noise: give "
            "use_reentrant=False"
        )


def _altered(leaf: Tensor) -> Tensor:
    """Another example of the same kind: numbers in [0, 1] stay there, and the same indices come in another order."""
    if leaf.is_floating_point():
        return 1 - leaf
    return leaf.flip(-1) if leaf.ndim > 1 else leaf


def _sketch(name: str, flat: Tensor) -> Tensor:
    """A random projection to few values, of the same length; that of differences is right within a percent."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    random = torch.Generator(flat.device).manual_seed(seed)
    found = torch.zeros(_SKETCH, dtype=flat.dtype, device=flat.device)
    for some in torch.split(flat, 16 * _SKETCH):
        signs = torch.randint(2, some.shape, generator=random, dtype=flat.dtype, device=flat.device)
        turned = signs.mul_(2).sub_(1).mul_(some)
        even = len(turned) // _SKETCH * _SKETCH
        found += turned[:even].view(-1, _SKETCH).sum(0)
        found[: len(turned) - even] += turned[even:]
    size = length(found)
    return found * (length(flat) / size) if size else found


def length(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # NaN is left as it was, too.
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
