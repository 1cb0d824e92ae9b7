"""When a run may use its key again: everything that the bits of a step depend on, as values that can be compared.

Two results with the same noise and different sums reveal their difference without noise. So a key is used again only
for steps that come out the same bit for bit; where anything differs, or cannot be told to be equal, a new key is drawn.
"""

import dataclasses
import functools
import hashlib
import json
import os
import platform
import secrets
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpgrad import __version__, source
from dpgrad.keys import Key
from dpgrad.source import Collate

_CHUNK = 1 << 24  # bytes hashed at a time
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_STEERING = ("MKL_", "ONEDNN_", "DNNL_", "ATEN_")  # variables of the environment that choose kernels


@dataclass(frozen=True)
class Identity:
    """What must be equal for the same key to be used again, as plain values of JSON.

    ``options`` is everything else that moves a bit of a step: rule, engine, optimizer and its settings, the `behaviour`
    of model and loss.

    >>> one = Identity({}, "d", "c", "cpu", 1, None, {"rule": "hard", "engine": "vmap"})
    >>> one.differences(dataclasses.replace(one, ranks=2, options={"rule": "psac", "engine": "vmap"}))
    ['ranks', 'rule']
    """

    mechanism: dict[str, Any]
    data: str
    code: str
    device: str
    ranks: int
    microbatch: int | None
    options: dict[str, Any]

    def __post_init__(self) -> None:
        for field in ("mechanism", "options"):  # as they are read again: a tuple becomes a list
            object.__setattr__(self, field, json.loads(json.dumps(getattr(self, field), allow_nan=False)))

    def differences(self, other: "Identity") -> list[str]:
        """The names of what differs; an option by its own name."""
        mine, theirs = vars(self) | self.options, vars(other) | other.options
        names = [field.name for field in dataclasses.fields(self) if field.name != "options"]
        names += sorted({*self.options, *other.options} - set(names))
        return [name for name in names if mine.get(name) != theirs.get(name)]

    def to_json(self) -> str:
        """One line; `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Identity":
        """The identity that `to_json` wrote."""
        return cls(**json.loads(text))


def data_digest(key: Key, data: Any, collate: Collate = default_collate) -> str:
    """A digest of every example under ``key``; without the key it tells nothing about the data.

    A Dataset is read twice: where it gives other examples the second time, the digest is a word never given twice.

    >>> data_digest(Key.from_seed(7), torch.zeros(3, 2)) == data_digest(Key.from_seed(7), torch.zeros(3, 2))
    True
    """
    if isinstance(data, TensorDataset):
        return _digest_of_data(key, data.tensors)
    if not isinstance(data, Dataset):
        return _digest_of_data(key, data)
    with torch.random.fork_rng(range(torch.cuda.device_count()) if _cuda_in_use() else []):
        first, second = (_digest_of_examples(key, data, collate) for _ in range(2))
    return first if first == second else _never_again()


def _digest_of_data(key: Key, data: Any) -> str:
    digest = hashlib.blake2b(key=key.derive("data digest"))
    for path, leaf in pytree.tree_flatten_with_path(data)[0]:
        _add_array(digest, pytree.keystr(path), leaf)
    return digest.hexdigest()


def _digest_of_examples(key: Key, data: "Dataset[Any]", collate: Collate) -> str:
    digest = hashlib.blake2b(key=key.derive("data digest"))
    for index in range(source.rows(data)):
        example = source.gathered(data, torch.tensor([index]), torch.device("cpu"), collate)
        for path, leaf in pytree.tree_flatten_with_path(example)[0]:
            _add_array(digest, pytree.keystr(path), leaf)
    return digest.hexdigest()


def _add_array(digest: "hashlib.blake2b", name: str, values: "Tensor | np.ndarray[Any, Any]") -> None:
    """Add type, shape and bytes, little by little: an array may be larger than memory."""
    digest.update(repr((name, str(values.dtype), tuple(values.shape))).encode())
    many = max(1, _CHUNK * len(values) // max(1, values.nbytes)) if values.ndim else 1
    for start in range(0, len(values), many) if values.ndim else [None]:
        part = values if start is None else values[start : start + many]
        if isinstance(part, Tensor):
            part = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(np.ascontiguousarray(part).tobytes())


def _never_again() -> str:
    """A word that is equal to no other: what it stands for cannot be told to be equal."""
    return f"not comparable {secrets.token_hex(16)}"


@functools.cache
def code_version() -> str:
    """The version of dpgrad, a digest of its source, and the versions of Python, torch and numpy.

    >>> code_version().startswith("dpgrad ")
    True
    """
    versions = f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    return f"dpgrad {__version__} ({_source_digest(Path(__file__).parent)}), {versions}"


def _source_digest(folder: Path) -> str:
    """A digest of the Python files in ``folder``, and of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def device_kind(device: torch.device | str) -> str:
    """The kind of device, and what else the bits of its kernels depend on.

    A CUDA device is comparable only inside `deterministic`.

    >>> device_kind("cpu") == device_kind(torch.device("cpu"))
    True
    """
    device = torch.device(device)
    precision = f"{torch.get_float32_matmul_precision()} precision, {torch.get_default_dtype()}"
    if device.type == "cpu":
        kernels = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        steered = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_STEERING))
        return f"cpu, {platform.machine()}, {_processor()}, {kernels}, {precision}, {steered}"
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled() or not os.environ.get(_CUBLAS):
        return f"{device.type}, {_never_again()}"
    name, cudnn = torch.cuda.get_device_name(device), torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"cuda, {name}, CUDA {torch.version.cuda}, cuDNN {cudnn}, {os.environ[_CUBLAS]}, {precision}"


