"""What will be done: the run as it is accounted, its samplers, its schedules, and the key of all randomness.

>>> from dpgrad import mechanism
>>> plan = mechanism.mechanism.Mechanism(mechanism.sampling.Poisson(0.01), steps=1000, noise_multiplier=1.0)
>>> round(plan.profile().epsilon(1e-5), 2)
1.83
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute
from dpgrad.mechanism.mechanism import Group, Mechanism

__all__ = ["Group", "Mechanism"]

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
