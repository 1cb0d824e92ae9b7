"""Triton kernels of the gradient engines; each has a plain path that it equals, and is imported only where it runs."""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
