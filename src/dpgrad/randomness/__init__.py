"""One law of noise and sampling: (secret key, step, name) to numbers, the same on a CPU and on a CUDA device.

>>> from dpgrad import randomness, sampling
>>> randomness.draw.chosen(sampling.Poisson(0.5), 6, step=0, key=7, device="cpu").tolist()
[1, 3]
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
