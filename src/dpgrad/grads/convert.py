"""Models without layers that let examples act on each other."""

import copy

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.swap import unwrapped

__all__ = ["convert"]

_MOST_GROUPS = 32  # as Wu and He (2018) chose


def convert(model: nn.Module) -> nn.Module:
    """A copy of the model in which each BatchNorm is a GroupNorm and no InstanceNorm keeps running statistics.

    A BatchNorm of C channels becomes a GroupNorm of C channels: BatchNorm2d, BatchNorm3d and SyncBatchNorm in as many
    groups as divide C, at most 32; BatchNorm1d in one group, because its input may be one number for each channel, and
    a group must not be a single number. Scale and shift stay the same parameters: tied or frozen if they were, of the
    same type and on the same device. The statistics that BatchNorm gathered are dropped: they came from data. So the
    copy computes something else than the model, and a pre-trained one has to be trained further. To keep what a
    pre-trained BatchNorm computes, put it in eval mode instead, if the data of its statistics are public.

    >>> convert(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    24
    """
    model = unwrapped(model)
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin):
            raise UnsupportedModelError(
                f"module {name or 'itself'!r} is lazy: run the model once, on public data, to give it sizes"
            )
    root = nn.Sequential(copy.deepcopy(model))
    made: dict[nn.Module, nn.Module] = {}  # a module that stands in several places stays one module
    for module in list(root.modules()):
        for slot, child in module._modules.items():
            if isinstance(child, _BatchNorm):
                module._modules[slot] = made.setdefault(child, _group_norm(child))
            elif isinstance(child, _InstanceNorm):
                child.track_running_stats = False
                child._buffers.update(dict.fromkeys(child._buffers))
    return root[0]


def _group_norm(layer: _BatchNorm) -> nn.GroupNorm:
    channels = layer.num_features
    groups = max(d for d in range(1, min(channels, _MOST_GROUPS) + 1) if channels % d == 0)
    made = nn.GroupNorm(1 if isinstance(layer, nn.BatchNorm1d) else groups, channels, layer.eps, affine=False)
    made.affine, made.weight, made.bias = layer.affine, layer.weight, layer.bias
    return made.train(layer.training)
