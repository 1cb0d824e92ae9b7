"""Models and losses that try to make an engine mistake one example for another, and plain ones that must stay exact.

Every case defines the answer by itself: the gradient of example i is that of the loss on a batch of row i alone.

- ``exact``: plain models. They must be accepted, without a warning, and be exact.
- ``separable``: each loss depends on its own row, but rows are regrouped, sorted or packed on the way. Exact, or
  refused with a remedy that works.
- ``mixing``: a statistic of the batch enters the losses. Refused, or computed as the statistic of one row, with a
  warning.
- ``refused``: what no engine may accept, since one row alone means something else than what was written.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

FEATURES, WIDTH, CLASSES, TIME, TOKENS, RARE = 6, 8, 3, 5, 12, 11
Body = Callable[..., Tensor]
Loss = Callable[[nn.Module, Any], Tensor]
Made = tuple[nn.Module, Loss, Any]


@dataclass(frozen=True)
class Case:
    """A model, a loss and data, made from a seed.

    ``odd`` marks the rows that make the fault show, for tests that move them about. ``mended`` is the body of the same
    model written as a refusal may ask for it: the same gradients from whole tensors. ``drifts``: right at the initial
    values, wrong later. ``smooth``: nothing that was learned decides on a path, so that coarse types agree.
    """

    name: str
    make: Callable[[int], Made]
    expect: Literal["exact", "separable", "mixing", "refused"]
    odd: Callable[[Any], Tensor] | None = None
    mended: Body | None = None
    drifts: bool = False
    smooth: bool = False


class Net(nn.Module):
    """A model that is a function of (module, inputs), with some layers to use."""

    def __init__(self, body: Body, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.body = body
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.body(self, *inputs)


CASES: list[Case] = []


def case(
    name: str,
    expect: Literal["exact", "separable", "mixing", "refused"],
    body: Body,
    data: Callable[[torch.Generator], Any],
    loss: Loss | None = None,
    layers: Callable[[], dict[str, nn.Module]] | None = None,
    odd: Callable[[Any], Tensor] | None = None,
    mended: Body | None = None,
    drifts: bool = False,
    smooth: bool = False,
) -> None:
    """Add a case to the list."""

    def make(seed: int) -> Made:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            model = Net(body, (layers or two_layers)())
        return model, loss or classify, data(torch.Generator().manual_seed(1000 + seed))

    CASES.append(Case(name, make, expect, odd, mended, drifts, smooth))


def two_layers() -> dict[str, nn.Module]:
    return {"layer": nn.Linear(FEATURES, WIDTH), "head": nn.Linear(WIDTH, CLASSES)}


def token_layers() -> dict[str, nn.Module]:
    return {"embedding": nn.Embedding(TOKENS, FEATURES), **two_layers()}


def experts() -> dict[str, nn.Module]:
    return {
        "gate": nn.Linear(FEATURES, 3, bias=False),
        "experts": nn.ModuleList(nn.Linear(FEATURES, WIDTH) for _ in range(3)),
        "head": nn.Linear(WIDTH, CLASSES),
    }


def classify(model: nn.Module, batch: Any) -> Tensor:
    *inputs, targets = batch
    return F.cross_entropy(model(*inputs), targets, reduction="none")


# ---- data. Rows are of very different sizes: a gradient charged to another example is clipped by another factor.


def _sizes(g: torch.Generator, n: int) -> Tensor:
    return torch.randn(n, 1, generator=g).exp()


def _some(g: torch.Generator, n: int, share: float) -> Tensor:
    """True for that share of the rows, at least one, anywhere."""
    return torch.rand(n, generator=g).argsort() < max(1, round(share * n))


def plain(g: torch.Generator, n: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, FEATURES, generator=g) * _sizes(g, n)
    return x, torch.randint(CLASSES, (n,), generator=g)


def flagged(share: float, n: int = 60) -> Callable[[torch.Generator], Any]:
    """(x, flag, target), the flag set for a share of the rows."""

    def data(g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        x, y = plain(g, n)
        return x, _some(g, n, share).long(), y

    return data


def sequences(g: torch.Generator, n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """(x, length, target): vectors over time, from 1 to TIME of which count."""
    x = torch.randn(n, TIME, FEATURES, generator=g) * _sizes(g, n)[:, None]
    return x, torch.randint(1, TIME + 1, (n,), generator=g), torch.randint(CLASSES, (n,), generator=g)


def tokens(g: torch.Generator, n: int = 40, rare: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, target); the token RARE occurs in so many rows only."""
    ids = torch.randint(RARE, (n, TIME), generator=g)
    for row in torch.rand(n, generator=g).argsort()[:rare].tolist():
        ids[row, row % TIME] = RARE
    return ids, torch.randint(CLASSES, (n,), generator=g)


