"""When a run may use its key again: everything that the bits of a step depend on, as values that can be compared.

Two results with the same noise and different sums reveal their difference without noise. So a key is used again only
for steps that come out the same bit for bit; where anything differs, or cannot be shown equal, a new key is drawn.
"""

import dataclasses
import dis
import functools
import hashlib
import importlib
import json
import os
import platform
import secrets
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

from dpgrad import __version__, _triton
from dpgrad.mechanism.keys import Key
from dpgrad.reports.environment import processor

__all__ = ["Identity", "behaviour", "code_version", "data_digest", "deterministic", "device_kind", "incomparable"]

_NEVER = "not comparable"
_CHUNK = 1 << 24  # bytes hashed at a time
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_STEERING = {  # variables of the environment that choose kernels
    "cpu": ("MKL_", "ONEDNN_", "DNNL_", "ATEN_", "OPENBLAS_", "BLIS_", "OMP_", "KMP_DE", "KMP_DY", "NPY_"),
    "cuda": ("NVIDIA_", "CUBLAS_", "CUDNN_", "TRITON_", "TORCH_"),
}


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

    def incomparable(self) -> set[str]:
        """The names of what is equal to nothing, since it cannot be shown to be."""
        held = vars(self) | self.options
        return {name for name, value in held.items() if isinstance(value, str) and incomparable(value)}

    def to_json(self) -> str:
        """One line; `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Identity":
        """The identity that `to_json` wrote."""
        return cls(**json.loads(text))


def data_digest(key: Key, data: Any) -> str:
    """A digest of every example under ``key``; without the key it tells nothing about the data.

    What a Dataset gives depends on code and state that cannot be seen: any but a `TensorDataset` itself, and any array
    of a class of its own, has a word never given twice in place of a digest. Give tensors or arrays where a run is to
    be replayed with the same key. Contents that are read from files come batch by batch, as an iterator.

    >>> data_digest(Key.from_seed(7), torch.zeros(3, 2)) == data_digest(Key.from_seed(7), torch.zeros(3, 2))
    True
    """
    held = data.tensors if type(data) is TensorDataset else data
    digest = hashlib.blake2b(key=key.derive("data digest"))
    for part in held if isinstance(held, Iterator) else (held,):
        leaves = pytree.tree_flatten_with_path(part)[0]
        if any(type(leaf) not in _ARRAYS or leaf.dtype == object for _, leaf in leaves):
            return _never_again()
        for path, leaf in leaves:
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


def incomparable(word: str) -> bool:
    """Whether a word stands for what cannot be shown equal to anything.

    >>> incomparable(behaviour(1)), incomparable(behaviour(iter([])))
    (False, True)
    """
    return _NEVER in word


def _never_again() -> str:
    """A word that is equal to no other: what it stands for cannot be shown equal."""
    return f"{_NEVER} {secrets.token_hex(16)}"


@functools.cache
def code_version() -> str:
    """The version of dpgrad, a digest of its source, and the versions of Python, torch and numpy.

    >>> code_version().startswith("dpgrad ")
    True
    """
    versions = f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    return f"dpgrad {__version__} ({_source_digest(Path(__file__).parents[1])}), {versions}"


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
    try:
        precision = f"{torch.get_float32_matmul_precision()} precision, {torch.get_default_dtype()}"
        precision += f", {_flags(device.type)}"
    except RuntimeError:  # torch says of some settings that it cannot tell what holds
        precision = _never_again()
    steered = sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(_STEERING.get(device.type, ()))
    )
    if device.type == "cpu":
        computed = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        return f"cpu, {platform.machine()}, {processor()}, {computed}, {precision}, {steered}"
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled() or not os.environ.get(_CUBLAS):
        return f"{device.type}, {_never_again()}"
    name, cudnn = torch.cuda.get_device_name(device), torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    triton = f"Triton {importlib.import_module('triton').__version__}" if _triton.available else "no Triton"
    return f"cuda, {name}, CUDA {torch.version.cuda}, cuDNN {cudnn}, {triton}, {precision}, {steered}"


def _flags(device: str) -> str:
    """The switches of torch that choose kernels or their precision."""
    cuda: Any = torch.backends.cuda
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    tiny = torch.tensor(1e-310, dtype=torch.float64)
    found = {
        "autocast": torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device)),
        "denormal": bool(tiny * 1 != 0),
        "mkldnn": (torch._C._get_mkldnn_enabled(), mkldnn.deterministic, mkldnn.allow_tf32),
        "cudnn": (cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32),
        "matmul": (
            cuda.matmul.allow_tf32,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        "attention": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
    }  # fmt: skip
    return str(found)


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


def behaviour(subject: Any, trained: nn.Module | None = None) -> str:
    """A digest of what a function, a class, a model or a plain value does, found from its code and its settings.

    Functions are followed into what they name; what comes with Python, torch, numpy and dpgrad stands by its name,
    since `code_version` covers it. The values of all tensors count, apart from those that the state dict of ``trained``
    holds, since a checkpoint has them; of these only types, shapes and whether they are trained. Where anything is met
    that cannot be compared, such as a generator, a clock, random numbers of Python or numpy, Python's ``hash``, a file,
    the environment, ``eval``, a function in C of another library, a graph module or an attribute of a module found
    only while running, the digest is a word never given twice.

    >>> behaviour(lambda x: x + 1) == behaviour(lambda x: x + 2)
    False
    """
    told = _Told({} if trained is None else trained.state_dict(keep_vars=True))
    try:
        told.add(subject)
    except Exception:  # what cannot be read cannot be compared, whatever the reason
        told.comparable = False
    return told.digest.hexdigest() if told.comparable else _never_again()


_KNOWN = {"builtins", "torch", "numpy", "dpgrad", *sys.stdlib_module_names}
_REPEATING = {  # modules of Python whose functions depend on nothing but what they are given
    "__future__", "_operator", "abc", "array", "base64", "binascii", "bisect", "builtins", "cmath", "collections",
    "contextlib", "copy", "copyreg", "dataclasses", "decimal", "enum", "fractions", "functools", "hashlib", "heapq",
    "itertools", "json", "logging", "math", "numbers", "operator", "re", "string", "struct", "textwrap", "types",
    "typing", "unicodedata", "warnings", "weakref", "zlib",
}  # fmt: skip
_REPEATING |= {f"_{name}" for name in _REPEATING} | {"_collections_abc", "_py_warnings", "torch", "numpy", "dpgrad"}
_CHANGING_NAMES = {  # what changes in them: by the process, or with what lies on the disk
    "numpy": {"random", "load", "loadtxt", "genfromtxt", "fromfile", "fromregex", "memmap", "open_memmap",
              "DataSource", "datetime64"},
    "torch": {"load", "seed", "initial_seed", "from_file", "hub", "load_state_dict_from_url", "PackageImporter",
              "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats", "max_memory_allocated",
              "max_memory_reserved", "elapsed_time"},
    "builtins": {"hash", "id", "open", "eval", "exec", "compile", "__import__", "input", "globals"},
}  # fmt: skip
_BY_TEXT = {"getattr", "vars", "attrgetter", "methodcaller", "__dict__", "__getattribute__", "__globals__"}
_STEADY_NAMES = {  # what does not change in modules that give access to the system
    "os": {"path", "sep", "name", "fspath", "PathLike", "join", "split", "splitext", "basename", "dirname"},
    "sys": {"byteorder", "float_info", "hexversion", "int_info", "maxsize", "stderr", "stdout", "version_info"},
}
_OFFERED = {"os": {*os.__all__, *os.path.__all__, "_Environ"}, "sys": {*dir(sys)}}
_PLAIN = {type(None), bool, int, float, complex, str, bytes, type(Ellipsis)}
_ARRAYS = {Tensor, nn.Parameter, np.ndarray, np.memmap}
_SHOWN = (
    np.generic, np.ufunc, np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice,
)  # fmt: skip  # distinguished by how they are written
_SLOTS = vars(nn.Module())  # what every module has; followed by what it is for


class _Told:
    """Collects what an object does into a digest; ``held`` are the tensors whose values a checkpoint has."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.comparable = True
        self._held = {id(tensor) for tensor in held.values()}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = [held]  # held, or an identity could be reused
        self._modules: set[tuple[str, frozenset[str]]] = set()

    def add(self, subject: Any) -> None:
        if not self.comparable:  # the answer is known: the code of a large library takes many seconds to follow
            return
        if type(subject) in _PLAIN:
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
            case tuple() | list() | set() | frozenset() | dict() | types.MappingProxyType():
                self._add_container(subject)
            case Tensor() | np.ndarray():
                self._add_values(subject)
            case np.ufunc() if getattr(np, subject.__name__, None) is not subject:  # of a library of any version
                self.comparable = False
            case _ if isinstance(subject, _SHOWN):
                self._word(repr(subject))
            case Enum():
                self._all(type(subject), subject.name, subject.value)
            case functools.partial():
                self._all(subject.func, subject.args, subject.keywords, vars(subject))
            case functools._lru_cache_wrapper():
                self.add(subject.__wrapped__)
            case weakref.ReferenceType():
                self.add(subject())
            case types.CodeType():
                self._all(subject.co_code, subject.co_consts, subject.co_names, subject.co_varnames)
            case types.ModuleType():  # which of its names are used is not known
                self._add_module(subject, None)
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
                self._add_compiled(getattr(subject, "__objclass__", subject), subject.__name__)
            case types.GetSetDescriptorType() | types.MemberDescriptorType():
                self._word(subject.__qualname__)
            case type():
                self._add_class(subject)
            case torch.fx.GraphModule():  # its code is made while running, and known by no name
                self.comparable = False
            case nn.Module():
                self._add_model(subject)
            case _:
                self._add_object(subject)

    def _add_container(self, subject: Any) -> None:
        match subject:
            case tuple() | list() if type(subject) in (tuple, list, torch.Size):
                self._all(len(subject), *subject)
            case set() | frozenset() if {type(one) for one in subject} <= _PLAIN:
                self._all(type(subject), len(subject), *sorted(map(repr, subject)))
            case dict() | types.MappingProxyType() if type(subject) in (dict, OrderedDict, types.MappingProxyType):
                self._all(len(subject), *(part for pair in subject.items() for part in pair))
            case _:  # one of a class of its own may do anything
                self.comparable = False

    def _add_values(self, values: "Tensor | np.ndarray[Any, Any]") -> None:
        if type(values) not in _ARRAYS or values.dtype == object:
            self.comparable = False
            return
        if isinstance(values, Tensor):
            self._word(f"{values.dtype} {tuple(values.shape)} {values.requires_grad}")
        if id(values) not in self._held:
            _add_array(self.digest, "", values)

    def _add_module(self, module: types.ModuleType, names: frozenset[str] | None) -> None:
        """A module may hold anything: its file is compared, and the values of ``names``, those that code may use."""
        self._word(module.__name__)
        self._refuse_changing(module.__name__, names)
        if module.__name__.partition(".")[0] in _KNOWN:
            return
        path = getattr(module, "__file__", None)
        if names is None or path is None or not Path(path).is_file():
            self.comparable = False
        elif (module.__name__, names) not in self._modules:
            self._modules.add((module.__name__, names))
            self.digest.update(Path(path).read_bytes())
            self._add_names({name: vars(module)[name] for name in names & set(vars(module))}, names)

    def _add_compiled(self, holder: Any, name: str) -> None:
        """A function written in C; that of a library other than the known ones may do anything in another version."""
        module = str(getattr(holder, "__module__", None) or "builtins")
        self._refuse_changing(module, {name})
        if module.partition(".")[0] not in _KNOWN:
            self.comparable = False

    def _refuse_changing(self, module: str, names: Set[str] | None) -> None:
        """Clocks, files, the environment and random numbers; torch's own repeat: a step draws them from the key."""
        top = module.partition(".")[0]
        if top not in _KNOWN:
            return
        if top in _STEADY_NAMES:
            changing = names is None or (names & _OFFERED[top]) - _STEADY_NAMES[top]
        else:
            found = _CHANGING_NAMES.get(top, set())
            changing = top not in _REPEATING or found & {*module.split("."), *(found if names is None else names)}
        if changing:
            self.comparable = False

    def _add_names(self, found: Mapping[str, Any], names: frozenset[str]) -> None:
        """What names stand for; of a module among them what ``names`` may take from it."""
        for name in sorted(found):
            self._word(name)
            if isinstance(found[name], types.ModuleType):
                self._add_module(found[name], names)
            else:
                self.add(found[name])

    def _add_function(self, function: types.FunctionType) -> None:
        self._all(function.__code__, function.__defaults__, function.__kwdefaults__, vars(function))
        names, builtin = frozenset(_names(function.__code__)), _named_by("LOAD_GLOBAL", function.__code__)
        if names & _BY_TEXT:
            names |= _texts(function.__code__.co_consts)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found = cell.cell_contents
            except ValueError:  # not filled yet
                self._word("empty")
            else:
                self._add_names({name: found}, names)
        # by its globals: the module it says it is of may be that of a function it wraps
        home = str(function.__globals__.get("__name__", ""))
        if home.partition(".")[0] in _KNOWN:
            self._refuse_changing(home, {function.__name__})
            return
        self._add_names({name: function.__globals__[name] for name in names & set(function.__globals__)}, names)
        if function.__name__ != "__hash__":  # the default one does not depend on an object's values
            self._refuse_changing("builtins", builtin - set(function.__globals__))
            self.comparable &= "__hash__" not in names
        every = _named_by("IMPORT_NAME", function.__code__)
        for name in every:
            self._refuse_changing(name, names)
        imported = {name for name in every if name.partition(".")[0] not in _KNOWN}
        if not imported <= set(sys.modules):  # relative, or not imported yet
            self.comparable = False
        self._add_names({name: sys.modules[name] for name in imported & set(sys.modules)}, names)

    def _add_class(self, kind: type) -> None:
        for ancestor in kind.__mro__:
            self._word(f"{ancestor.__module__}.{ancestor.__qualname__}")
            self._refuse_changing(ancestor.__module__, {ancestor.__name__})
            if not _is_known(ancestor):
                own = {name: value for name, value in vars(ancestor).items() if name not in _UNTOLD}
                self.add(own)

    def _add_model(self, model: nn.Module) -> None:
        self.add(type(model))
        for name, value in list(vars(model).items()):
            hooks = name in _SLOTS and name.endswith(_HOOKS) and isinstance(value, dict)
            self._all(name, list(value.values()) if hooks else value)

    def _add_object(self, subject: Any) -> None:
        """An object of a class written in Python, all of whose state can be seen."""
        kind = type(subject)
        self.add(kind)
        if any(_is_compiled(a) for a in kind.__mro__ if a is not object):
            self.comparable = False  # it may hold what only C code sees
        written = [vars(a) for a in kind.__mro__ if "__slots__" in vars(a)]
        slots = [name for own in written for name, v in own.items() if isinstance(v, types.MemberDescriptorType)]
        state = getattr(subject, "__dict__", None)
        if not isinstance(state, dict) and not slots:
            self.comparable = False
        self._all(dict(state or {}), [getattr(subject, name, None) for name in slots])


