"""The pages on other libraries: how many lines of an ordinary script change. tests/test_readme.py runs the scripts."""

import difflib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(("page", "most"), [("hugging_face.md", 6), ("lightning.md", 4)])
def test_as_many_lines_change_as_the_page_says(page: str, most: int) -> None:
    text = (DOCS / page).read_text("utf-8")
    ordinary, private = (
        re.search(rf"^{words}.*?\n\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for words in ("The ordinary script:", "The private one\\.")
    )
    stated = re.search(r"^The private one\. (\d+) lines are new or changed:$", text, re.MULTILINE)
    assert ordinary
    assert private
    assert stated
    lines = difflib.ndiff(ordinary[1].splitlines(), private[1].splitlines())
    assert sum(line.startswith("+ ") for line in lines) == int(stated[1]) <= most
