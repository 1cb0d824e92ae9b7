"""Reports for people: what a run, a model or an estimator promises, as text, JSON, figures and one HTML page."""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
