"""What engines sum, compared with the definition: the clipped gradients of single examples, one after another."""

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from benchmarks.steps.engines import CLIP, SEED, Sums
from benchmarks.steps.workloads import LOTS, Batch, Workload
from dpgrad.grads.precision import exact_products
from dpgrad.grads.scaling import Hard
from dpgrad.grads.sums import trainable
from dpgrad.mechanism import sampling
from dpgrad.mechanism.keys import Key

PROJECTIONS = 8
# Book-keeping adds to each norm what rounding may have hidden, and all of dpgrad shortens factors by τ; peers neither.
TOLERANCE = 1e-2
# What TF32 and bfloat16 round grows on its way through many layers: on ResNet-9 TF32 moved the sums of torch's own vmap
# by 8 %. What is another computation is found all the same.
ROUNDED_TOLERANCE = 0.25
# A parameter whose sum is a smaller share of the whole is compared with that share. The bias of an attention's keys has
# no gradient but rounding errors; and to take noise of length √p off a sum of p values leaves errors of about 3e-8·√p,
# 3e-5 of the whole for the largest parameter here.
SMALL_SHARE = 1e-3
MOST = 1024  # examples that are differentiated one by one
_SEED = 3

Sketch = dict[str, list[float]]


def lot(workload: Workload, device: str) -> Batch:
    """The examples that dpgrad draws at its first step."""
    drawn = sampling.Poisson(1 / LOTS).draw(LOTS * workload.batch_size, 0, Key.from_seed(SEED))
    places = torch.from_numpy(drawn).long().to(device)
    inputs, labels = workload.rows(LOTS * workload.batch_size, device)
    return inputs[places], labels[places]


def definition(workload: Workload, batch: Batch, device: str) -> Sums:
    """The sum of the clipped gradients of single examples, each by autograd alone, in float32."""
    model, loss = workload.built(device), replace(workload, autocast=False).loss
    parameters = trainable(model)
    scale = partial(workload.options.get("rule", Hard()), clip=CLIP)
    sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
    with exact_products():
        for example in zip(*(column.split(1) for column in batch), strict=True):
            grads = torch.autograd.grad(loss(model, example).sum(), list(parameters.values()), materialize_grads=True)
            norm = torch.stack([grad.double().norm() for grad in grads]).norm()
            factor = scale(norm.view(1, 1)).float()[0, 0]
            for total, grad in zip(sums.values(), grads, strict=True):
                total.addcmul_(grad, factor)
    return sums


def definitions(device: str, kinds: Collection[bool], workload: Workload) -> dict[bool, Sketch]:
    """Sketches of the definition on the fixed batch (False), on dpgrad's first lot (True), or on both.

    None where examples have several views, which are drawn elsewhere, or where there are too many.
    """
    if workload.views > 1 or workload.batch_size > MOST:
        return {}
    batches = {of: lot(workload, device) if of else workload.batch(device) for of in sorted(kinds)}
    return {of: sketched(definition(workload, batch, device)) for of, batch in batches.items()}


def sketched(sums: Mapping[str, Tensor]) -> Sketch:
    """Each tensor's projections on a few Gaussian vectors, the same for every engine, and its norm at the end.

    The root mean square of the differences of projections estimates the norm of the difference of tensors (Johnson and
    Lindenstrauss, 1984), so that large sums need not leave their process to be compared.

    >>> sketched({"weight": torch.zeros(3)})["weight"][-1]
    0.0
    """
    sketch = {}
    for name in sorted(sums):
        flat = sums[name].detach().flatten().float()
        random = torch.Generator(flat.device).manual_seed(_SEED)
        directions = (torch.randn(flat.numel(), generator=random, device=flat.device) for _ in range(PROJECTIONS))
        sketch[name] = [float((flat * direction).sum()) for direction in directions] + [float(flat.norm())]
    return sketch


def difference(found: Sketch, definition: Sketch) -> float:
    """The largest relative difference of a tensor, estimated; infinite where one is missing or is not finite.

    >>> one = sketched({"weight": torch.ones(100)})
    >>> difference(one, one), difference(sketched({"weight": torch.zeros(100)}), one) > 0.5
    (0.0, True)
    """
    if found.keys() != definition.keys() or not all(map(math.isfinite, chain(*found.values()))):
        return math.inf
    least = SMALL_SHARE * math.hypot(*(values[-1] for values in definition.values()))
    apart = []
    for name, values in definition.items():
        squares = [(a - b) ** 2 for a, b in zip(found[name][:-1], values[:-1], strict=True)]
        apart.append(math.sqrt(statistics.fmean(squares)) / max(values[-1], least))
    return max(apart)
