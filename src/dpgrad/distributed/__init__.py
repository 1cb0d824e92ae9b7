"""The sum over several processes (ranks) that take the steps of one run together.

>>> from dpgrad import distributed
>>> distributed.share.Share(rank=1, size=2).bounds(5)  # the part of a batch of five that the second of two ranks takes
(2, 5)
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
