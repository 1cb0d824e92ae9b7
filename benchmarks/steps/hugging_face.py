"""Networks of transformers, built from their configurations: random weights, nothing is downloaded, no dropout."""

from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from benchmarks.steps.networks import CLASSES

IMAGE, PATCH = 224, 16


def installed() -> bool:
    """Whether transformers can be imported."""
    return find_spec("transformers") is not None


class Logits(nn.Module):
    """What a model of transformers returns, without the record around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.inner(inputs).logits
        return logits


def gpt2(width: int = 768, layers: int = 12, heads: int = 12, vocabulary: int = 50257, length: int = 256) -> Logits:
    """GPT-2, the output layer tied to the embedding; the small one has 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Logits(GPT2LMHeadModel(config))


class Lora(nn.Module):
    """A frozen linear layer plus a trained product of two thin ones (Hu et al., 2022).

    Both factors begin at random, where the usual choice is zeros for one: the gradients of both can then be compared.
    """

    def __init__(self, frozen: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        whole: Tensor = self.frozen(x) + self.up(self.down(x))
        return whole


def gpt2_lora(rank: int = 8, **config: Any) -> Logits:
    """GPT-2 of which only LoRA factors of each attention's queries, keys and values are trained."""
    model = gpt2(**config).requires_grad_(False)
    blocks: Any = model.inner
    for block in blocks.transformer.h:
        frozen = block.attn.c_attn
        block.attn.c_attn = Lora(frozen, *frozen.weight.shape, rank)
    return model


def llama(width: int = 1024, layers: int = 10, heads: int = 16, vocabulary: int = 32000, length: int = 256) -> Logits:
    """A decoder in the shape of Llama, four heads to a key and value; 178 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return Logits(LlamaForCausalLM(config))


def vit(width: int = 384, layers: int = 12, heads: int = 6, image: int = IMAGE) -> Logits:
    """ViT-S/16: 22 million parameters, images of 224 × 224 in patches of 16 × 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
        image_size=image, patch_size=PATCH, num_labels=CLASSES,
    )  # fmt: skip
    return Logits(ViTForImageClassification(config))
