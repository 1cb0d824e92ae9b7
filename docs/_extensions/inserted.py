"""Parts of pages that are made from the code when the site is built: ``<!-- inserted: commands -->`` names one."""

import re
from pathlib import Path
from typing import Any

import commands
import measured

DOCS = Path(__file__).resolve().parents[1]


def others() -> str:
    """Entries of a toctree: the pages of docs that the home page does not name yet."""
    named = set(re.findall(r"^(?:.*<)?([\w/]+)>?$", (DOCS / "index.md").read_text("utf-8"), re.MULTILINE))
    return "\n".join(sorted(page.stem for page in DOCS.glob("*.md") if page.stem not in {*named, "index"}))


PARTS = {"commands": commands.text, "measured": measured.text, "others": others}


def insert(app: Any, document: str, source: list[str]) -> None:
    source[0] = re.sub(r"<!-- inserted: (\w+) -->", lambda found: PARTS[found[1]](), source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", insert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
