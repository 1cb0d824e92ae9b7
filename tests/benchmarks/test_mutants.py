"""The tool that makes mutants: every kind of change, names that stay, and a page that hides nothing."""

import ast
from pathlib import Path

import pytest

from benchmarks import mutants, mutants_listed

FAULTS = {
    "a < b": "a <= b", "a == b": "a != b", "a is None": "a is not None", "a and b": "a or b", "not a": "a", "-a": "a",
    "a + b": "a - b", "a * b": "a / b", "a // b": "a * b", "a & b": "a | b", "a << b": "a >> b", "True": "False",
    "f(a, b)": "f(b, a)", "abs(a)": "a", "torch.sqrt(a)": "a", "a.clamp(b)": "a", "max(a, b)": "a",
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), FAULTS.items())
def test_each_kind_of_fault(before: str, after: str) -> None:
    made = [mutant.source for mutant in mutants.mutants(f"x = {before}")]
    assert f"x = {after}" in made


def test_constants_and_statements() -> None:
    made = {mutant.source for mutant in mutants.mutants("x = 3\ny = 0.5\nx += 1\ncharge(x)")}
    assert "x = 4\ny = 0.5\nx += 1\ncharge(x)" in made
    assert "x = 3\ny = 0.25\nx += 1\ncharge(x)" in made
    assert "x = 3\ny = 0.5\npass\ncharge(x)" in made
    assert "x = 3\ny = 0.5\nx += 1\npass" in made
    (refusal,) = [m for m in mutants.mutants("if a:\n    raise ValueError('no')") if m.before.startswith("raise")]
    assert refusal.source == "if a:\n    pass"


def test_words_and_annotations_are_left_alone() -> None:
    text = '''"""Says 1 < 2."""\ndef f(x: "int" = None) -> "dict[int, 3]":\n    raise ValueError(f"got {x + 1}")\n'''
    assert [mutant.after for mutant in mutants.mutants(text)] == ["pass"]


def test_names_differ_and_do_not_depend_on_lines() -> None:
    text = "def f(a):\n    return a + 1, a + 1"
    names = [mutant.name for mutant in mutants.mutants(text)]
    assert len(set(names)) == len(names)
    assert names == [mutant.name for mutant in mutants.mutants(f"\n# a comment\n\n{text}")]
    assert "f: a + 1 → a - 1 (2)" in names


@pytest.mark.parametrize("file", mutants.TESTS)
def test_every_mapped_file_and_test_is_there(file: str) -> None:
    text = (mutants.SOURCES / file).read_text("utf-8")
    assert all((mutants.ROOT / "tests" / name.partition("::")[0]).is_file() for name in mutants.TESTS[file])
    made = mutants.mutants(text)
    assert len(made) > 10
    plain = ast.unparse(ast.parse(text))
    for mutant in made[:: len(made) // 2]:
        assert mutant.source != plain


def test_the_page_names_every_survivor() -> None:
    outcomes = {"f: a → b": "survived", "f: b → c": "survived", "g: c → d": "killed", "g: e": "stalled"}
    entry = {"mutants": 9, "date": "2030-01-02", "options": "all", "outcomes": outcomes}
    page = mutants.page({"noise.py": entry}, {"noise.py": {"f: a → b": "Equal for every a."}})
    assert "| noise.py | 9 | 4 | 1 | 1 | 2 | 1 | 2030-01-02 | all |" in page
    assert "f: `a` → `b`: Equal for every a." in page
    assert "f: `b` → `c`: **no reason given**" in page


def test_reasons_are_of_survivors() -> None:
    """A reason that no result needs is stale."""
    state = mutants._read()
    for file, told in mutants.reasons().items():
        outcomes = state.get(file, {}).get("outcomes", {})
        stale = [name for name in told if outcomes.get(name, "survived") != "survived"]  # type: ignore[attr-defined]
        assert not stale, f"{file}: {stale}"


FILE = "randomness/noise.py"


def test_a_mutant_is_tried_in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "repository"
    for name in ("src/dpgrad/randomness", "tests/randomness", "benchmarks"):
        (root / name).mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "constraints.txt", "Makefile"):
        (root / name).write_text("", "utf-8")
    (root / "src" / "dpgrad" / FILE).write_text("def half(x):\n    return x / 2\n", "utf-8")
    (root / "tests" / "randomness" / "test_noise.py").write_text(
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        "spec = spec_from_file_location('noise', 'src/dpgrad/randomness/noise.py')\nmodule = module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\ndef test_half():\n    assert module.half(4) == 2\n",
        "utf-8",
    )
    (root / "tests" / "randomness" / "test_none.py").write_text(
        "import pytest\n@pytest.mark.skip\ndef test_none():\n    pass\n", "utf-8"
    )
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setitem(mutants.TESTS, "noise.py", ("test_noise.py",))
    bench = mutants.Bench(tmp_path / "copy")
    assert bench.outcome(FILE, None, 120.0) == "survived"
    assert bench.outcome(FILE, "def half(x):\n    return x * 2\n", 120.0) == "killed"
    assert bench.outcome(FILE, None, 120.0, ("randomness/test_none.py",)) == "killed"  # where no test runs
    assert bench.outcome(FILE, "while True:\n    pass\n", 2.0) == "stalled"
    assert "x / 2" in (root / "src" / "dpgrad" / FILE).read_text("utf-8")


class TestListed:
    """benchmarks/mutants_listed.toml."""

    def test_every_fault_fits_its_file(self) -> None:
        for one in mutants_listed.read():
            assert one.source() != (mutants.SOURCES / one.file).read_text("utf-8"), one.name
            assert all((mutants.ROOT / "tests" / name.partition("::")[0]).is_file() for name in one.tests), one.name

    def test_there_are_fifty_and_every_topic_has_some(self) -> None:
        listed = mutants_listed.read()
        assert len(listed) >= 50
        assert {one.topic for one in listed} == set(mutants_listed.TOPICS)
        assert len({one.name for one in listed}) == len(listed)

    def test_a_fault_that_fits_nowhere_is_refused(self) -> None:
        stray = mutants_listed.Listed("clip", "grads/clip.py", "no such line", "", ("grads/test_edges.py",))
        with pytest.raises(LookupError, match=r"grads/clip\.py holds 0 times"):
            stray.source()
