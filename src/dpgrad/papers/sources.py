"""A digest of the code that a result depends on, by which a stale result is found."""

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from dpgrad.errors import OptionError

__all__ = ["PACKAGE", "closure", "digest"]

PACKAGE = Path(__file__).resolve().parents[1]
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def digest(module: str) -> str:
    """Twelve hexadecimal digits that change with the code of ``module`` or of anything of dpgrad that it imports.

    Comments, docstrings and layout do not count. Modules of ``benchmarks`` are known where the working folder has them.

    >>> digest("dpgrad.convex.solvers.gd") == digest("dpgrad.convex.solvers.amp")
    False
    """
    total = hashlib.sha256()
    for name in sorted(closure(module)):
        total.update(f"{name}\n{_code(name)}\n".encode())
    return total.hexdigest()[:12]


def closure(module: str) -> set[str]:
    """The module and all that it imports of dpgrad and benchmarks, also inside functions, by their dotted names.

    >>> {"dpgrad.convex.solvers.perturbed", "dpgrad.accounting.events"} <= closure("dpgrad.convex.solvers.amp")
    True
    """
    if _file(module) is None:
        raise OptionError(f"there is no module {module} of dpgrad or benchmarks")
    found, left = set[str](), [module]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _imported(name)
    return found


def _imported(module: str) -> Iterator[str]:
    """What runs when the module does: reports only show what was computed, and some imports are for types alone."""
    tree = _tree(module)
    unread = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # a name of a package is a module of it, or lies in its __init__
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if _file(name) else node.module for name in inner]
        yield from (name for name in names if _file(name) and not name.startswith("dpgrad.reports"))


def _file(module: str) -> Path | None:
    top, *rest = module.split(".")
    roots = {"dpgrad": PACKAGE, "benchmarks": PACKAGE.parents[1] / "benchmarks"}
    if top not in roots:
        return None
    path = roots[top].joinpath(*rest)
    candidates = path.with_suffix(".py") if rest else path, path / "__init__.py"
    return next((file for file in candidates if file.is_file()), None)


def _tree(module: str) -> ast.Module:
    file = _file(module)
    assert file is not None, module
    return ast.parse(file.read_text("utf-8"))


def _code(module: str) -> str:
    """The code as a tree without positions and docstrings."""
    tree = _tree(module)
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return _shape(tree)


def _shape(node: object) -> str:
    """A tree as text, the same under every version of Python: `ast.dump` shows fields that only newer ones have."""
    if isinstance(node, list):
        return f"[{','.join(map(_shape, node))}]"
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        # None is a value of a constant, and only a field that is not there elsewhere
        inner = [repr(node.value)] if isinstance(node, ast.Constant) else [f"{n}={_shape(v)}" for n, v in fields]
        return f"{type(node).__name__}({','.join(inner)})"
    return repr(node)
