"""Networks of the benchmarks; they are those of `python -m benchmarks.steps`."""

from benchmarks.steps.workloads import cnn

__all__ = ["cnn"]
