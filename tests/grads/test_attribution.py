"""No model can make the engine mistake one example for another: sums through `PrivateGradient`, case by case.

Each case of `attribution_cases` is stepped on lots that the test chooses: all rows, all but one, half of them. A sum
that is released must be that of one-example autograd, clipped, and one row must move it by at most the clip bound.
A refusal must name a remedy, and the remedy must work.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attribution_cases import CASES, NAMED, Case, Loss, rows_of
from reference import DEVICE, norms, row_gradients, trained
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad import Mechanism, PrivateGradient
from dpgrad.grads import ENGINES, check
from dpgrad.grads.precision import exact_products, norm_error
from dpgrad.mechanism import sampling
from dpgrad.randomness import draw
from dpgrad.training.step.lots import Lot, Lots
from thinned import thinned

NOISE = 1e-6  # the least that a mechanism takes, as a multiple of the clip bound: what is released is the sum
ONE_ROW = re.compile(r"(one|single) (row|example)", re.IGNORECASE)  # in the warning of a mixing case
UNUSED = re.compile(r"does not depend on ([\w., ]+?)(?: and \d+ more)?:")  # in a refusal
OTHER_ENGINE = re.compile(r"engine='(\w+)'")  # in a refusal
SEEDS, MANY_SEEDS = range(3), range(20)


# ---- the way to the engine: the one place to adapt when the library changes


class Stepped:
    """A `PrivateGradient` whose lots the test chooses; what it releases is the clipped sum, but for `NOISE`."""

    def __init__(self, model: nn.Module, loss: Loss, data: Any, clip: float, engine: str = "bookkeeping") -> None:
        self.size = max(1, len(pytree.tree_leaves(data)[0]) // 2)
        plan = Mechanism(sampling.Poisson(0.5), 64, NOISE, clip=clip, batch_size=self.size)
        self.model, self.data, self.clip = model, data, clip
        self.private = PrivateGradient(model, loss, plan, engine=engine, seed=1)

    def sum_of(self, lot: Tensor) -> dict[str, Tensor]:
        """The sum that a step on these rows releases, in float64."""
        with _drawing(lot):
            self.private.step(self.data)
        return {name: self.size * parameter.grad.double() for name, parameter in trained(self.model).items()}

    @property
    def charged(self) -> bool:
        return self.private.steps_taken > 0

    @property
    def way(self) -> str:
        """How the engine goes about this model, where the library says so."""
        return str(getattr(self.private, "way", ""))


@contextmanager
def _drawing(lot: Tensor) -> Iterator[None]:
    """Within the block every lot that is drawn is this one."""
    drawn, at, known = draw.chosen, Lots.at, Lots.known
    padded = torch.cat([lot, lot[:1].expand(2 * len(lot))])
    draw.chosen = lambda sampler, rows, step, key, device: lot.to(device)
    Lots.at = lambda self, step: Lot(padded.to("cpu" if self._to_host else self._device), len(lot))
    Lots.known = lambda self, step: [self.at(step)]
    try:
        yield
    finally:
        draw.chosen, Lots.at, Lots.known = drawn, at, known


# ---- precisions


@dataclass(frozen=True)
class Precision:
    """``sums``: by how much a sum may differ from the definition, of the sum of all its terms' lengths; ``single``: the
    same for one example's term, of the clip bound; ``margin``: what rounding may add to what one row moves."""

    name: str
    dtype: torch.dtype
    block: Callable[[], AbstractContextManager[Any]]
    sums: float
    single: float
    margin: float


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE, torch.bfloat16)


# τ is taken off every factor and is known; what else differs in float32 and float64 is rounding and NOISE. A term that
# is charged to another example differs by a share of the clip bound that is far larger. In float32 τ leaves room for
# both; in float64 it leaves none for NOISE. In bfloat16, and in TF32, rows round differently with the number of rows,
# which the guarantee leaves out for neighbours by add-remove; with TF32 the norms are also lengthened by what it hides.
FLOAT32 = Precision("float32", torch.float32, exact_products, sums=1e-5, single=1e-3, margin=0.0)
FLOAT64 = Precision("float64", torch.float64, exact_products, sums=1e-6, single=1e-4, margin=1e-4)
BFLOAT16 = Precision("bfloat16", torch.float32, _bfloat16, sums=2e-3, single=0.02, margin=0.02)
TF32 = Precision("TF32", torch.float32, _tf32, sums=0.02, single=0.1, margin=0.02)


# ---- what a case comes to


