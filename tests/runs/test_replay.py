"""When a key may be used again: what is equal is told to be equal, also by another process; what differs is not."""

import contextlib
import functools
import importlib
import itertools
import math
import operator
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pytest
import scipy.special
import sklearn.utils.murmurhash
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpgrad import Relation
from dpgrad.grads import scaling
from dpgrad.mechanism.keys import Key
from dpgrad.runs import replay
from dpgrad.runs.replay import Identity, behaviour, code_version, data_digest, deterministic, device_kind

KEY = Key.from_seed(1)
ROWS = torch.arange(12.0).view(4, 3)
IDENTITY = Identity({"steps": 3}, "digest", "code", "cpu", 1, None, {"sizes": (1, 2), "rule": "hard"})


def test_identities_survive_json() -> None:
    again = Identity.from_json(IDENTITY.to_json())
    assert again == IDENTITY
    assert again.differences(IDENTITY) == []


def test_an_option_that_came_or_went_is_a_difference() -> None:
    other = Identity({"steps": 3}, "digest", "code", "cpu", 1, None, {"rule": "hard", "more": 1})
    assert IDENTITY.differences(other) == other.differences(IDENTITY) == ["more", "sizes"]


def test_data_are_told_by_every_bit_under_the_key() -> None:
    digest = data_digest(KEY, (ROWS, ROWS[:, 0].long()))
    assert digest == data_digest(KEY, (ROWS.clone(), ROWS[:, 0].clone().long()))
    assert digest == data_digest(KEY, TensorDataset(ROWS, ROWS[:, 0].long()))
    moved = ROWS.clone()
    moved[2, 1] = torch.nextafter(moved[2, 1], torch.tensor(9.0))
    others: list[Any] = [
        (moved, ROWS[:, 0].long()),
        (ROWS.flip(0), ROWS[:, 0].long()),
        (ROWS, ROWS[:, 0]),
        (ROWS[:3], ROWS[:3, 0].long()),
        (ROWS.view(4, 1, 3), ROWS[:, 0].long()),
        {"x": ROWS, "y": ROWS[:, 0].long()},
    ]
    digests = {data_digest(KEY, data) for data in others}
    assert len(digests) == len(others)
    assert digest not in digests
    assert data_digest(Key.from_seed(2), (ROWS, ROWS[:, 0].long())) != digest


def test_arrays_views_and_large_files_are_told_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).normal(size=(50, 7))
    np.save(tmp_path / "rows.npy", array)
    digest = data_digest(KEY, array)
    assert data_digest(KEY, np.load(tmp_path / "rows.npy", mmap_mode="r")) == digest
    assert data_digest(KEY, np.asfortranarray(array)) == digest
    monkeypatch.setattr(replay, "_CHUNK", 100)  # a row or two at a time
    assert data_digest(KEY, array) == digest
    objects = np.array([1, "a"], dtype=object)  # of which an array holds only where they lie
    assert data_digest(KEY, objects) != data_digest(KEY, objects)
    assert data_digest(KEY, torch.zeros(3, dtype=torch.bfloat16)) != data_digest(KEY, torch.zeros(3, dtype=torch.half))


