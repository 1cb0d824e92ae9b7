"""Submodules as attributes of their package, imported when first asked for: ``import dpgrad`` is enough."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def attribute(package: str) -> Callable[[str], ModuleType]:
    """The ``__getattr__`` of a package whose public submodules need no import of their own.

    >>> attribute("dpgrad.accounting")("events").__name__
    'dpgrad.accounting.events'
    >>> attribute("dpgrad.accounting")("even")
    Traceback (most recent call last):
    AttributeError: module 'dpgrad.accounting' has no attribute 'even'
    """

    def find(name: str) -> ModuleType:
        if name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")  # from now on the package has the attribute

    return find
