"""How each torch function uses its parameters: one file a family of layers.

`RULES` maps a torch function to a rule with the same arguments after ``g``, the gradient of the function's output. Data
come as (examples, rows, ...), and the rule returns, for each argument that may be a parameter, the form its gradient
takes (`dpgrad.grads.uses`). `REWRITES` maps a function to one of the same meaning made of simpler ones.

Rules are found by the function that is called, not by the type of the module that calls it: a subclass, a tied weight
or ``F.linear(x, embedding.weight)`` is seen for what it computes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpgrad._submodules import attribute
from dpgrad.grads.layers import attention, convolution, embedding, linear, normalization, recurrent, reparametrized
from dpgrad.grads.uses import Use

__all__ = ["ANY_RANK", "REWRITES", "RULES", "Rule"]

Rule = Callable[..., dict[str, Use]]

RULES: dict[Callable[..., Any], Rule] = {
    **linear.RULES,
    **embedding.RULES,
    **convolution.RULES,
    **normalization.RULES,
}
REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    **attention.REWRITES,
    **recurrent.REWRITES,
    **reparametrized.REWRITES,
}

# Rules that hold whatever dimensions stand between the batch and the last ones, and wherever the batch stands.
ANY_RANK: frozenset[Rule] = frozenset(
    {linear.linear, linear.matmul, embedding.embedding, normalization.layer_norm, normalization.rms_norm}
)

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
