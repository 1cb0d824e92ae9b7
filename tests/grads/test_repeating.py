"""A pass is compared with one that was followed: what is the same, and what is not."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from reference import row_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads import bookkeeping, lifted, vmap
from dpgrad.grads.calls import MixedError
from dpgrad.grads.forks import Fork, Seen
from dpgrad.grads.lifted import CannotLiftError
from dpgrad.grads.repeating import DivergedError, Script
from dpgrad.grads.ways import Attributed

ROWS, OTHER = 6, 9
TABLE = torch.linspace(0, 1, 40)
Body = Callable[[Tensor], Tensor]


def passed(script: Script, body: Body, x: Tensor) -> Tensor:
    with script.of(x, {}):
        return script.ended(body(x))


def noted(body: Body, rows: int = ROWS) -> Script:
    script = Script()
    passed(script, body, torch.randn(rows, 3))
    return script


def caught(x: Tensor) -> Tensor:
    with suppress(RuntimeError):
        x.gather(1, torch.full((len(x), 1), 9))
    return x * 2


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * (g - g.mean(0))


def hooked(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    x.register_hook(lambda g: g - g.mean(0))
    return x * 2


@pytest.mark.parametrize(
    ("body", "other"),
    [
        (lambda x: x * 2, lambda x: x + 2),
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 2, lambda x: (x * 2) * 1),
        (lambda x: (x * 2) * 1, lambda x: x * 2),
        (lambda x: (x * 2, x * 3)[0], lambda x: (x * 2, x * 3)[1]),
        (lambda x: x * TABLE[:1], lambda x: x * TABLE.clone()[:1]),
        (lambda x: x * torch.tensor(2.0), lambda x: x * torch.tensor(3.0)),
        (lambda x: x * torch.from_numpy(TABLE.numpy()[:1]), lambda x: x * torch.from_numpy(TABLE.numpy()[1:2])),
        (lambda x: x * 2, caught),
        (lambda x: x * 2, Turned.apply),
        (lambda x: x.clone().requires_grad_() * 2, hooked),
    ],
    ids=["operation", "number", "more", "fewer", "result", "memory", "constant", "array", "error", "function", "hook"],
)
def test_another_pass_is_told(body: Body, other: Body) -> None:
    script = noted(body)
    with suppress(DivergedError):
        assert torch.equal(passed(script, body, torch.zeros(ROWS, 3)), body(torch.zeros(ROWS, 3)))
        with pytest.raises(DivergedError):
            passed(script, other, torch.randn(ROWS, 3))
        return
    assert body.__code__.co_names[-1] == "numpy"  # which is other memory every time


def test_parts_of_a_batch_are_like_each_other() -> None:
    script, x = Script(), torch.randn(3 * ROWS, 3)
    for part in x.split(ROWS):
        assert torch.equal(passed(script, lambda x: x[:, 1:] * 2, part), 2 * part[:, 1:])


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.view(len(x), 3, 1).expand(-1, -1, 4).flatten(1),
        lambda x: torch.cat([x, torch.ones(len(x), 2)], 1),
        lambda x: torch.cat([x, x])[len(x) :],
        lambda x: torch.stack([x, x * TABLE[0]], 1).mean(1),
        lambda x: x * TABLE[:3].expand(len(x), -1),
        lambda x: torch.func.vmap(lambda row: row.sum())(x),
        lambda x: torch.func.vmap(lambda row: row.sum() + 1)(x),  # which looks at the first sum for its type
        lambda x: nn.functional.conv1d(x.view(1, 3 * len(x), 1), torch.ones(3 * len(x), 1, 1), groups=3 * len(x)),
    ],
)
def test_passes_over_other_numbers_of_rows_do_the_same(body: Body) -> None:
    assert noted(body).alike(ROWS, noted(body, OTHER), OTHER)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x * len(x),
        lambda x: x * torch.full((len(x), 1), len(x)),
        lambda x: x * torch.tensor(len(x)),
        lambda x: x * TABLE[len(x)],
        lambda x: x * TABLE[: len(x)].sum(),
        lambda x: x * torch.ones(len(x)).sum(),
        lambda x: x * torch.arange(len(x)).amax(),
        lambda x: x[:, None].expand(-1, len(x), -1).sum(1),
        lambda x: x * x[0],
        lambda x: x + 0 * x[0, 0].view(1).exp(),
        lambda x: x.roll(len(x), 1),
        lambda x: x * 2 if len(x) > ROWS else x + 2,
        lambda x: x * 1 * 1 if len(x) > ROWS else x * 1,
    ],
)
def test_what_depends_on_the_number_of_rows_is_told(body: Body) -> None:
    assert not noted(body).alike(ROWS, noted(body, OTHER), OTHER)


class Late(nn.Module):
    """Draws for dropout, and does more once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.late = nn.Linear(3, 2), [False] * 1000  # more than are watched

    def forward(self, x: Tensor) -> Tensor:
        h = torch.dropout(self.layer(x), 0.5, True)
        return h.tanh() if self.late[-1] else h


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum(1)
    return out


