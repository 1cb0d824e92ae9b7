"""The shape of the package: who may import whom, what loads when, how long a file may grow."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import dpgrad

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "dpgrad"
MOST_LINES = 400  # of code, in a file
MOST_OF_A_FUNCTION = 60  # lines, with its docstring

# The rooms in their order, as ARCHITECTURE.md lists them: each imports only rooms above its own. The files at the top
# whose names begin with an underscore, and errors.py, lie under all of them.
_LISTED = re.findall(
    r"^\| `(\w+)/` \||^(\| .*torch begins below.*)", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.M
)
ROOMS = [room for room, _ in _LISTED if room]
WITH_TORCH = {room for place, (room, _) in enumerate(_LISTED) if any(line for _, line in _LISTED[:place])}

# Triton comes with torch where there is a CUDA device, and is not looked for elsewhere.
RUNTIME = {
    "dpgrad", "matplotlib", "numpy", "PIL", "rich", "scipy", "shtab", "sklearn", "threadpoolctl", "torch", "triton",
}  # fmt: skip
RUNTIME |= {"cryptography", "dask", "datasets", "pyarrow"}  # optional: imported where first used
# Optional, and large: each is imported by the module of its name alone, which nothing else imports.
PEERS = {"integrations.lightning": "lightning", "integrations.transformers": "transformers"}
# Loaded only inside the function that needs it, so that a command that does not need it starts at once.
DEFERRED = (
    "matplotlib",
    "rich",
    "shtab",
    "PIL",
    "cryptography",
    "dask",
    "datasets",
    "pyarrow",
    "scipy.integrate",
    "scipy.optimize",
    "scipy.stats",
)
SKLEARN_HOMES = {"convex.estimators", "data.digits"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SKLEARN_HOMES |= {name for name in FILES if name.startswith("convex.estimators.")}
NAMES = [pytest.param(name, id=f"dpgrad.{name}" if name else "dpgrad") for name in FILES]
FACADE = {"", "__main__"}


def room(name: str) -> str:
    """The room of a module; nothing for the files at the top."""
    top = name.partition(".")[0]
    return top if top in ROOMS else ""


def place(name: str) -> int:
    return len(ROOMS) if name in FACADE else ROOMS.index(room(name)) if room(name) else -1


def imports(source: str, modules: set[str], own: str = "test") -> Iterator[tuple[str, bool]]:
    """Each import anywhere in ``source`` as (dotted module, at module level); ``modules`` are those of dpgrad."""
    tree = ast.parse(source)
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        top = id(node) not in inner
        match node:
            case ast.Import(names):
                yield from ((alias.name, top) for alias in names)
            case ast.ImportFrom(module, names, level):
                assert level == 0, f"dpgrad.{own} line {node.lineno}: relative import"
                for alias in names:
                    whole = f"{module}.{alias.name}"
                    inside = whole.removeprefix("dpgrad.") in modules
                    # `from scipy import stats` loads scipy.stats; `from numpy import array` merely reads a name.
                    yield (whole if inside or module in {"dpgrad", "scipy"} else str(module)), top
                    if module == "dpgrad" and not inside and own not in FACADE:
                        assert alias.name == "__version__", (
                            f"dpgrad.{own} line {node.lineno}: import {alias.name} from the module that defines it"
                        )
            case ast.Call(
                ast.Name("__import__") | ast.Attribute(attr="import_module") | ast.Name("import_module"), args
            ):
                if args and isinstance(args[0], ast.Constant):
                    yield str(args[0].value), top


def lines_of_code(source: str) -> int:
    """Lines that hold code: not blank, not only a comment, not a docstring."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def loaded_after(code: str) -> set[str]:
    """The modules a fresh interpreter has loaded after running ``code``."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def for_types_alone(source: str) -> set[int]:
    """The lines that only a type checker reads."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def running(source: str) -> str:
    """The source without the lines that only a type checker reads."""
    skipped = for_types_alone(source)
    kept = ["" if number in skipped else line for number, line in enumerate(source.splitlines(), 1)]
    return "\n".join(
        "if False: pass" if number in skipped and number - 1 not in skipped and not line else line
        for number, line in enumerate(kept, 1)
    )


def test_every_room_is_listed() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(ROOMS)
    assert len(ROOMS) == len(set(ROOMS))
    assert {"grads", "training"} <= WITH_TORCH < set(ROOMS)


def test_only_what_lies_under_every_room_stands_at_the_top() -> None:
    top = {name for name in FILES if "." not in name and name not in ROOMS and name not in FACADE}
    assert all(name.startswith("_") or name == "errors" for name in top), top


@cache
def imports_of(name: str) -> tuple[tuple[str, bool], ...]:
    """The imports of a module that is run, read once for all tests."""
    return tuple(imports(running(FILES[name].read_text("utf-8")), set(FILES), name))


