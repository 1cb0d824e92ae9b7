"""Training: the private step and its captured form, data sources, the papers' methods, the plan, and `fit`.

>>> from dpgrad import training
>>> "psasc" in training.recipes.RECIPES
True
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
