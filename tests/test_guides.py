"""Commands in ``sh`` blocks of the docs that can run in seconds; tests/test_readme.py reads all of them.

Each block runs in a folder with the files that its page names, training one method for two steps. Not run are commands
for a GPU, for datasets or checkpoints that have to be fetched, and those that train many models.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import test_readme
from dpgrad import cli


def nothing() -> None:
    pass


def people() -> None:
    rows = [f"p{row},{20 + row % 50},{['cook', 'clerk'][row % 2]}" for row in range(200)]
    labels = [["low", "high"][row % 3 > 0] for row in range(200)]
    Path("people.csv").write_text("patient,age,job,income\n" + "".join(map("{},{}\n".format, rows, labels)), "utf-8")
    Path("new.csv").write_text("patient,age,job\n" + "\n".join(rows[:3]) + "\n", "utf-8")


def pets() -> None:
    random = np.random.default_rng(0)
    for folder in ("pets/cat", "pets/dog", "unsorted"):
        Path(folder).mkdir(parents=True)
        for number in range(30 if "pets" in folder else 3):
            Image.fromarray(random.integers(0, 256, (16, 16, 3), "uint8")).save(f"{folder}/{number}.png")


BLOCKS: dict[str, tuple[Callable[[], None], ...]] = {  # page: what makes the files of each of its first blocks
    "docs/tutorial.md": (nothing,),
    "docs/own_data.md": (people, pets),
    "docs/adaptive_clip.md": (nothing,),
}


def quickly(command: str) -> list[str]:
    """The words of a command, which trains one model for two steps or one epoch."""
    if command.startswith("dpgrad train"):
        command += " --no-baseline" + ("" if "--method" in command else " --method dpsgd")
        command = re.sub(r"--epochs \d+", "--epochs 1", command) + ("" if "--epochs" in command else " --steps 2")
    return shlex.split(command)[1:]


def run(line: str) -> None:
    """A line of a block, as a shell would run it; the editor confirms what was proposed."""
    command, _, target = line.partition("#")[0].partition(">")
    if command.startswith("$EDITOR"):
        schema = Path("schema.toml")
        schema.write_text(schema.read_text("utf-8").replace("public = false", "public = true"), "utf-8")
        return
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.main(quickly(command)) == 0
    if target:
        Path(target.strip()).write_text(said.getvalue(), "utf-8")


@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page, made in BLOCKS.items() for number in range(len(made))]
)
def test_commands_of_guides_run(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BLOCKS[page][number]()
    block = [one for one in test_readme.blocks(page) if one.language == "sh"][number]
    for line in test_readme.lines_of(block):
        run(line)
    assert all(Path(name).stat().st_size for name in re.findall(r"--out (\S+\.csv)", block.text))