@pytest.mark.parametrize("name", NAMES)
def test_module_imports_only_rooms_above_its_own(name: str) -> None:
    for imported, _ in imports_of(name):
        package, _, inner = imported.partition(".")
        if package == "dpgrad" and name not in FACADE and imported != "dpgrad.__version__":
            assert inner, f"dpgrad.{name} imports dpgrad itself: import the module that is needed"
            assert place(inner) <= place(name), f"dpgrad.{name} imports {imported}, a room below its own"


@pytest.mark.parametrize("name", NAMES)
def test_no_other_room_imports_an_integration(name: str) -> None:
    found = {imported for imported, _ in imports_of(name)}
    assert room(name) == "integrations" or not any(each.startswith("dpgrad.integrations") for each in found)


def test_no_modules_import_each_other() -> None:
    above: dict[str, set[str]] = {}
    for name in FILES:
        found = {inner for inner, top in imports_of(name) if top}
        inner = {module.removeprefix("dpgrad.") for module in found if module.startswith("dpgrad.")}
        above[name] = {module for module in inner if module in FILES and FILES[module].name != "__init__.py"}
    while free := {name for name, needed in above.items() if not needed & above.keys()}:
        for name in free:
            del above[name]
    assert not above, f"these import each other: {sorted(above)}"


def private_names(source: str, own: str) -> Iterator[str]:
    """Names with an underscore that a module reads of another room, by import or as attributes of what it imported."""
    tree = ast.parse(source)
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not f"{node.module}.".startswith("dpgrad."):
            continue
        if node.module == "dpgrad":
            foreign |= {alias.asname or alias.name for alias in node.names if alias.name != own}
            continue
        inner = str(node.module).removeprefix("dpgrad.")
        if room(inner) and room(inner) != own:
            if "._" in f".{inner}":
                yield f"{node.lineno}: {node.module}"
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if alias.name.startswith("_"))
            foreign |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(name), attr) if name in foreign and re.match("_[a-z]", attr):
                yield f"{node.lineno}: {name}.{attr}"


OUTSIDE = [path for folder in ("benchmarks", "docs", "release") for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("path", [*FILES.values(), *OUTSIDE], ids=str)
def test_no_room_reads_names_with_an_underscore_of_another(path: Path) -> None:
    own = room(module_name(path)) if PACKAGE in path.parents else "outside"
    assert not list(private_names(path.read_text("utf-8"), own))


@pytest.mark.parametrize("name", NAMES)
def test_module_imports_what_it_may(name: str) -> None:
    for imported, top in imports(running(FILES[name].read_text("utf-8")), set(FILES), name):
        package = imported.partition(".")[0]
        assert package in sys.stdlib_module_names | RUNTIME | {PEERS.get(name)}, (
            f"dpgrad.{name} imports {imported}: not a dependency"
        )
        if package == "torch":
            allowed = room(name) in WITH_TORCH and room(name) != "cli"
            assert allowed or name == "_triton" or not top, f"dpgrad.{name} imports torch at module level"
            assert room(name) in WITH_TORCH or not room(name), f"dpgrad.{name} is above the line: no torch"
        if package == "sklearn":
            assert name in SKLEARN_HOMES, f"dpgrad.{name} imports {imported}: only {SKLEARN_HOMES} may"
        deferred = any(f"{imported}.".startswith(f"{heavy}.") for heavy in DEFERRED)
        assert not (top and deferred), f"dpgrad.{name} imports {imported} at module level: import it where it is used"


# What a user gives and the event it causes share their name, and so do the noise of both sources in their two forms.
SHARED_NAMES = {"FixedSize", "Poisson", "Shuffle", "Wanted"}


def test_a_name_of_a_class_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in FILES.items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert twice.keys() == SHARED_NAMES, twice


@pytest.mark.parametrize("name", NAMES)
def test_module_is_short(name: str) -> None:
    count = lines_of_code(FILES[name].read_text("utf-8"))
    assert count <= MOST_LINES, f"dpgrad.{name} has {count} lines of code, at most {MOST_LINES}: it holds a second idea"


@pytest.mark.parametrize("name", NAMES)
def test_functions_are_short(name: str) -> None:
    for node in ast.walk(ast.parse(FILES[name].read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MOST_OF_A_FUNCTION, f"dpgrad.{name}: {node.name} has {length} lines"


def test_import_of_the_package_is_light() -> None:
    loaded = loaded_after("import dpgrad; dpgrad.__version__; dir(dpgrad); dpgrad.integrations")
    assert not loaded & {"numpy", "scipy", "torch", "sklearn", "matplotlib", "rich", *PEERS.values()}


ABOVE = [
    name
    for name in FILES
    if room(name) not in WITH_TORCH and name not in SKLEARN_HOMES and name not in {*FACADE, "_triton"}
]


def test_imports_above_the_line_are_quick() -> None:
    """All of them in one process: what none of them loads, each one does not load."""
    loaded = loaded_after("\n".join(f"import dpgrad.{name}" for name in ABOVE))
    slow = {"torch", "sklearn", "matplotlib", "rich", "scipy.stats", "scipy.optimize", "scipy.integrate"}
    assert not loaded & slow


@pytest.mark.skipif("cli" not in FILES, reason="the command is not there")
def test_epsilon_loads_nothing_heavy() -> None:
    arguments = "epsilon --sampling-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5 --json".split()
    run = f"import sys\nfrom dpgrad.cli import main\nsys.argv = ['dpgrad', *{arguments}]"
    loaded = loaded_after(
        f"{run}\ntry: code = main()\nexcept SystemExit as stop: code = stop.code\nassert not code, code"
    )
    assert not loaded & {"torch", "sklearn", "matplotlib", "scipy.stats", "scipy.optimize", "scipy.integrate"}


def test_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["dynamic"] == ["version"], "the version is read from dpgrad.__version__"
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] in ("Unreleased", dpgrad.__version__), "CHANGELOG.md begins with this version, or what is to be"


def test_constraints_pin_every_requirement_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins), pins
    assert "torch==2.13.0" in pins
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {re.split(r"[<>=!~ \[]", requirement)[0].lower() for requirement in wanted}
    assert names <= {pin.partition("==")[0].lower() for pin in pins}


MACHINE_PATH = re.compile(r"(?<![\w.~}])/(?:work|root|opt|home|Users)(?![\w-])")
REGISTRY = re.compile(
    r"pypi\.(?:org|python)|pythonhosted\.|download\.pytorch|npmjs\.|anaconda\.(?:org|com)|index[-]url|find[-]links"
)
PASSED_OVER = re.compile(
    r"^(?:\.git|\.venv.*|\.carry|\..*_cache|\.hypothesis|__pycache__|.*\.egg-info|build|dist|demo-out)$"
)


def text_files(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.iterdir()):
        if PASSED_OVER.match(path.name):
            continue
        if path.is_dir():
            yield from text_files(path)
        elif path.is_file():
            try:
                yield path.relative_to(ROOT), path.read_text("utf-8")
            except UnicodeDecodeError:
                continue


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in text_files(ROOT)
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line) or REGISTRY.search(line)
    ]
    assert not found, "\n".join(found)


