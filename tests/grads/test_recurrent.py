"""The recurrent rewrites: torch's own outputs and gradients, and each example's gradient from the calls of F.linear."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpgrad.grads.layers.recurrent import REWRITES, composed, known_inputs, run_layer

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], Tensor]] = []  # of one forward: function, arguments, result

READS = {"__get__", "data_ptr", "get_device"}  # of a shape, a type, a device


class Watched(Tensor):
    """A parameter that notes the functions that see it, and takes the rewritten one where there is one."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in REWRITES:
            return REWRITES[func](*args, **(kwargs or {}))
        if func is run_layer:
            return composed(*args)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func.__name__ not in READS:
            CALLS.append((func, args, result))
        return result


@pytest.fixture(autouse=True)
def _forget_calls() -> Iterator[None]:
    yield
    CALLS.clear()


def watched(module: nn.Module, *args: Any) -> tuple[Any, dict[str, Tensor]]:
    """What the module's own forward returns with watched parameters, and these."""
    with torch._C.DisableTorchFunctionSubclass():
        parameters = {
            name: parameter.detach().clone().as_subclass(Watched).requires_grad_()
            for name, parameter in module.named_parameters()
        }
    CALLS.clear()
    return functional_call(module, parameters, args), parameters


def tensors(result: Any) -> list[Tensor]:
    """The tensors of values in an output, in their order."""
    if isinstance(result, PackedSequence):
        return [result.data]
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in tensors(part)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    directions = [drawn(*output.shape, seed=seed).detach().to(output.device) for seed, output in enumerate(outputs)]
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(outputs, inputs, directions, retain_graph=True)  # packing is shared


def assert_equals_torch(module: nn.Module, args: tuple[Any, ...], leaves: list[Tensor]) -> None:
    """Outputs and gradients equal torch's own, and F.linear is all that sees a weight."""
    wanted = tensors(module(*args))
    with known_inputs(module):
        result, parameters = watched(module, *args)
    found = tensors(result)
    assert {func for func, _, _ in CALLS} == {F.linear}
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(
        gradients(found, [*leaves, *parameters.values()]), gradients(wanted, [*leaves, *module.parameters()]), **CLOSE
    )


@st.composite
def modules(draw: st.DrawFn) -> nn.RNNBase:
    options: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
        "dtype": torch.float64,
    }
    torch.manual_seed(draw(st.integers(0, 99)))
    match draw(st.sampled_from(["tanh", "relu", "lstm", "gru"])):
        case "lstm":
            module: nn.RNNBase = nn.LSTM(3, 4, proj_size=draw(st.sampled_from([0, 2])), **options)
        case "gru":
            module = nn.GRU(3, 4, **options)
        case nonlinearity:
            module = nn.RNN(3, 4, nonlinearity=nonlinearity, **options)
    return module.train(draw(st.booleans()))


def states(module: nn.RNNBase, batch: int) -> list[Tensor]:
    """A state to start from."""
    groups = module.num_layers * (2 if module.bidirectional else 1)
    h = drawn(groups, batch, module.proj_size or 4, seed=7)
    return [h, drawn(groups, batch, 4, seed=8)] if isinstance(module, nn.LSTM) else [h]


def as_argument(state: list[Tensor]) -> tuple[Any, ...]:
    """The state as the module takes it; nothing where there is none."""
    return (tuple(state),) if len(state) == 2 else tuple(state)


def pack(x: Tensor, lengths: list[int], enforce_sorted: bool = False) -> PackedSequence:
    return pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=enforce_sorted)


LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


