"""The rewritten attention: torch's own outputs and gradients, and each example's gradient from the calls it makes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dpgrad.grads.layers.attention import REWRITES

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], Tensor]] = []  # of one forward: function, arguments, result
attention = REWRITES[F.multi_head_attention_forward]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


class Watched(Tensor):
    """A parameter that notes the functions that see it, and takes the rewritten one where there is one."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in REWRITES:
            return REWRITES[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func.__name__ != "__get__":  # reading a shape, a type, a device
            CALLS.append((func, args, result))
        return result


@pytest.fixture(autouse=True)
def _forget_calls() -> Iterator[None]:
    yield
    CALLS.clear()


def watched(module: nn.Module, *args: Any, **named: Any) -> tuple[Any, dict[str, Tensor]]:
    """What the module's own forward returns with watched parameters, and these."""
    with torch._C.DisableTorchFunctionSubclass():
        parameters = {
            name: parameter.detach().clone().as_subclass(Watched).requires_grad_()
            for name, parameter in module.named_parameters()
        }
    CALLS.clear()
    return functional_call(module, parameters, args, named), parameters


def tensors(result: Any) -> list[Tensor]:
    parts = [result] if isinstance(result, Tensor) else result
    return [part for part in parts if part is not None]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    directions = [drawn(*output.shape, seed=seed).detach().to(output.device) for seed, output in enumerate(outputs)]
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(outputs, inputs, directions)


def assert_equals_torch(
    module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], leaves: list[Tensor], may: set[Any]
) -> None:
    """Outputs and gradients equal torch's own, and nothing outside ``may`` sees a parameter."""
    torch.manual_seed(3)
    wanted = tensors(module(*args, **named))
    torch.manual_seed(3)
    result, parameters = watched(module, *args, **named)
    found = tensors(result)
    assert {func for func, _, _ in CALLS} <= may
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(
        gradients(found, [*leaves, *parameters.values()]), gradients(wanted, [*leaves, *module.parameters()]), **CLOSE
    )


WHOLE = {F.linear, Tensor.expand}
EMBED, SOURCE_WIDTHS = 4, (3, 5)
Case = tuple[nn.MultiheadAttention, tuple[Tensor, Tensor, Tensor], dict[str, Any]]


def masks(kind: str, *shape: int, seed: int) -> Tensor | None:
    """A mask of each form; no row is closed altogether, for softmax would be 0/0."""
    values = drawn(*shape, seed=seed).detach()
    truth = values > 0
    truth[..., 0] = False
    match kind:
        case "none":
            return None
        case "truth":
            return truth
        case "infinite":
            return torch.zeros_like(values).masked_fill(truth, -torch.inf)
        case _:
            return values


KINDS = st.sampled_from(["none", "truth", "infinite", "finite"])


@st.composite
def cases(draw: st.DrawFn, dropout: float = 0.0) -> Case:
    """A module, its three inputs and its other arguments."""
    sharing = draw(st.sampled_from(["self", "key is value", "query is key", "query is value", "all differ"]))
    separate = draw(st.booleans()) and sharing in {"key is value", "all differ"}
    key_width, value_width = SOURCE_WIDTHS if separate else (EMBED, EMBED)
    if sharing == "key is value":
        value_width = key_width
    heads, batch_first = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 99)))
    module = nn.MultiheadAttention(
        EMBED,
        heads,
        dropout=dropout,
        bias=draw(st.booleans()),
        add_bias_kv=draw(st.booleans()),
        add_zero_attn=draw(st.booleans()),
        kdim=key_width,
        vdim=value_width,
        batch_first=batch_first,
        dtype=torch.float64,
    )
    for parameter in module.parameters():  # biases start at zero, which would hide one that is left out
        nn.init.normal_(parameter)
    batch, target = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    source = target if sharing.startswith(("self", "query")) else draw(st.integers(1, 4))

    def sequence(time: int, width: int, seed: int) -> Tensor:
        return drawn(batch, time, width, seed=seed) if batch_first else drawn(time, batch, width, seed=seed)

    query = sequence(target, EMBED, 1)
    key = query if sharing in {"self", "query is key"} else sequence(source, key_width, 2)
    value = {"self": query, "key is value": key, "query is value": query}.get(sharing)
    if value is None:
        value = sequence(source, value_width, 3)

    named: dict[str, Any] = {
        "need_weights": draw(st.booleans()),
        "average_attn_weights": draw(st.booleans()),
        "key_padding_mask": masks(draw(KINDS), batch, source, seed=4),
    }
    match draw(st.sampled_from(["2-D", "3-D", "causal"])):
        case "2-D":
            named["attn_mask"] = masks(draw(KINDS), target, source, seed=5)
        case "3-D":
            named["attn_mask"] = masks(draw(KINDS), batch * heads, target, source, seed=6)
        case _:
            named["attn_mask"] = torch.ones(target, source, dtype=torch.bool).triu(1)
            named["is_causal"] = draw(st.booleans())
    return module.train(draw(st.booleans())), (query, key, value), named


