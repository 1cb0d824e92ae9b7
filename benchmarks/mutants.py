"""Small faults, one at a time, in the files that carry the guarantee: does a test notice?

    python -m benchmarks.mutants [FILE ...] [--sample N] [--seed S] [--minutes M] [--workers W] [--fresh] [--list]

Each mutant is the file with one change (a comparison or an operator turned round, a constant off by one or halved, a
statement dropped, two arguments swapped, an abs, clamp or max taken away) in a copy of the sources, on which the mapped
tests run up to the first failure. Results are kept in benchmarks/mutants_tried.json, so that a run that is stopped
goes on where it was, and written to benchmarks/results/mutants.md. A file that changed begins anew, and survivors
without a reason are tried again. Why a survivor is no fault, or cannot be noticed, is said in benchmarks/mutants.toml.
POSIX only: each mutant runs in a fork of a process that has torch loaded. The exit status is 1 where a mutant survived
for which no reason is given.
"""

import argparse
import ast
import copy
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TRIED = ROOT / "benchmarks" / "mutants_tried.json"
REASONS = ROOT / "benchmarks" / "mutants.toml"
SOURCES = ROOT / "src" / "dpgrad"

# The tests of each file, the quickest first: files, or tests in them.
_PRIVATE, _QUANTILE = "training/test_private.py", "training/step/test_quantile.py"
_STEP = f"{_PRIVATE}::test_step_is_the_step_written_out"
_RUN = f"{_QUANTILE}::test_a_run_is_the_run_written_out"
_RELEASE = ("training/step/test_release.py", "training/step/test_secure_release.py")
_REPLAYED = "training/step/test_graphed.py::TestSameRun"
TESTS: dict[str, tuple[str, ...]] = {
    "mechanism/normal.py": ("randomness/test_noise.py",),
    "mechanism/chacha.py": ("mechanism/test_chacha.py",),
    "mechanism/schedules.py": ("mechanism/test_schedules.py", "mechanism/test_mechanism.py"),
    "randomness/noise.py": ("randomness/test_noise.py",),
    "randomness/device_noise.py": ("randomness/test_device_noise.py",),
    "randomness/secure_noise.py": (_RELEASE[1], "distributed/test_in_threads.py"),
    "randomness/secure_kernels.py": ("randomness/test_secure_kernels.py",),
    "randomness/philox.py": ("randomness/test_draw.py", "randomness/test_device_noise.py"),
    "randomness/draw.py": ("randomness/test_draw.py",),
    "mechanism/keys.py": ("mechanism/test_keys.py",),
    "grads/scaling.py": ("grads/test_own_rules.py", "grads/test_scaling.py"),
    "grads/clip.py": ("grads/test_clip.py", _STEP, f"{_PRIVATE}::test_groups_have_their_own_clip_and_noise"),
    "grads/precision.py": ("grads/test_precision.py", "grads/test_edges.py"),
    "mechanism/mechanism.py": ("mechanism/test_mechanism.py", "mechanism/test_secured.py", _STEP, _RUN),
    "training/private.py": (_STEP, "training/test_private_attacks.py", "training/test_same_data.py", _PRIVATE),
    "training/step/bodies.py": (
        _STEP, *_RELEASE, _QUANTILE, f"{_REPLAYED}::test_microbatches", f"{_REPLAYED}::test_averages",
        f"{_REPLAYED}::test_observed", f"{_PRIVATE}::test_what_is_observed_is_what_the_step_did",
        "training/step/test_straight.py::test_the_same_to_the_bit",
    ),
    "training/step/release.py": (
        *_RELEASE, "distributed/test_in_threads.py", _STEP, _RUN,
        f"{_PRIVATE}::test_a_parameter_frozen_on_the_way_is_not_stepped_again",
    ),
    "training/step/quantile.py": (f"{_QUANTILE}::test_each_count_gets_the_noise_of_its_step", _QUANTILE),
    "training/step/taped.py": (
        _STEP, _RELEASE[0], f"{_PRIVATE}::test_microbatches_do_not_change_the_step",
        f"{_PRIVATE}::test_out_of_memory_takes_smaller_pieces_of_the_same_batch",
        f"{_PRIVATE}::test_one_example_that_does_not_fit_is_said",
        f"{_PRIVATE}::test_a_step_that_must_be_replayed_is_not_worked_on_in_smaller_pieces",
        f"{_PRIVATE}::test_what_is_observed_is_what_the_step_did", f"{_PRIVATE}::test_an_empty_batch_is_observed",
    ),
    "training/step/work.py": (_STEP, "training/test_private_attacks.py", _RUN, _PRIVATE),
    "training/step/graphed.py": ("training/step/test_graphed.py",),
    "training/step/lots.py": (
        f"{_REPLAYED}::test_every_sampler", f"{_REPLAYED}::test_few_steps_ahead_at_a_time",
        f"{_REPLAYED}::test_lots_are_those_of_their_steps_however_large",
        f"{_REPLAYED}::test_a_run_goes_on_from_its_state",
    ),
    "training/step/feeds.py": (_REPLAYED, "training/step/test_step_attacks.py"),
    "training/step/sizes.py": ("training/step/test_graphed.py::TestSizes", f"{_REPLAYED}::test_every_sampler"),
    "training/step/pieces.py": (
        f"{_REPLAYED}::test_every_sampler", f"{_REPLAYED}::test_augmentation", f"{_REPLAYED}::test_averages",
        f"{_REPLAYED}::test_observed", _RELEASE[0], "training/step/test_graphed.py::TestChanges",
        "training/step/test_step_attacks.py",
    ),
    "training/step/straight.py": ("training/step/test_straight.py",),
    "training/units.py": ("training/test_units.py",),
    "training/temperature.py": ("training/test_temperature.py",),
    "tuning/selecting.py": (
        "tuning/test_selecting.py::test_each_trial_of_a_seeded_selection_has_a_seed_of_its_own",
        "tuning/test_selecting.py::test_the_whole_is_charged_before_the_first_trial",
        "tuning/test_selecting_attacks.py", "tuning/test_selecting.py",
    ),
    "tuning/scores.py": ("tuning/test_selecting.py", "tuning/test_selecting_attacks.py"),
    "tuning/planned.py": ("tuning/test_selecting.py", "tuning/test_selecting_attacks.py"),
    "tuning/store.py": ("tuning/test_selecting.py", "tuning/test_selecting_attacks.py"),
    "mechanism/sampling.py": ("mechanism/test_sampling.py", "mechanism/test_mechanism.py"),
    "mechanism/secure.py": ("mechanism/test_secure.py", "mechanism/test_secured.py"),
    "mechanism/adaptive.py": ("mechanism/test_adaptive.py", _RUN),
    "distributed/share.py": ("distributed/test_steps.py", "distributed/test_fits.py"),
    "distributed/exchange.py": ("distributed/test_in_threads.py", "distributed/test_steps.py"),
    "distributed/rounds.py": ("distributed/test_in_threads.py",),
    "distributed/stored.py": ("distributed/test_stored.py",),
    "runs/replay.py": ("runs/test_replay.py",),
    "runs/snapshot.py": ("runs/test_snapshot.py", "runs/test_checkpoint.py"),
    "runs/checkpoint.py": ("runs/test_checkpoint.py", "runs/test_faults.py"),
    "runs/writeahead.py": ("runs/test_writeahead.py", "runs/test_checkpoint.py", "runs/test_faults.py"),
    "_processes.py": ("test_processes.py",),
    "training/pca.py": ("training/test_pca.py",),
    "training/source.py": ("training/test_same_data.py", _PRIVATE),
    **{f"convex/solvers/{name}.py": (f"convex/solvers/test_{name}.py", "convex/test_attacks.py")
       for name in ("output", "objective", "amp", "gd", "sgd", "perturbed")},
    **{f"convex/solvers/{name}.py": (f"convex/solvers/test_{name}.py",)
       for name in ("auto", "one_vs_rest", "regression")},
    **{f"convex/{name}.py": (f"convex/test_{name}.py", "convex/test_attacks.py") for name in ("bounds", "design")},
    "convex/weighted.py": ("convex/test_weighted.py",),
    **{f"accounting/{name}.py": (f"accounting/test_{name}.py",)
       for name in (
           "calibrate", "events", "exact", "group", "inexact", "interchange", "ledger", "online", "pairs", "rdp",
           "selection",
       )},
}  # fmt: skip

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_SYMMETRIC = {
    "max",
    "min",
    "maximum",
    "minimum",
    "hypot",
    "equal",
    "gcd",
    "promote_types",
}  # in their first two arguments
_BOUNDS = {"abs", "max", "min", "maximum", "minimum", "clamp", "clamp_min", "ceil", "sqrt", "nextafter"}


