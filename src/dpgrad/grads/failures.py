"""What a pass must not go by: operations that fail, foreign hooks on saved tensors, memory that holds anything.

A model may catch an error, and what it does then depends on the values of one example. Hooks on saved tensors exchange
what a derivative is computed from. Memory that was given out and not written to holds what other examples left there.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CAUGHT", "UNWRITTEN", "Failures", "are_torchs", "cleared", "failing", "saving_hooks"]

# The operations that give out memory as it is.
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
CAUGHT = "the model catches an error ({}), and one example may have caused it"


class Failures(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation within the block that fails; memory that nothing was written to holds zeros.

    >>> import torch
    >>> with Failures() as failures:
    ...     try:
    ...         found = torch.ones(3).gather(0, torch.tensor([7]))
    ...     except RuntimeError:
    ...         found = torch.zeros(())
    >>> failures.first
    'gather fails'
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first = ""
        self.exchanged = False  # whether a tensor was given the memory of another

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "_opname", "")
        if name == "set_":
            self.exchanged = True
        try:
            result = func(*args, **(kwargs or {}))
            return cleared(func, result) if name in UNWRITTEN else result
        except Exception:
            self.first = self.first or failing(func)
            raise


def failing(func: Any) -> str:
    """What is said of an operation that fails."""
    return f"{getattr(func, '_opname', func)} fails"


def cleared(func: Any, result: Any) -> Any:
    """The result of an operation, set to 0 where it would hold what was in memory before.

    >>> cleared(torch.ops.aten.empty.memory_format, torch.ones(2))
    tensor([0., 0.])
    """
    return result.zero_() if getattr(func, "_opname", "") in UNWRITTEN and result.numel() else result


def saving_hooks() -> Any:
    """The hooks on saved tensors that are in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def are_torchs(hooks: Any) -> bool:
    """Whether hooks on saved tensors are those of a checkpoint, or others that keep values as they are."""
    return all(map(_is_torchs, hooks))


def _is_torchs(hook: Any) -> bool:
    """Whether the code of a hook is torch's, and of a file whose hooks return what they were given."""
    own = isinstance(hook, FunctionType) and hook.__globals__
    if hasattr(hook, "__wrapped__"):  # to keep a compiler out
        return own is vars(torch._dynamo.eval_frame) and _is_torchs(hook.__wrapped__)
    return own is vars(checkpoint) or own is vars(torch.autograd.graph)
