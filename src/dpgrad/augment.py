"""Several rows made of each example at every step: their gradients are averaged before the mean is scaled.

De, Berrada, Hayes, Smith and Balle, "Unlocking high-accuracy differentially private image classification through scale"
(2022), call it augmentation multiplicity.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpgrad.grads.batch import leaves
from dpgrad.grads.sums import Batch

Augment = Callable[[Batch, torch.Generator], Batch]  # (examples, ...) -> (examples, K, ...)


def refuse_mixing(augment: Augment, probe: Batch, device: torch.device) -> None:
    """Refuse an augmentation of the wrong shape, and one that lets an example act on the rows of another.

    Guarantee: where an example's rows are made from it and from independent draws alone, an example more or less moves
    the sum by its own term: the draws of the others are the same in law, and divergences of mixtures over draws are at
    most the worst. The check is of behaviour, on a few examples: one is exchanged and the rows of the others compared.

    >>> refuse_mixing(lambda batch, generator: (batch - batch.mean())[:, None], torch.arange(3.0), torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: augment must make an example's rows from that example and the generator alone: ...
    """

    def rows_of(batch: Batch) -> list[Tensor]:
        random = torch.Generator(device)
        random.manual_seed(0)
        return leaves(augment(batch, random))

    examples = len(leaves(probe)[0])
    changed = pytree.tree_map(lambda leaf: torch.cat([leaf[1:2], leaf[1:]]) if examples > 1 else leaf, probe)
    found, moved = rows_of(probe), rows_of(changed)
    shapes = {tuple(leaf.shape[:2]) for leaf in found}
    if len(shapes) > 1 or any(leaf.ndim < 2 or len(leaf) != examples or not leaf.shape[1] for leaf in found):
        raise ValueError(
            f"augment must return tensors that begin with (examples, rows), here ({examples}, K), got {sorted(shapes)}"
        )
    for one, other in zip(found, moved, strict=True):
        if one.shape != other.shape or not ((one == other) | (one != one) & (other != other))[1:].all():
            raise ValueError(
                "augment must make an example's rows from that example and the generator alone: another example was "
                "changed and they moved (or it draws randomness from elsewhere)"
            )
