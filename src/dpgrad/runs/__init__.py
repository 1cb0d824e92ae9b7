"""What is on disk of a run: the log of what is spent, checkpoints, what may be replayed, and what is released."""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
