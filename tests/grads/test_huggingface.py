"""Models of the library transformers, tiny and with random weights: exact in the way they go, or refused with a remedy.

The usual run has one model of each kind of network; its relatives, and attention computed in plain operations, are
exhaustive. Nothing is downloaded. A model that this version of transformers cannot import, build or differentiate by
itself is skipped with the reason. Each test prints the way that its model goes (`pytest -rP`).
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from attribution_cases import Case, Loss
from reference import row_gradients
from test_attribution import FLOAT32, OTHER_ENGINE, complaint, made, outcome
from torch import Tensor, nn
from torch.nn import functional as F

transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
pytestmark = pytest.mark.slow

ROWS, TIME, TOKENS, CLASSES, WIDTH, SIDE = 10, 8, 20, 3, 8, 16
SPECIAL = 3  # padding, the beginning and the end
Batch = dict[str, Tensor]
Inputs = Callable[[torch.Generator], Batch]


# ---- rows: of different lengths, and losses of different sizes, so that a wrong factor shows


def words(g: torch.Generator) -> Batch:
    ids = torch.randint(SPECIAL, TOKENS, (ROWS, TIME), generator=g)
    lengths = torch.randint(3, TIME + 1, (ROWS, 1), generator=g)
    lengths[:2] = TIME  # without padding
    mask = (torch.arange(TIME) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def words_in_and_out(g: torch.Generator) -> Batch:
    return {**words(g), "decoder_input_ids": torch.randint(SPECIAL, TOKENS, (ROWS, 5), generator=g)}


def images(g: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, SIDE, SIDE, generator=g)}


def words_and_images(g: torch.Generator) -> Batch:
    return {**words(g), **images(g)}


def sound(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(ROWS, 64, generator=g)}


# ---- losses: one value for each row, weighted by a column of the data


def classify(found: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(found.logits, batch["labels"], reduction="none")


def next_word(found: Any, batch: Batch) -> Tensor:
    each = F.cross_entropy(found.logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return (each * batch["attention_mask"][:, 1:]).sum(1) / TIME


def next_word_out(found: Any, batch: Batch) -> Tensor:
    out = batch["decoder_input_ids"]
    return F.cross_entropy(found.logits[:, :-1].transpose(1, 2), out[:, 1:], reduction="none").mean(1)


def own_pair(found: Any, batch: Batch) -> Tensor:
    return 1 - (found.image_embeds * found.text_embeds).sum(1)


# ---- models


@dataclass(frozen=True)
class Shape:
    """A model of transformers: names of its classes, options of its configuration, what it is given and judged by."""

    name: str
    model: str
    config: str
    options: dict[str, Any]
    inputs: Inputs = words
    judged: Callable[[Any, Batch], Tensor] = classify
    exact: bool = False  # it must be: a refusal with a remedy is not enough
    attentions: tuple[str, ...] = field(default=("sdpa", "eager"))


def like_bert(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 2 * WIDTH, "max_position_embeddings": TIME + 8, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES, "pad_token_id": 0, **more,
    }  # fmt: skip


def like_llama(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": WIDTH // 2, "intermediate_size": 2 * WIDTH,
        "max_position_embeddings": 2 * TIME, "attention_dropout": 0.0, "use_cache": False, "num_labels": CLASSES,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


GPT2 = {
    "vocab_size": TOKENS, "n_positions": 2 * TIME, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "num_labels": CLASSES, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT_NEO = {
    "vocab_size": TOKENS, "max_position_embeddings": 2 * TIME, "hidden_size": WIDTH, "num_layers": 2,
    "attention_types": [[["global", "local"], 1]], "num_heads": 2, "window_size": 4, "intermediate_size": 2 * WIDTH,
    "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPT = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "num_hidden_layers": 2, "ffn_dim": 2 * WIDTH,
    "max_position_embeddings": 2 * TIME, "num_attention_heads": 2, "word_embed_proj_dim": WIDTH, "dropout": 0.0,
    "attention_dropout": 0.0, "layerdrop": 0.0, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
BLOOM = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": TOKENS, "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 2 * WIDTH, "dropout": 0.0,
    "max_position_embeddings": 2 * TIME, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": CLASSES,
    "pad_token_id": 0,
}  # fmt: skip
T5 = {
    "vocab_size": TOKENS, "d_model": WIDTH, "d_kv": WIDTH // 2, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "relative_attention_num_buckets": 4, "relative_attention_max_distance": 8, "use_cache": False,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": TOKENS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": 2 * TIME, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
VIT = {
    "image_size": SIDE, "patch_size": 4, "num_channels": 3, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 2 * WIDTH, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES,
}  # fmt: skip
SWIN = {
    "image_size": SIDE, "patch_size": 2, "num_channels": 3, "embed_dim": WIDTH, "depths": [2, 1], "num_heads": [1, 2],
    "window_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
    "num_labels": CLASSES,
}  # fmt: skip
CLIP_PART = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "attention_dropout": 0.0, "projection_dim": WIDTH,
}  # fmt: skip
CLIP = {
    "text_config": {
        **CLIP_PART, "vocab_size": TOKENS, "max_position_embeddings": TIME, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {**CLIP_PART, "image_size": SIDE, "patch_size": 4, "num_channels": 3},
    "projection_dim": WIDTH,
}  # fmt: skip
WAV2VEC2 = {
    "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH,
    "conv_dim": (WIDTH, WIDTH), "conv_stride": (4, 2), "conv_kernel": (4, 2),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "classifier_proj_size": WIDTH, "num_labels": CLASSES,
}  # fmt: skip
DEBERTA = like_bert(
    relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm",
    share_att_key=True, position_biased_input=False, type_vocab_size=0, max_relative_positions=-1, pooler_dropout=0.0,
    pooler_hidden_size=WIDTH,
)  # fmt: skip

SHAPES = [
    Shape("BERT", "BertForSequenceClassification", "BertConfig", like_bert()),
    Shape("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", like_bert()),
    Shape("DistilBERT", "DistilBertForSequenceClassification", "DistilBertConfig", DISTILBERT),
    Shape(
        "ALBERT", "AlbertForSequenceClassification", "AlbertConfig",
        like_bert(embedding_size=4, classifier_dropout_prob=0.0),
    ),
    Shape("ELECTRA", "ElectraForSequenceClassification", "ElectraConfig", like_bert(embedding_size=4)),
    Shape("DeBERTa-v2", "DebertaV2ForSequenceClassification", "DebertaV2Config", DEBERTA, exact=True,
          attentions=("eager",)),
    Shape("Longformer", "LongformerForSequenceClassification", "LongformerConfig", like_bert(attention_window=4),
          attentions=("eager",)),
    Shape("GPT-2", "GPT2LMHeadModel", "GPT2Config", GPT2, judged=next_word),
    Shape("GPT-2 that classifies", "GPT2ForSequenceClassification", "GPT2Config", GPT2),
    Shape("GPT-Neo", "GPTNeoForCausalLM", "GPTNeoConfig", GPT_NEO, judged=next_word, attentions=("eager",)),
    Shape("OPT", "OPTForCausalLM", "OPTConfig", OPT, judged=next_word),
    Shape("BLOOM", "BloomForCausalLM", "BloomConfig", BLOOM, judged=next_word, attentions=("eager",)),
    Shape("Llama", "LlamaForCausalLM", "LlamaConfig", like_llama(), judged=next_word),
    Shape("Llama that classifies", "LlamaForSequenceClassification", "LlamaConfig", like_llama()),
    Shape("Mistral", "MistralForCausalLM", "MistralConfig", like_llama(sliding_window=4), judged=next_word),
    Shape("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", like_llama(), judged=next_word),
    Shape(
        "Mixtral", "MixtralForCausalLM", "MixtralConfig",
        like_llama(num_local_experts=3, num_experts_per_tok=2, sliding_window=None), judged=next_word, exact=True,
    ),
    Shape(
        "Qwen3-MoE", "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        like_llama(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=WIDTH, decoder_sparse_step=1),
        judged=next_word, exact=True,
    ),
    Shape("T5", "T5ForConditionalGeneration", "T5Config", T5, words_in_and_out, next_word_out, exact=True,
          attentions=("eager",)),
    Shape("BART", "BartForConditionalGeneration", "BartConfig", BART, words_in_and_out, next_word_out),
    Shape("ViT", "ViTForImageClassification", "ViTConfig", VIT, images),
    Shape("Swin", "SwinForImageClassification", "SwinConfig", SWIN, images, exact=True, attentions=("eager",)),
    Shape("CLIP", "CLIPModel", "CLIPConfig", CLIP, words_and_images, own_pair, exact=True),
    Shape("Wav2Vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAV2VEC2, sound),
]  # fmt: skip


def case_of(shape: Shape, attention: str) -> Case:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        given = {name: value for name, value in batch.items() if name not in ("labels", "sizes")}
        return shape.judged(model(**given), batch) * batch["sizes"]

    def make(seed: int) -> tuple[nn.Module, Loss, Batch]:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            config = getattr(transformers, shape.config)(**shape.options, attn_implementation=attention)
            model: nn.Module = getattr(transformers, shape.model)(config).eval()
        g = torch.Generator().manual_seed(1000 + seed)
        data = {
            **shape.inputs(g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
            "sizes": torch.randn(ROWS, generator=g).exp(),
        }
        _freeze_unused(model, loss(model, data).sum())
        return model, loss, data

    return Case(f"{shape.name}, {attention}", make, "separable")


def _freeze_unused(model: nn.Module, value: Tensor) -> None:
    """Leave out what no loss depends on, such as a pooler, which `check` would ask for."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters, allow_unused=True), strict=True):
        parameter.requires_grad_(gradient is not None)


