"""One law of noise and of sampling: (secret key, step, name) to numbers, the same on a CPU and on a CUDA device."""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
