"""What the ranks of a run must have in common, compared before the first step, and what they may not do.

Everything is compared by digests. What cannot be shown equal, such as a loss that holds a generator, is left out:
noise and charge do not depend on it.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset

from dpgrad import _validate
from dpgrad.accounting.events import Event, to_json
from dpgrad.distributed.ranks import Phase, Ranks, weights_sum
from dpgrad.distributed.share import Share
from dpgrad.errors import OptionError, RanksError, ResumeError
from dpgrad.grads.fsdp import is_sharded
from dpgrad.grads.sums import trainable
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import draw
from dpgrad.runs import replay
from dpgrad.training import source

__all__ = [
    "data_word", "mechanism_word", "model_word", "noise_digest", "opened", "refuse_features", "refuse_other_past",
    "refuse_with_shards", "rows_word", "same_lots", "same_model", "settings", "share_of", "weights_at",
]  # fmt: skip

_COMPARED = 16  # rows of data whose contents cannot all be compared
_OFTEN = 16  # weights are compared at so many steps, and at every such step later: it waits for a CUDA device
_AT_ONCE = 4096  # rows


def refuse_features(ranks: Ranks, features: Mapping[str, object]) -> None:
    """Refuse, by name, what keeps something of single examples, which each rank sees a part of."""
    given = [name for name, value in features.items() if value is not None and value is not False]
    if not ranks.alone and given:
        raise OptionError(
            f"{given[0]} keeps values of single examples, and each of the {ranks.size} ranks sees a part of them: "
            "leave it out, or run in one process"
        )


def refuse_with_shards(model: nn.Module, features: Mapping[str, object]) -> None:
    """Refuse, by name, what needs whole parameters between the steps of a model that is sharded by fully_shard."""
    given = [name for name, value in features.items() if value is not None and value is not False]
    if given and is_sharded(model):
        raise OptionError(
            f"{given[0]} needs whole parameters between steps, and the model is sharded by fully_shard: leave it out, "
            "or give the plain model to every rank"
        )


def settings(mechanism: Mechanism, start: int, before: Event, **others: Any) -> dict[str, str]:
    """What a private step depends on, by name, in words."""
    found = {"mechanism": mechanism_word(mechanism), "start": f"{start} {to_json(before)}"}
    found["code"] = replay.code_version()
    for name, value in others.items():
        word = replay.behaviour(value)
        found[name] = type(value).__qualname__ if replay.incomparable(word) else word
    return found


def opened(
    ranks: Ranks, model: nn.Module, key: Key, mechanism: Mechanism, start: int, before: Event, **others: Any
) -> Key:
    """The key of all ranks, which is rank 0's, after settings were compared and its weights were given to every rank.

    From here on, meetings carry this key and its first step, which distinguishes two runs on the same ranks.
    """
    if ranks.alone:
        return key
    ranks.refuse_different(settings(mechanism, start, before, **others))
    ranks.share_model(model)
    found = ranks.from_first(lambda: key)
    ranks.named(int.from_bytes(found.derive("ranks", str(start), size=7), "little"))
    return found


def mechanism_word(mechanism: Mechanism) -> str:
    """The mechanism by what it does at each step: a schedule may be a function, which has no other form."""
    patterns = [group.pattern for group in mechanism.groups]
    told = mechanism.steps, mechanism.divisor, mechanism.relation.value, patterns, repr(mechanism.adaptive_clip)
    noise = noise_digest(mechanism, range(mechanism.steps))
    return f"{type(mechanism.sampler).__qualname__} {told} {to_json(mechanism.event())} {noise}"


def noise_digest(mechanism: Mechanism, steps: range) -> str:
    """A digest of the batches, the clip bounds and the noise of ``steps``."""
    digest = hashlib.blake2b(digest_size=16)
    for step in steps[:1]:
        digest.update(to_json(mechanism.sampler.event(1.0, step)).encode())
    for group in (mechanism.groups or (None,)) if steps else ():
        digest.update(np.ascontiguousarray(mechanism.clips(steps, group)).tobytes())
        digest.update(np.ascontiguousarray(mechanism.stds(steps, group)).tobytes())
    return digest.hexdigest()


def refuse_other_past(state: Mapping[str, Any], same: bool, mechanism: Mechanism, start: int) -> None:
    """Refuse the state of a PrivateGradient that this mechanism and ``start`` do not lead to.

    ``same`` says whether the key is that of the state: its steps must then have had these batches, bounds and noise.
    """
    step = state["step"]
    if same and state["start"] != start:
        raise ResumeError(f"start must be {state['start']:,}, as when the state was taken, got {start:,}")
    _validate.whole(least=start, most=mechanism.steps, **{"step of the state": step})
    if same and state.get("noise") not in (None, noise_digest(mechanism, range(start, step))):  # 0.1.0 kept none
        raise ResumeError(
            f"the state was taken with other batches, clip bounds or noise, at step {step:,}: give the mechanism it "
            "was taken with; or, for another one, a new key, whose noise is its own"
        )


def model_word(model: nn.Module) -> str:
    """The modules of a model, their modes, and the parameters that are trained."""
    modules = [(name, type(module).__qualname__, module.training) for name, module in model.named_modules()]
    trained = [(name, tuple(each.shape), str(each.dtype)) for name, each in trainable(model).items()]
    return repr((modules, trained))


def same_model(ranks: Ranks, model: nn.Module, microbatch: int | None) -> int | None:
    """The microbatch of all ranks, after their models were compared: the smallest, which fits into the memory of all.

    A run that resumes has the microbatch of rank 0 on every rank, and must round as before.
    """
    every = ranks.every((model_word(model), microbatch), Phase.PREPARED)
    if len({word for word, _ in every}) > 1:
        with ranks.agreeing():
            raise RanksError("ranks do not have the same model: train the same parameters, in the same modes, on all")
    return min((most for _, most in every if most is not None), default=None)


def same_lots(ranks: Ranks, mechanism: Mechanism, rows: int, key: Key, start: int) -> None:
    """Refuse ranks that draw different rows at the first or the last step: a row might count twice, or never.

    A sampler of the user's own may draw from more than (key, step).
    """
    if ranks.alone or start >= mechanism.steps:
        return
    drawn = [draw.chosen(mechanism.sampler, rows, step, key, "cpu") for step in (start, mechanism.steps - 1)]
    ranks.refuse_different({"batches": replay.data_digest(key, drawn)})


def weights_at(ranks: Ranks, model: nn.Module, taken: int) -> int:
    """What stands for the weights in a meeting after ``taken`` steps; 0 where they are not compared.

    A row more or less moves the bound between two ranks' parts of a step by up to a row at each. Rows that another
    rank works on then must have the same gradients there, or more than one row's contribution changes.
    """
    if ranks.alone or (taken >= _OFTEN and taken % _OFTEN):
        return 0
    return weights_sum(trainable(model).values())


def data_word(data: Any, key: Key, rows: int) -> str:
    """A digest of the data under a key; of data that cannot be compared, of a few rows at secret places."""
    digest = replay.data_digest(key, source.comparable(data))
    if not replay.incomparable(digest) or not rows:
        return digest
    random = np.random.default_rng(np.frombuffer(key.derive("rows of ranks"), np.uint64))
    places = torch.from_numpy(random.integers(rows, size=_COMPARED))
    few = source.gathered(data, places, torch.device("cpu")) if isinstance(data, Dataset) else data
    leaves: Iterable[Any] = pytree.tree_leaves(few)
    taken = [np.asarray(leaf)[places.numpy() if few is data else slice(None)] for leaf in leaves]
    return replay.data_digest(key, taken)


def rows_word(data: Any, key: Key, rows: int) -> str:
    """A digest of rows under a key, the same in whatever order they are; of what cannot be compared, `data_word`."""
    held = source.comparable(data)
    leaves = pytree.tree_leaves(held.tensors if type(held) is TensorDataset else held)
    plain = all(type(leaf) in (Tensor, np.ndarray, np.memmap) and leaf.dtype != object for leaf in leaves)
    if not leaves or not plain or any(not leaf.ndim or len(leaf) != rows for leaf in leaves):
        return data_word(data, key, rows)
    total, own = 0, key.derive("rows of ranks in any order")
    for start in range(0, rows, _AT_ONCE):
        few = [_row_bytes(leaf[start : start + _AT_ONCE]) for leaf in leaves]
        for row in np.concatenate(few, 1):
            total += int.from_bytes(hashlib.blake2b(row.tobytes(), key=own, digest_size=16).digest(), "little")
    return str([total % (1 << 128), *((str(leaf.dtype), tuple(leaf.shape[1:])) for leaf in leaves)])


def _row_bytes(values: "Tensor | np.ndarray[Any, Any]") -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The bytes of each row, (rows, bytes)."""
    shape = len(values), math.prod(values.shape[1:])
    if isinstance(values, Tensor):
        return values.detach().cpu().contiguous().reshape(shape).view(torch.uint8).numpy()
    return np.ascontiguousarray(values).reshape(shape).view(np.uint8)