def tokens_alike(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """As `tokens`, but the first rows are nothing but padding."""
    ids, y = tokens(g)
    ids[:8] = 0
    return ids, y


def views(g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, y = plain(g)
    return x, x + 0.3 * torch.randn(x.shape, generator=g), y


def rare_labels(share: float, n: int = 60) -> Callable[[torch.Generator], Any]:
    """(x, target), the target being 1.0 for a share of the rows and 0.0 elsewhere."""

    def data(g: torch.Generator) -> tuple[Tensor, Tensor]:
        x, _ = plain(g, n)
        return x, _some(g, n, share).float()

    return data


def sorted_labels(g: torch.Generator) -> tuple[Tensor, Tensor]:
    x, _ = plain(g, 60)
    return x, torch.arange(60) // 20


def few_of_one_class(g: torch.Generator) -> tuple[Tensor, Tensor]:
    x, _ = plain(g, 60)
    return x, torch.where(_some(g, 60, 0.05), 1, 0)


def odd_flag(data: Any) -> Tensor:
    return data[1] == 1


def odd_length(data: Any) -> Tensor:
    return data[1] < TIME


def odd_token(data: Any) -> Tensor:
    return (data[0] == RARE).any(1)


def odd_label(data: Any) -> Tensor:
    return data[-1] == 1


# ---- plain models: value-free, at today's speed


def mlp(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(x)))


def first_input(m: Any, x: Tensor, *rest: Tensor) -> Tensor:
    """The model without its detours."""
    return mlp(m, x)


def images(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(24, 2, 8, 8, generator=g) * _sizes(g, 24)[:, None, None], torch.randint(3, (24,), generator=g)


def bytes_of_images(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return (
        torch.randint(256, (24, 2, 8, 8), generator=g, dtype=torch.uint8),
        torch.randint(3, (24,), generator=g),
    )


def cnn_layers() -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(2, 4, 3, padding=1),
        "norm": nn.GroupNorm(2, 4),
        "head": nn.Linear(4 * 16, CLASSES),
    }


def cnn(m: Any, x: Tensor) -> Tensor:
    return m.head(F.avg_pool2d(torch.tanh(m.norm(m.conv(x))), 2).flatten(1))


def cnn_of_bytes(m: Any, x: Tensor) -> Tensor:
    return cnn(m, x.to(m.head.weight.dtype) / 255)


def lstm_layers(batch_first: bool = True) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {
        "lstm": nn.LSTM(FEATURES, WIDTH, batch_first=batch_first),
        "head": nn.Linear(WIDTH, CLASSES),
    }


def attention_layers() -> dict[str, nn.Module]:
    return {
        "embedding": nn.Embedding(TOKENS, WIDTH),
        "position": nn.Embedding(TIME, WIDTH),
        "block": nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, activation="gelu"),
        "head": nn.Linear(WIDTH, CLASSES),
    }


def transformer(m: Any, ids: Tensor) -> Tensor:
    x = m.embedding(ids) + m.position(torch.arange(ids.shape[1], device=ids.device))
    return m.head(m.block(x).mean(1))


def flat_tokens(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    b, t, f = x.shape
    return m.head(torch.tanh(m.layer(x.reshape(b * t, f))).view(b, t, -1).mean(1))


def time_first(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(x.transpose(0, 1))).mean(0))


def windows(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """As Swin: shifted along the sequence, windows folded into the batch, attention within each, and back."""
    b = len(x)
    x = F.pad(x, (0, 0, 0, 1)).roll(-1, 1)  # six positions: three windows of two
    h = torch.tanh(m.layer(x.unflatten(1, (3, 2)).flatten(0, 1)))  # (b * 3, 2, width)
    h = F.scaled_dot_product_attention(h, h, h)
    return m.head(h.unflatten(0, (b, 3)).flatten(1, 2).roll(1, 1).mean(1))


def transposed(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer.weight @ x.T + m.layer.bias[:, None]).T)


def by_einsum(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(torch.einsum("bf,wf->bw", x, m.layer.weight) + m.layer.bias))


def dense_experts(m: Any, x: Tensor) -> Tensor:
    every = torch.stack([torch.tanh(expert(x)) for expert in m.experts], 1)
    return m.head(torch.einsum("be,bew->bw", m.gate(x).softmax(1), every))


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return m.head(checkpoint(lambda x: torch.tanh(m.layer(x)), x, use_reentrant=False))


def masked_mean(m: Any, ids: Tensor) -> Tensor:
    kept = (ids != 0).unsqueeze(2)
    h = torch.where(kept, torch.tanh(m.layer(m.embedding(ids))), 0)
    return m.head(h.sum(1) / kept.sum(1).clamp(min=1))


case("MLP", "exact", mlp, plain, smooth=True)
case("CNN with GroupNorm", "exact", cnn, images, layers=cnn_layers, smooth=True)
case("CNN on bytes", "exact", cnn_of_bytes, bytes_of_images, layers=cnn_layers)
case("LSTM", "exact", lambda m, x, n: m.head(m.lstm(x)[0].mean(1)), sequences, layers=lstm_layers())
case("transformer", "exact", transformer, tokens, layers=attention_layers, smooth=True)
case("(B, T) flattened and back", "exact", flat_tokens, sequences, smooth=True)
case("time first", "exact", time_first, sequences)
case("LSTM, time first", "exact", lambda m, x, n: m.head(m.lstm(x.transpose(0, 1))[0].mean(0)), sequences,
     layers=lstm_layers(batch_first=False))  # fmt: skip
case("shifted windows folded into the batch", "exact", windows, sequences, smooth=True)
case("linear of x transposed", "exact", transposed, plain)
case("einsum", "exact", by_einsum, plain, smooth=True)
case("dense mixture of experts", "exact", dense_experts, plain, layers=experts, smooth=True)
case("checkpointed block", "exact", checkpointed, plain)
case("mean over positions that are not padding", "exact", masked_mean, tokens, layers=token_layers)


# ---- rows regrouped by value: each loss depends on its own row


def grouped(m: Any, x: Tensor, d: Tensor) -> Tensor:
    parts = [(d == k).nonzero()[:, 0] for k in (0, 1)]
    h = torch.tanh(m.layer(torch.cat([x[d == k] for k in (0, 1)])))
    return m.head(torch.zeros_like(h).index_copy(0, torch.cat(parts), h))


def grouped_if_any(m: Any, x: Tensor, d: Tensor) -> Tensor:
    order = [where for k in (0, 1) if len(where := (d == k).nonzero()[:, 0])]
    groups = [x[d == k] for k in (0, 1) if (d == k).any()]
    h = torch.tanh(m.layer(torch.cat(groups)))
    return m.head(torch.zeros_like(h).index_copy(0, torch.cat(order), h))


def grouped_in_python(m: Any, x: Tensor, d: Tensor) -> Tensor:
    buckets: dict[int, list[int]] = {}
    for row, kind in enumerate(d):
        buckets.setdefault(int(kind), []).append(row)
    order = torch.tensor([row for kind in sorted(buckets) for row in buckets[kind]], device=x.device)
    h = torch.tanh(m.layer(x[order]))
    return m.head(torch.zeros_like(h).index_copy(0, order, h))


def by_loop(m: Any, x: Tensor, d: Tensor) -> Tensor:
    """Row after row, the layer chosen by a list."""
    h = torch.stack([m.experts[kind](x[row]) for row, kind in enumerate(d.tolist())])
    return m.head(torch.tanh(h) + m.experts[2](x)) + m.gate(x)


def by_loop_mended(m: Any, x: Tensor, d: Tensor) -> Tensor:
    every = torch.stack([expert(x) for expert in m.experts], 1)
    chosen = F.one_hot(d, 3).to(every.dtype)
    return m.head(torch.tanh((every * chosen[:, :, None]).sum(1)) + m.experts[2](x)) + m.gate(x)


def by_numpy(m: Any, x: Tensor, d: Tensor) -> Tensor:
    order = d.detach().cpu().numpy().argsort(kind="stable")
    back = torch.from_numpy(order.argsort()).to(x.device)
    return m.head(torch.tanh(m.layer(x[torch.from_numpy(order).to(x.device)]))[back])


def sorted_rows(m: Any, x: Tensor, d: Tensor) -> Tensor:
    order = (x.norm(dim=1) * (1 + d)).argsort()
    return m.head(torch.tanh(m.layer(x[order]))[order.argsort()])


def sorted_entries(m: Any, x: Tensor) -> Tensor:
    """Sorts the entries of each row, not the rows."""
    return m.head(torch.tanh(m.layer(x).sort(1).values))


def put(m: Any, x: Tensor, d: Tensor) -> Tensor:
    order = d.argsort(stable=True)
    h = torch.tanh(m.layer(x[order]))
    return m.head(torch.zeros_like(h).index_put_((order,), h))


def written_in_place(m: Any, x: Tensor, d: Tensor) -> Tensor:
    order = d.argsort(stable=True)
    h = torch.tanh(m.layer(x[order]))
    out = torch.zeros_like(h)
    out[order] = h
    return m.head(out)


def deduplicated(m: Any, x: Tensor, d: Tensor) -> Tensor:
    """The layer is applied once to each pattern of signs that occurs."""
    signs, inverse = x.sign().unique(dim=0, return_inverse=True)
    return m.head(torch.tanh(m.layer(signs))[inverse] * x.norm(dim=1, keepdim=True))


def deduplicated_all_different(m: Any, x: Tensor, d: Tensor) -> Tensor:
    """No two rows are alike: as many remain as there are, in another order."""
    different, inverse = x.unique(dim=0, return_inverse=True)
    return m.head(torch.tanh(m.layer(different))[inverse])


def deduplicated_mended(m: Any, x: Tensor, d: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(x.sign())) * x.norm(dim=1, keepdim=True))