_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_UNTOLD = {
    "__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__firstlineno__", "__abstractmethods__",
    "_abc_impl", "__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__parameters__", "__orig_bases__", "__slots__",
}  # fmt: skip


def _is_known(kind: type) -> bool:
    """Whether a class is one of a library's own, found there by the name it has."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind and kind.__module__.partition(".")[0] in _KNOWN


def _is_compiled(kind: type) -> bool:
    """Whether a class is written in C: it makes its objects or has methods that no statement of Python made."""
    written = (types.WrapperDescriptorType, types.MethodDescriptorType)
    own = [value for value in vars(kind).values() if isinstance(value, written) and value.__objclass__ is kind]
    return bool(own) or isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)


def _names(code: types.CodeType) -> set[str]:
    """The global names, and the names of attributes, that a function and those inside it may use."""
    return set(code.co_names).union(*(_names(constant) for constant in _inner(code)))


def _named_by(opname: str, code: types.CodeType) -> set[str]:
    """The names in the instructions of one kind of a function and those inside it, without names of attributes."""
    own = {str(found.argval) for found in dis.get_instructions(code) if found.opname == opname}
    return own.union(*(_named_by(opname, constant) for constant in _inner(code)))


def _texts(constants: Iterable[Any]) -> set[str]:
    """The texts among the constants of a function, which may be names of attributes, with dots between them."""
    found = set[str]()
    for constant in constants:
        match constant:
            case str():
                found.update(constant.split("."))
            case tuple() | frozenset():
                found |= _texts(constant)
            case types.CodeType():
                found |= _texts(constant.co_consts)
    return found


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
