"""Other libraries' training loops, made private. Optional: nothing else imports these modules.

>>> from dpgrad.integrations import tensorboard
>>> tensorboard.TensorBoard.__name__
'TensorBoard'
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
