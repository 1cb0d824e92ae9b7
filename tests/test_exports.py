"""The public names: what they are, where they live, and that they load when asked for."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dpgrad

PUBLIC = {
    "Group": "dpgrad.mechanism",
    "Guarantee": "dpgrad.guarantee",
    "Ledger": "dpgrad.ledger",
    "Mechanism": "dpgrad.mechanism",
    "PrivateGradient": "dpgrad.private",
    "Relation": "dpgrad.events",
    "fit": "dpgrad.train",
}
MODULES = {
    "accounting", "calibrate", "checkpoint", "convex", "data", "events", "features", "grads", "online", "pca", "plan",
    "recipes", "sampling", "scaling", "schedules",
}  # fmt: skip


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
    assert module.__name__ == f"dpgrad.{name}"


@pytest.mark.parametrize("name", sorted({*PUBLIC, *MODULES}))
def test_name_is_documented(name: str) -> None:
    assert (getattr(dpgrad, name).__doc__ or "").strip()


def test_every_name_resolves_in_a_fresh_interpreter() -> None:
    code = (
        "import dpgrad\nfor n in dpgrad.__all__: getattr(dpgrad, n)\nfrom dpgrad import *\nassert Relation and events"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_dir_lists_public_names() -> None:
    assert set(dpgrad.__all__) <= set(dir(dpgrad))


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