@dataclass(frozen=True, eq=False)
class Mutant:
    """One change of one file."""

    where: str  # the function
    before: str
    after: str
    tree: ast.Module
    node: ast.AST
    other: ast.AST

    @property
    def name(self) -> str:
        """Stays the same when lines move."""
        return f"{self.where}: {self.before} → {self.after}"

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)

    @property
    def source(self) -> str:
        """The whole file with the change."""
        return ast.unparse(ast.fix_missing_locations(_exchanged(self.tree, self.node, self.other)))


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What one node may be exchanged for."""
    match node:
        case ast.Compare(left, [operator, *rest], right) if type(operator) in _TURNED:
            yield ast.Compare(left, [_TURNED[type(operator)](), *rest], right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS and not _is_text(left, right):
            yield ast.BinOp(left, _OPERATORS[type(operator)](), right)
        case ast.AugAssign(target, operator, value) if type(operator) in _OPERATORS:
            yield ast.AugAssign(target, _OPERATORS[type(operator)](), value)
            yield ast.Pass()
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(float() as value):
            yield ast.Constant(value / 2 if value else 1.0)
        case ast.If(test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Expr(ast.Call()) | ast.Raise():
            yield ast.Pass()
        case ast.Call(ast.Name(name) | ast.Attribute(_, name), [first, *_]) if name in _BOUNDS and not _method(node):
            yield first
        case ast.Call(ast.Attribute(receiver, name)) if name in _BOUNDS and _method(node):
            yield receiver
    match node:
        case ast.Call(ast.Name(name) | ast.Attribute(_, name)) if name in _SYMMETRIC:
            pass
        case ast.Call(function, [first, second, *rest], keywords) if not _starred(first, second):
            yield ast.Call(function, [second, first, *rest], keywords)


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.JoinedStr) or getattr(node, "value", None).__class__ is str for node in nodes)


def _starred(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)


def _method(call: ast.Call) -> bool:
    """Whether the call is a method of a value, not a function of a module."""
    function = call.func
    return isinstance(function, ast.Attribute) and not (
        isinstance(function.value, ast.Name) and function.value.id in ("torch", "np", "math")
    )


def _exchanged(tree: ast.AST, node: ast.AST, other: ast.AST) -> ast.AST:
    """A copy of the tree with ``other`` in the place of the node."""
    return copy.deepcopy(tree, {id(node): ast.copy_location(other, node)})


def mutants(text: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines, under names that differ."""
    found: list[Mutant] = []

    def walk(tree: ast.Module, node: ast.AST, where: str) -> None:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or _is_prose(child):
                    continue
                inner = where
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    inner = f"{where}.{child.name}".lstrip(".")
                shown = node if isinstance(child, ast.Constant) and not isinstance(node, _COMPOUND) else child
                found.extend(_made(tree, child, other, shown, where or "module") for other in changes(child))
                walk(tree, child, inner)

    tree = ast.parse(text)
    walk(tree, tree, "")
    counts: Counter[str] = Counter()
    named = []
    for mutant in sorted(found, key=lambda mutant: mutant.line):
        counts[mutant.name] += 1
        again = f" ({counts[mutant.name]})" if counts[mutant.name] > 1 else ""
        named.append(replace(mutant, after=mutant.after + again))
    return named


