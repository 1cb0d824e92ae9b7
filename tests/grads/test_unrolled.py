"""Recurrent layers in one operation: equal to their definition, and each example's gradient on every way of running."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import example_gradients
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dpgrad import _triton
from dpgrad.grads import bookkeeping, lifted, recurrences
from dpgrad.grads.calls import MixedError
from dpgrad.grads.following import own_functions
from dpgrad.grads.forks import Seen
from dpgrad.grads.layers import unrolled
from dpgrad.grads.layers.recurrent import OneLayer, composed, fused
from dpgrad.grads.layers.unrolled import Unrolled
from dpgrad.grads.tape import Tape

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
WAYS: dict[str, Callable[..., Any]] = {"batched": bookkeeping.gradients, "lifted": lifted.gradients}


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@st.composite
def layers(draw: st.DrawFn) -> OneLayer:
    kind = draw(st.sampled_from(list(GATES)))
    batch, time, features, size = (draw(st.integers(1, 4)) for _ in range(4))
    projected = kind == "lstm" and draw(st.booleans())
    outputs = 2 if projected else size
    random = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).requires_grad_()

    lengths = [draw(st.integers(1, time)) for _ in range(batch)]
    valid = torch.arange(time) < torch.tensor(lengths).unsqueeze(1) if draw(st.booleans()) else None
    biases = [some(GATES[kind] * size) if draw(st.booleans()) else None for _ in range(2)]
    return OneLayer(
        kind, draw(st.booleans()), some(batch, time, features), some(batch, outputs),
        some(batch, size) if kind == "lstm" else None, valid,
        some(GATES[kind] * size, features), some(GATES[kind] * size, outputs), *biases,
        some(outputs, size) if projected else None,
    )  # fmt: skip


def data(layer: OneLayer) -> list[Tensor]:
    return [each for each in (layer.inputs, layer.hidden, layer.cell) if each is not None]


class TestEqualToTheDefinition:
    @given(layers(), st.sets(st.integers(0, 2), min_size=1))
    @settings(max_examples=150)
    def test_results_and_gradients(self, layer: OneLayer, asked: set[int]) -> None:
        """Whichever of the outputs, the last state and the last cell a gradient arrives at."""
        found, wanted = fused(layer).state, composed(layer)
        torch.testing.assert_close(found, wanted, **CLOSE)
        some = [which for which in asked if which < len(wanted)] or [0]
        directions = [torch.randn_like(wanted[which]) for which in some]
        torch.testing.assert_close(
            torch.autograd.grad([found[which] for which in some], data(layer), directions, allow_unused=True),
            torch.autograd.grad([wanted[which] for which in some], data(layer), directions, allow_unused=True),
            **CLOSE,
        )

    @given(layers())
    def test_a_second_backward_pass_is_the_first(self, layer: OneLayer) -> None:
        outputs = fused(layer).state[0]
        one, two = (torch.autograd.grad(outputs.sum(), data(layer), retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, one, two))

    @given(layers())
    def test_rows_are_kept_apart(self, layer: OneLayer) -> None:
        """A row alone gives what it gives among others, and another row moves nothing of it."""
        last = len(layer.inputs) - 1
        rows = {name: getattr(layer, name) for name in ("inputs", "hidden", "cell", "valid")}
        alone = layer._replace(**{name: each if each is None else each[last:] for name, each in rows.items()})
        torch.testing.assert_close([each[last:] for each in fused(layer).state], list(fused(alone).state), **CLOSE)
        broken = torch.full_like(layer.inputs, torch.nan)
        broken[last] = layer.inputs[last]
        found = fused(layer._replace(inputs=broken)).state
        assert all(each[last].isfinite().all() for each in found)

    @given(layers())
    @settings(max_examples=30)
    def test_shapes_without_values(self, layer: OneLayer) -> None:
        def passed(layer: OneLayer) -> list[Any]:
            run = fused(layer)
            with torch.enable_grad():
                gradients = torch.autograd.grad(run.state[0].sum(), data(layer))
            return [(each.shape, each.dtype) for each in (*run.state, *run[3:], *gradients)]

        wanted = passed(layer)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            held = [fake.from_tensor(each) if isinstance(each, Tensor) else each for each in layer]
            assert passed(OneLayer(*held)) == wanted

    def test_a_traced_pass_follows_the_weights(self) -> None:
        """One operation each way in the trace, whatever the number of time steps."""
        layer = nn.LSTM(3, 4, batch_first=True)
        weights = [each.detach() for each in layer.parameters()]

        def gradient(x: Tensor, *weights: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            zeros = x.new_zeros(2, 4)
            outputs = fused(OneLayer("lstm", False, x, zeros, zeros, None, *weights)).state[0]
            return torch.autograd.grad(outputs.sin().sum(), x)[0]

        x = torch.randn(2, 30, 3)
        traced = make_fx(gradient)(x, *weights)
        names = [node.target for node in traced.graph.nodes if "unrolled" in str(node.target)]
        assert names == [unrolled.operation, torch.ops.dpgrad.unrolled_backward.default]
        others = [torch.randn_like(each) for each in weights]
        assert torch.equal(traced(2 * x, *others), gradient(2 * x, *others))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("kind", GATES)
    def test_half_precision_is_computed_wide(self, kind: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        shapes = [(3, 8, 5), (3, 4), (3, 4) if kind == "lstm" else None, None, *((GATES[kind] * 4, n) for n in (5, 4))]
        given = [None if shape is None else torch.randn(shape).to(dtype) for shape in shapes]
        exact = [None if each is None else each.double() for each in given]
        found, wanted = (fused(OneLayer(kind, False, *each)).state for each in (given, exact))  # type: ignore[arg-type]
        assert {each.dtype for each in found} == {dtype}
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=0.05, atol=0.05)


class Sequences(nn.Module):
    """Something recurrent, and a linear layer before and after it."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 3), nn.Linear(4, 2)
        for name, part in parts.items():
            setattr(self, name, part)
        self.does = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.does(self, self.into(x))).flatten(1).sum(1)