class TestEqualToTorch:
    @given(modules(), st.integers(1, 4), st.integers(1, 5), st.booleans())
    @settings(max_examples=60)
    def test_padded(self, module: nn.RNNBase, batch: int, time: int, with_state: bool) -> None:
        x = drawn(batch, time, 3) if module.batch_first else drawn(time, batch, 3)
        state = states(module, batch) if with_state else []
        assert_equals_torch(module, (x, *as_argument(state)), [x, *state])

    @given(modules(), LENGTHS, st.booleans(), st.booleans())
    @settings(max_examples=60)
    def test_packed(self, module: nn.RNNBase, lengths: list[int], enforce_sorted: bool, with_state: bool) -> None:
        lengths = sorted(lengths, reverse=True) if enforce_sorted else lengths
        x = drawn(len(lengths), max(lengths), 3)
        state = states(module, len(lengths)) if with_state else []
        assert_equals_torch(module, (pack(x, lengths, enforce_sorted), *as_argument(state)), [x, *state])

    @pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("with_state", [True, False])
    def test_cells(self, kind: Any, bias: bool, with_state: bool) -> None:
        cell, x = kind(3, 4, bias=bias, dtype=torch.float64), drawn(5, 3)
        state = [drawn(5, 4, seed=seed) for seed in range(2 if kind is nn.LSTMCell else 1)] if with_state else []
        assert_equals_torch(cell, (x, *as_argument(state)), [x, *state])

    def test_relu_cell(self) -> None:
        x = drawn(5, 3)
        assert_equals_torch(nn.RNNCell(3, 4, nonlinearity="relu", dtype=torch.float64), (x,), [x])

    def test_arguments_by_name(self) -> None:
        layer, x, h = nn.GRU(3, 4, dtype=torch.float64), drawn(5, 2, 3), drawn(1, 2, 4)
        named = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False}
        padded = REWRITES[torch.gru](input=x, hx=h, params=layer._flat_weights, batch_first=False, **named)
        torch.testing.assert_close(padded, layer(x, h), **CLOSE)
        with pytest.raises(ValueError, match="order that is not known"):
            REWRITES[torch.gru](data=x[0], batch_sizes=torch.tensor([2]), hx=h, params=layer._flat_weights, **named)

    def test_no_recurrent_function_is_left_out(self) -> None:
        names = [name for name in dir(torch._VF.vf) if name.startswith(("lstm", "gru", "rnn_"))]
        assert {getattr(torch, name) for name in names if not name.startswith("lstm_mps")} < set(REWRITES)

    def test_weights_are_not_moved(self) -> None:
        weights = nn.GRU(3, 4)._flat_weights
        places = [weight.data_ptr() for weight in weights]
        assert REWRITES[torch._cudnn_rnn_flatten_weight](weights, 4, 3, 3, 4, 0, 1, False, False) is None
        assert [weight.data_ptr() for weight in weights] == places

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    @given(modules(), LENGTHS, st.booleans())
    @settings(max_examples=30)
    def test_on_a_gpu(self, module: nn.RNNBase, lengths: list[int], packed: bool) -> None:
        module.cuda().train()  # cuDNN goes back through training mode only
        x = drawn(len(lengths), max(lengths), 3).detach().cuda().requires_grad_()
        padded = x if module.batch_first else x.transpose(0, 1)
        assert_equals_torch(module, (pack(x, lengths) if packed else padded,), [x])


class TestDropout:
    """Between layers and in training only."""

    def layer(self, dropout: float) -> nn.GRU:
        return nn.GRU(3, 4, num_layers=2, dropout=dropout, batch_first=True, dtype=torch.float64)

    def test_half_of_the_inputs_of_the_second_layer(self) -> None:
        torch.manual_seed(0)
        _, parameters = watched(self.layer(0.5), drawn(64, 5, 3))
        (first,) = (args[0] for _, args, _ in CALLS if args[1] is parameters["weight_ih_l0"])
        (second,) = (args[0] for _, args, _ in CALLS if args[1] is parameters["weight_ih_l1"])
        assert (first != 0).all()
        # 1280 fair draws: 0.09 is 6.4 standard deviations, a false alarm below 1e-9.
        assert abs((second == 0).double().mean() - 0.5) < 0.09
        assert second.abs().max() > 1  # what is left is doubled; a state lies within (-1, 1)

    def test_none_in_evaluation(self) -> None:
        x = drawn(2, 5, 3)
        assert_equals_torch(self.layer(0.5).eval(), (x,), [x])

    def test_everything(self) -> None:
        x = drawn(2, 5, 3)
        layer = self.layer(1.0)
        torch.testing.assert_close(tensors(watched(layer, x)[0]), tensors(layer(x)), **CLOSE)


def example_gradients(losses: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each example's gradient (batch, *shape), from what F.linear was given, its first dimension the batch."""
    found = {name: torch.zeros(len(losses), *parameter.shape).double() for name, parameter in parameters.items()}
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    with torch._C.DisableTorchFunctionSubclass():
        of_outputs = torch.autograd.grad(losses.sum(), [result for _, _, result in CALLS])
    for (_, (a, weight, *rest), _), g in zip(CALLS, of_outputs, strict=True):
        a, g = (tensor if tensor.dim() == 3 else tensor.unsqueeze(1) for tensor in (a.detach(), g))
        found[name_of[id(weight)]] += torch.einsum("ntp,ntd->npd", g, a)
        if rest and rest[0] is not None:
            found[name_of[id(rest[0])]] += g.sum(1)
    return found


class TestExamplesAreKeptApart:
    """The first dimension of every F.linear is the batch in its own order, however the sequences are packed."""

    @given(modules(), LENGTHS, st.booleans(), st.booleans())
    @settings(max_examples=40)
    def test_gradient_of_each_example(
        self, module: nn.RNNBase, lengths: list[int], packed: bool, with_state: bool
    ) -> None:
        batch, time = len(lengths), max(lengths)
        x, position = drawn(batch, time, 3).detach(), drawn(time, 8, seed=5).detach()
        state = [part.detach() for part in states(module, batch)] if with_state else []
        importance = torch.arange(1.0, batch + 1).double()  # so that equal examples are told apart

        def arguments(rows: slice) -> tuple[Any, ...]:
            padded = x[rows] if module.batch_first else x[rows].transpose(0, 1)
            given = pack(x[rows], lengths[rows]) if packed else padded
            return given, *as_argument([part[:, rows] for part in state])

        def losses(result: Any, rows: slice) -> Tensor:
            output, last = result
            if packed:
                output, _ = pad_packed_sequence(output, batch_first=True, total_length=time)
            elif not module.batch_first:
                output = output.transpose(0, 1)
            value = (output * position[:, : output.shape[2]]).sum((1, 2))
            return importance[rows] * (value + sum(part.sum((0, 2)) for part in tensors(last)))

        everyone = slice(None)
        with known_inputs(module):
            result, parameters = watched(module, *arguments(everyone))
        found = example_gradients(losses(result, everyone), parameters)
        for i in range(batch):
            alone = slice(i, i + 1)
            loss = losses(module(*arguments(alone)), alone).sum()
            wanted = torch.autograd.grad(loss, list(module.parameters()))
            torch.testing.assert_close([of_all[i] for of_all in found.values()], list(wanted), **CLOSE)

    def test_vmap_takes_the_rewrites(self) -> None:
        layer, x = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), torch.randn(5, 6, 3)
        state = torch.zeros(4, 1, 4)

        def loss(weights: list[Tensor], row: Tensor) -> Tensor:
            arguments = (row[None], (state, state), weights, True, 2, 0.0, True, True, True)
            return REWRITES[torch.lstm](*arguments)[0].square().sum()

        weights = [weight.detach() for weight in layer._flat_weights]
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
        wanted = torch.autograd.grad(layer(x[3:4])[0].square().sum(), layer._flat_weights)
        torch.testing.assert_close([of_all[3] for of_all in found], list(wanted))