class Items(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Tensor:
        return ROWS[index]


class Scaled(TensorDataset):
    scale = 1.0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(self.scale * tensor for tensor in super().__getitem__(index))


class Watched(np.ndarray[Any, Any]):
    """An array with methods of its own."""


@pytest.mark.parametrize("data", [Items(), Scaled(ROWS), ROWS.numpy().view(Watched)], ids=["items", "scaled", "array"])
def test_data_that_run_code_of_their_own_are_never_equal(data: Any) -> None:
    first, second = (data_digest(KEY, data) for _ in range(2))
    assert first != second
    assert first.startswith("not comparable")


def test_code_is_told_by_its_source(tmp_path: Path) -> None:
    assert f"torch {torch.__version__}" in code_version()
    digests = set()
    for name, content in (("a.py", "1"), ("a.py", "2"), ("b.py", "3"), ("c/d.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, "utf-8")
        digests.add(replay._source_digest(tmp_path))
        assert replay._source_digest(tmp_path) in digests
    assert len(digests) == 4


def settings_of_two_kinds() -> str:
    raise RuntimeError("mix of the legacy and new APIs")


@pytest.mark.parametrize(
    "name",
    [
        "ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "BLIS_ARCH_TYPE", "OMP_DYNAMIC",
        "KMP_DETERMINISTIC_REDUCTION", "NPY_DISABLE_CPU_FEATURES",
    ],
)  # fmt: skip
def test_variables_that_choose_kernels_tell_devices_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    found = device_kind("cpu")
    monkeypatch.setenv(name, "other")
    assert device_kind("cpu") != found


@pytest.mark.parametrize(("holder", "name"), [(torch.backends.cpu, "get_cpu_capability"), (replay, "processor")])
def test_other_processors_are_other_devices(holder: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = device_kind("cpu")
    monkeypatch.setattr(holder, name, lambda: "another")
    assert device_kind("cpu") != found


def test_devices_are_told_by_what_moves_a_bit() -> None:
    threads = torch.get_num_threads()
    found = device_kind("cpu")
    try:
        torch.set_num_threads(threads + 1)
        assert device_kind("cpu") != found
    finally:
        torch.set_num_threads(threads)
    assert device_kind("cpu") == found
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert device_kind("cpu") != found
    enabled = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(not enabled)
        assert device_kind("cpu") != found
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert device_kind("cpu") != found
    if torch.set_flush_denormal(True):
        try:
            assert device_kind("cpu") != found
        finally:
            torch.set_flush_denormal(False)
    assert device_kind("cpu") == found
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "get_float32_matmul_precision", settings_of_two_kinds)
        assert device_kind("cpu") != device_kind("cpu")
    assert device_kind("cuda") != device_kind("cuda")  # its kernels are not said to be deterministic here


def test_deterministic_kernels_are_asked_for_and_left_as_they_were() -> None:
    benchmark = torch.backends.cudnn.benchmark
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark == benchmark
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


FACTOR = 2.0


def helper(x: float) -> float:
    return FACTOR * x


def using(x: float) -> float:
    return helper(x) + 1


class Net(nn.Module):
    def __init__(self, slope: float = 1.0, width: int = 3) -> None:
        super().__init__()
        self.slope = slope
        self.inner = nn.Linear(2, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.slope * self.inner(x)
        return out


def closure(factor: float) -> Any:
    return lambda x: factor * x


def test_functions_are_followed_into_what_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = behaviour(using)
    assert before == behaviour(using)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert behaviour(using) != before
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    assert behaviour(using) == before
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda x: x)
    assert behaviour(using) != before


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


class Hidden(nn.Module):
    """A module whose setting is none of its public attributes."""

    def __init__(self, slope: float, persistent: bool | None = None) -> None:
        super().__init__()
        self._slope = slope
        if persistent is not None:
            self._slope = 0.0
            self.register_buffer("slope", torch.tensor(slope), persistent=persistent)


class Slotted:
    __slots__ = ("slope",)

    def __init__(self, slope: float) -> None:
        self.slope = slope


class Pair(NamedTuple):
    one: float
    other: float


def distilled(teacher: nn.Module) -> Any:
    return lambda model, batch: (model(batch) - teacher(batch)).square().sum(1)


@functools.wraps(torch.nn.functional.cross_entropy)
def wrapped(x: float) -> float:
    return FACTOR * x


def told(x: float) -> float:
    return float(told.factor * x)  # type: ignore[attr-defined]


told.factor = 1.0  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Frozen:
    """It has a method that hashes, which its results do not depend on."""

    id: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.id


SAME: dict[str, Any] = {
    "frozen": Frozen,
    "closure": lambda: closure(2.0),
    "partial": lambda: functools.partial(helper, 3),
    "model": lambda: seeded(Net),
    "layers": lambda: seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.LSTM(2, 2))),
    "parametrized": lambda: seeded(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2))),
    "enumeration": lambda: Relation.ADD_REMOVE,
    "slots": lambda: Slotted(2.0),
    "rule": lambda: scaling.Psasc(s=0.5),
    "values": lambda: {"a": [1, 2.5, None], "b": (np.float32(1), torch.float16)},
    "array": lambda: np.arange(3),
    "builtin": lambda: max,
    "torch": lambda: torch.nn.functional.relu,
    "method": lambda: Net.forward,
    "set": lambda: {"red", "green", "blue"},
    "ufunc": lambda: np.exp,
    "mathematics": lambda: lambda x: math.exp(x) * functools.reduce(operator.mul, [1, 2]) * next(itertools.count(1)),
    "names of paths": lambda: lambda words: [os.path.join("a", word) for word in words],
    "the version of Python": lambda: lambda x: x * sys.version_info[0],
    "an attribute by its name": lambda: lambda layers: [getattr(layers, "weight"), getattr(layers, "bias", None)],  # noqa: B009
    "a context": lambda: contexts,
}


