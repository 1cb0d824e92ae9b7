"""Notebooks from three pages of the docs: ``python docs/notebooks/make.py`` (`make notebooks`).

A Python block of a page is a code cell, with the output that the page shows; what lies between is text. Notebooks are
written in format 4.5 of Jupyter, without ids that change, so that the same page gives the same bytes. The tests compare
the committed notebooks with the pages and run their cells.
"""

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGES = ("tutorial", "images", "own_loop")
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n\n?```text\n(.*?)^```$)?\n?", re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[dict[str, object]]:
    """The cells of a page."""
    found: list[dict[str, object]] = []
    place = 0
    for block in PYTHON.finditer(page):
        found += prose(page[place : block.start()], len(found))
        code = {"cell_type": "code", "execution_count": None, "id": f"cell-{len(found)}", "metadata": {}}
        outputs = [{"name": "stdout", "output_type": "stream", "text": lines(block[2])}] if block[2] else []
        found.append({**code, "outputs": outputs, "source": lines(block[1].rstrip("\n"))})
        place = block.end()
    return found + prose(page[place:], len(found))


def prose(text: str, number: int) -> list[dict[str, object]]:
    """A cell of text; links lead to the pages, which lie a folder above."""
    text = re.sub(r"\]\((?!https?:|#)([^)]+)\)", r"](../\1)", text.strip())
    return [{"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": lines(text)}] if text else []


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook(name: str) -> str:
    """The notebook of a page, as JSON."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {
        "cells": cells((HERE.parent / f"{name}.md").read_text("utf-8")),
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    for name in PAGES:
        (HERE / f"{name}.ipynb").write_text(notebook(name), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
