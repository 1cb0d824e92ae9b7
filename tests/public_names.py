"""Every public name of dpgrad, one per line with its arguments: ``python tests/public_names.py [--write]``.

The list is committed as tests/public_names.txt, so that a name that comes, goes or changes its arguments is seen in
review; tests/test_public_names.py compares. Public are the modules without an underscore, and of each what its
``__all__`` lists; the methods and fields of classes are those without an underscore.
"""

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import dpgrad

LIST = Path(__file__).resolve().with_suffix(".txt")
# Triton's kernels; commands have their own reference; modules that load another, optional library
LEFT_OUT = (
    "kernels",
    "dpgrad.cli",
    "dpgrad.__main__",
    "dpgrad.integrations.lightning",
    "dpgrad.integrations.transformers",
)


def names() -> Iterator[str]:
    """The lines of the list, in the order of modules."""
    yield from (f"dpgrad.{name}" for name in sorted(dpgrad.__all__))
    for found in pkgutil.walk_packages(dpgrad.__path__, "dpgrad."):
        if "._" in found.name or any(part in found.name for part in LEFT_OUT):
            continue
        module = import_module(found.name)
        for name in sorted(getattr(module, "__all__", ())):
            yield from of(f"{module.__name__}.{name}", getattr(module, name), module.__name__)


def of(name: str, value: Any, module: str) -> Iterator[str]:
    """A name, and the public members of a class that the module defines."""
    yield name + arguments(value)
    if inspect.isclass(value) and value.__module__ == module:
        fields = {one for one in getattr(value, "__dataclass_fields__", {}) if not one.startswith("_")}
        for member in sorted({one for one in vars(value) if not one.startswith("_")} | fields):
            yield f"{name}.{member}" + arguments(vars(value).get(member))


def arguments(value: Any) -> str:
    """The names of the arguments, without types and defaults, which differ in how versions of Python write them."""
    held = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if not (inspect.isfunction(held) or inspect.isclass(held)):
        return ""
    try:
        found = inspect.signature(held).parameters.values()
    except (TypeError, ValueError):
        return ""
    signs = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown = []
    for one in found:
        if one.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in [part[:1] for part in shown]:
            shown.append("*")
        shown.append(signs.get(one.kind, "") + one.name)
    return f"({', '.join(shown)})"


def main() -> int:
    text = "\n".join(names()) + "\n"
    if "--write" in sys.argv[1:]:
        LIST.write_text(text, "utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