def both_ends(own: Any, x: Tensor) -> Tensor:
    outputs, state = own.rnn(x)
    parts = state if isinstance(state, tuple) else (state,)
    return outputs[..., :4].sin() + sum(part.sum(0)[:, None, :1] for part in parts)


def last_state(own: Any, x: Tensor) -> Tensor:
    state = own.rnn(x)[1]
    return (state[0] if isinstance(state, tuple) else state)[-1]


def started(own: Any, x: Tensor) -> Tensor:
    """From a state that is computed from the example, and one that is learned."""
    h, c = own.rnn.weight_ih_l0.new_zeros(1, len(x), 4) + x.mean(1)[None, :, :1], own.start.expand(1, len(x), 4)
    return own.rnn(x, (h, c.contiguous()))[0]


def twice(own: Any, x: Tensor) -> Tensor:
    first, state = own.rnn(x)
    return own.rnn(first[..., :3].flip(1), state)[0] + first


def by_cells(own: Any, x: Tensor) -> Tensor:
    state, outputs = None, []
    for step in x.unbind(1):
        state = own.cell(step, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs, 1)


def changed_in_place(own: Any, x: Tensor) -> Tensor:
    return own.rnn(x)[0].mul_(2).add_(1)


def rebuilt(own: Any, x: Tensor) -> Tensor:
    return checkpoint(own.rnn, x, use_reentrant=False)[0]


def only_biases(kind: Any) -> nn.Module:
    layer = kind(3, 4, batch_first=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith("bias"))
    return layer


def only_state() -> nn.Module:
    layer = nn.GRU(3, 4, batch_first=True).requires_grad_(False)
    layer.weight_hh_l0.requires_grad_(True)
    return layer


def outputs(own: Any, x: Tensor) -> Tensor:
    return own.rnn(x)[0]


def turned(own: Any, x: Tensor) -> Tensor:
    return own.rnn(x.transpose(0, 1))[0].transpose(0, 1)


def in_two_pieces(own: Any, x: Tensor) -> Tensor:
    """An example has two sequences of half the length."""
    return own.rnn(x.flatten(0, 1).unflatten(0, (-1, 3)))[0].reshape(len(x), -1, 4)