def _processor() -> str:
    """The model of the processor, which chooses the kernels of linear algebra."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextmanager
def deterministic() -> Iterator[None]:
    """Within the block torch uses kernels that give the same bits every time; an operation without one is refused.

    cuBLAS reads its setting when it starts: enter the block before the first use of a CUDA device.

    >>> with deterministic():
    ...     torch.are_deterministic_algorithms_enabled()
    True
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    benchmark, fill = torch.backends.cudnn.benchmark, filling.fill_uninitialized_memory
    if not _cuda_in_use():
        os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    filling.fill_uninitialized_memory = False  # nothing of ours reads memory before it is written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
        filling.fill_uninitialized_memory = fill


def behaviour(subject: Any) -> str:
    """A digest of what a function, a class, a model or a plain value does, found from its code and its settings.

    Functions are followed into what they name; what comes with Python, torch, numpy and dpgrad stands by its name,
    since `code_version` covers it; the parameters and buffers of a model are left out, since a checkpoint holds them.
    Where anything is met that cannot be compared, the digest is a word never given twice.

    >>> behaviour(lambda x: x + 1) == behaviour(lambda x: x + 2)
    False
    """
    told = _Told()
    told.add(subject)
    return told.digest.hexdigest() if told.comparable else _never_again()


_KNOWN = {"builtins", "torch", "numpy", "dpgrad", *sys.stdlib_module_names}


