"""Operations that fail: a model may catch the error, and what it does then depends on the values of one example."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CAUGHT", "Failures"]

CAUGHT = "the model catches an error ({}), and one example may have caused it"


class Failures(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation within the block that fails.

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

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.first = self.first or failing(func)
            raise


def failing(func: Any) -> str:
    """What is said of an operation that fails."""
    return f"{getattr(func, '_opname', func)} fails"