KINDS = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one layer": (both_ends, {}),
    "two layers, two ways": (both_ends, {"num_layers": 2, "bidirectional": True}),
    "no bias, two ways": (both_ends, {"bias": False, "bidirectional": True}),
    "last state": (last_state, {}),
    "used twice": (twice, {}),
    "outputs changed in place": (changed_in_place, {}),
    "two sequences of an example": (in_two_pieces, {}),
    "time first": (turned, {"batch_first": False}),
}
CASES: dict[str, Callable[[], nn.Module]] = {
    **{
        f"{kind.__name__}, {name}": lambda kind=kind, forward=forward, options=options: Sequences(
            forward, rnn=kind(3, 4, **{"batch_first": True, **options})
        )
        for kind in KINDS
        for name, (forward, options) in OPTIONS.items()
    },
    **{f"{kind.__name__}, biases": lambda kind=kind: Sequences(outputs, rnn=only_biases(kind)) for kind in KINDS},
    **{kind.__name__: lambda kind=kind: Sequences(by_cells, cell=kind(3, 4)) for kind in CELLS},
    "RNN of ReLU": lambda: Sequences(both_ends, rnn=nn.RNN(3, 4, nonlinearity="relu", batch_first=True)),
    "LSTM, projected": lambda: Sequences(
        both_ends, rnn=nn.LSTM(3, 5, 2, batch_first=True, proj_size=4, bidirectional=True)
    ),
    "LSTM, started": lambda: Sequences(
        started, rnn=nn.LSTM(3, 4, batch_first=True), start=nn.Parameter(torch.randn(1, 1, 4))
    ),
    "GRU, weight of the state alone": lambda: Sequences(outputs, rnn=only_state()),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, weight = batch
    return model(x) * weight


def drawn(examples: int = 5, time: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(examples, time, 3), torch.linspace(0.5, 1.5, examples)


def assert_exact(way: str, model: nn.Module, batch: Any) -> None:
    found = WAYS[way](model, loss, batch, torch.ones(len(batch[0])))
    wanted = example_gradients(model, loss, batch)
    assert found.uses.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(
            found.uses[name].per_example(), each, **CLOSE, msg=lambda said, name=name: name + said
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_each_example(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to autograd of one example at a time; never by the definition, which takes one record a time step."""
    monkeypatch.setattr("dpgrad.grads.layers.recurrent.composed", None)
    monkeypatch.setattr("dpgrad.grads.lifted.composed", None)
    torch.manual_seed(1)
    assert_exact(way, CASES[name](), drawn())


def test_checkpointed() -> None:
    torch.manual_seed(1)
    assert_exact("batched", Sequences(rebuilt, rnn=nn.LSTM(3, 4, 2, batch_first=True)), drawn())


@pytest.mark.parametrize("kind", KINDS)
def test_packed_inside_vmap(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples of one length run together, in one operation."""

    def forward(own: Any, x: Tensor) -> Tensor:
        lengths = (x[:, :, 0] > 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(own.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]

    monkeypatch.setattr("dpgrad.grads.lifted.composed", None)
    torch.manual_seed(1)
    model, batch = Sequences(forward, rnn=kind(3, 4, batch_first=True, bidirectional=True)), drawn()
    model.out = nn.Linear(8, 2)
    found = lifted.gradients(model, loss, batch, torch.ones(5), seen=Seen(masks=True))
    for name, each in example_gradients(model, loss, batch).items():
        torch.testing.assert_close(found.uses[name].per_example(), each, **CLOSE)


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_computed_fall_back_to_the_definition(way: str) -> None:
    torch.manual_seed(1)
    model = Sequences(outputs, rnn=nn.GRU(3, 4, batch_first=True))
    nn.utils.parametrizations.weight_norm(model.rnn, "weight_hh_l0")
    assert_exact(way, model, drawn())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_no_operation_is_added_by_a_longer_sequence(way: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records, and what is run outside of the layer's own operation."""
    torch.manual_seed(1)
    model = Sequences(outputs, rnn=kind(3, 4, 2, batch_first=True, bidirectional=True))
    model.out = nn.Linear(8, 2)
    records: list[int] = []
    record = Tape._record
    monkeypatch.setattr(Tape, "_record", lambda self, *rest: (records.append(1), record(self, *rest))[1])

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    def counts(time: int) -> tuple[int, int]:
        batch = drawn(3, time)
        layouts = {"layouts": bookkeeping.find_layouts(model, loss, batch)} if way == "batched" else {}
        WAYS[way](model, loss, batch, torch.ones(3), **layouts)
        records.clear()
        with Counted() as counted:
            WAYS[way](model, loss, batch, torch.ones(3), **layouts)
        return len(records), counted.count

    assert counts(5) == counts(9)


class TestRefused:
    def test_examples_that_stand_in_time(self) -> None:
        """A layer that takes the batch for its time steps lets a state flow from example to example."""
        model = Sequences(outputs, rnn=nn.LSTM(3, 4))
        with pytest.raises(MixedError):
            bookkeeping.gradients(model, loss, drawn(), torch.ones(5))

    def test_a_state_of_other_examples(self) -> None:
        def forward(own: Any, x: Tensor) -> Tensor:
            h = x[:, 0, :1].expand(-1, 4)[None]
            return own.rnn(x, h.flip(1))[0]

        model = Sequences(forward, rnn=nn.GRU(3, 4, batch_first=True))
        with pytest.raises(MixedError):
            bookkeeping.gradients(model, loss, drawn(), torch.ones(5))

    @pytest.mark.parametrize("part", ["hidden", "cell"])
    def test_a_state_by_the_place_in_the_batch(self, part: str) -> None:
        def forward(own: Any, x: Tensor) -> Tensor:
            by_place, zeros = torch.arange(float(len(x)))[None, :, None].repeat(1, 1, 4), x.new_zeros(1, len(x), 4)
            return own.rnn(x, (by_place, zeros) if part == "hidden" else (zeros, by_place))[0]

        model = Sequences(forward, rnn=nn.LSTM(3, 4, batch_first=True))
        with pytest.raises(MixedError, match="by their place in the batch"):
            bookkeeping.gradients(model, loss, drawn(), torch.ones(5))

    def test_an_input_changed_in_place(self) -> None:
        def forward(own: Any, x: Tensor) -> Tensor:
            x = x.sin()
            outputs = own.rnn(x)[0]
            x.zero_()
            return outputs

        model = Sequences(forward, rnn=only_state())
        model.rnn.weight_ih_l0.requires_grad_(True)
        with pytest.raises(ValueError, match=r"parameter rnn\.weight_ih_l0 was changed in place after it was used"):
            bookkeeping.gradients(model, loss, drawn(), torch.ones(5))

    def test_a_function_of_the_models_own_by_another_name(self) -> None:
        class Other(Unrolled):
            """Its forward and backward passes may be anything."""

        x = torch.ones(2, 3, requires_grad=True)
        layer = OneLayer("rnn_tanh", False, x[:, :, None], x[:, :1], None, None, torch.ones(1, 1), torch.ones(1, 1))
        assert own_functions(fused(layer).state[0].sum((1, 2))) == []
        found = Other.apply(x[:, :, None], x[:, :1], None, None, "rnn_tanh", torch.ones(1, 1), None, None, None, False)
        assert own_functions(found[0].sum((1, 2))) == ["Other"]

    def test_weights_with_a_gradient_of_their_own(self) -> None:
        """One that is kept outside its module would get no gradient, and nobody would notice."""
        layer = nn.RNN(1, 1, bias=False)
        weights = [each.detach() for each in layer.parameters()]
        made = OneLayer("rnn_tanh", False, torch.ones(2, 3, 1), torch.ones(2, 1), None, None, *weights)
        assert recurrences.fits(made)
        assert not recurrences.fits(made._replace(of_state=layer.weight_hh_l0))


@pytest.mark.skipif(not _triton.available, reason="needs a CUDA device and Triton")
@given(layers(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60, deadline=None)
def test_kernels_equal_the_plain_path(layer: OneLayer, dtype: torch.dtype) -> None:
    """Gates that a kernel computes are those of plain torch in float64."""

    def on_device(each: Any, dtype: torch.dtype) -> Any:
        if not isinstance(each, Tensor):
            return each
        return each.detach().cuda().to(dtype if each.is_floating_point() else each.dtype)

    tolerance = 1e-4 if dtype == torch.float32 else 0.1  # of the whole tensor: single values may cancel
    results = []
    for kind in (dtype, torch.float64):
        made = OneLayer(*(on_device(on_device(each, dtype), kind) for each in layer))
        for each in data(made):
            each.requires_grad_()
        state = fused(made).state
        gradients = torch.autograd.grad(sum(each.sin().sum() for each in state), data(made))
        results.append([each.double() for each in (*state, *gradients)])
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).norm()) <= tolerance * (float(wanted.norm()) + 1e-3)
