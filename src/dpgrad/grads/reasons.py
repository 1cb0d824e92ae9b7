"""Why vmap does not take a model, in one sentence."""

import re
import traceback
from pathlib import Path

import torch

__all__ = ["HOOKS", "ITEM", "PICKS", "WRITING", "reason"]

PICKS = "it picks or counts entries of an example by their values ({}), so examples differ in shape"
HOOKS = "vmap: hooks on saved tensors"
ITEM = re.compile(r"calling \.item\(\)|data-dependent control flow")
WRITING = re.compile(r"vmap: .*in-?place|is not possible because there exists a Tensor .* more elements than")
_REASONS = [
    (re.compile(pattern), why)
    for pattern, why in (
        (HOOKS, "it registers hooks on saved tensors, as torch.utils.checkpoint does"),
        (r"boolean mask|dynamic shape|differently shaped", PICKS.format("boolean mask")),
        (WRITING.pattern, "it writes an example into a tensor that is common to all, such as a buffer"),
        (r"setup_context", "it uses an autograd.Function without a setup_context method"),
        (r"You tried to vmap over (\w+), but", r"it uses the autograd.Function \1, which has no vmap method"),
        (ITEM.pattern, "it reads a value of an example in Python where examples cannot be told apart"),
        (r"data pointer of Tensor|\.numpy\(\)", "it hands the memory of a tensor to other code, such as NumPy"),
        (r"requires_grad_\(\)", "it calls requires_grad_() in its forward pass"),
    )
]


def reason(error: Exception) -> tuple[str, bool]:
    """Why a pass failed, in one sentence, and whether it is known that vmap alone is the reason."""
    said = str(error.__cause__ or error)
    for pattern, why in _REASONS:
        match = pattern.search(said)
        if match:
            return match.expand(why) + _place(error), True
    known = re.search(r"[Bb]atching rule|functorch|vmap", said) is not None
    return f"vmap does not take it: {said.split('. ')[0].splitlines()[0] if said else error!r}" + _place(error), known


def _place(error: Exception) -> str:
    """Where in the model an error arose."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    own = [frame for frame in frames if not frame.filename.startswith(ours)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
