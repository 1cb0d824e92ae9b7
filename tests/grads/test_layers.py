"""Every layer, randomised: each engine's clipped sum is that of autograd on one example at a time.

What is drawn: the layer's own options, the rank and size of the input, the number of examples, the rule and its
constants, the clip bound and the microbatch.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import output_loss
from reference import DEVICE, ENGINES, assert_equal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from dpgrad.grads import patches
from dpgrad.grads.layers import REWRITES, RULES
from dpgrad.grads.scaling import Automatic, Hard, Psac, Psasc, Quotient
from dpgrad.grads.tape import Tape

few = settings(max_examples=25, deadline=None, derandomize=True)
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True, scope="module")
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


rules: st.SearchStrategy[Quotient] = st.one_of(
    st.just(Hard()),
    st.builds(Automatic, st.floats(1e-3, 1.0)),
    st.builds(Psac, st.floats(1e-3, 1.0)),
    st.builds(Psasc, st.floats(0.1, 2.0), st.floats(1e-3, 1.0)),
)


class Drawn(NamedTuple):
    """A layer and its input, and how the sum is taken."""

    model: nn.Module
    x: Tensor
    rule: Quotient
    clip: float
    microbatch: int | None

    def check(self, engine: str) -> None:
        weights = torch.linspace(0.5, 1.5, len(self.x), dtype=torch.float64)
        batch = self.x, weights
        assert_equal(
            self.model, output_loss, batch, ENGINES[engine], self.rule, (self.clip,), microbatch=self.microbatch
        )


def drawn(draw: st.DrawFn, model: Callable[[], nn.Module], *shape: int, ids: int = 0) -> Drawn:
    """The layer on an input of that shape for each example, of indices below ``ids`` where that is given."""
    torch.manual_seed(draw(st.integers(0, 99)))
    examples = draw(st.integers(1, 5))
    x = torch.randint(ids, (examples, *shape)) if ids else torch.randn(examples, *shape, dtype=torch.float64)
    microbatch = draw(st.sampled_from([None, 1, 2, 3, 100]))
    return Drawn(model().double(), x, draw(rules), draw(st.sampled_from([0.1, 3.0, 1e3])), microbatch)


@st.composite
def linears(draw: st.DrawFn) -> Drawn:
    """Wide and narrow, so that norms are taken from the matrix and from inner products of positions."""
    inner, outer, bias = draw(st.sampled_from([1, 4, 13])), draw(st.sampled_from([1, 3, 13])), draw(st.booleans())
    positions = draw(st.lists(st.integers(1, 3), max_size=2))
    return drawn(draw, lambda: nn.Linear(inner, outer, bias), *positions, inner)


@engines
@few
@given(linears())
def test_linear(engine: str, case: Drawn) -> None:
    case.check(engine)


@st.composite
def convolutions(draw: st.DrawFn) -> Drawn:
    """Wide with few positions, and narrow with many: norms are taken in both ways."""
    many = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 2))
    wide = draw(st.booleans())
    inner, outer = (
        groups * draw(st.integers(1, 2)) * (4 if wide else 1),
        groups * (8 if wide else draw(st.integers(1, 2))),
    )
    space = [draw(st.integers(5, 6 if many < 3 else 5)) for _ in range(many)]
    padding: Any = draw(st.sampled_from(["same", "valid", 0, 1, 2]))
    options = {
        "kernel_size": [draw(st.integers(1, 3)) for _ in range(many)],
        "stride": 1 if padding == "same" else [draw(st.integers(1, 4)) for _ in range(many)],
        "dilation": [draw(st.integers(1, 2)) for _ in range(many)],
        "padding": padding,
        "padding_mode": draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][many - 1]
    return drawn(draw, lambda: layer(inner, outer, **options), inner, *space)


@engines
@settings(few, max_examples=60)
@given(convolutions())
def test_convolution(engine: str, case: Drawn) -> None:
    case.check(engine)


@settings(few)
@given(convolutions())
def test_convolution_in_pieces(case: Drawn) -> None:
    """Where the patches of all examples are too many to be held at once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patches, "_VALUES_AT_ONCE", {DEVICE: 200})
        case.check("bookkeeping")