def share_of(ranks: Ranks, rows: int, parts: bool, word: Callable[[], str]) -> tuple[Share, int]:
    """The share of this rank, and how many rows all ranks have, after their data were compared.

    Guarantee: where every rank holds all rows they are the same rows. Where each holds a part, two ranks with the same
    rows, in whatever order, are refused: each row would count twice.
    """
    if ranks.alone:
        return Share(), rows
    every = ranks.every((rows, word()), Phase.COMPARED)
    if not parts:
        other = next((rank for rank, each in enumerate(every) if each != every[0]), None)
        if other is not None:
            with ranks.agreeing():
                raise RanksError(
                    f"ranks 0 and {other} do not have the same data: give every rank all rows in the same order, or "
                    'declare that each holds its own part, with rows_on_rank="part"'
                )
        return Share(ranks.rank, ranks.size), rows
    words = [digest for held, digest in every if held]
    if len(set(words)) < len(words):
        with ranks.agreeing():
            raise RanksError(
                'two ranks hold the same rows, and rows_on_rank="part" says that each has its own: a row on two ranks '
                "would count twice. Give every rank its own rows, or leave out rows_on_rank"
            )
    ends = np.cumsum([held for held, _ in every]).tolist()
    return Share(ranks.rank, ranks.size, range(ends[ranks.rank] - rows, ends[ranks.rank])), ends[-1]
