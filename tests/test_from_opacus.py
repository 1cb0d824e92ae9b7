"""docs/from_opacus.md: its diffs apply, the scripts they make run, and its counts are those of difflib."""

import contextlib
import difflib
import io
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "from_opacus.md").read_text("utf-8")
WAYS = ["Opacus", "`PrivateGradient`", "`fit`"]


class Port(NamedTuple):
    """An ordinary script, and one of the ways to make it private."""

    script: str
    way: str
    before: str
    after: str


def applied(script: str, diff: str) -> str:
    """The script with every hunk of a diff applied; each must fit in exactly one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " +")
        assert script.count(old) == 1, hunk
        script = script.replace(old, new)
    return script


def ports() -> list[Port]:
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:3]:
        (script,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        diffs = re.findall(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        name = section.partition("\n")[0].lower()
        found += [Port(name, way, script, applied(script, diff)) for way, diff in zip(WAYS, diffs, strict=True)]
    return found


def changed(port: Port) -> tuple[int, int]:
    """How many lines difflib finds added and removed; empty ones do not count."""
    lines = list(difflib.ndiff(port.before.splitlines(), port.after.splitlines()))
    added, removed = ([line for line in lines if line.startswith(mark) and line[2:].strip()] for mark in "+-")
    return len(added), len(removed)


def test_the_counts_are_those_of_difflib() -> None:
    counted = ["| {} | {} | {} | {} |".format(port.script, port.way, *changed(port)) for port in ports()]
    shown = re.findall(r"^\| (?:images|text) \|.*$", PAGE, re.MULTILINE)
    assert shown == counted


SMALL = {"range(3)": "range(1)", "epochs=3": "epochs=1", "steps=30": "steps=10"}


def runs() -> list[Any]:
    """Every script; that Opacus' own run is seen once by default."""
    heavy = [pytest.mark.exhaustive]
    return [
        pytest.param(port, marks=heavy if port[:2] == ("images", "Opacus") else [], id=f"{port.script} by {port.way}")
        for port in ports()
    ]


@pytest.mark.parametrize("port", runs())
def test_the_private_scripts_run(port: Port) -> None:
    """One epoch of each, at the price of one epoch."""
    script = port.after
    for part, smaller in SMALL.items():
        script = script.replace(part, smaller)
    assert script != port.after
    printed, names = io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the loader, and of Opacus' own hooks
        exec(compile(script, port.script, "exec"), names)
    (epsilon,) = re.findall(r"^(?:ε = )?(\d+(?:\.\d+)?)", printed.getvalue())
    assert 4 < float(epsilon) <= 5
    trained: Any = names["model"]
    assert all(parameter.isfinite().all() for parameter in trained.parameters())