class Repacking(nn.LSTM):
    """Takes a padded batch and packs it out of sight."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Any:  # type: ignore[override]
        return super().forward(pack_padded_sequence(tokens, lengths, batch_first=True, enforce_sorted=False))


class Tokens(nn.LSTM):
    """Takes token numbers, (batch, time)."""

    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        return super().forward(F.one_hot(tokens, 3).to(self.weight_ih_l0.dtype))


class TestRefused:
    @pytest.mark.parametrize("enforce_sorted", [True, False])
    def test_packed_in_unknown_order(self, enforce_sorted: bool) -> None:
        packed = pack(drawn(2, 5, 3), [5, 3], enforce_sorted)
        with pytest.raises(ValueError, match="packed sequences of 2 examples came in an order that is not known"):
            watched(nn.LSTM(3, 4).double(), packed)

    def test_packed_out_of_sight(self) -> None:
        layer = Repacking(3, 4).double()
        with known_inputs(layer), pytest.raises(ValueError, match="order that is not known"):
            watched(layer, drawn(2, 5, 3), torch.tensor([3, 5]))

    def test_an_order_noted_for_other_data(self) -> None:
        layer, packed = nn.LSTM(3, 4).double(), pack(drawn(2, 5, 3), [3, 5])
        zeros = torch.zeros(1, 2, 4).double()
        with known_inputs(layer):
            watched(layer, packed)
            arguments = (packed.data.clone(), packed.batch_sizes, (zeros, zeros), layer._flat_weights)
            with pytest.raises(ValueError, match="order that is not known"):
                REWRITES[torch.lstm](*arguments, True, 1, 0.0, True, False)

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_modules_without_a_batch(self, kind: Any) -> None:
        layer = kind(3, 4).double()
        with known_inputs(layer), pytest.raises(ValueError, match=rf"nn.{kind.__name__} needs 3 dimensions.*\(5, 3\)"):
            watched(layer, drawn(5, 3))

    def test_functions_without_a_batch(self) -> None:
        with pytest.raises(ValueError, match="a recurrent layer needs 3 dimensions"):
            REWRITES[torch.gru](drawn(5, 3), drawn(1, 4), [], True, 1, 0.0, True, False, False)
        with pytest.raises(ValueError, match="a recurrent cell needs 2 dimensions"):
            REWRITES[torch.gru_cell](drawn(3), drawn(4), drawn(12, 3), drawn(12, 4))


class TestKnownInputs:
    def test_inside_a_model_and_by_name(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.GRU(3, 4).double(), nn.LSTM(4, 2).double()

            def forward(self, packed: PackedSequence) -> Any:
                return self.second(input=self.first(input=packed)[0])

        x = drawn(3, 5, 3)
        assert_equals_torch(Model(), (pack(x, [2, 5, 4]),), [x])

    def test_a_subclass_takes_what_it_likes(self) -> None:
        assert_equals_torch(Tokens(3, 4, batch_first=True).double(), (torch.tensor([[0, 2], [1, 1]]),), [])

    def test_nothing_is_left_behind(self) -> None:
        layer, packed = nn.LSTM(3, 4).double(), pack(drawn(2, 5, 3), [3, 5])

        def interrupted() -> None:
            with known_inputs(layer):
                watched(layer, packed)
                raise InterruptedError("stop")

        with pytest.raises(InterruptedError, match="stop"):
            interrupted()
        assert not layer._forward_pre_hooks
        with pytest.raises(ValueError, match="order that is not known"):
            watched(layer, packed)