def unique_tokens(m: Any, ids: Tensor) -> Tensor:
    found, inverse = ids.unique(return_inverse=True)
    return m.head(torch.tanh(m.layer(m.embedding(found)))[inverse].mean(1))


def token_mean(m: Any, ids: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(m.embedding(ids))).mean(1))


def shuffled(m: Any, x: Tensor) -> Tensor:
    order = torch.randperm(len(x), device=x.device)
    return m.head(torch.tanh(m.layer(x[order]))[order.argsort()])


def rolled_and_back(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(x.roll(1, 0))).roll(-1, 0))


def flipped_and_back(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(x.flip(0))).flip(0))


def halves_exchanged(m: Any, x: Tensor) -> Tensor:
    half = len(x) // 2
    h = torch.tanh(m.layer(torch.cat([x[half:], x[:half]])))
    return m.head(torch.cat([h[len(x) - half :], h[: len(x) - half]]))


def two_views(m: Any, x: Tensor, other: Tensor) -> Tensor:
    one, two = torch.tanh(m.layer(torch.cat([x, other]))).chunk(2)
    return m.head(one * two)


def views_side_by_side(m: Any, x: Tensor, other: Tensor) -> Tensor:
    h = torch.tanh(m.layer(torch.stack([x, other], 1).flatten(0, 1))).unflatten(0, (-1, 2))
    return m.head(h.prod(1))


def views_reversed(m: Any, x: Tensor, other: Tensor) -> Tensor:
    """The second view comes in the reverse order."""
    one, two = torch.tanh(m.layer(torch.cat([x, other.flip(0)]))).chunk(2)
    return m.head(one * two.flip(0))


def rows_doubled(m: Any, x: Tensor) -> Tensor:
    twice = torch.arange(len(x), device=x.device).repeat(2)
    h = torch.tanh(m.layer(x[twice])).view(2, len(x), -1)
    return m.head(h[0] * h[1])


def own_vmap(m: Any, x: Tensor) -> Tensor:
    weight, bias = m.layer.weight, m.layer.bias
    return m.head(torch.func.vmap(lambda row: torch.tanh(F.linear(row, weight, bias)))(x))


FEW = flagged(0.05)
case("rows grouped by mask", "separable", grouped, FEW, odd=odd_flag, mended=first_input, smooth=True)
case("rows grouped if any", "separable", grouped_if_any, FEW, odd=odd_flag, mended=first_input)
case("rows grouped by a Python bucket", "separable", grouped_in_python, FEW, odd=odd_flag, mended=first_input)
case("one rare row of 400, grouped", "separable", grouped, flagged(0, 400), odd=odd_flag, mended=first_input)
case("one rare row of 400, grouped if any", "separable", grouped_if_any, flagged(0, 400), odd=odd_flag,
     mended=first_input)  # fmt: skip
case("tolist loop", "separable", by_loop, FEW, layers=experts, odd=odd_flag, mended=by_loop_mended)
case("numpy argsort", "separable", by_numpy, FEW, odd=odd_flag, mended=first_input)
case("rows sorted inside a layer", "separable", sorted_rows, FEW, odd=odd_flag, mended=first_input, smooth=True)
case("entries of a row sorted", "separable", sorted_entries, plain)
case("index_put_", "separable", put, FEW, odd=odd_flag, mended=first_input)
case("written in place across rows", "separable", written_in_place, FEW, odd=odd_flag, mended=first_input)
case("rows deduplicated", "separable", deduplicated, FEW, mended=deduplicated_mended)
case("rows deduplicated, all different", "separable", deduplicated_all_different, FEW, mended=first_input)
case("tokens deduplicated", "separable", unique_tokens, tokens, layers=token_layers, mended=token_mean)
case("rows shuffled and back", "separable", shuffled, plain, mended=mlp)
case("rows rolled and back", "separable", rolled_and_back, plain, mended=mlp, smooth=True)
case("rows flipped and back", "separable", flipped_and_back, plain, mended=mlp)
case("halves of the batch exchanged", "separable", halves_exchanged, plain, mended=mlp)
case("two views, concatenated", "separable", two_views, views, smooth=True)
case("two views, side by side", "separable", views_side_by_side, views)
case("two views, the second reversed", "separable", views_reversed, views, mended=two_views)
case("rows doubled by an index", "separable", rows_doubled, plain)
case("vmap of the model's own", "separable", own_vmap, plain, mended=mlp)