def test_a_pass_that_ends_early_draws_its_random_numbers_again() -> None:
    """So that a step that is replayed, whose first pass is followed, has the same dropout."""
    model, x, weights = Late(), torch.randn(ROWS, 3), torch.ones(ROWS)
    layouts = bookkeeping.find_layouts(model, squares, x)
    bookkeeping.gradients(model, squares, x, weights, layouts=layouts)
    model.late[-1] = True
    found = []
    for known in (layouts, bookkeeping.find_layouts(model, squares, x)):
        torch.manual_seed(1)
        gradients = bookkeeping.gradients(model, squares, x, weights, layouts=known)
        found.append(gradients.uses["layer.weight"].per_example())
    assert torch.equal(*found)


def forgiving(model: nn.Module, x: Tensor) -> Tensor:
    with suppress(RuntimeError):
        x.gather(1, 9 * (x[:, :1] > 1).long())
        return squares(model, x)
    return 5 * squares(model, x)


def test_an_error_that_the_model_catches() -> None:
    model, weights = nn.Linear(3, 2), torch.ones(ROWS)
    good, bad = torch.zeros(ROWS, 3), torch.eye(ROWS, 3) * 2
    layouts = bookkeeping.find_layouts(model, forgiving, good)
    for _ in range(2):
        bookkeeping.gradients(model, forgiving, good, weights, layouts=layouts)
    with pytest.raises(MixedError, match=r"catches an error \(gather fails\)"):
        bookkeeping.gradients(model, forgiving, bad, weights, layouts=layouts)
    lifted.gradients(model, forgiving, good, weights)
    with pytest.raises(CannotLiftError, match=r"catches an error \(gather fails\)"):
        lifted.gradients(model, forgiving, bad, weights)
    vmap.gradients(model, forgiving, good, weights)
    with pytest.raises(UnsupportedModelError, match="use engine='single'"):
        vmap.gradients(model, forgiving, bad, weights)


@pytest.mark.parametrize("kind", [BaseException, Fork])
def test_a_question_whose_answers_differ_cannot_be_caught(kind: type[BaseException]) -> None:
    """All examples would go on as the one path that the model has for errors."""

    def asking(model: nn.Module, x: Tensor) -> Tensor:
        scale = 1
        try:
            scale = 3 if bool(x[0, 0] > 0) else 2
        except kind:
            scale = 7
        return scale * squares(model, x)

    model, x, seen = nn.Linear(3, 2), torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)), Seen()
    found = lifted.gradients(model, asking, x, torch.ones(ROWS), seen=seen)
    assert seen.paths == 2
    torch.testing.assert_close(found.uses["weight"].per_example(), row_gradients(model, asking, x)["weight"])


@pytest.mark.parametrize("asked", [torch._is_all_true, torch._is_any_true])
def test_functions_that_vmap_asks_all_examples_at_once(
    asked: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vmap of torch gives the answer of all of them, as `torch.distributions` asks whether arguments are valid."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) * (3 if asked(x > 0) else 1)

    model, x = nn.Linear(3, 2), torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    found = lifted.gradients(model, loss, x, torch.ones(ROWS))
    torch.testing.assert_close(found.uses["weight"].per_example(), row_gradients(model, loss, x)["weight"])
    monkeypatch.setattr(lifted, "_PLAINER", {})
    with pytest.raises(CannotLiftError, match="one result for all examples"):
        lifted.gradients(model, loss, x, torch.ones(ROWS))


def test_a_loss_may_add_a_penalty_on_the_parameters() -> None:
    """A parameter is given rows then, of which one is chosen in the end; it counts none of them."""

    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) + sum(p.square().sum() for p in model.parameters())

    engine, model = Attributed(), nn.Linear(3, 2)
    for rows in (ROWS, OTHER, ROWS):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
        found = engine(model, penalised, x, torch.ones(rows))
        torch.testing.assert_close(found.uses["weight"].per_example(), row_gradients(model, penalised, x)["weight"])
    assert engine.way.name == "batched"


