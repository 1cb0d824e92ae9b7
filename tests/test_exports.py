"""The public names: what they are, where they live, and that they load when asked for."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dpgrad

PUBLIC = {
    "CSVLog": "dpgrad.training.callbacks",
    "DpgradError": "dpgrad.errors",
    "Group": "dpgrad.mechanism.mechanism",
    "Guarantee": "dpgrad.accounting.guarantee",
    "Ledger": "dpgrad.accounting.ledger",
    "Mechanism": "dpgrad.mechanism.mechanism",
    "PrivateGradient": "dpgrad.training.private",
    "Computing": "dpgrad.training.options",
    "Fitted": "dpgrad.training.fit",
    "HeldOut": "dpgrad.training.options",
    "Privacy": "dpgrad.training.options",
    "Recipe": "dpgrad.training.recipes",
    "RunFolder": "dpgrad.training.options",
    "Relation": "dpgrad.accounting.relation",
    "fit": "dpgrad.training.fit",
    "report": "dpgrad.reports.report",
}
ROOMS = {path.name for path in Path(dpgrad.__path__[0]).iterdir() if (path / "__init__.py").is_file()}
HOMES = {  # modules that users name often
    "augment": "training", "calibrate": "accounting", "checkpoint": "runs", "events": "accounting",
    "features": "training", "online": "accounting", "pca": "training", "plan": "training", "recipes": "training",
    "sampling": "mechanism", "scaling": "grads", "schedules": "mechanism",
}  # fmt: skip
MODULES = {*ROOMS, *HOMES, "errors"}


def submodules() -> list[str]:
    """Every public module of the package by its whole name.

    Without the kernels, which need Triton, and those that load another library: tests/integrations import them.
    """
    found = (module.name for module in pkgutil.walk_packages(dpgrad.__path__, "dpgrad."))
    left_out = {"dpgrad.integrations.lightning", "dpgrad.integrations.transformers"}
    return [name for name in found if "._" not in name and "kernels" not in name and name not in left_out]


def test_public_names() -> None:
    assert set(dpgrad.__all__) == {*PUBLIC, *MODULES, "__version__"}
    assert dpgrad.__all__ == sorted(dpgrad.__all__)


@pytest.mark.parametrize(("name", "home"), PUBLIC.items())
def test_name_is_the_one_its_home_defines(name: str, home: str) -> None:
    value = getattr(dpgrad, name)
    assert value is getattr(importlib.import_module(home), name)
    assert value.__module__ == home


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_is_reached_by_attribute(name: str) -> None:
    module = getattr(dpgrad, name)
    assert isinstance(module, ModuleType)
    assert module.__name__ == (f"dpgrad.{HOMES[name]}.{name}" if name in HOMES else f"dpgrad.{name}")


@pytest.mark.parametrize("name", sorted({*PUBLIC, *MODULES}))
def test_name_is_documented_with_an_example(name: str) -> None:
    assert ">>> " in (getattr(dpgrad, name).__doc__ or "")


def test_every_name_resolves_in_a_fresh_interpreter() -> None:
    code = (
        "import dpgrad\nfor n in dpgrad.__all__: getattr(dpgrad, n)\nfrom dpgrad import *\nassert Relation and events"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_every_submodule_is_reached_by_attribute_without_an_import_of_its_own() -> None:
    exported = {"dpgrad.grads.check", "dpgrad.grads.convert"}  # functions, after which their modules are named
    names = sorted({*submodules()} - exported)
    assert {
        "dpgrad.training.augment",
        "dpgrad.accounting.ledger",
        "dpgrad.reports.report",
        "dpgrad.training.fit",
    } <= set(names)
    code = f"""
import os, torch  # once, for both orders
for order in ({names}, {names[::-1]}):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    import dpgrad
    for name in order:
        assert eval(name).__name__ == name, name
    break
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["training.augment", "reports", "training.private", "reports.report", "accounting.pld", "data.mnist"]
)
def test_a_submodule_is_the_first_thing_asked_for(name: str) -> None:
    code = f"import dpgrad, sys\nassert 'torch' not in sys.modules\nassert dpgrad.{name}.__name__ == 'dpgrad.{name}'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["dpgrad", "dpgrad.reports", "dpgrad.accounting", "dpgrad.convex", "dpgrad.data"])
@pytest.mark.parametrize("name", ["nothing", "_validate_", "__wrapped__"])
def test_a_package_has_no_other_attributes(package: str, name: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute '{name}'"):
        getattr(importlib.import_module(package), name)


def test_dir_lists_public_names() -> None:
    assert {*dpgrad.__all__} <= set(dir(dpgrad))


def test_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="'dpgrad' has no attribute 'Optimizer'"):
        dpgrad.Optimizer  # noqa: B018


def test_type_checkers_see_every_name() -> None:
    tree = ast.parse(Path(dpgrad.__file__).read_text("utf-8"))
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {*PUBLIC, *MODULES}


def test_package_is_typed() -> None:
    assert Path(dpgrad.__file__).with_name("py.typed").is_file()


@pytest.mark.parametrize("name", submodules())
def test_a_public_module_says_what_is_public(name: str) -> None:
    module = importlib.import_module(name)
    path = Path(str(module.__file__))
    if path.name == "__init__.py" and "def " not in path.read_text("utf-8"):
        return  # rooms without code of their own show their modules
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert all(getattr(module, public, None) is not None for public in module.__all__)
