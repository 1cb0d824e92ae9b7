"""What will be done: the run as accounted, its samplers and schedules, and the key that all randomness comes from."""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute
from dpgrad.mechanism.mechanism import Group, Mechanism

__all__ = ["Group", "Mechanism"]

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