@st.composite
def transposed_convolutions(draw: st.DrawFn) -> Drawn:
    many = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 2))
    wide = draw(st.booleans())
    inner, outer = (
        groups * (8 if wide else draw(st.integers(1, 2))),
        groups * draw(st.integers(1, 2)) * (4 if wide else 1),
    )
    strides = [draw(st.integers(1, 3)) for _ in range(many)]
    dilation = [draw(st.integers(1, 2)) for _ in range(many)]
    options: dict[str, Any] = {
        "kernel_size": [draw(st.integers(1, 3)) for _ in range(many)],
        "stride": strides,
        "dilation": dilation,
        "padding": [draw(st.integers(0, 1)) for _ in range(many)],
        "output_padding": [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(strides, dilation, strict=True)],
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    layer = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][many - 1]
    space = [draw(st.integers(3, 4)) for _ in range(many)]
    return drawn(draw, lambda: layer(inner, outer, **options), inner, *space)


@engines
@settings(few, max_examples=60)
@given(transposed_convolutions())
def test_transposed_convolution(engine: str, case: Drawn) -> None:
    case.check(engine)


@st.composite
def embeddings(draw: st.DrawFn) -> Drawn:
    """Few indices, so that they repeat; ids of rank 1 to 3."""
    padding = draw(st.sampled_from([None, 0, -1, 2]))
    positions = draw(st.lists(st.integers(1, 4), max_size=2))
    return drawn(draw, lambda: nn.Embedding(5, 3, padding_idx=padding), *positions, ids=5)


@engines
@few
@given(embeddings())
def test_embedding(engine: str, case: Drawn) -> None:
    case.check(engine)


@st.composite
def normalizations(draw: st.DrawFn) -> Drawn:
    channels, space = 4, draw(st.lists(st.integers(2, 3), max_size=3))
    kind = draw(st.sampled_from(["layer", "rms", "group", "instance", "batch in eval", "instance with statistics"]))

    def trailing() -> list[int]:
        return [channels, *space][draw(st.integers(0, len(space))) :]

    match kind:
        case "layer":
            shape, bias = trailing(), draw(st.booleans())
            return drawn(draw, lambda: shaken(nn.LayerNorm(shape, bias=bias)), channels, *space)
        case "rms":
            shape = trailing()
            return drawn(draw, lambda: shaken(nn.RMSNorm(shape)), channels, *space)
        case "group":
            groups = draw(st.sampled_from([1, 2, 4]))
            space = space or [2]  # two channels of one number each are normalized to ±1 whatever they are
            return drawn(draw, lambda: shaken(nn.GroupNorm(groups, channels)), channels, *space)
        case "batch in eval":
            norm = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(space)]
            return drawn(draw, lambda: shaken(norm(channels)).eval(), channels, *space)
        case _:
            space = space or [3]
            norm = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][len(space) - 1]
            fixed = kind != "instance"
            made = norm(channels, affine=True, track_running_stats=fixed)
            return drawn(draw, lambda: shaken(made).train(not fixed), channels, *space)


def shaken(module: nn.Module) -> nn.Module:
    """With parameters and statistics that are not all one or zero."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    return module


@engines
@settings(few, max_examples=60)
@given(normalizations())
def test_normalization(engine: str, case: Drawn) -> None:
    case.check(engine)


class Attention(nn.Module):
    """One input, seen by attention as query, key and value as the options say."""

    def __init__(self, cross: bool, separate: bool, masks: frozenset[str], need_weights: bool, **options: Any) -> None:
        super().__init__()
        sizes = {"kdim": 3, "vdim": 2} if separate else {}
        self.attention = nn.MultiheadAttention(**{"embed_dim": 4, "num_heads": 2, **options, **sizes})
        self.cross, self.separate, self.masks, self.need_weights = cross, separate, masks, need_weights

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, 4)
        key = value = x.flip(1)[:, 1:] * 2 if self.cross else x
        if self.separate:
            key, value = key[..., :3], value[..., :2]
        batch, target, source = len(x), x.shape[1], key.shape[1]
        given: dict[str, Tensor] = {}
        if "padding" in self.masks:
            given["key_padding_mask"] = (torch.arange(source) == source - 1).expand(batch, source)
        if "causal" in self.masks:
            given["attn_mask"] = torch.ones(target, source, dtype=torch.bool).triu(1)
        if "scores" in self.masks:
            given["attn_mask"] = torch.linspace(-1, 1, target * source).view(1, target, source).repeat(2 * batch, 1, 1)
        first = self.attention.batch_first
        query, key, value = (t if first else t.transpose(0, 1) for t in (x, key, value))
        out = self.attention(query, key, value, need_weights=self.need_weights, **given)[0]
        return out if first else out.transpose(0, 1)


@st.composite
def attentions(draw: st.DrawFn) -> Drawn:
    masks = draw(st.sampled_from([(), ("padding",), ("causal",), ("scores",), ("padding", "causal")]))
    options = {name: draw(st.booleans()) for name in ("batch_first", "bias", "add_bias_kv", "add_zero_attn")}
    cross, separate, weights = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    return drawn(draw, lambda: Attention(cross, separate, frozenset(masks), weights, **options), 4, 4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@engines
@settings(few, max_examples=40)
@given(attentions())
def test_attention(engine: str, case: Drawn) -> None:
    case.check(engine)


class Recurrent(nn.Module):
    """Outputs and last states of a recurrent layer as one tensor, (batch, everything)."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        out = out if self.layer.batch_first else out.transpose(0, 1)
        states = state if isinstance(state, tuple) else (state,)
        return torch.cat([out.flatten(1), *(part.transpose(0, 1).flatten(1) for part in states)], 1)