class Blocks(nn.Module):
    """A block whose activations are computed again for the backward pass, and layers around it."""

    def __init__(self, block: Callable[["Blocks", Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.rand(4))
        self.block, self.options, self.runs, self.late = block, options, 0, False

    def run(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.block(self, x)

    def forward(self, x: Tensor) -> Tensor:
        self.runs = 0
        h: Tensor = checkpoint(self.run, x, use_reentrant=False, **self.options)
        out: Tensor = self.second(h)
        return out


def waved(m: Blocks, x: Tensor) -> Tensor:
    h: Tensor = m.first(x)
    return m.scale * h.sin()


def keeping_products() -> Any:
    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = func is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


HONEST: dict[str, Blocks] = {
    "plain": Blocks(waved),
    "nested": Blocks(lambda m, x: checkpoint(torch.cos, waved(m, x), use_reentrant=False).tanh()),
    "one after another": Blocks(lambda m, x: checkpoint(torch.cos, waved(m, x), use_reentrant=False)),
    "the same inputs twice": Blocks(
        lambda m, x: checkpoint(waved, m, x, use_reentrant=False) * checkpoint(waved, m, x, use_reentrant=False).cos()
    ),
    "some results kept": Blocks(waved, context_fn=keeping_products),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_block_that_runs_again_is_followed_once(name: str) -> None:
    model, x = HONEST[name], torch.randn(ROWS, 3)
    wanted = row_gradients(model, squares, x)
    model.runs = 1  # as after any pass
    layouts = bookkeeping.find_layouts(model, squares, x)
    for _ in range(3):
        uses = bookkeeping.gradients(model, squares, x, torch.ones(ROWS), layouts=layouts).uses
        torch.testing.assert_close(uses["first.weight"].per_example(), wanted["first.weight"])
        assert layouts.proven
        del uses  # which hold values of the batch


@pytest.mark.parametrize(
    "other",
    [
        lambda m, x: waved(m, x.flip(0)),
        lambda m, x: waved(m, x * (1 + (x > 9).any())),
        lambda m, x: m.scale * m.first(x).cos(),
        lambda m, x: m.scale * m.first(x).mul_(x.sum()).sin(),
        lambda m, x: waved(m, TABLE[: x.numel()].view_as(x)),
        lambda m, x: checkpoint(waved, m, x.flip(0), use_reentrant=False),
    ],
    ids=["order", "statistic", "operation", "in place", "other memory", "nested"],
)
@pytest.mark.parametrize("later", [False, True])
def test_a_block_that_runs_again_otherwise(other: Callable[[Blocks, Tensor], Tensor], later: bool) -> None:
    """The backward pass was not followed: one row moved the sum by 9 times the clip bound."""

    def block(m: Blocks, x: Tensor) -> Tensor:
        return (other if m.late and m.runs > 1 else waved)(m, x)

    model, x = Blocks(block), torch.randn(ROWS, 3)
    model.late = not later
    layouts = bookkeeping.find_layouts(model, squares, x)
    if later:
        bookkeeping.gradients(model, squares, x, torch.ones(ROWS), layouts=layouts)
        assert layouts.proven
        model.late = True
    with pytest.raises(MixedError, match="other things when it runs again"):
        bookkeeping.gradients(model, squares, x, torch.ones(ROWS), layouts=layouts)


def test_parameters_that_meet_rows_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done to see where their rows stand was taken for a part of the pass, which no other pass had."""
    model, x = Blocks(waved), torch.randn(ROWS, 3)
    layouts = bookkeeping.find_layouts(model, squares, x)
    bookkeeping.gradients(model, squares, x, torch.ones(ROWS), layouts=layouts)
    monkeypatch.setattr(bookkeeping, "_followed", None)
    bookkeeping.gradients(model, squares, x, torch.ones(ROWS), layouts=layouts)
