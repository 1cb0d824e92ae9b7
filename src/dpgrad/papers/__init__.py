"""The published tables and figures as experiments, and the code with which each result was made.

>>> from dpgrad import papers
>>> "yu2018-figure2-softmax" in papers.catalogue.experiments()
True
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
