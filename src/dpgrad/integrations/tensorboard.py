"""A callback that shows a run in TensorBoard; it needs ``pip install dpgrad[tensorboard]``."""

from os import PathLike, fspath
from typing import Any, final

from dpgrad.errors import OptionError
from dpgrad.training.callbacks import OUTSIDE
from dpgrad.training.curves import Point, Progress

__all__ = ["TensorBoard"]


@final
class TensorBoard:
    """A callback of `dpgrad.fit` that writes a run's public curves to ``folder`` for TensorBoard.

    After each step: a bound on ε so far, learning rate, clip bound, noise multiplier. After each evaluation: the metric
    on held-out rows, under a tag that says it is outside the guarantee. Each event is stamped with its step in place of
    the time: how long a step takes may depend on the size of its batch, which is private. A resumed run goes on in the
    same folder, and TensorBoard drops what is taken again.

    >>> import tempfile
    >>> board = TensorBoard(tempfile.mkdtemp())
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise OptionError("TensorBoard needs the tensorboard package: pip install dpgrad[tensorboard]") from None
        self._folder, self._kind = fspath(folder), SummaryWriter
        self._writer: Any = None

    def at_start(self, progress: Progress) -> None:
        """Open the folder; of a resumed run, hide what came after the step from which it goes on."""
        purge = progress.step + 1 if progress.resumed else None
        self._writer = self._kind(self._folder, purge_step=purge, max_queue=1, flush_secs=1)

    def after_evaluation(self, point: Point) -> None:
        """Show the metric on held-out rows."""
        if point.held_out is not None:
            self._show(f"{OUTSIDE}/held_out", point.held_out, point.step)

    def after_step(self, progress: Progress) -> None:
        """Log the figures of a step and the ε spent."""
        named = f"epsilon at delta {progress.delta:g}"
        self._show(named, progress.epsilon, progress.step)
        for name in ("learning_rate", "clip", "noise_multiplier"):
            self._show(name, getattr(progress, name), progress.step)

    def at_end(self, fitted: object) -> None:
        """Close the folder."""
        self._writer.close()

    def _show(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step, walltime=float(step))
        self._writer.flush()
