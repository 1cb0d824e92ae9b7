"""Solvers of convex models: each is a module with a function ``solve`` that returns coefficients and their event."""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
