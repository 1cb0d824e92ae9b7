"""A run on disk: the log of what is spent, checkpoints, what may be replayed, and what is released.

>>> from dpgrad import Mechanism, runs, sampling
>>> plan = Mechanism(sampling.Poisson(0.1), steps=5, noise_multiplier=1.0)
>>> runs.writeahead.charges(plan, start=2, stop=5) == plan.with_steps(3).event()  # the cost of steps 2, 3 and 4
True
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
