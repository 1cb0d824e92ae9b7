"""Small networks of the kinds that are trained privately; each builder returns a fresh one in the default dtype."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from reference import ENGINES, Loss
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH = 11, 6, 8


class Same(torch.autograd.Function):
    """The same values, in the old style, which vmap does not take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def per_row(out: Tensor) -> Tensor:
    """One value per row that no entry of the output leaves unchanged."""
    flat = out.flatten(1)
    return (flat * torch.sin(1 + torch.arange(flat.shape[1], dtype=flat.dtype))).sum(1) + flat.square().sum(1) / 2


def output_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss for any model of one input: (x, weight of the row)."""
    return per_row(model(batch[0])) * batch[1]


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Next-token prediction: the mean over positions of each row."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1)


def mnist_cnn() -> nn.Module:
    """The network of Papernot et al. and of most papers on MNIST, at half its size."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 6, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(96, 8), nn.Tanh(), nn.Linear(8, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Convolution, GroupNorm, ReLU in place and, where asked for, pooling."""

    def __init__(self, inner: int, outer: int, pool: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inner, outer, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, outer)
        self.after = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2) if pool else nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.convolution(x)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(width, width), Block(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def resnet9(width: int = 2) -> nn.Module:
    """ResNet-9 with GroupNorm."""
    return nn.Sequential(
        Block(3, width), Block(width, 2 * width, pool=True), Residual(2 * width),
        Block(2 * width, 4 * width, pool=True), Block(4 * width, 8 * width, pool=True), Residual(8 * width),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8 * width, 5),
    )  # fmt: skip


class Conv1D(nn.Module):
    """The linear layer of GPT-2 in transformers: the weight transposed, rows of all tokens in one matrix."""

    def __init__(self, outer: int, inner: int) -> None:
        super().__init__()
        self.outer = outer
        self.weight = nn.Parameter(torch.randn(inner, outer) / math.sqrt(inner))
        self.bias = nn.Parameter(torch.zeros(outer))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.outer)


class LlamaRMSNorm(nn.Module):
    """As transformers write it: a bare weight."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, time, features)."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), 100 ** (-torch.arange(half, dtype=x.dtype) / half))
    angles = torch.cat([angles, angles], -1)
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


class Gpt2Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.c_out = Conv1D(2 * width, width), Conv1D(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*part.shape[:2], self.heads, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(x.shape[-1], dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = LlamaRMSNorm(width), LlamaRMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(
            F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True).transpose(1, 2).flatten(2)
        )
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TorchBlock(nn.Module):
    """`nn.TransformerEncoderLayer` with a causal mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.layer(x, src_mask=mask)


class Transformer(nn.Module):
    """Tokens, positions, blocks, and the token embedding again as the last layer.

    ``tie``: 'module' as Hugging Face models (two modules, one parameter), 'functional' by `F.linear`, 'transposed' by
    a product, 'none' with a head of its own.
    """

    def __init__(self, block: Callable[[int], nn.Module], tie: str, positions: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, width)
        self.pos = nn.Embedding(LENGTH + 2, width) if positions else None
        self.blocks = nn.ModuleList(block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.tie = tie
        if tie in ("module", "none"):
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tie == "module":
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        if self.pos is not None:
            x = x + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        match self.tie:
            case "functional":
                return F.linear(x, self.tok.weight)
            case "transposed":
                return x @ self.tok.weight.T
            case _:
                return self.head(x)


class LstmClassifier(nn.Module):
    """Tokens, a recurrent network, the mean of its outputs, classes."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, 5, padding_idx=0)
        self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=batch_first)
        self.head = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids if self.batch_first else ids.T)
        return self.head(self.lstm(x)[0].mean(1 if self.batch_first else 0))


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it, as in peft."""

    def __init__(self, inner: int, outer: int, rank: int = 2, bare: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        self.bare = bare
        if bare:
            self.A, self.B = nn.Parameter(torch.randn(inner, rank)), nn.Parameter(torch.randn(rank, outer) / 4)
        else:
            self.lora_A, self.lora_B = nn.Linear(inner, rank, bias=False), nn.Linear(rank, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added = x @ self.A @ self.B if self.bare else self.lora_B(self.lora_A(x))
        return self.base(x) + 2.0 * added


def lora(bare: bool) -> nn.Module:
    """A frozen transformer block between LoRA layers, with a trained head."""
    frozen = TorchBlock(WIDTH).requires_grad_(False)
    return nn.Sequential(
        LoraLinear(5, WIDTH, bare=bare), frozen, LoraLinear(WIDTH, WIDTH, bare=bare), nn.Tanh(), nn.Linear(WIDTH, 3)
    )


class VisionTransformer(nn.Module):
    """Patches, a class token, positions as one parameter, changed in place as many write it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
            1,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        x += self.positions[:, : x.shape[1]]
        return self.head(self.blocks(x)[:, 0])


class Network(NamedTuple):
    """How a network, four examples for it and its loss are made, and the engines that take it on every device."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Loss
    engines: tuple[str, ...] = tuple(ENGINES)


def images(channels: int, side: int, classes: int) -> Callable[[], Any]:
    return lambda: (torch.randn(4, channels, side, side), torch.randint(classes, (4,)))


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (4, LENGTH + 1))


def labelled_tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (4, LENGTH)), torch.randint(3, (4,))


def sequences(examples: int = 4, *shape: int) -> tuple[Tensor, Tensor]:
    """Inputs and a weight for the loss of each."""
    return torch.randn(examples, *(shape or (LENGTH, 5))), torch.rand(examples) + 0.5


def transformer(block: Callable[[int], nn.Module], tie: str, positions: bool = True) -> Network:
    return Network(lambda: Transformer(block, tie, positions), tokens, token_loss)


NOT_VMAP = tuple(engine for engine in ENGINES if engine != "vmap")
NETWORKS: dict[str, Network] = {
    "CNN": Network(mnist_cnn, images(1, 28, 10), class_loss),
    "ResNet-9": Network(resnet9, images(3, 8, 5), class_loss),
    "transformer": transformer(TorchBlock, "none"),
    "transformer, tied": transformer(TorchBlock, "module"),
    "transformer, tied functionally": transformer(TorchBlock, "functional"),
    "transformer, tied by a product": transformer(TorchBlock, "transposed"),
    "GPT-2, tied": transformer(Gpt2Block, "module"),
    "Llama, tied": transformer(LlamaBlock, "module", positions=False),
    "LSTM": Network(LstmClassifier, labelled_tokens, class_loss, NOT_VMAP),
    "LSTM, time first": Network(partial(LstmClassifier, False), labelled_tokens, class_loss, NOT_VMAP),
    "LoRA": Network(partial(lora, False), sequences, output_loss),
    "LoRA, bare": Network(partial(lora, True), sequences, output_loss),
    "ViT": Network(VisionTransformer, images(3, 8, 3), class_loss),
}  # fmt: skip
ON_ENGINES = [(name, engine) for name, network in NETWORKS.items() for engine in network.engines]
