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


# Modules that run, keep and show results, and compute none of their numbers.
_AROUND = ("reports", "cli", *(f"papers.{name}" for name in (
    "catalogue", "claims", "experiment", "figures", "page", "running", "searching", "sources", "summary", "tables",
)))  # fmt: skip


@functools.cache
def digest(module: str, function: str | None = None) -> str:
    """Twelve hexadecimal digits that change with the code of ``module`` or of anything of dpgrad that it imports.

    With ``function``, only the part of the module counts that this function needs. Comments, docstrings and layout do
    not count, and neither do modules that run and show results. Modules of ``benchmarks`` are known where the working
    folder has them.

    >>> digest("dpgrad.convex.solvers.gd") == digest("dpgrad.convex.solvers.amp")
    False
    """
    total = hashlib.sha256()
    for name in sorted(closure(module, function)):
        total.update(f"{name}\n{_code(_text(name), function if name == module else None)}\n".encode())
    return total.hexdigest()[:12]


def closure(module: str, function: str | None = None) -> set[str]:
    """The module and all that it imports of dpgrad and benchmarks, also inside functions, by their dotted names.

    With ``function``, what the module imports for that function alone.

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
            left += _imported(name, function if name == module else None)
    return found


def _imported(module: str, function: str | None) -> Iterator[str]:
    """What runs when the module does, without what shows it."""
    for names in _imports(_text(module), function):
        for name in names[:1] if _file(names[0]) else names[1:]:
            if _file(name) and not _around(name):
                yield name


@functools.cache
def _imports(text: str, function: str | None) -> tuple[tuple[str, ...], ...]:
    """What code imports, but for types alone: a module, or else the one that it is in, where it may be a name."""
    tree = _tree(text, function)
    unread = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: list[tuple[str, ...]] = []
    for node in ast.walk(tree):
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # a name of a package is a module of it, or lies in its __init__
            found += [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
    return tuple(dict.fromkeys(found))


def _around(module: str) -> bool:
    return any(f"{module}.".startswith(f"dpgrad.{one}.") for one in _AROUND)


def _file(module: str) -> Path | None:
    top, *rest = module.split(".")
    roots = {"dpgrad": PACKAGE, "benchmarks": PACKAGE.parents[1] / "benchmarks"}
    if top not in roots:
        return None
    path = roots[top].joinpath(*rest)
    candidates = path.with_suffix(".py") if rest else path, path / "__init__.py"
    return next((file for file in candidates if file.is_file()), None)


def _text(module: str) -> str:
    file = _file(module)
    assert file is not None, module
    return file.read_text("utf-8")


def _tree(text: str, function: str | None) -> ast.Module:
    tree = ast.parse(text)
    if function is not None:
        tree.body = _needed(tree.body, function)
    return tree


def _needed(statements: list[ast.stmt], function: str) -> list[ast.stmt]:
    """The statements of a module that define a function and every name that they use; all where it has none of it."""
    defining: dict[str, list[ast.stmt]] = {}
    for statement in statements:
        for name in _defined(statement):
            defining.setdefault(name, []).append(statement)
    if function not in defining:
        return statements
    found, left = set[str](), [function]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            used = (node for statement in defining[name] for node in ast.walk(statement))
            left += [node.id for node in used if isinstance(node, ast.Name) and node.id in defining]
    return [statement for statement in statements if found.intersection(_defined(statement))]


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module gives a meaning; what a comprehension runs over ends with it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    over = [node.target for node in ast.walk(statement) if isinstance(node, ast.comprehension)]
    inner = {name for target in over for name in ast.walk(target)}
    return {node.id for node in names if node not in inner}


@functools.cache
def _code(text: str, function: str | None) -> str:
    """The code as a tree without positions and docstrings."""
    tree = _tree(text, function)
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