def of_its_own(case: Case) -> tuple[nn.Module, Loss, Any]:
    """The model, if transformers itself can build it and differentiate its losses row by row."""
    try:
        model, loss, data = made(case, 0)
        gradients = row_gradients(model, loss, data)
    except Exception as error:  # whatever another version of transformers does
        pytest.skip(f"transformers {transformers.__version__}: {type(error).__name__}: {str(error)[:200]}")
    assert gradients
    assert all(math.isfinite(float(each.sum())) for each in gradients.values())
    return made(case, 0)


# of each kind one: encoders, decoders, both, experts, images, sound, pairs
USUAL = {
    "BERT-sdpa", "DeBERTa-v2-eager", "GPT-2-sdpa", "GPT-Neo-eager", "Llama-sdpa", "Mixtral-sdpa", "T5-eager",
    "ViT-sdpa", "Swin-eager", "CLIP-sdpa", "Wav2Vec2-sdpa",
}  # fmt: skip


def cases() -> Iterator[Any]:
    for shape in SHAPES:
        for attention in shape.attentions:
            name = f"{shape.name}-{attention}"
            marks = [] if name in USUAL else [pytest.mark.exhaustive]
            yield pytest.param(case_of(shape, attention), shape.exact, id=name, marks=marks)


def test_the_usual_ones_are_there() -> None:
    assert {str(case.id) for case in cases()} >= USUAL


@pytest.mark.parametrize(("case", "exact"), list(cases()))
def test_the_sum_is_that_of_one_row_at_a_time_or_refused(case: Case, exact: bool) -> None:
    found = outcome(case, of_its_own(case), FLOAT32)
    print(f"{case.name}: {found.way or found.detail}")
    if found.kind == "refused" and not exact and not OTHER_ENGINE.search(found.detail):
        assert re.search(r": \S+ \S+", found.detail), f"the refusal names no remedy: {found.detail}"
        return
    assert not (wrong := complaint(case, found, lambda: made(case, 0), FLOAT32)), wrong
    assert found.kind == "exact" or not exact, found.detail