def distinct(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in inputs}.values())


class TestEqualToTorch:
    @given(cases())
    @settings(max_examples=150)
    def test_outputs_and_gradients(self, case: Case) -> None:
        module, inputs, named = case
        assert_equals_torch(module, inputs, named, distinct(inputs), WHOLE)

    @given(cases(dropout=0.5))
    @settings(max_examples=30)
    def test_dropout_with_the_same_seed(self, case: Case) -> None:
        module, inputs, named = case
        assert_equals_torch(module, inputs, named, distinct(inputs), WHOLE)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    @given(cases())
    @settings(max_examples=50)
    def test_on_a_gpu(self, case: Case) -> None:
        module, inputs, named = case
        moved = {id(tensor): tensor.detach().cuda().requires_grad_() for tensor in inputs}
        named = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in named.items()}
        there = tuple(moved[id(tensor)] for tensor in inputs)
        assert_equals_torch(module.cuda(), there, named, distinct(there), WHOLE)

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_masks_of_truth_values_given_to_the_function(self, need_weights: bool) -> None:
        # The module turns them into numbers before it calls the function; others may not.
        x, bias = drawn(4, 3, EMBED), drawn(3 * EMBED)
        own = drawn(3 * EMBED, EMBED), bias, drawn(1, 1, EMBED), drawn(1, 1, EMBED), True, 0.0
        named = {
            "key_padding_mask": masks("truth", 3, 4, seed=1),
            "attn_mask": masks("truth", 6, 4, 4, seed=2),
            "need_weights": need_weights,
        }
        arguments = (x, x, x, EMBED, 2, *own, drawn(EMBED, EMBED), None)
        wanted = F.multi_head_attention_forward(*arguments, **named)
        torch.testing.assert_close(attention(*arguments, **named), wanted, **CLOSE)

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("norm_first", [True, False])
    def test_a_transformer(self, training: bool, norm_first: bool) -> None:
        options: dict[str, Any] = {"batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
        model = nn.Transformer(EMBED, 2, 2, 2, 8, dropout=0.0, **options).train(training)
        source, target = drawn(3, 5, EMBED), drawn(3, 4, EMBED, seed=1)
        named = {
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64),
            "src_key_padding_mask": masks("infinite", 3, 5, seed=2),
            "tgt_is_causal": True,
        }
        assert_equals_torch(model, (source, target), named, [source, target], {F.linear, F.layer_norm})


class TestUses:
    """How often a weight is used, which is what the engine pays for."""

    def uses(self, module: nn.Module, *inputs: Tensor) -> list[tuple[int, ...]]:
        _, parameters = watched(module, *inputs)
        return [tuple(args[0].shape) for _, args, _ in CALLS if args[1] is parameters["in_proj_weight"]]

    def test_self_attention_uses_the_packed_weight_once(self) -> None:
        x = drawn(3, 5, EMBED)
        assert self.uses(nn.MultiheadAttention(EMBED, 2, batch_first=True).double(), x, x, x) == [(3, 5, EMBED)]

    def test_cross_attention_uses_it_once_over_both_inputs(self) -> None:
        x, memory = drawn(5, 3, EMBED), drawn(7, 3, EMBED)
        assert self.uses(nn.MultiheadAttention(EMBED, 2).double(), x, memory, memory) == [(3, 12, EMBED)]