_COMPOUND = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.If, ast.For, ast.While, ast.With, ast.Try, ast.match_case)


def _is_prose(node: ast.AST) -> bool:
    """Documentation, messages, and what only type checkers or readers see."""
    match node:
        case ast.Expr(ast.Constant()) | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.If(ast.Name("TYPE_CHECKING")) | ast.If(ast.UnaryOp(ast.Not(), ast.Name("TYPE_CHECKING"))):
            return True
        case ast.FunctionDef(name) if name in ("__repr__", "__dir__"):
            return True
    return False


def _made(tree: ast.Module, node: ast.AST, other: ast.AST, shown: ast.AST, where: str) -> Mutant:
    """The mutant with ``other`` in place of ``node``; it is told by what becomes of the node that is ``shown``."""
    before, after = ast.unparse(shown), ast.unparse(_exchanged(shown, node, other))
    return Mutant(where, _short(before), _short(after), tree, node, other)


def _short(code: str) -> str:
    line = " ".join(code.split())
    return line if len(line) <= 100 else f"{line[:60]} … {line[-35:]}"


_PIECE = 8  # mutants that a worker takes at a time


class Bench:
    """A copy of the repository in which mutants are tried, one fork each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("src", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "constraints.txt", "Makefile"):
            shutil.copy(ROOT / name, folder / name)

    def outcome(self, file: str, source: str | None, limit: float, tests: Sequence[str] = ()) -> str:
        """killed, survived or stalled, by these ``tests`` or the mapped ones; the file as it is without a source."""
        path = self.folder / "src" / "dpgrad" / file
        before = path.read_text("utf-8")
        try:
            if source is not None:
                path.write_text(source, "utf-8")
            return self._forked([f"tests/{name}" for name in tests or TESTS[file]], limit)
        finally:
            path.write_text(before, "utf-8")

    def _forked(self, tests: list[str], limit: float) -> str:
        child = os.fork()
        if not child:
            self._run(tests)
        return _waited(child, limit)

    def _run(self, tests: list[str]) -> None:
        """Run the tests in this process and end it."""
        os.setsid()
        os.chdir(self.folder)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path[:] = [
            str(self.folder / "src"),
            str(self.folder),
            *(p for p in sys.path if p and Path(p) != ROOT / "src"),
        ]
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": f"{self.folder / 'src'}", "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        code = 1
        try:
            import pytest

            here = ["-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-q", "-x", "-m", "not slow", *tests]
            ran = _Ran()
            code = int(pytest.main(here, plugins=[ran])) or int(not ran.some)
        finally:
            os._exit(code)


class _Ran:
    """Whether any test was not skipped: where none runs, nothing can survive."""

    some = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.some = self.some or (report.when == "call" and not report.skipped)


def _waited(child: int, limit: float) -> str:
    """How a forked run of tests ended; after ``limit`` seconds it is ended."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "stalled"