# ---- tokens regrouped: ragged, sorted, packed


def _valid(x: Tensor, lengths: Tensor) -> Tensor:
    """(rows, time): the positions that count."""
    return torch.arange(x.shape[1], device=x.device) < lengths[:, None]


def ragged_mended(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    h = torch.tanh(m.layer(x)) * _valid(x, lengths)[:, :, None]
    return m.head(h.sum(1) / lengths[:, None])


def ragged(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    counts = [int(n) for n in lengths]
    h = torch.tanh(m.layer(torch.cat([row[:n] for row, n in zip(x, counts, strict=True)])))
    return m.head(torch.stack([part.mean(0) for part in h.split(counts)]))


def repeated(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """As many copies of the mean of a row as its length says, each scaled by its place."""
    copies = x.mean(1).repeat_interleave(lengths, 0)
    owner = torch.arange(len(x), device=x.device).repeat_interleave(lengths)
    place = torch.arange(len(owner), device=x.device) - (lengths.cumsum(0) - lengths)[owner]
    h = torch.tanh(m.layer(copies * (1 + place)[:, None]))
    return m.head(h.new_zeros(len(x), h.shape[1]).index_add(0, owner, h))


def repeated_mended(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    place = torch.arange(x.shape[1], device=x.device)
    h = torch.tanh(m.layer(x.mean(1, keepdim=True) * (1 + place)[:, None]))
    return m.head((h * _valid(x, lengths)[:, :, None]).sum(1))


def packed_by_index(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Positions that count first, of all rows; the number of positions stays what it is."""
    valid = _valid(x, lengths).flatten()
    order = (~valid).to(torch.uint8).argsort(stable=True)
    h = torch.tanh(m.layer(x.flatten(0, 1)[order]))[order.argsort()] * valid[:, None]
    return m.head(h.view(*x.shape[:2], -1).sum(1) / lengths[:, None])


def last_by_index(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(x))[torch.arange(len(x), device=x.device), lengths - 1])


def by_length(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Rows of one length are worked on together, cut to that length."""
    out = x.new_zeros(len(x), WIDTH)
    for n in range(1, x.shape[1] + 1):
        rows = (lengths == n).nonzero()[:, 0]
        if len(rows):
            out = out.index_copy(0, rows, torch.tanh(m.layer(x[rows, :n])).mean(1).to(out.dtype))
    return m.head(out)


def nested(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = [row[: int(n)] for row, n in zip(x, lengths, strict=True)]
    jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    h = torch.tanh(m.layer(jagged))
    return m.head(torch.nested.to_padded_tensor(h, 0.0, (len(x), x.shape[1], WIDTH)).sum(1) / lengths[:, None])


def selected(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    valid = _valid(x, lengths)[:, :, None]
    h = torch.tanh(m.layer(x.masked_select(valid).view(-1, FEATURES)))
    back = h.new_zeros(*x.shape[:2], WIDTH).masked_scatter(valid, h)
    return m.head(back.sum(1) / lengths[:, None])


def packed_lstm(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return m.head(m.lstm(packed)[1][0][-1])


def packed_lstm_mended(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return m.head(m.lstm(x)[0].gather(1, (lengths - 1)[:, None, None].expand(-1, 1, WIDTH))[:, 0])


def packed_attention(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Sequences end to end; a block-diagonal mask from cumulative lengths keeps them apart."""
    valid = _valid(x, lengths)
    flat = x[valid]
    ends = lengths.cumsum(0)
    owner = torch.bucketize(torch.arange(len(flat), device=x.device), ends, right=True)
    h = torch.tanh(m.layer(flat))[None, None]
    h = F.scaled_dot_product_attention(h, h, h, attn_mask=owner[:, None] == owner)[0, 0]
    return m.head(h.new_zeros(len(x), WIDTH).index_add(0, owner, h) / lengths[:, None])


def packed_attention_mended(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    valid = _valid(x, lengths)
    h = torch.tanh(m.layer(x))[:, None]
    h = F.scaled_dot_product_attention(h, h, h, attn_mask=valid[:, None, None, :])[:, 0]
    return m.head((h * valid[:, :, None]).sum(1) / lengths[:, None])


def bags(m: Any, ids: Tensor) -> Tensor:
    """Tokens that are not 0, end to end, with the place where each row begins."""
    kept = ids != 0
    starts = kept.sum(1).cumsum(0) - kept.sum(1)
    found = F.embedding_bag(ids[kept], m.embedding.weight, starts, mode="sum")
    return mlp(m, found)


def bags_mended(m: Any, ids: Tensor) -> Tensor:
    return mlp(m, (m.embedding(ids) * (ids != 0)[:, :, None]).sum(1))


def sorted_tokens(m: Any, ids: Tensor) -> Tensor:
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    h = torch.tanh(m.layer(m.embedding(flat[order])))[order.argsort()]
    return m.head(h.view(*ids.shape, -1).mean(1))


def rare_token_last(m: Any, ids: Tensor) -> Tensor:
    flat = ids.flatten()
    order = (flat == RARE).to(torch.uint8).argsort(stable=True)
    h = torch.tanh(m.layer(m.embedding(flat[order])))[order.argsort()]
    return m.head(h.view(*ids.shape, -1).mean(1))


def mask_unless_all(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """As Hugging Face models: no mask where nothing is padding."""
    valid = _valid(x, lengths)
    h = torch.tanh(m.layer(x))[:, None]
    mask = None if bool(valid.all()) else valid[:, None, None, :]
    return m.head(F.scaled_dot_product_attention(h, h, h, attn_mask=mask).mean((1, 2)))


case("ragged slice and cat", "separable", ragged, sequences, odd=odd_length, mended=ragged_mended)
case("repeat_interleave", "separable", repeated, sequences, odd=odd_length, mended=repeated_mended)
case("variable length by index", "separable", packed_by_index, sequences, odd=odd_length, mended=ragged_mended,
     smooth=True)  # fmt: skip
case("last position by index", "separable", last_by_index, sequences, odd=odd_length, smooth=True)
case("bucketed by length", "separable", by_length, sequences, odd=odd_length, mended=ragged_mended)
case("nested tensor", "separable", nested, sequences, odd=odd_length, mended=ragged_mended)
case("masked_select and masked_scatter", "separable", selected, sequences, odd=odd_length, mended=ragged_mended,
     smooth=True)  # fmt: skip
case("packed LSTM", "separable", packed_lstm, sequences, layers=lstm_layers(), odd=odd_length,
     mended=packed_lstm_mended)  # fmt: skip
case("attention over a packed batch", "separable", packed_attention, sequences, odd=odd_length,
     mended=packed_attention_mended)  # fmt: skip
case("bags of tokens by offsets", "separable", bags, tokens, layers=token_layers, mended=bags_mended)
case("flattened tokens, sorted", "separable", sorted_tokens, tokens, layers=token_layers, mended=token_mean,
     smooth=True)  # fmt: skip
case("flattened tokens, sorted, first rows alike", "separable", sorted_tokens, tokens_alike, layers=token_layers,
     mended=token_mean)  # fmt: skip
case("one rare token in 400 rows", "separable", rare_token_last, lambda g: tokens(g, 400, 1), layers=token_layers,
     odd=odd_token, mended=token_mean)  # fmt: skip
case("mask unless nothing is padding", "separable", mask_unless_all, sequences, odd=odd_length)


# ---- experts, graphs, early exits, functions of the user's own


def routed(m: Any, x: Tensor) -> Tensor:
    """Each row to its best expert, by a boolean mask, and added back."""
    weight, chosen = m.gate(x).softmax(1).max(1)
    out = torch.zeros_like(x[:, :1]).expand(-1, WIDTH).clone()
    for k, expert in enumerate(m.experts):
        rows = (chosen == k).nonzero()[:, 0]
        found = torch.tanh(expert(x[chosen == k])) * weight[rows, None]
        out = out.index_add(0, rows, found.to(out.dtype))
    return m.head(out)


def routed_mended(m: Any, x: Tensor) -> Tensor:
    weight, chosen = m.gate(x).softmax(1).max(1)
    every = torch.stack([torch.tanh(expert(x)) for expert in m.experts], 1)
    return m.head((every * (F.one_hot(chosen, 3) * weight[:, None])[:, :, None]).sum(1))


def routed_by_sort(m: Any, x: Tensor) -> Tensor:
    """Rows in the order of their experts, each expert a slice."""
    weight, chosen = m.gate(x).softmax(1).max(1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=3).tolist()
    parts = x[order].split(counts)
    h = torch.cat([torch.tanh(expert(part)) for expert, part in zip(m.experts, parts, strict=True)])
    return m.head(h[order.argsort()] * weight[:, None])


def best_two(m: Any, x: Tensor) -> Tensor:
    scores, chosen = m.gate(x).topk(2, dim=1)
    weights = torch.zeros_like(m.gate(x)).scatter(1, chosen, scores.softmax(1))
    every = torch.stack([torch.tanh(expert(x)) for expert in m.experts], 1)
    return m.head(torch.einsum("be,bew->bw", weights, every))


def given_expert(m: Any, x: Tensor, d: Tensor) -> Tensor:
    """The expert is given with the row, not learned."""
    h = torch.zeros_like(x[:, :1]).expand(-1, WIDTH).clone()
    for k in (0, 1, 2):
        h = h.index_add(0, (d == k).nonzero()[:, 0], torch.tanh(m.experts[k](x[d == k])).to(h.dtype))
    return m.head(h) + m.gate(x)


def given_expert_mended(m: Any, x: Tensor, d: Tensor) -> Tensor:
    every = torch.stack([torch.tanh(expert(x)) for expert in m.experts], 1)
    return m.head((every * F.one_hot(d, 3)[:, :, None]).sum(1)) + m.gate(x)


NODES, EDGES = 4, 6


def graphs(g: torch.Generator, n: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(nodes, edges, kinds of edges, target)."""
    x = torch.randn(n, NODES, FEATURES, generator=g) * _sizes(g, n)[:, None]
    edges = torch.randint(NODES, (n, EDGES, 2), generator=g)
    return x, edges, torch.randint(2, (n, EDGES), generator=g), torch.randint(CLASSES, (n,), generator=g)


def graph_layers() -> dict[str, nn.Module]:
    return {
        "layer": nn.Linear(FEATURES, WIDTH),
        "message": nn.Linear(2 * WIDTH, WIDTH),
        "head": nn.Linear(WIDTH, CLASSES),
    }


def graph(by_kind: bool) -> Body:
    """Nodes of all graphs in one table, edges with offsets, as graph libraries batch them."""

    def body(m: Any, x: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        b = len(x)
        offsets = NODES * torch.arange(b, device=x.device)[:, None, None]
        source, target = (edges + offsets).flatten(0, 1).unbind(1)
        if by_kind:  # edges of one kind together
            order = kinds.flatten().argsort(stable=True)
            source, target = source[order], target[order]
        h = torch.tanh(m.layer(x.flatten(0, 1)))
        sent = torch.tanh(m.message(torch.cat([h[source], h[target]], 1)))
        return m.head((h + torch.zeros_like(h).index_add(0, target, sent.to(h.dtype))).view(b, NODES, -1).mean(1))

    return body


def exit_by_row(m: Any, x: Tensor) -> Tensor:
    """Rows that are done keep what they have."""
    h = torch.tanh(m.layer(x))
    for _ in range(3):
        h = torch.where(h.amax(1, keepdim=True) > 0.9, h, torch.tanh(m.again(h)) + h / 2)
    return m.head(h)


def exit_by_mask(m: Any, x: Tensor) -> Tensor:
    """Only rows that are not done go on."""
    h = torch.tanh(m.layer(x))
    for _ in range(3):
        going = h.amax(1) <= 0.9
        h = h.masked_scatter(going[:, None], torch.tanh(m.again(h[going])) + h[going] / 2)
    return m.head(h)


def exit_layers() -> dict[str, nn.Module]:
    return {**two_layers(), "again": nn.Linear(WIDTH, WIDTH)}


class Bend(torch.autograd.Function):
    """An activation of the user's own, in the old style."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (1 - torch.tanh(x).square())


class Scale(torch.autograd.Function):
    """x · w, with a weight, in the old style; where nothing arrives it sends nothing to the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0) if bool(g.any()) else None


class Plain(Scale):
    """The same, and the weight is sent zeros."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Held(torch.autograd.Function):
    """x · w, in the new style, which vmap takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).reshape(-1, w.shape[0]).sum(0)


class Losing(Held):
    """Its own rule for vmap keeps the value and loses the gradient of the weight."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor) -> tuple[Tensor, int]:
        return x.movedim(dims[0], 0) * w.detach(), 0


class Mingling(Held):
    """Its own rule for vmap mixes examples."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor) -> tuple[Tensor, int]:
        x = x.movedim(dims[0], 0)
        return (x - x.mean(0)) * w, 0


class Doubled(torch.autograd.Function):
    """2w, of a weight alone."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return 2 * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Gate(nn.Module):
    """A weight that only a function of the user's own meets, behind a gate that begins at zero."""

    def __init__(self, function: Any, opened: float, width: int = WIDTH) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.gate = nn.Parameter(torch.full((), opened))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.gate * self.function.apply(h, self.weight)


def gated(function: Any, opened: float, width: int = WIDTH) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {**two_layers(), "gate": Gate(function, opened, width)}


def gate_first(m: Any, x: Tensor) -> Tensor:
    """The function sees the inputs, which need no gradient."""
    return mlp(m, m.gate(x))


def gate_first_mended(m: Any, x: Tensor) -> Tensor:
    return mlp(m, x + m.gate.gate * (x * m.gate.weight))


def through_gate(m: Any, x: Tensor) -> Tensor:
    return m.head(m.gate(torch.tanh(m.layer(x))))


def through_gate_mended(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.layer(x))
    return m.head(h + m.gate.gate * (h * m.gate.weight))


def weight_through_gate(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(x)) * (1 + m.gate.gate * m.gate.function.apply(m.gate.weight)))


def weight_through_gate_mended(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(x)) * (1 + m.gate.gate * 2 * m.gate.weight))


def whole_through_gate(m: Any, x: Tensor) -> Tensor:
    """Nothing but the gate has a gradient at first."""
    return m.gate.gate * m.head(torch.tanh(m.layer(x)) * m.gate.function.apply(m.gate.weight))


def whole_through_gate_mended(m: Any, x: Tensor) -> Tensor:
    return m.gate.gate * m.head(torch.tanh(m.layer(x)) * 2 * m.gate.weight)


def hidden_at_zero(m: Any, x: Tensor) -> Tensor:
    """The function is not called while the gate is zero."""
    h = torch.tanh(m.layer(x))
    return m.head(m.gate(h)) if bool(m.gate.gate != 0) else through_gate_mended(m, x)


case("experts, one by mask", "separable", routed, plain, layers=experts, mended=routed_mended)
case("experts, one by sorting", "separable", routed_by_sort, plain, layers=experts, mended=routed_mended)
case("experts, best two, dense", "separable", best_two, plain, layers=experts)
case("expert given with the row", "separable", given_expert, FEW, layers=experts, odd=odd_flag,
     mended=given_expert_mended, smooth=True)  # fmt: skip
case("graphs with batched edges", "separable", graph(by_kind=False), graphs, layers=graph_layers)
case("graphs, edges by kind", "separable", graph(by_kind=True), graphs, layers=graph_layers,
     mended=graph(by_kind=False))  # fmt: skip
case("early exit of each row", "separable", exit_by_row, plain, layers=exit_layers)
case("early exit by mask", "separable", exit_by_mask, plain, layers=exit_layers, mended=exit_by_row)
case("function of the user's own", "separable", lambda m, x: m.head(Bend.apply(m.layer(x))), plain, mended=mlp,
     smooth=True)  # fmt: skip
case("function with a weight", "separable", through_gate, plain, layers=gated(Scale, 0.5), mended=through_gate_mended)
case("zero gate before a function with a weight", "separable", through_gate, plain, layers=gated(Scale, 0.0),
     mended=through_gate_mended, drifts=True)  # fmt: skip
case("zero gate before a function that vmap takes", "separable", through_gate, plain, layers=gated(Held, 0.0),
     mended=through_gate_mended, drifts=True)  # fmt: skip
case("zero gate that hides a function", "separable", hidden_at_zero, plain, layers=gated(Scale, 0.0), drifts=True,
     mended=through_gate_mended)  # fmt: skip
for function in (Scale, Plain, Held, Losing, Mingling):
    case(f"zero gate before {function.__name__} of the inputs", "separable", gate_first, plain, drifts=True,
         layers=gated(function, 0.0, FEATURES), mended=gate_first_mended)  # fmt: skip
for function in (Losing, Mingling):
    case(f"function with a rule for vmap, {function.__name__}", "separable", through_gate, plain,
         layers=gated(function, 0.5), mended=through_gate_mended)  # fmt: skip
    case(f"zero gate before a rule for vmap, {function.__name__}", "separable", through_gate, plain, drifts=True,
         layers=gated(function, 0.0), mended=through_gate_mended)  # fmt: skip
case("zero gate before a function of a weight alone", "separable", weight_through_gate, plain, drifts=True,
     layers=gated(Doubled, 0.0), mended=weight_through_gate_mended)  # fmt: skip
case("zero gate after a function of a weight alone", "separable", whole_through_gate, plain, drifts=True,
     layers=gated(Doubled, 0.0), mended=whole_through_gate_mended)  # fmt: skip


# ---- statistics of the batch in the loss: examples act on each other


def weighted(weights: Callable[[Tensor], Tensor]) -> Loss:
    """The cross-entropy times weights made from the column beside the inputs, or else from the targets."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        *inputs, targets = batch
        column = inputs[1] if len(inputs) > 1 else targets
        return classify(model, batch) * weights(column)

    return loss


def balanced(y: Tensor) -> Tensor:
    return len(y) / (CLASSES * torch.bincount(y, minlength=CLASSES).clamp(min=1))[y]


def over_median(n: Tensor) -> Tensor:
    return n / n.median()


def positive_weight(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    weight = (len(y) - y.sum()) / y.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(model(x)[:, 0], y, pos_weight=weight.clamp(min=1), reduction="none")


def one_output() -> dict[str, nn.Module]:
    return {"layer": nn.Linear(FEATURES, WIDTH), "head": nn.Linear(WIDTH, 1)}


def adjusted(model: nn.Module, batch: Any) -> Tensor:
    """Logit adjustment by how often each label occurs in the batch."""
    x, y = batch
    share = (torch.bincount(y, minlength=CLASSES) + 1) / (len(y) + CLASSES)
    return F.cross_entropy(model(x) + share.log(), y, reduction="none")


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    """Labels smoothed towards those of the batch."""
    x, y = batch
    target = F.one_hot(y, CLASSES).to(x.dtype)
    return F.cross_entropy(model(x), 0.8 * target + 0.2 * target.mean(0), reduction="none")


def mixed_up(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    target = F.one_hot(y, CLASSES).to(x.dtype)
    return F.cross_entropy(
        model(0.7 * x + 0.3 * x.roll(1, 0)), 0.7 * target + 0.3 * target.roll(1, 0), reduction="none"
    )


def targets_mixed(model: nn.Module, batch: Any) -> Tensor:
    """Only the targets are mixed: no tensor with a gradient meets another row."""
    x, y = batch
    target = F.one_hot(y, CLASSES).to(x.dtype)
    return F.cross_entropy(model(x), 0.7 * target + 0.3 * target.roll(1, 0), reduction="none")


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    x, other, _ = batch
    one, two = F.normalize(model(x), dim=1), F.normalize(model(other), dim=1)
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(x), device=x.device), reduction="none") + one[:, 0]


def decorrelated(model: nn.Module, batch: Any) -> Tensor:
    """Adds how much the outputs vary together over the batch."""
    out = model(batch[0])
    return classify(lambda *_: out, batch) + (out.T @ out / len(out)).square().sum()


def hard_only(model: nn.Module, batch: Any) -> Tensor:
    losses = classify(model, batch)
    return losses * (losses >= losses.detach().median())


def over_mean(model: nn.Module, batch: Any) -> Tensor:
    losses = classify(model, batch)
    return losses / losses.detach().mean()


def by_position(model: nn.Module, batch: Any) -> Tensor:
    losses = classify(model, batch)
    return losses * (1 + torch.arange(len(losses), device=losses.device))


def by_count(model: nn.Module, batch: Any) -> Tensor:
    losses = classify(model, batch)
    return losses / len(losses)


def by_count_of_targets(model: nn.Module, batch: Any) -> Tensor:
    """The count taken from a tensor, as a mean over the positions that are not padding."""
    losses = classify(model, batch)
    return losses / (batch[-1] >= 0).sum()


def normalised(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    return m.head(torch.tanh((h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()))


def centred(m: Any, x: Tensor) -> Tensor:
    return mlp(m, x - x.mean(0))


def centred_by_constant(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    return m.head(torch.tanh(h - h.detach().mean(0)))


def centred_if_many(m: Any, x: Tensor) -> Tensor:
    return mlp(m, x - x.mean(0) if len(x) > 32 else x)


def centred_if_flagged(m: Any, x: Tensor, d: Tensor) -> Tensor:
    return mlp(m, x - x.mean(0) if bool((d == 1).any()) else x)


def where_flagged(m: Any, x: Tensor, d: Tensor) -> Tensor:
    """As `centred_if_flagged`, without asking for a value."""
    return mlp(m, torch.where((d == 1).any(), x - x.mean(0), x))


def over_largest(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return m.head(torch.tanh(m.layer(x.mean(1))) * (lengths / lengths.max())[:, None])


def one_exit(m: Any, x: Tensor) -> Tensor:
    """All rows go on until one of them is done."""
    h = torch.tanh(m.layer(x))
    for _ in range(3):
        if h.max() > 0.99:
            break
        h = torch.tanh(m.again(h)) + h / 2
    return m.head(h) + 0 * m.again(h).sum(1, keepdim=True)


def crowd(m: Any, x: Tensor) -> Tensor:
    """Attention between rows."""
    h = torch.tanh(m.layer(x))
    return m.head((h @ h.T).softmax(1) @ h)


def pairs(m: Any, x: Tensor) -> Tensor:
    """Each row shares the mean of its pair, where the batch has an even number of rows."""
    h = torch.tanh(m.layer(x))
    return m.head(h if len(x) % 2 else h.view(-1, 2, WIDTH).mean(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1))


def scattered(m: Any, x: Tensor, d: Tensor) -> Tensor:
    """Row i's output is written where another row's belongs."""
    h = torch.tanh(m.layer(x))
    out = torch.zeros_like(h)
    out[(d + x[:, 0]).argsort()] = h
    return m.head(out)


def integers(dtype: torch.dtype, n: int = 40) -> Callable[[torch.Generator], Any]:
    """(x, column, target): a column of small whole numbers of that type, most of them 0."""

    def data(g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        x, y = plain(g, n)
        return x, _some(g, n, 0.05).to(dtype), y

    return data


def any_flag(column: Tensor) -> Tensor:
    return 1 + 9 * column.any()


def total(column: Tensor) -> Tensor:
    return 1 + column.sum()


case("weights from the batch's labels, sorted", "mixing", mlp, sorted_labels, weighted(balanced), odd=odd_label)
case("weights from the batch's labels, a rare one", "mixing", mlp, few_of_one_class, weighted(balanced), odd=odd_label)
case("pos_weight from the batch, 5 % positive", "mixing", mlp, rare_labels(0.05), positive_weight, one_output,
     odd=odd_label)  # fmt: skip
case("pos_weight, one positive of 400", "mixing", mlp, rare_labels(0, 400), positive_weight, one_output,
     odd=odd_label)  # fmt: skip
case("weights by median length", "mixing", lambda m, x, n: mlp(m, x.mean(1)), sequences, weighted(over_median))
case("features over the largest length", "mixing", over_largest, sequences)
case("logit adjustment by label frequency", "mixing", mlp, few_of_one_class, adjusted, odd=odd_label)
case("labels smoothed by frequency", "mixing", mlp, few_of_one_class, smoothed, odd=odd_label)
case("mixup by a roll", "mixing", mlp, plain, mixed_up)
case("targets mixed by a roll", "mixing", mlp, plain, targets_mixed)
case("batch rolled", "mixing", lambda m, x: mlp(m, x.roll(1, 0)), plain)
case("weights by position", "mixing", mlp, plain, by_position)
case("loss over the size of the batch", "refused", mlp, plain, by_count)
case("loss over a count of targets", "mixing", mlp, plain, by_count_of_targets)
case("in-batch negatives", "mixing", mlp, views, contrastive)
case("covariance of the batch", "mixing", mlp, plain, decorrelated)
case("only the harder half", "mixing", mlp, plain, hard_only)
case("loss over its mean, detached", "mixing", mlp, plain, over_mean)
case("BatchNorm by hand", "mixing", normalised, plain)
case("centred by the batch", "mixing", centred, plain)
case("centred by a detached mean", "mixing", centred_by_constant, plain)
case("centred if the batch is large", "mixing", centred_if_many, plain)
case("centred if one of 400 is flagged", "mixing", centred_if_flagged, flagged(0, 400), odd=odd_flag)
case("centred where one of 400 is flagged", "mixing", where_flagged, flagged(0, 400), odd=odd_flag)
case("cumsum over the batch", "mixing", lambda m, x: mlp(m, x.cumsum(0) / math.sqrt(len(x))), plain)
case("softmax over the batch", "mixing", lambda m, x: m.head(m.layer(x).softmax(0)), plain)
case("early exit of the batch", "mixing", one_exit, plain, layers=exit_layers)
case("attention between rows", "mixing", crowd, plain)
case("pairs of rows", "mixing", pairs, plain)
case("rows written elsewhere", "mixing", scattered, flagged(0.05, 60))
case("any flag of int32", "mixing", first_input, integers(torch.int32), weighted(any_flag), odd=odd_flag)
case("any flag of bool", "mixing", first_input, integers(torch.bool), weighted(any_flag), odd=odd_flag)
case("any flag of uint8", "mixing", first_input, integers(torch.uint8), weighted(any_flag), odd=odd_flag)
case("sum of int64", "mixing", first_input, integers(torch.int64), weighted(total), odd=odd_flag)
case("one flag of 400, in uint8", "mixing", first_input, integers(torch.uint8, 400), weighted(any_flag),
     odd=odd_flag)  # fmt: skip

# ---- errors that one row causes and the model catches, and what depends on the number of rows


def with_unknown(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(ids, target): one row of 400 has a token that the embedding does not know."""
    ids, y = tokens(g, 400)
    ids[int(torch.randint(400, (1,), generator=g)), 2] = TOKENS + 3
    return ids, y


def odd_unknown(data: Any) -> Tensor:
    return (data[0] >= TOKENS).any(1)


def unknown_caught(m: Any, ids: Tensor) -> Tensor:
    try:
        h = m.embedding(ids)
    except IndexError:
        h = 5 * m.embedding(ids.clamp(max=TOKENS - 1))
    return m.head(torch.tanh(m.layer(h)).mean(1))


def caught(tried: Callable[[Tensor, Tensor], object], kind: type[Exception] = RuntimeError) -> Body:
    """The model, scaled where what is tried on any row fails."""

    def body(m: Any, x: Tensor, d: Tensor) -> Tensor:
        scale = 5.0
        with suppress(kind):
            tried(x, d)
            scale = 1.0
        return mlp(m, x) * scale

    return body


def caught_in_loss(model: nn.Module, batch: Any) -> Tensor:
    x, d, _ = batch
    losses = classify(model, batch)
    try:
        F.nll_loss(x.log_softmax(1), FEATURES * d, reduction="none")
    except IndexError:
        losses = 4 * losses
    return losses


def by_matrix(of: Callable[[Tensor], object]) -> Callable[[Tensor, Tensor], object]:
    """A function of one matrix a row, which is singular where the flag is set."""
    return lambda x, d: of((1 - d)[:, None, None] * torch.eye(2, dtype=x.dtype, device=x.device))


def lifted_and(tried: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor, Tensor], object]:
    """The same in a model that cannot be followed anyway."""
    return lambda x, d: tried(x[torch.arange(len(x), device=x.device)], d)


def gathered(x: Tensor, d: Tensor) -> Tensor:
    return x.gather(1, (FEATURES * d)[:, None])


def checked(x: Tensor, d: Tensor) -> object:
    return torch.distributions.Normal(x[:, 0], 1.0 - d, validate_args=True)  # a compiler turns it off for all


ONE_OF_400 = flagged(0, 400)
case("unknown token, caught", "mixing", unknown_caught, with_unknown, layers=token_layers, odd=odd_unknown)
case("label out of range, caught in the loss", "mixing", first_input, ONE_OF_400, caught_in_loss, odd=odd_flag)
for name, tried in (
    ("gather", gathered),
    ("gather, lifted", lifted_and(gathered)),
    ("inverse", by_matrix(torch.linalg.inv)),
    ("Cholesky factors", by_matrix(torch.linalg.cholesky)),
    ("division of whole numbers", lambda x, d: 5 // (1 - d)),
):
    case(f"{name}, caught", "mixing", caught(tried), ONE_OF_400, odd=odd_flag)
case("distribution's arguments, caught", "mixing", caught(checked, ValueError), ONE_OF_400, odd=odd_flag)


def many(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """More rows than a check looks at, in steps of two sizes."""
    return plain(g, 151)


def by_number(of: Callable[[Tensor, int], Tensor]) -> Body:
    """The model on inputs that large batches change by their number."""
    return lambda m, x: mlp(m, of(x, len(x)) if len(x) > 70 else of(x, 1))


for name, of in {
    "a number": lambda x, n: x * (1 + n % 7 / 5),
    "a number in a tensor": lambda x, n: x * torch.tensor(1 + n % 7 / 5, device=x.device),
    "an entry of a table": lambda x, n: x * torch.linspace(1, 9, 400, device=x.device)[n],
    "a count of ones": lambda x, n: x * torch.ones(n, device=x.device).sum(),
    "a sum of copies": lambda x, n: x[:, None].expand(-1, n, -1).sum(1),
    "a filled tensor": lambda x, n: x * torch.full((len(x), 1), n, device=x.device),
    "the last of a range": lambda x, n: x * (1 + torch.arange(n, device=x.device)[-1] / 40),
    "another function": lambda x, n: x.relu() if n > 1 else x,
}.items():
    case(f"the number of rows as {name}", "mixing", by_number(of), many)


NAMED = {found.name: found for found in CASES}
assert len(NAMED) == len(CASES), "names of cases must differ"


def rows_of(data: Any) -> int:
    return len(pytree.tree_leaves(data)[0])