class TestTheTestsThemselves:
    """The searches above find what they are for."""

    def test_imports_are_found_wherever_they_hide(self) -> None:
        source = (
            "import torch.nn\ndef f():\n    from scipy import stats\n    import_module('torch')\n"
            "from dpgrad import _files\nfrom dpgrad.accounting import account, pld\n"
        )
        found = set(imports(source, {"_files", "accounting", "accounting.pld"}))
        assert found == {
            ("torch.nn", True),
            ("scipy.stats", False),
            ("torch", False),
            ("dpgrad._files", True),
            ("dpgrad.accounting", True),
            ("dpgrad.accounting.pld", True),
        }

    def test_what_only_a_type_checker_reads_does_not_count(self) -> None:
        source = "if TYPE_CHECKING:\n    from dpgrad.cli import train\nfrom dpgrad.data import load\n"
        assert {name for name, _ in imports(running(source), set(FILES))} == {"dpgrad.data"}

    def test_private_names_are_found(self) -> None:
        source = "from dpgrad.grads import tape\nfrom dpgrad.data._source import Source\ntape._bound(Source._x)\n"
        assert sorted(private_names(source, "training")) == ["2: dpgrad.data._source", "3: Source._x", "3: tape._bound"]
        assert list(private_names("from dpgrad import cli\ncli._parser()\n", "outside")) == ["2: cli._parser"]

    def test_the_facade_is_not_a_way_around_the_order(self) -> None:
        with pytest.raises(AssertionError, match="the module that defines it"):
            list(imports("from dpgrad import Relation", {"accounting.events"}))

    def test_code_is_counted_without_words(self) -> None:
        assert lines_of_code('"""Doc\nstring."""\n\n# comment\nx = [\n    1,\n]\n') == 3

    @pytest.mark.parametrize(
        ("line", "bad"), [("see /" + "work/x", True), ("and/" + "work", False), ("a network/", False)]
    )
    def test_machine_paths_are_told_apart(self, line: str, bad: bool) -> None:
        assert bool(MACHINE_PATH.search(line)) is bad


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_text_files_name_their_encoding(folder: str) -> None:
    """The locale's need not be UTF-8, and ε is in many of ours. Ruff sees only what it knows to be a path."""
    positional = {"read_text": 1, "write_text": 2}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in positional:
                named = len(node.args) >= positional[node.func.attr] or "encoding" in {key.arg for key in node.keywords}
                assert named, f"{path}:{node.lineno}: give the encoding"