@dataclass(frozen=True)
class Outcome:
    """What became of a case: ``refused``, ``exact``, or ``wrong`` in the way that ``detail`` says.

    ``failed`` is a refusal that is not a ValueError: nothing was released, but nothing was explained either.
    """

    kind: str
    detail: str = ""
    warned: bool = False
    way: str = ""
    charged: bool = False


def made(case: Case, seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Loss, Any]:
    model, loss, data = case.make(seed)

    def converted(leaf: Tensor) -> Tensor:
        return leaf.to(DEVICE, dtype if leaf.is_floating_point() else leaf.dtype)

    return model.to(DEVICE, dtype), loss, pytree.tree_map(converted, data)


class Defined:
    """The definition: the gradient of each row's loss on a batch of that row alone, and sums of them, clipped."""

    def __init__(self, model: nn.Module, loss: Loss, data: Any, precision: Precision, clipped: float = 0.7) -> None:
        with precision.block():
            self.gradients = {name: each.double() for name, each in row_gradients(model, loss, data).items()}
        self.norms = torch.tensor(norms(self.gradients), dtype=torch.float64, device=DEVICE)
        finite = self.norms[self.norms.isfinite() & (self.norms > 0)]
        self.clip = float(finite.quantile(1 - clipped))  # what share of the rows is clipped
        self.shrink = 1 - norm_error(precision.dtype)

    def factors(self, lot: Tensor) -> Tensor:
        found = self.shrink * (self.clip / self.norms[lot]).clamp(max=1)
        return torch.where(self.norms[lot].isfinite(), found, 0)

    def sum_of(self, lot: Tensor) -> dict[str, Tensor]:
        kept, factors = lot[self.norms[lot].isfinite()], self.factors(lot[self.norms[lot].isfinite()])
        return {name: torch.einsum("b,b...->...", factors, each[kept]) for name, each in self.gradients.items()}

    def lengths(self, lot: Tensor) -> float:
        """The lengths of all terms, added up."""
        return float((self.factors(lot) * self.norms[lot].nan_to_num(0, 0, 0)).sum())


def length(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(each.square().sum()) for each in tensors.values()))


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one[name] - other[name] for name in one}