def example_gradients(losses: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each example's gradient (batch, *shape), from the calls, the first dimension of each being the batch."""
    found = {name: torch.zeros(len(losses), *parameter.shape).double() for name, parameter in parameters.items()}
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    with torch._C.DisableTorchFunctionSubclass():
        of_outputs = torch.autograd.grad(losses.sum(), [result for _, _, result in CALLS])
    for (func, args, _), g in zip(CALLS, of_outputs, strict=True):
        if func is F.linear:
            a, weight, *rest = args
            found[name_of[id(weight)]] += torch.einsum("ntp,ntd->npd", g, a.detach())
            if rest and rest[0] is not None:
                found[name_of[id(rest[0])]] += g.sum(1)
        else:
            of_parameter = found[name_of[id(args[0])]]
            of_parameter += g.view(of_parameter.shape)
    return found


class TestExamplesAreKeptApart:
    @given(cases())
    @settings(max_examples=60)
    def test_gradient_of_each_example(self, case: Case) -> None:
        module, inputs, named = case
        heads, dimension = module.num_heads, 0 if module.batch_first else 1
        batch = inputs[0].shape[dimension]

        def losses(result: Any) -> Tensor:
            return result[0].transpose(0, dimension).pow(3).sum((1, 2))

        result, parameters = watched(module, *inputs, **named)
        found = example_gradients(losses(result), parameters)
        for i in range(batch):
            taken = {id(tensor): tensor.narrow(dimension, i, 1) for tensor in inputs}  # what was one tensor stays one
            alone = dict(named)
            if alone["key_padding_mask"] is not None:
                alone["key_padding_mask"] = alone["key_padding_mask"][i : i + 1]
            if alone["attn_mask"] is not None and alone["attn_mask"].dim() == 3:
                alone["attn_mask"] = alone["attn_mask"][i * heads : (i + 1) * heads]
            loss = losses(module(*(taken[id(tensor)] for tensor in inputs), **alone)).sum()
            wanted = torch.autograd.grad(loss, list(module.parameters()))
            # The gradient of the key's bias is zero but for the rounding of the terms that cancel in it.
            size = max(1.0, *(float(gradient.abs().max()) for gradient in wanted))
            found_alone = [of_all[i] for of_all in found.values()]
            torch.testing.assert_close(found_alone, list(wanted), rtol=1e-10, atol=1e-12 * size)


FUSED = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
MODELS = {
    "attention": lambda: nn.MultiheadAttention(EMBED, 2, batch_first=True),
    "layer": lambda: nn.TransformerEncoderLayer(EMBED, 2, 8, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, 2, 8, batch_first=True), 2),
}


@pytest.mark.parametrize("name", MODELS)
class TestFusedFunctions:
    """They are not reached with trainable parameters: the rewrites would be passed by."""

    def reached(self, name: str, trainable: bool, gradients: bool, subclass: bool) -> set[str]:
        """The fused functions that the model calls in evaluation mode."""
        model, x = MODELS[name]().eval().requires_grad_(trainable), torch.randn(3, 5, EMBED)
        inputs = (x, x, x) if name == "attention" else (x,)
        found: set[str] = set()

        def noting(fused: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                found.add(fused.__name__)
                return fused(*args)

            return call

        with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(gradients):
            for fused in FUSED:
                patch.setattr(torch, fused, noting(getattr(torch, fused)))
            watched(model, *inputs) if subclass else model(*inputs)
        return found

    def test_they_are_where_nothing_is_trained(self, name: str) -> None:
        assert self.reached(name, trainable=False, gradients=True, subclass=False)

    def test_not_in_evaluation_mode_with_gradients(self, name: str) -> None:
        assert not self.reached(name, trainable=True, gradients=True, subclass=False)

    @pytest.mark.parametrize("gradients", [True, False])
    def test_not_with_parameters_of_a_subclass(self, name: str, gradients: bool) -> None:
        assert not self.reached(name, trainable=True, gradients=gradients, subclass=True)


class TestRefused:
    def call(self, query: Tensor, key: Tensor, **named: Any) -> Any:
        own = drawn(3 * EMBED, EMBED), None, None, None, False, 0.0, drawn(EMBED, EMBED), None
        return attention(query, key, key, EMBED, 2, *own, **named)

    def test_no_batch(self) -> None:
        with pytest.raises(ValueError, match=r"3 dimensions, one of them the batch, got shapes \[\(5, 4\)"):
            watched(nn.MultiheadAttention(EMBED, 2).double(), drawn(5, EMBED), drawn(5, EMBED), drawn(5, EMBED))

    def test_keys_common_to_all_examples(self) -> None:
        with pytest.raises(ValueError, match="must have one batch size"):
            self.call(drawn(5, 3, EMBED), drawn(5, 1, EMBED))

    @pytest.mark.parametrize("name", ["static_k", "static_v"])
    def test_static(self, name: str) -> None:
        x = drawn(5, 3, EMBED)
        with pytest.raises(ValueError, match="static_k and static_v have no rule"):
            self.call(x, x, **{name: drawn(6, 5, 2)})

    def test_a_hint_without_a_mask(self) -> None:
        x = drawn(5, 3, EMBED)
        with pytest.raises(ValueError, match="is_causal is a hint"):
            self.call(x, x, is_causal=True)

    @pytest.mark.parametrize(
        ("name", "mask", "words"),
        [
            ("attn_mask", torch.zeros(1, 5), r"\(5, 5\) or \(6, 5, 5\), got \(1, 5\)"),
            ("attn_mask", torch.zeros(3, 5, 5), r"\(5, 5\) or \(6, 5, 5\), got \(3, 5, 5\)"),
            ("key_padding_mask", torch.zeros(5, 3), r"shape \(3, 5\), got \(5, 3\)"),
            ("key_padding_mask", torch.zeros(3, 5, dtype=torch.int64), "truth values or floating point"),
        ],
    )
    def test_masks(self, name: str, mask: Tensor, words: str) -> None:
        x = drawn(5, 3, EMBED)
        with pytest.raises(ValueError, match=words):
            self.call(x, x, **{name: mask})
