"""The index of measurements: date and hardware of every committed table, read from the results files."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = "| table | made | on | command |\n|---|---|---|---|"


def text() -> str:
    """Two tables, as Markdown: what benchmarks measured, and what experiments of papers gave."""
    speed = [row(file, *of_benchmark(file)) for file in sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
    papers = [
        row(file, *of_experiment(file)) for file in sorted((ROOT / "results").glob("*.md")) if file.name != "README.md"
    ]
    return "\n".join(["## Benchmarks", "", HEADER, *speed, "", "## Experiments of the papers", "", HEADER, *papers])


def row(file: Path, date: str, hardware: str, command: str) -> str:
    title = file.read_text("utf-8").split("\n", 1)[0].removeprefix("# ").replace("|", "\\|")
    code = f"`{command}`".replace("|", "\\|") if command else "see the page"
    day = re.sub(r"^(\d{4})-(\d\d)-(\d\d).*", "\\1\N{NON-BREAKING HYPHEN}\\2\N{NON-BREAKING HYPHEN}\\3", date)
    return f"| [{title}](../{file.relative_to(ROOT).as_posix()}) | {day} | {hardware} | {code} |"


def of_benchmark(file: Path) -> tuple[str, str, str]:
    """Date, hardware and command: from the JSON file of the same name, or from the first lines of the page."""
    beside = file.with_suffix(".json")
    content = json.loads(beside.read_text("utf-8")) if beside.exists() else {}
    ran = content.get("environment", {}) if isinstance(content, dict) else {}
    if not ran:
        return of_page(file)
    device = ran.get("gpu") or ran.get("device")
    title = re.search(r" on (NVIDIA [\w ]+)$", file.read_text("utf-8").split("\n", 1)[0])
    parts = [device or (title and title[1]), f"{ran['processor']}, {ran['cores']} cores"]
    return ran["date"], "; ".join(filter(None, parts)), ran["command"]


def of_page(file: Path) -> tuple[str, str, str]:
    """The same from the words of a page whose JSON file does not say it; dates of rows where it has no other."""
    start = file.read_text("utf-8")
    dates = sorted(re.findall(r"\b20\d\d-\d\d-\d\d\b", start))
    command = re.search(r"`(python -m [^`]+)`", start)
    device = re.search(r"NVIDIA H200|Intel\(R\) Xeon\(R\)[\w ]*|AMD EPYC|\b\d+ cores", start)
    return dates[-1] if dates else "no date", device[0] if device else "–", command[1] if command else ""


def of_experiment(file: Path) -> tuple[str, str, str]:
    page = file.read_text("utf-8")
    made = re.search(r"^Trials made (.+?) on (.+?) \(", page, re.MULTILINE)
    command = re.search(r"^`(dpgrad reproduce [^`]+)`", page, re.MULTILINE)
    date, hardware = made.groups() if made else ("see the page", "see the page")
    return date, hardware, command[1] if command else ""
