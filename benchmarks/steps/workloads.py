"""What is trained in a benchmark: a network, random examples, the same for every engine, and how it is trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from benchmarks.steps import hugging_face
from benchmarks.steps.networks import (
    CLASSES,
    VOCABULARY,
    Characters,
    Recurrent,
    Transformer,
    cnn,
    mlp,
    resnet9,
    stack,
    wide_resnet,
)

Batch = tuple[Tensor, Tensor]  # inputs, labels
DEVICE, HOST, DATASET = "device", "host", "dataset"  # where the data of a run are
LOTS = 16  # Poisson lots are drawn from so many times as many rows
DISTINCT = 4096  # rows of a dataset that differ; they repeat after that


class Examples(Dataset[Batch]):
    """Examples on the host, read one at a time."""

    def __init__(self, columns: Batch) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[1])

    def __getitem__(self, index: int) -> Batch:
        return self.columns[0][index], self.columns[1][index]


@dataclass(frozen=True)
class Workload:
    """A model, the shape of its examples, and how it is trained.

    >>> WORKLOADS["mnist-cnn"].of(4).batch("cpu")[0].shape
    torch.Size([4, 1, 28, 28])
    """

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one input
    batch_size: int
    batch_size_cpu: int  # sized for two cores
    vocabulary: int | None = None  # inputs are indices into it
    next_token: bool = False  # what is predicted: each next token, instead of one class
    autocast: bool = False  # to bfloat16
    small: "Workload | None" = None  # measured on a CPU in its place, trained in the same way
    place: str = DEVICE  # of the data of private steps; other steps take one batch on the device
    microbatch: int | None = None  # examples processed at a time, by every engine
    views: int = 1  # augmented rows of each example
    options: Mapping[str, Any] = field(default_factory=dict)  # of the private step alone

    def of(self, batch_size: int) -> "Workload":
        """The same with batches of another size."""
        return replace(self, batch_size=batch_size, batch_size_cpu=batch_size)

    def on(self, device: str) -> "Workload":
        """The same in the size that fits the device."""
        if device == "cuda":
            return self
        training = {"autocast": self.autocast, "place": self.place, "views": self.views, "options": self.options}
        return replace(self.small or self, **training).of(self.batch_size_cpu)

    def built(self, device: str) -> nn.Module:
        """The model with weights that depend on nothing but torch's generator at seed 0."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.make().to(device)

    def batch(self, device: str) -> Batch:
        """The same random rows at every call: one batch, with as many rows as its examples and their views."""
        return self.rows(self.batch_size * self.views, device)

    def data(self, device: str) -> Any:
        """The dataset from which private steps draw, where the workload has it."""
        columns = self.rows(LOTS * self.batch_size, device if self.place == DEVICE else "cpu")
        return Examples(columns) if self.place == DATASET else columns

    def rows(self, count: int, device: str) -> Batch:
        """As many random examples."""
        random = torch.Generator().manual_seed(1)
        few = min(count, DISTINCT)
        columns: Batch
        if self.vocabulary is None:
            columns = (
                torch.randn((few, *self.shape), generator=random),
                torch.randint(CLASSES, (few,), generator=random),
            )
        else:
            ids = torch.randint(self.vocabulary, (few, self.shape[0] + 1), generator=random)
            columns = ids[:, :-1].contiguous(), ids[:, 1:].contiguous() if self.next_token else ids[:, -1] % CLASSES
        places = torch.arange(count, device=device) % few
        inputs, labels = (column.to(device) for column in columns)
        return (inputs[places], labels[places]) if count > few else (inputs, labels)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each row."""
        inputs, labels = batch
        if not self.autocast:
            return self.losses(model(inputs), labels)
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return self.losses(model(inputs), labels)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of each row: of its class, or the mean over its next tokens."""
        if not self.next_token:
            return F.cross_entropy(outputs, labels, reduction="none")
        each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        return each.unflatten(0, labels.shape).mean(1)


def transformer(width: int, layers: int, length: int, batch_size: int) -> Workload:
    """A transformer with heads of 64 dimensions."""
    make = partial(Transformer, width, layers, max(1, width // 64), length)
    return Workload("transformer encoder", make, (length,), batch_size, batch_size, VOCABULARY)


def deep(width: int, layers: int, batch_size: int) -> Workload:
    """A stack of linear layers."""
    make = partial(stack, width, layers)
    return Workload(f"{layers} linear layers of {width}", make, (width,), batch_size, batch_size)


def _decoder(family: str, title: str, make: Callable[..., nn.Module], vocabulary: int) -> Workload:
    """A language model on sequences of 256 tokens, 16 in a batch; on a CPU two small layers and 32 tokens."""
    few = partial(make, width=128, layers=2, heads=4, vocabulary=VOCABULARY, length=32)
    small = Workload(f"{family}, 2 layers of 128, T=32", few, (32,), 4, 4, VOCABULARY, next_token=True)
    return Workload(f"{title}, T=256", make, (256,), 16, 4, vocabulary, next_token=True, small=small)


_BERT = partial(Transformer, 768, 12, 12, 256, 30522)
_SMALL_VIT = Workload("ViT, 2 layers of 128", partial(hugging_face.vit, 128, 2, 4, 32), (3, 32, 32), 8, 8)

WORKLOADS: dict[str, Workload] = {
    "mlp": Workload("MLP, one hidden layer", partial(mlp, 64, 64), (64,), 512, 512),
    "mlp-50": deep(64, 50, 32),
    "mnist-cnn": Workload("MNIST CNN", cnn, (1, 28, 28), 512, 512),
    "resnet9": Workload("ResNet-9, GroupNorm", resnet9, (3, 32, 32), 512, 8),
    "bert": Workload("BERT-base shape, T=256", _BERT, (256,), 32, 1, 30522),
    "wrn-16-4": Workload("WRN-16-4, GroupNorm", wide_resnet, (3, 32, 32), 256, 4),
    "vit-s16": Workload("ViT-S/16", hugging_face.vit, (3, 224, 224), 64, 8, small=_SMALL_VIT),
    "gpt2": _decoder("GPT-2, tied", "GPT-2 small, tied", hugging_face.gpt2, 50257),
    "gpt2-lora": _decoder("GPT-2, LoRA r=8", "GPT-2 small, LoRA r=8", hugging_face.gpt2_lora, 50257),
    "llama": _decoder("Llama-style", "Llama-style, 178M", hugging_face.llama, 32000),
    "char-lstm": Workload("char-LSTM, T=64", Characters, (64,), 256, 16, 128, next_token=True),
    "stack-32": replace(deep(256, 32, 512), batch_size_cpu=32),
    "transformer": transformer(256, 4, 128, 16),
    "lstm": Workload("LSTM classifier", Recurrent, (64,), 64, 64, VOCABULARY),
}
TRANSFORMERS = ("vit-s16", "gpt2", "gpt2-lora", "llama")  # need that library
