"""Reports for people: what a run, a model or an estimator promises, as text, JSON, figures and one HTML page.

>>> from dpgrad import reports
>>> from dpgrad.accounting import Relation, events
>>> figure = reports.compare.figure(events.Gaussian(4.0), Relation.ADD_REMOVE, "exact", delta=1e-5)
>>> round(figure.epsilon, 3)
0.926
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