@contextlib.contextmanager
def contexts(x: float) -> Iterator[float]:
    yield helper(x)


class Factor(float):
    """A number that may do anything."""


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "closure": (closure(2.0), closure(3.0)),
    "partial": (functools.partial(helper, 3), functools.partial(helper, 4)),
    "slope": (Net(1.0), Net(2.0)),
    "width": (nn.Linear(2, 3, bias=False), nn.Linear(2, 3)),
    "activation": (nn.Sequential(nn.Tanh()), nn.Sequential(nn.ReLU())),
    "dropout": (nn.Dropout(0.1), nn.Dropout(0.2)),
    "rule": (scaling.Psasc(s=0.5), scaling.Psasc(s=0.6)),
    "order": ([1, 2], [2, 1]),
    "nesting": ([[1], 2], [1, [2]]),
    "defaults": (lambda x, y=1: x, lambda x, y=2: x),
    "array": (np.arange(3), np.arange(3.0)),
    "mode": (nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5)).eval()),
    "mode of a part": (nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5).eval())),
    "private attribute": (Hidden(1.0), Hidden(2.0)),
    "non-persistent buffer": (Hidden(1.0, persistent=False), Hidden(2.0, persistent=False)),
    "buffer of another module": (Hidden(1.0, persistent=True), Hidden(2.0, persistent=True)),
    "teacher": (distilled(nn.Linear(2, 2)), distilled(nn.Linear(2, 2))),
    "slots": (Slotted(1.0), Slotted(2.0)),
    "frozen": (nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)),
    "number of a class of its own": (Factor(1.0), Factor(2.0)),
}


@pytest.mark.parametrize("name", SAME)
def test_what_does_the_same_is_told_to_be_equal(name: str) -> None:
    assert behaviour(SAME[name]()) == behaviour(SAME[name]())


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_told_apart(name: str) -> None:
    one, other = DIFFERENT[name]
    assert behaviour(one) != behaviour(other)


def test_weights_are_the_checkpoint_s_and_hooks_are_not() -> None:
    model = Net()
    before = behaviour(model, trained=model)
    assert behaviour(Net(), trained=model) != before  # another model's weights are in no checkpoint
    with torch.no_grad():
        model.inner.weight.add_(1)
    assert behaviour(model, trained=model) == before
    assert behaviour(distilled(model), trained=model) == behaviour(distilled(model), trained=model)
    model.inner.weight.requires_grad_(False)
    assert behaviour(model, trained=model) != before
    model.inner.weight.requires_grad_(True)
    assert behaviour(model, trained=model) == before
    model.register_forward_hook(lambda module, given, out: 2 * out)
    assert behaviour(model, trained=model) != before


@pytest.mark.parametrize("persistent", [True, False])
def test_only_what_the_checkpoint_holds_is_left_out(persistent: bool) -> None:
    one, other = Hidden(1.0, persistent), Hidden(2.0, persistent)
    assert (behaviour(one, trained=one) == behaviour(other, trained=other)) == persistent


