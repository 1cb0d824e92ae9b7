"""One private step: what it computes (`work`), its two bodies, and who runs them (`taped`, `graphed`, `straight`)."""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