@st.composite
def recurrents(draw: st.DrawFn) -> Drawn:
    kind = draw(st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]))
    options: dict[str, Any] = {name: draw(st.booleans()) for name in ("batch_first", "bias", "bidirectional")}
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    if kind is nn.LSTM:
        options["proj_size"] = draw(st.sampled_from([0, 2]))
    layers = draw(st.integers(1, 2))
    return drawn(draw, lambda: Recurrent(kind(3, 4, layers, **options)), draw(st.integers(1, 4)), 3)


@few
@given(recurrents())
def test_recurrent(case: Drawn) -> None:
    case.check("bookkeeping")  # torch.func.vmap cannot take them


class Cell(nn.Module):
    """A cell run over a sequence by hand."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


@few
@given(st.data())
def test_recurrent_cell(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([nn.RNNCell, nn.LSTMCell, nn.GRUCell]))
    bias = data.draw(st.booleans())
    data.draw(st.composite(lambda draw: drawn(draw, lambda: Cell(kind(3, 4, bias)), 3, 3))()).check("bookkeeping")


class TwoInputs(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(*sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x.flip(-1).tanh())


def masked(weight: Tensor) -> Tensor:
    return weight * torch.tril(torch.ones_like(weight))


class Masked(nn.Linear):
    """Subclassed, with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, masked(self.weight), self.bias)


class Named(nn.Linear):
    """Subclassed, with nothing changed."""