def outcome(
    case: Case,
    made: tuple[nn.Module, Loss, Any],
    precision: Precision = FLOAT32,
    engine: str = "bookkeeping",
    left_out: int = 3,
) -> Outcome:
    """Step a case on all rows, without some of them one at a time, on half and on one; say what came of it."""
    model, loss, data = made
    # A wrong factor shows on rows that are clipped, a wrong weight in the loss on rows that are not.
    defined = Defined(model, loss, data, precision, clipped=0.7 if case.expect in ("exact", "separable") else 0.1)
    with precision.block(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            stepped = Stepped(model, loss, data, defined.clip, engine)
        except ValueError as refusal:
            return Outcome("refused", str(refusal))
        try:
            fault = _fault(case, stepped, defined, precision, left_out)
        except ValueError as refusal:
            return Outcome("refused", str(refusal), charged=stepped.charged)
        except (RuntimeError, IndexError, TypeError, KeyError, AttributeError, AssertionError) as error:
            return Outcome("failed", f"{type(error).__name__}: {error}", charged=stepped.charged)
    warned = any(ONE_ROW.search(str(warning.message)) for warning in caught)
    return Outcome("wrong" if fault else "exact", fault, warned, stepped.way, charged=True)


def _fault(case: Case, stepped: Stepped, defined: Defined, precision: Precision, left_out: int) -> str:
    """The first thing that is wrong with the sums on several lots, or nothing."""
    rows = rows_of(stepped.data)
    everyone = torch.arange(rows, device=DEVICE)
    whole = stepped.sum_of(everyone)
    moved = {
        row: difference(whole, stepped.sum_of(everyone[everyone != row]))
        for row in _suspects(case, stepped.data, left_out)
    }
    change = max(map(length, moved.values())) / defined.clip
    if change > 1 + precision.margin:
        return f"one row moves the sum by {change:.2f} × clip"
    off = max(length(difference(found, defined.sum_of(everyone[row : row + 1]))) for row, found in moved.items())
    if off > precision.single * defined.clip:
        return f"the term of one row is off by {off / defined.clip:.2g} × clip"
    drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[: rows // 2]
    half = drawn.sort().values.to(DEVICE)
    alone = everyone[list(moved)[:1]]
    for lot, found in ((everyone, whole), (half, stepped.sum_of(half)), (alone, stepped.sum_of(alone))):
        off = length(difference(found, defined.sum_of(lot)))
        if off > precision.sums * defined.lengths(lot) + precision.single * defined.clip:
            return f"the sum of {len(lot)} row(s) is off by {off / defined.clip:.2g} × clip"
    return ""


def _suspects(case: Case, data: Any, count: int) -> list[int]:
    """Rows to leave out: the first, the last, and those that make the fault show."""
    rows = rows_of(data)
    odd = [] if case.odd is None else case.odd(data).nonzero()[:, 0].tolist()
    others = [0, rows - 1, rows // 2, rows // 3, 2 * rows // 3]
    return list(dict.fromkeys([*odd[: max(1, count // 2)], *others]))[:count]


def complaint(case: Case, found: Outcome, made: Callable[[], tuple[nn.Module, Loss, Any]], precision: Precision) -> str:
    """What is wrong with the outcome, given what the case allows; nothing where all is well."""
    if found.kind in ("wrong", "failed"):
        return f"{found.kind}: {found.detail}"
    if found.kind == "exact":
        match case.expect:
            case "refused":
                return "accepted, though one row alone means something else than what was written"
            case "mixing":
                return "" if found.warned else "the statistic of one row instead of the batch's, without a warning"
            case _:
                return "warned of a statistic of the batch, though there is none" if found.warned else ""
    if case.expect == "exact":
        return f"a plain model is refused: {found.detail}"
    return _bad_remedy(case, found.detail, made, precision)


def _bad_remedy(case: Case, refusal: str, made: Callable[[], tuple[nn.Module, Loss, Any]], precision: Precision) -> str:
    """Why the remedy that a refusal names does not work, or nothing where it does."""
    if not re.search(r": \S+ \S+", refusal):
        return f"the refusal names no remedy: {refusal}"
    if unused := UNUSED.search(refusal):
        gradients = Defined(*made(), precision).gradients
        if used := [name for name in unused[1].split(", ") if bool(gradients[name].any())]:
            return f"the loss of some rows does depend on {', '.join(used)}: {refusal}"
    if named := OTHER_ENGINE.search(refusal):
        if named[1] not in ENGINES:
            return f"the remedy names engine {named[1]!r}, which there is not: {refusal}"
        found = outcome(case, made(), precision, engine=named[1])
        allowed = found.kind == "exact" and (case.expect == "separable" or found.warned)
        if case.expect in ("mixing", "refused"):
            allowed |= found.kind == "refused" and not OTHER_ENGINE.search(found.detail)
        return "" if allowed else f"engine={named[1]!r} does not help ({found.kind}: {found.detail}): {refusal}"
    if case.mended is None:
        return "" if case.expect != "separable" else f"refused, with no remedy known to work: {refusal}"
    model, loss, data = made()
    model.body = case.mended
    found = outcome(case, (model, loss, data), precision)
    return "" if found.kind == "exact" else f"written as asked, {found.kind}: {found.detail}; {refusal}"


def assert_holds(case: Case, seed: int, precision: Precision, placed: Callable[[Any], Any] = lambda data: data) -> None:
    def fresh() -> tuple[nn.Module, Loss, Any]:
        model, loss, data = made(case, seed, precision.dtype)
        return model, loss, placed(data)

    assert not (wrong := complaint(case, outcome(case, fresh(), precision), fresh, precision)), wrong


# ---- the tests

of_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@of_cases
def test_no_example_is_mistaken_for_another(case: Case) -> None:
    assert_holds(case, 0, FLOAT32)


@pytest.mark.exhaustive
@of_cases
def test_no_example_is_mistaken_on_many_datasets(case: Case) -> None:
    for seed in MANY_SEEDS:
        assert_holds(case, seed, FLOAT32)


@pytest.mark.exhaustive
@of_cases
def test_no_example_is_mistaken_in_double(case: Case) -> None:
    for seed in SEEDS:
        assert_holds(case, seed, FLOAT64)


SMOOTH = [case for case in CASES if case.smooth]


@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.name)
def test_no_example_is_mistaken_in_bfloat16(case: Case) -> None:
    assert_holds(case, 0, BFLOAT16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 is of CUDA devices")
@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.name)
def test_no_example_is_mistaken_in_tf32(case: Case) -> None:
    assert_holds(case, 0, TF32)


# Where the rows that make the fault show may lie: the first rows are not all there are.


def _placed(case: Case, where: str) -> Callable[[Any], Any]:
    def placed(data: Any) -> Any:
        odd = case.odd(data).to(torch.uint8)
        order = odd.argsort(stable=True, descending=where != "last")
        if where == "middle":
            order = order.roll(len(order) // 2)
        return pytree.tree_map(lambda leaf: leaf[order], data)

    return placed


WITH_ODD = [case for case in CASES if case.odd is not None]


@pytest.mark.parametrize(
    ("case", "where"), thinned(WITH_ODD, ["first", "middle", "last"]), ids=lambda value: getattr(value, "name", value)
)
def test_wherever_the_odd_rows_lie(case: Case, where: str) -> None:
    assert_holds(case, 7, FLOAT32, _placed(case, where))


# Right at the initial values only: what is released later is right, or the run stops.


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        # One example at a time is the definition itself; of the others only some pairs notice, so that all are taken.
        pytest.param(case, engine, marks=pytest.mark.exhaustive if engine == "single" else ())
        for case in CASES
        if case.drifts
        for engine in ENGINES
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_is_right_at_first_stays_right_or_stops(case: Case, engine: str) -> None:
    model, loss, data = made(case, 0)
    everyone = torch.arange(rows_of(data), device=DEVICE)
    clip = Defined(model, loss, data, FLOAT32).clip
    stepped = Stepped(model, loss, data, clip, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 / (clip * len(everyone)))
    with FLOAT32.block(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the way that is taken
        for step in range(5):
            try:
                found = stepped.sum_of(everyone)
            except ValueError as stopped:
                wrong = _bad_remedy(case, str(stopped), lambda: made(case, 0), FLOAT32)
                assert not wrong, wrong
                return
            defined = Defined(model, loss, data, FLOAT32)
            defined.clip = clip
            off = length(difference(found, defined.sum_of(everyone))) / clip
            assert off <= FLOAT32.sums * len(everyone) + FLOAT32.single, f"step {step}: off by {off:.2g} × clip"
            optimizer.step()


# `check` sees what a step would see, given rows from all over the data.


@pytest.mark.parametrize("case", [case for case in CASES if case.expect == "exact"], ids=lambda case: case.name)
def test_check_accepts_plain_models(case: Case) -> None:
    model, loss, data = made(case, 0)
    check(model, loss, data)


@pytest.mark.parametrize("case", [case for case in CASES if case.expect == "mixing"], ids=lambda case: case.name)
def test_check_refuses_or_warns_of_statistics_of_the_batch(case: Case) -> None:
    model, loss, data = made(case, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check(model, loss, data)
        except ValueError:
            return
    assert any(ONE_ROW.search(str(warning.message)) for warning in caught)


# The harness itself: its remedies mean the same as what they replace, and it sees a fault where there is one.


@pytest.mark.parametrize("case", [case for case in CASES if case.mended], ids=lambda case: case.name)
def test_a_mended_model_has_the_gradients_of_the_first(case: Case) -> None:
    model, loss, data = made(case, 3, torch.float64)
    data = pytree.tree_map(lambda leaf: leaf[:12], data)
    other = copy.deepcopy(model)
    other.body = case.mended
    one, two = row_gradients(model, loss, data), row_gradients(other, loss, data)
    for name, wanted in one.items():
        torch.testing.assert_close(two[name], wanted, rtol=1e-9, atol=1e-9 * float(wanted.abs().max()))


class Exchanged(Stepped):
    """An engine that takes the rows of one layer in another order, as one that was deceived does."""

    def __init__(self, defined: Defined, data: Any, rows: list[int]) -> None:
        self.data, self.defined = data, copy.copy(defined)
        gradients = dict(defined.gradients)
        gradients["layer.weight"] = gradients["layer.weight"].clone()
        gradients["layer.weight"][rows] = gradients["layer.weight"][rows[::-1]]
        self.defined.norms = torch.tensor(norms(gradients), dtype=torch.float64, device=DEVICE)

    def sum_of(self, lot: Tensor) -> dict[str, Tensor]:
        return self.defined.sum_of(lot)


@pytest.mark.parametrize("precision", [FLOAT32, FLOAT64], ids=lambda precision: precision.name)
@pytest.mark.parametrize("rows", [[], [2, 3], [10, 25]])
def test_two_rows_exchanged_in_one_layer_are_seen(precision: Precision, rows: list[int]) -> None:
    case = NAMED["MLP"]
    model, loss, data = made(case, 0, precision.dtype)
    defined = Defined(model, loss, data, precision)
    assert bool(_fault(case, Exchanged(defined, data, rows), defined, precision, 3)) == bool(rows)