def _loaded() -> None:
    """What every test imports and no mutant changes."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # as tests/conftest.py says
    heavy = ("hypothesis.strategies", "numpy", "pytest", "scipy.special", "scipy.stats", "sklearn.linear_model")
    for name in (*heavy, "torch._dynamo"):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)  # a fork has none of the other threads


def waiting(file: str, known: dict[str, str], sample: int | None, seed: int) -> list[Mutant]:
    """The mutants of a file that have no outcome yet, or so many of them."""
    every = mutants((SOURCES / file).read_text("utf-8"))
    chosen = every if sample is None else random.Random(f"{seed} {file}").sample(every, min(sample, len(every)))
    told = reasons().get(file, {})
    open_ = {name for name, outcome in known.items() if outcome == "survived" and name not in told}  # tests may be new
    return [mutant for mutant in chosen if mutant.name not in known or mutant.name in open_]


def tried(todo: list[tuple[str, Mutant]], workers: int, until: float) -> Iterator[tuple[str, str, str]]:
    """Try mutants of files, yielding (file, mutant, outcome) as they come; each worker has a copy of the repository."""
    pieces = [todo[start : start + _PIECE] for start in range(0, len(todo), _PIECE)]
    taken, given = os.pipe()  # numbers of pieces; whichever worker is free takes the next
    os.write(given, b"".join(number.to_bytes(2, "big") for number in range(len(pieces))))
    os.close(given)
    reader, writer = os.pipe()
    children = [os.fork() or _work(pieces, taken, writer, until) for _ in range(workers)]
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as lines:
        for line in lines:
            file, name, outcome = json.loads(line)
            print(f"{outcome:9} {file} {name}", flush=True)
            yield file, name, outcome
    for child in children:
        os.waitpid(child, 0)


def _work(pieces: list[list[tuple[str, Mutant]]], taken: int, results: int, until: float) -> int:
    """Try piece after piece; the process ends here."""
    limits: dict[str, float] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            bench = Bench(Path(folder))
            while number := os.read(taken, 2):
                for file, mutant in pieces[int.from_bytes(number, "big")]:
                    if time.monotonic() > until:
                        return 0
                    if file not in limits:
                        limits[file] = _limit(bench, file)
                    if not limits[file]:
                        break
                    line = json.dumps([file, mutant.name, bench.outcome(file, mutant.source, limits[file])]) + "\n"
                    os.write(results, line.encode())  # shorter than PIPE_BUF: lines of several workers do not mix
        return 0
    finally:
        os._exit(0)


def _limit(bench: Bench, file: str) -> float:
    """Seconds after which a mutant of the file has stalled, by the time of its tests without one; 0 if these fail."""
    began = time.monotonic()
    if bench.outcome(file, None, 1800.0) != "survived":
        print(
            f"error: without a mutant the tests of {file} fail, or none runs here: {', '.join(TESTS[file])}",
            file=sys.stderr,
            flush=True,
        )
        return 0.0
    return 60 + 5 * (time.monotonic() - began)


def _digest(file: str) -> str:
    return hashlib.sha256((SOURCES / file).read_bytes()).hexdigest()[:16]


def _read() -> dict[str, dict[str, object]]:
    return json.loads(TRIED.read_text("utf-8")) if TRIED.is_file() else {}


def _write(state: dict[str, dict[str, object]]) -> None:
    TRIED.write_text(json.dumps(state, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")
    (RESULTS / "mutants.md").write_text(page(state, reasons()), "utf-8")


def reasons() -> dict[str, dict[str, str]]:
    """Why a mutant that survives is no fault, or cannot be noticed: by file, then by name."""
    return tomllib.loads(REASONS.read_text("utf-8")) if REASONS.is_file() else {}


def page(state: dict[str, dict[str, object]], why: dict[str, dict[str, str]]) -> str:
    """The results as a page."""
    lines = [
        "# Mutants of the privacy-critical files", "",
        "Made by `make mutants` (`python -m benchmarks.mutants`). A mutant is one small fault in a copy of a file; "
        "the mapped tests, without slow ones, run until one fails, on a CUDA device where the options say so. "
        "*Stalled* is a run that did not end within its limit. Where fewer mutants were tried than there are, they are "
        "a random sample (`--sample`); files that are not listed were not tried.", "",
        "| file | mutants | tried | killed | stalled | survived | of these explained | date | options |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    survivors: list[str] = []
    for file, entry in sorted(state.items()):
        outcomes: dict[str, str] = entry["outcomes"]  # type: ignore[assignment]
        left = sorted(name for name, outcome in outcomes.items() if outcome == "survived")
        counts = [sum(found == kind for found in outcomes.values()) for kind in ("killed", "stalled", "survived")]
        told = why.get(file, {})
        lines.append(
            f"| {file} | {entry['mutants']} | {len(outcomes)} | {' | '.join(map(str, counts))} | "
            f"{sum(name in told for name in left)} | {entry['date']} | {entry['options']} |"
        )
        survivors += [f"- `{file}` {_code(name)}: {told.get(name, '**no reason given**')}" for name in left]
    return "\n".join([*lines, "", "## What survived", "", *(survivors or ["Nothing."])]) + "\n"


def _code(name: str) -> str:
    where, _, change = name.partition(": ")
    before, _, after = change.partition(" → ")
    return f"{where}: `{before}` → `{after}`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files under src/dpgrad; default: all that are mapped")
    parser.add_argument("--sample", type=int, metavar="N", help="at most so many mutants of each file")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which of them")
    parser.add_argument("--minutes", type=float, default=1e9, metavar="M", help="begin no mutant after so long")
    parser.add_argument("--workers", type=int, default=1, metavar="W", help="processes that try mutants")
    parser.add_argument("--fresh", action="store_true", help="forget earlier outcomes of these files")
    parser.add_argument("--list", action="store_true", help="show the mutants and try none")
    given = parser.parse_args()
    files = [str(Path(file).resolve().relative_to(SOURCES)) if Path(file).exists() else file for file in given.files]
    unknown = [file for file in files if file not in TESTS]
    if unknown:
        print(f"error: no tests are mapped to {', '.join(unknown)}: add them to TESTS", file=sys.stderr)
        return 2
    files = files or list(TESTS)
    if given.list:
        for file in files:
            for mutant in mutants((SOURCES / file).read_text("utf-8")):
                print(f"{file}:{mutant.line} {mutant.name}")
        return 0
    _loaded()
    state, until = _read(), time.monotonic() + 60 * given.minutes
    options = "all" if given.sample is None else f"--sample {given.sample} --seed {given.seed}"
    if Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        options += ", CUDA"
    todo: list[tuple[str, Mutant]] = []
    for file in files:
        entry = state.get(file)
        if entry is None or entry["digest"] != _digest(file) or given.fresh:
            entry = {"digest": _digest(file), "outcomes": {}, "date": "", "options": ""}
        entry["mutants"] = len(mutants((SOURCES / file).read_text("utf-8")))
        todo += [(file, mutant) for mutant in waiting(file, entry["outcomes"], given.sample, given.seed)]  # type: ignore[arg-type]
        state[file] = entry
    for file, name, outcome in tried(todo, given.workers, until):
        state[file]["outcomes"][name] = outcome  # type: ignore[index]
        state[file] |= {"date": time.strftime("%Y-%m-%d"), "options": options}
        _write(state)
    state = {file: entry for file, entry in state.items() if entry["outcomes"]}
    _write(state)
    why = reasons()
    open_ = [
        f"{file}: {name}"
        for file in files
        for name, outcome in state.get(file, {}).get("outcomes", {}).items()  # type: ignore[attr-defined]
        if outcome == "survived" and name not in why.get(file, {})
    ]
    print(f"{len(open_)} survivors without a reason", *open_, sep="\n  ")
    return 1 if open_ else 0


if __name__ == "__main__":
    sys.exit(main())