def test_values_behind_names_are_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A function that says it is of torch, one with attributes, and modules that are named, enclosed, imported late."""
    (tmp_path / "dpgrad_settings.py").write_text("SCALE = 1.0\nUNUSED = 1.0\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    settings = importlib.import_module("dpgrad_settings")
    monkeypatch.setitem(globals(), "settings", settings)

    def late(x: float) -> float:
        import dpgrad_settings

        return float(dpgrad_settings.SCALE * x)

    def enclosed(module: Any) -> Any:
        return lambda x: module.SCALE * x

    subjects = {"named": named, "late": late, "enclosed": enclosed(settings), "wrapped": wrapped, "told": told}
    before = {name: behaviour(subject) for name, subject in subjects.items()}
    assert not {name for name, found in before.items() if found.startswith("not comparable")}
    settings.UNUSED = 2.0
    assert {name: behaviour(subject) for name, subject in subjects.items()} == before
    settings.SCALE = 2.0
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    monkeypatch.setattr(told, "factor", 3.0)
    for name, subject in subjects.items():
        assert behaviour(subject) != before[name], name


def named(x: float) -> float:
    return float(settings.SCALE * x)  # type: ignore[name-defined]  # noqa: F821


class Unreadable:
    """An object that does not say what it holds."""

    @property
    def __dict__(self) -> Any:
        raise ValueError("no")


class Words(dict[str, int]):
    """A dict that may do anything."""


class Reading(nn.Module):
    """A model that is scaled by what a file says."""

    def forward(self, x: Tensor) -> Tensor:
        with Path("scale.txt").open(encoding="utf-8") as lines:
            return x * float(lines.read())


NEVER: dict[str, Any] = {
    "generator of torch": torch.Generator,
    "generator": lambda: (number for number in range(3)),
    "object": object,
    "random": lambda: random.Random(1),
    "numpy": lambda: np.random.default_rng(1),
    "graph": lambda: torch.fx.symbolic_trace(nn.Linear(1, 1)),
    "part of it a graph": lambda: nn.Sequential(torch.fx.symbolic_trace(nn.Linear(1, 1))),
    "named tuple": lambda: Pair(1.0, 2.0),
    "dict": Words,
    "list": lambda: type("Own", (list,), {})(),
    "set of objects": lambda: {object()},
    "module held by an object": lambda: SimpleNamespace(module=sys.modules[__name__]),
    "array": lambda: ROWS.numpy().view(Watched),
    "array of objects": lambda: np.array([1, "a"], dtype=object),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "enclosed": lambda: closure(Unreadable()),
    "random numbers of Python": lambda: lambda x: x * random.random(),
    "random numbers of numpy": lambda: lambda x: x * np.random.rand(),
    "a function of them": lambda: np.random.rand,
    "random numbers that are enclosed": lambda: (lambda drawn: lambda x: drawn.rand() * x)(np.random),
    "random numbers imported late": lambda: drawn_late,
    "random numbers of the system": lambda: lambda x: os.urandom(1)[0] * x,
    "a function of the system": lambda: os.urandom,
    "a clock": lambda: lambda x: x * time.perf_counter(),
    "a function of it": lambda: (time.time,),
    "a date": lambda: lambda x: x * datetime.now().microsecond,
    "an identifier": lambda: (uuid4,),
    "the hash of a text": lambda: lambda words: [hash(word) % 64 for word in words],
    "a function that hashes": lambda: functools.partial(map, hash),
    "the identity of an object": lambda: lambda x: id(x),
    "the number of the process": lambda: lambda x: x * os.getpid(),
    "the environment": lambda: lambda x: x * float(os.environ["SCALE"]),
    "a variable of the environment": lambda: lambda x: x * float(os.getenv("SCALE", "1")),
    "a function of the environment": lambda: functools.partial(os.getenv, "SCALE"),
    "the environment that is held": lambda: SimpleNamespace(settings=os.environ),
    "the environment that is enclosed": lambda: (lambda settings: lambda x: x * float(settings["SCALE"]))(os.environ),
    "the environment imported late": lambda: environment_late,
    "the environment found by its name": lambda: lambda x: x * float(getattr(os, "environ")["SCALE"]),  # noqa: B009
    "the environment by a function of its name": lambda: lambda x: x * len(operator.attrgetter("environ")(os)),
    "the environment among some names": lambda: lambda x: [getattr(os, name) for name in ("sep", "environ")],
    "the environment among all names": lambda: lambda x: x * len(os.__dict__["environ"]),
    "the environment among its variables": lambda: lambda x: x * len(vars(os)["environ"]),
    "a file by the name of a method": lambda: lambda x: x * operator.methodcaller("load", "scale.npy")(np),
    "random numbers by their names": lambda: lambda x: x * operator.attrgetter("random.rand")(np)(),
    "the time of numpy": lambda: lambda x: x * np.datetime64("now").astype(int),
    "a file of numpy by its source": lambda: lambda x: x * len(np.lib.npyio.DataSource().open("scale.txt").read()),
    "the memory that is free": lambda: lambda x: x.split(torch.cuda.mem_get_info()[0] // 2**20),
    "a package of torch": lambda: lambda x: x * torch.package.PackageImporter("scale.pt").load_pickle("a", "b"),
    "the seed of torch": lambda: lambda x: x * torch.initial_seed(),
    "the hash of a text by its method": lambda: lambda words: [word.__hash__() % 64 for word in words],
    "the arguments of the program": lambda: lambda x: x * len(sys.argv),
    "a file": lambda: lambda x: x * float(open("scale.txt", encoding="utf-8").read()),  # noqa: SIM115
    "a file by a function": lambda: functools.partial(open, "scale.txt"),
    "a file by its path": lambda: lambda x: x * float(Path("scale.txt").read_text("utf-8")),
    "a path": lambda: SimpleNamespace(where=Path("scale.txt")),
    "whether there is a file": lambda: lambda x: x * os.path.exists("scale.txt"),
    "a folder": lambda: lambda x: x * len(os.listdir(".")),
    "a file of torch": lambda: lambda x: x * torch.load("scale.pt"),
    "a function that reads it": lambda: functools.partial(torch.load, "scale.pt"),
    "a file of numpy": lambda: lambda x: x * np.load("scale.npy"),
    "a text of numbers": lambda: functools.partial(np.loadtxt, "scale.txt"),
    "a method that reads a file": Reading,
    "another program": lambda: lambda x: x * subprocess.run(["true"]).returncode,
    "a module found by its name": lambda: lambda x: x * importlib.import_module("random").random(),
    "code in a text": lambda: lambda x: eval("x * SCALE"),
    "code that is run": lambda: functools.partial(exec, "SCALE = 2"),
    "a module by the function behind import": lambda: lambda x: x * __import__("random").random(),
    "random numbers of torch from the system": lambda: lambda x: x * torch.seed(),
    "a function in C of another library": lambda: scipy.special.expit,
    "one that Cython made": lambda: sklearn.utils.murmurhash.murmurhash3_32,
}


def environment_late(x: float) -> float:
    from os import environ

    return x * float(environ["SCALE"])


def drawn_late(x: float) -> float:
    import random as drawn

    return x * drawn.random()


@pytest.mark.parametrize("name", NEVER)
def test_what_cannot_be_compared_is_never_equal(name: str) -> None:
    subject = NEVER[name]()
    assert behaviour(subject) != behaviour(subject)


SCRIPT = """
import torch
from torch import nn
from dpgrad.runs.replay import behaviour, device_kind
torch.manual_seed(0)
words = {"some", "words", "in", "a", "set"}
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") * len(words)
print(behaviour((loss, nn.Linear(2, 3))), device_kind("cpu"))
"""


def test_another_process_comes_to_the_same() -> None:
    """Two processes with different hashes of strings."""
    found = {
        subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=600).stdout
        for _ in range(2)
    }
    assert len(found) == 1
    assert "not comparable" not in next(iter(found))


def test_another_processor_is_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replay.device_kind("cpu")
    monkeypatch.setattr(replay, "processor", lambda: "another model")
    assert replay.device_kind("cpu") != here


def test_following_ends_where_nothing_can_be_compared() -> None:
    """The rest of a large library need not be read: the answer is known."""
    seen: list[str] = []

    class Watched:
        def __getattribute__(self, name: str) -> object:
            seen.append(name)
            return object.__getattribute__(self, name)

    assert "not comparable" in replay.behaviour(((one for one in ()), Watched()))
    assert seen == []
