"""Tables as Markdown that is read as well in a terminal."""

from collections.abc import Sequence

__all__ = ["table"]


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with its columns under each other; the first row is its heading.

    >>> print(table([["engine", "ms"], ["dpgrad", "1.25"]]))
    | engine | ms   |
    | ------ | ---- |
    | dpgrad | 1.25 |
    """
    clean = [[cell.replace("|", "/") for cell in row] for row in rows]
    widths = [max(3, *(len(row[column]) for row in clean)) for column in range(len(clean[0]))]
    head, *body = clean
    ruled = [head, ["-" * width for width in widths], *body]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in ruled
    )
