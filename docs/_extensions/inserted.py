"""Parts of pages that are made from the code when the site is built: ``<!-- inserted: commands -->`` names one."""

import re
from typing import Any

import commands
import measured

PARTS = {"commands": commands.text, "measured": measured.text}


def insert(app: Any, document: str, source: list[str]) -> None:
    source[0] = re.sub(r"<!-- inserted: (\w+) -->", lambda found: PARTS[found[1]](), source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", insert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