# Layers without a rule of their own, and weights that are computed from parameters.
FOLLOWED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "PReLU": (nn.PReLU, (4, 3)),
    "PReLU of channels": (lambda: nn.PReLU(4), (4, 3)),
    "Bilinear": (lambda: TwoInputs(4, 4, 3), (2, 4)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4)),
    "weight_norm of all": (lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=None), (2, 4)),
    "weight_norm of inputs": (lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=1), (2, 4)),
    "weight_norm of a convolution": (lambda: parametrizations.weight_norm(nn.Conv1d(4, 3, 2)), (4, 5)),
    "weight_norm by a hook": (lambda: weight_norm(nn.Linear(4, 3)), (2, 4)),
    "weight_norm by a hook, of all": (lambda: weight_norm(nn.Linear(4, 3), dim=None), (2, 4)),
    "spectral_norm in eval": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), (2, 4)),
    "spectral_norm by a hook, in eval": (lambda: spectral_norm(nn.Linear(4, 3)).eval(), (2, 4)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 3)), (2, 4)),
    "subclass": (lambda: Named(4, 3), (2, 4)),
    "subclass with its own forward": (lambda: Masked(4, 3), (2, 4)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@engines
@pytest.mark.parametrize("name", FOLLOWED)
@settings(few, max_examples=4)
@given(st.data())
def test_followed(name: str, engine: str, data: st.DataObject) -> None:
    make, shape = FOLLOWED[name]
    data.draw(st.composite(lambda draw: drawn(draw, make, *shape))()).check(engine)


class Does(nn.Module):
    """Parameters of the given shapes and what is done with them: ``does(self, x)``."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.does = does
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def bare(does: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Does(does, shapes)


# Bare parameters on x (batch, 4, 5).
BARE: dict[str, Callable[[], nn.Module]] = {
    "added": bare(lambda own, x: (x + own.w).tanh(), w=(5,)),
    "multiplied": bare(lambda own, x: own.w * x, w=(4, 1)),
    "scalar": bare(lambda own, x: x * own.w.exp() + own.b, w=(), b=(1,)),
    "in place": bare(lambda own, x: x.tanh().mul_(own.w).add_(own.w).sin(), w=(5,)),
    "class token": bare(lambda own, x: torch.cat([own.w.expand(len(x), -1, -1), x], 1).sin(), w=(1, 1, 5)),
    "class token repeated": bare(lambda own, x: torch.cat([own.w.repeat(len(x), 1, 1), x], 1).sin(), w=(1, 5)),
    "positions sliced": bare(lambda own, x: (x + own.w[:, : x.shape[1]]).sin(), w=(1, 7, 5)),
    "positions unsqueezed": bare(lambda own, x: (x + own.w.unsqueeze(0)).sin(), w=(4, 5)),
    "positions in time first": bare(lambda own, x: (x.transpose(0, 1) + own.w).sin().transpose(0, 1), w=(4, 1, 5)),
    "product": bare(lambda own, x: x @ own.w, w=(5, 3)),
    "product from the left": bare(lambda own, x: own.w @ x, w=(3, 4)),
    "product with a column of rows": bare(lambda own, x: (own.w @ x[:, 0].T).T, w=(3, 5)),
    "vector": bare(lambda own, x: (x @ own.w).sin(), w=(5,)),
    "vector by linear": bare(lambda own, x: F.linear(x, own.w).sin(), w=(5,)),
    "two products": bare(lambda own, x: x @ own.A @ own.B, A=(5, 2), B=(2, 5)),
    "product of parameters": bare(lambda own, x: x @ (own.A @ own.B), A=(5, 2), B=(2, 5)),
    "both ways round": bare(lambda own, x: x @ own.w @ own.w.T + F.linear(x, own.w.t()).sin() @ own.w.mT, w=(5, 5)),
    "einsum": bare(lambda own, x: torch.einsum("bti,io->bto", x, own.w), w=(5, 3)),
    "two einsums": bare(
        lambda own, x: torch.einsum("bti,ti->bt", x, own.w) * torch.einsum("bti,ti->tb", x, own.w).T, w=(4, 5)
    ),
    "addmm of a row": bare(
        lambda own, x: torch.addmm(own.b, x.flatten(0, 1), own.w, beta=2, alpha=0.5).view(len(x), -1).sin(),
        w=(5, 3), b=(1, 3),
    ),
    "addmm of a number": bare(
        lambda own, x: torch.addmm(own.b, x.flatten(0, 1), own.w).view(len(x), -1).sin(), w=(5, 3), b=()
    ),
    "addmm of data": bare(
        lambda own, x: torch.addmm(x.flatten(0, 1)[:, :3], x.flatten(0, 1), own.w).view(len(x), -1), w=(5, 3)
    ),
    "looked up": bare(lambda own, x: own.w[(x[..., 0] > 0).long()], w=(2, 3)),
    "looked up, the last row for padding": bare(
        lambda own, x: F.embedding((x > 0).long() + (x > 1), own.w, padding_idx=-1), w=(3, 2)
    ),
    "chosen by where": bare(lambda own, x: torch.where(x > 0, own.w, x).sin(), w=(5,)),
    "in two ranks": bare(
        lambda own, x: (x.transpose(0, 1) * own.w).transpose(0, 1).sum(1).sin() + x[:, 0] * own.w, w=(5,)
    ),
    "written into": bare(lambda own, x: written(x.tanh(), own.w), w=(5,)),
    "detached in part": bare(lambda own, x: x @ own.w.detach() + x.sin() @ own.w, w=(5, 3)),
    "data in part": bare(lambda own, x: x @ own.w.data + x.sin() @ own.w, w=(5, 3)),
    "without gradient in part": bare(lambda own, x: x @ twice(own.w) + x.sin() @ own.w, w=(5, 3)),
    "of its own kind": bare(lambda own, x: F.linear(x, own.w.to(x.dtype).contiguous()), w=(3, 5)),
    "through Fourier": bare(lambda own, x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(own.w), 5), w=(5,)),
    "truth values expanded": bare(lambda own, x: x * own.w + x * (own.w > 0).expand(len(x), 4, 5), w=(5,)),
    "unused": bare(lambda own, x: x * own.w, w=(5,), unused=(3,)),
}  # fmt: skip


def written(x: Tensor, row: Tensor) -> Tensor:
    x[:, 1] = row
    return x.sin()


def twice(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return 2 * weight


@engines
@pytest.mark.parametrize("name", BARE)
@settings(few, max_examples=4)
@given(st.data())
def test_bare_parameter(name: str, engine: str, data: st.DataObject) -> None:
    data.draw(st.composite(lambda draw: drawn(draw, BARE[name], 4, 5))()).check(engine)


# One small use of each function that has a rule or a rewrite, on x (batch, 4, 5).
MADE_OF: dict[Callable[..., Any], Callable[[], nn.Module]] = {
    F.linear: lambda: nn.Linear(5, 2),
    torch.matmul: bare(lambda own, x: torch.matmul(x, own.w), w=(5, 2)),
    torch.mm: bare(lambda own, x: torch.mm(x[:, 0], own.w), w=(5, 2)),
    Tensor.matmul: bare(lambda own, x: x.matmul(own.w), w=(5, 2)),
    Tensor.mm: bare(lambda own, x: x[:, 0].mm(own.w), w=(5, 2)),
    Tensor.__matmul__: bare(lambda own, x: x @ own.w, w=(5, 2)),
    torch.addmm: bare(lambda own, x: torch.addmm(own.b, x[:, 0], own.w), w=(5, 2), b=(2,)),
    F.embedding: bare(lambda own, x: F.embedding((x > 0).long(), own.w), w=(2, 3)),
    F.conv1d: lambda: nn.Conv1d(4, 2, 2),
    F.conv2d: bare(lambda own, x: F.conv2d(x.unsqueeze(1), own.w), w=(2, 1, 2, 2)),
    F.conv3d: bare(lambda own, x: F.conv3d(x[:, None, None], own.w), w=(2, 1, 1, 2, 2)),
    F.conv_transpose1d: lambda: nn.ConvTranspose1d(4, 2, 2),
    F.conv_transpose2d: bare(lambda own, x: F.conv_transpose2d(x.unsqueeze(1), own.w), w=(1, 2, 2, 2)),
    F.conv_transpose3d: bare(lambda own, x: F.conv_transpose3d(x[:, None, None], own.w), w=(1, 1, 1, 2, 2)),
    F.layer_norm: lambda: nn.LayerNorm(5),
    F.rms_norm: lambda: nn.RMSNorm(5),
    F.group_norm: lambda: nn.GroupNorm(2, 4),
    F.instance_norm: lambda: nn.InstanceNorm1d(4, affine=True),
    F.batch_norm: lambda: nn.BatchNorm1d(4).eval(),
    F.multi_head_attention_forward: lambda: Attention(False, False, frozenset(), True, embed_dim=5, num_heads=1),
    torch.rnn_tanh: lambda: Recurrent(nn.RNN(5, 2)),
    torch.rnn_relu: lambda: Recurrent(nn.RNN(5, 2, nonlinearity="relu")),
    torch.lstm: lambda: Recurrent(nn.LSTM(5, 2)),
    torch.gru: lambda: Recurrent(nn.GRU(5, 2)),
    torch.rnn_tanh_cell: lambda: Cell(nn.RNNCell(5, 2)),
    torch.rnn_relu_cell: lambda: Cell(nn.RNNCell(5, 2, nonlinearity="relu")),
    torch.lstm_cell: lambda: Cell(nn.LSTMCell(5, 2)),
    torch.gru_cell: lambda: Cell(nn.GRUCell(5, 2)),
    torch._weight_norm: lambda: parametrizations.weight_norm(nn.Linear(5, 2)),
    Tensor.data.__get__: BARE["data in part"],
}  # fmt: skip


ON_CUDA = {torch._cudnn_rnn_flatten_weight}  # what a recurrent layer calls there; it changes no value


def test_every_rule_is_tested() -> None:
    assert MADE_OF.keys() | ON_CUDA == RULES.keys() | REWRITES.keys(), "a rule without a test, or a test without a rule"


@pytest.mark.parametrize("function", MADE_OF, ids=lambda function: getattr(function, "__qualname__", str(function)))
def test_the_rule_is_the_way_taken(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    by_rule = Tape._by_rule

    def noted(self: Tape, func: Callable[..., Any], *rest: Any) -> Tensor:
        taken.append(func)
        return by_rule(self, func, *rest)

    if function in REWRITES:
        rewrite = REWRITES[function]

        def rewritten(*args: Any, **kwargs: Any) -> Any:
            taken.append(function)
            return rewrite(*args, **kwargs)

        monkeypatch.setitem(REWRITES, function, rewritten)
    monkeypatch.setattr(Tape, "_by_rule", noted)
    torch.manual_seed(1)
    model = MADE_OF[function]().double()
    Drawn(model, torch.randn(3, 4, 5), Hard(), 0.5, None).check("bookkeeping")
    operator = {Tensor.matmul, Tensor.__matmul__}  # one function, by either name from version to version
    assert not (operator if function in operator else {function}).isdisjoint(taken)