class _Told:
    """Collects what an object does into a digest."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.comparable = True
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no identity is given twice

    def add(self, subject: Any) -> None:
        if subject is None or isinstance(subject, bool | int | float | complex | str | bytes | type(Ellipsis)):
            self._word(repr(subject))
            return
        if id(subject) in self._seen:
            self._word(f"again {self._seen[id(subject)]}")
            return
        self._seen[id(subject)] = len(self._seen)
        self._alive.append(subject)
        self._word(type(subject).__qualname__)
        self._add_compound(subject)

    def _word(self, word: str) -> None:
        self.digest.update(f"{len(word)}:{word}".encode())

    def _all(self, *parts: Any) -> None:
        for part in parts:
            self.add(part)

    def _add_compound(self, subject: Any) -> None:
        match subject:
            case tuple() | list():
                self._all(len(subject), *subject)
            case set() | frozenset():
                self._all(len(subject), *sorted(map(repr, subject)))
            case dict() | types.MappingProxyType():
                self._all(len(subject), *(part for pair in subject.items() for part in pair))
            case Tensor() | np.ndarray():
                _add_array(self.digest, "", subject)
            case np.generic() | np.ufunc() | np.dtype() | torch.dtype() | torch.device():
                self._word(repr(subject))
            case functools.partial():
                self._all(subject.func, subject.args, subject.keywords)
            case types.CodeType():
                self._all(subject.co_code, subject.co_consts, subject.co_names, subject.co_varnames)
            case types.ModuleType():
                self._add_module(subject)
            case types.MethodType():
                self._all(subject.__func__, subject.__self__)
            case staticmethod() | classmethod():
                self.add(subject.__func__)
            case property():
                self._all(subject.fget, subject.fset)
            case types.FunctionType():
                self._add_function(subject)
            case types.BuiltinFunctionType() if not isinstance(subject.__self__, types.ModuleType | type):
                self._all(subject.__qualname__, subject.__self__)
            case types.BuiltinFunctionType() | types.MethodDescriptorType() | types.WrapperDescriptorType():
                self._word(subject.__qualname__)
            case type():
                self._add_class(subject)
            case nn.Module():
                self._add_model(subject)
            case _:
                self._add_object(subject)

    def _add_module(self, module: types.ModuleType) -> None:
        """A module may hold anything: its file is compared, and those of the modules whose names it holds."""
        self._word(module.__name__)
        if module.__name__.partition(".")[0] in _KNOWN:
            return
        path = getattr(module, "__file__", None)
        if path is None or not Path(path).is_file():
            self.comparable = False
            return
        self.digest.update(Path(path).read_bytes())
        for value in list(vars(module).values()):
            home = value if isinstance(value, types.ModuleType) else sys.modules.get(_home(value))
            if home is not None:
                self.add(home)

    def _add_function(self, function: types.FunctionType) -> None:
        self._all(function.__code__, function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not filled yet
                self._word("empty")
        names = _names(function.__code__) if _package(function) not in _KNOWN else set()
        for name in sorted(names):
            if name in function.__globals__:
                self._word(name)
                self.add(function.__globals__[name])

    def _add_class(self, kind: type) -> None:
        for ancestor in kind.__mro__:
            self._word(f"{ancestor.__module__}.{ancestor.__qualname__}")
            if _package(ancestor) not in _KNOWN:
                own = {name: value for name, value in vars(ancestor).items() if name not in _UNTOLD}
                self.add(own)

    def _add_model(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self._all(name, type(module))
            values = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
            hooks = [list(found.values()) for k, found in vars(module).items() if k.endswith("_hooks") and found]
            tensors = {**module._parameters, **module._buffers}
            self._all(values, hooks, {name: _kind(tensor) for name, tensor in tensors.items()})

    def _add_object(self, subject: Any) -> None:
        self.add(type(subject))
        state = getattr(subject, "__dict__", None)
        if isinstance(state, Mapping):
            self.add(dict(state))
        elif dataclasses.is_dataclass(subject):
            self.add([getattr(subject, field.name) for field in dataclasses.fields(subject)])
        else:
            self.comparable = False


_UNTOLD = {
    "__dict__",
    "__weakref__",
    "__module__",
    "__doc__",
    "__annotations__",
    "__firstlineno__",
    "__abstractmethods__",
}
_UNTOLD |= {"_abc_impl", "__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__"}
_UNTOLD |= {"__parameters__", "__orig_bases__", "__slots__"}


def _kind(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}"


def _home(subject: Any) -> str:
    """The module that defines a function or a class."""
    return str(getattr(subject, "__module__", None) or "")


def _package(subject: Any) -> str:
    return _home(subject).partition(".")[0]


def _names(code: types.CodeType) -> set[str]:
    """The global names that a function and those inside it may use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_names(constant) for constant in inner))
