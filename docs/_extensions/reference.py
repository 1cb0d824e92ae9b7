"""The API reference: one page per public module, one per room, written to docs/api/modules before the site is read.

What is public is decided by the names: modules without an underscore, and of each what its ``__all__`` lists.
"""

import inspect
import pkgutil
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import dpgrad

FOLDER = Path(__file__).resolve().parents[1] / "api" / "modules"
LEFT_OUT = re.compile(r"\._|kernels\b|\.__main__$|^dpgrad\.cli\b")  # Triton's; the command line has its own page


def modules() -> list[ModuleType]:
    """Every public module that can be imported here, with the façade first."""
    names = (module.name for module in pkgutil.walk_packages(dpgrad.__path__, "dpgrad."))
    return [dpgrad, *(import_module(name) for name in names if not LEFT_OUT.search(name))]


def summary(thing: object) -> str:
    """The first sentence of a docstring, as Markdown."""
    first = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
    return re.sub(r"``([^`]*)``", r"`\1`", first).replace("|", "\\|")


def page(module: ModuleType) -> str:
    """The page of a module: its docstring, the modules inside, and every public name."""
    name = module.__name__
    inside = [other for other in sys.modules.values() if is_inside(other, name)] if hasattr(module, "__path__") else []
    inside.sort(key=lambda other: other.__name__)
    listed = list(module.__dict__.get("__all__", ()))
    others = [one for one in listed if home(module, one) != name]
    hidden = f":exclude-members: {', '.join(others)}" if others else ":members:"
    parts = [f"# {name}", autodoc(name, hidden if len(others) < len(listed) else ":no-members:")]
    parts += [names(module)] if others else []
    if inside:
        rows = [f"| [{other.__name__}]({other.__name__}.md) | {summary(other)} |" for other in inside]
        parts.append("## Modules\n\n| module | what it is |\n|---|---|\n" + "\n".join(rows))
        entries = "\n".join(other.__name__ for other in inside)
        parts.append(f"```{{toctree}}\n:hidden:\n\n{entries}\n```")
    return "\n\n".join(parts) + "\n"


def is_inside(module: ModuleType, package: str) -> bool:
    name = getattr(module, "__name__", "")
    return isinstance(name, str) and name.rpartition(".")[0] == package and not LEFT_OUT.search(name)


def home(module: ModuleType, name: str) -> str:
    """The public module that describes a name of ``__all__``."""
    value = getattr(module, name)
    if inspect.ismodule(value):
        return value.__name__
    where = value.__module__ if inspect.isclass(value) or inspect.isroutine(value) else module.__name__
    return module.__name__ if LEFT_OUT.search(where) or not where.startswith("dpgrad.") else where


def autodoc(name: str, option: str) -> str:
    return f"```{{eval-rst}}\n.. automodule:: {name}\n   {option}\n```"


def names(module: ModuleType) -> str:
    """The names that a package takes from its modules, each with the page where it is described."""
    rows = []
    for name in module.__all__:
        value, place = getattr(module, name), home(module, name)
        if place == module.__name__ or LEFT_OUT.search(place):  # described here, or the command line
            continue
        target = place if inspect.ismodule(value) else f"{place}.{name}"
        rows.append(f"| {{py:obj}}`{module.__name__}.{name} <{target}>` | {summary(value)} |")
    return "## Names\n\n| name | what it is |\n|---|---|\n" + "\n".join(rows)


def write(*_: object) -> None:
    """Write the pages that changed, and remove those of modules that are gone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = {f"{module.__name__}.md": page(module) for module in modules()}
    for old in FOLDER.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        place = FOLDER / name
        if not place.exists() or place.read_text("utf-8") != text:
            place.write_text(text, "utf-8")


def tidy(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Read a docstring as plain text with code in backquotes: formulas set apart are literal, and bars no markup."""
    found: list[str] = []
    listed = False
    for block in re.split(r"\n(?:[ \t]*\n)+", "\n".join(lines)):
        formula = block.startswith("    ") and not listed
        if formula and not (found and found[-1].startswith("    ")):
            found.append("::")
        code = formula or block.lstrip().startswith(">>>")
        listed = block.startswith("- ") or (listed and block.startswith(" "))
        found.append(block if code else "\n".join(map(marked, block.split("\n"))))
    lines[:] = "\n\n".join([*found, ""]).split("\n")


def marked(line: str) -> str:
    """A line of prose as reStructuredText: signs of absolute values, stars of arguments, code with an exponent."""
    line = re.sub(r"^(\s*)Guarantee: ", r"\1**Guarantee.** ", line)
    line = re.sub(
        r"``[^`]+``(?=(.?))", lambda found: found[0] + "\\ " * bool(re.match(r"[^\s.,:;!?)\]'\"/-]", found[1])), line
    )
    line = line.replace("|", "\\|")
    return re.sub(r"(?<![*\w`])\*(?=\w)(?![^*`]*\*)", r"\\*", line)


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out the methods that scikit-learn makes for its metadata routing."""
    return True if re.fullmatch(r"set_\w+_request", name.rpartition(".")[2]) else None


def setup(app: Any) -> dict[str, bool]:
    app.connect("config-inited", write)
    app.connect("autodoc-process-docstring", tidy)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
