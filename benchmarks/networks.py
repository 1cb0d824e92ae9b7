"""Networks of the benchmarks; they are those of `dpgrad bench`."""

from dpgrad.lab.bench.workloads import cnn

__all__ = ["cnn"]
