"""What a run shows: the bound on what is spent so far, evaluation on held-out rows."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from dpgrad.accounting import account
from dpgrad.accounting.events import Approximate, Compose, Event, Relation
from dpgrad.errors import DataError
from dpgrad.mechanism.mechanism import Group
from dpgrad.training import curves
from dpgrad.training.curves import Progress, RunWatch, Spent, evaluate, judging, refuse_held_out
from dpgrad.training.losses import Metric, NamedLoss, metric_named
from dpgrad.training.plan import make


def rows(count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :3].argmax(1)


@pytest.mark.parametrize(("method", "accountant"), [("dpsgd", "pld"), ("dpsgd", "moments"), ("dpsgd-dynamic", "rdp")])
def test_the_bound_on_what_is_spent_so_far(method: str, accountant: str) -> None:
    plan = make(method, rows=1000, batch_size=50, steps=70, epsilon=3.0, delta=1e-4, accountant=accountant)
    spent = Spent(plan)
    bounds = [spent(step) for step in range(1, 71)]
    assert bounds == sorted(bounds)
    assert bounds[-1] == plan.guarantee.epsilon
    for step in (1, 8, 33, 69):
        assert plan.epsilon_after(step) <= bounds[step - 1] <= plan.guarantee.epsilon
    assert len(set(bounds)) == 20
    for step in range(7, 70, 7):  # where `dpgrad train` prints a line
        assert bounds[step - 1] == plan.epsilon_after(step) < plan.guarantee.epsilon


@pytest.mark.parametrize(("method", "every"), [("dpsgd-amended", 4), ("dpsgd", 1), ("dpgd", 7)])
def test_the_curve_of_epsilon_is_that_of_shorter_runs(method: str, every: int) -> None:
    """Up to the last step before the end, and so is what the progress shows at each point."""
    options: dict[str, Any] = {} if method == "dpgd" else {"batch_size": 143}
    plan = make(method, rows=1437, steps=13, epsilon=3.0, delta=1e-5, **options)
    seen: list[Progress] = []
    watch = RunWatch(plan, every, None, seen.append)
    for step in range(1, 14):
        watch.after(step, 0.1)
    for point in watch.points:
        assert point.epsilon == seen[point.step - 1].epsilon == plan.epsilon_after(point.step)
    drawn = [point.epsilon for point in watch.points]
    assert all(one < other for one, other in pairwise(drawn))
    assert drawn[-1] == plan.guarantee.epsilon


def test_many_points_do_not_price_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make("dpsgd", rows=1000, batch_size=50, steps=400, noise_multiplier=1.5, delta=1e-4)
    asked: list[Event] = []
    monkeypatch.setattr(curves, "account", lambda event, *rest: asked.append(event) or account(event, *rest))
    watch = RunWatch(plan, 1, None, lambda now: None)
    for step in range(1, 401):
        watch.after(step, 0.1)
    assert len(asked) < 20
    for point in watch.points[::37]:
        assert plan.epsilon_after(point.step) <= point.epsilon <= plan.epsilon_after(min(point.step + 20, 400))


def test_what_is_released_beside_is_priced_by_the_accountant_of_the_plan() -> None:
    """One that is private with a δ of its own has no Rényi divergence."""
    beside = Approximate(0.1, 1e-6, Relation.ZERO_OUT)
    plan = make("dpsgd", rows=1000, batch_size=50, steps=40, epsilon=3.0, delta=1e-4, also_released=beside)
    assert Spent(plan).at(20) == plan.epsilon_after(20) < plan.guarantee.epsilon


def test_what_earlier_keys_spent_is_in_the_bound() -> None:
    """Forty steps under one key, of which a new one takes the last ten again, and goes on."""
    plan = make("dpsgd", rows=1000, batch_size=50, steps=400, noise_multiplier=1.5, delta=1e-4)
    before = plan.mechanism.with_steps(40).event()
    spent = Spent(plan, before, began=30)
    for step in (31, 70, 180):
        own = [plan.mechanism.step_event(t) for t in range(30, step)]
        truth = account(Compose((before, *own)), plan.mechanism.relation).epsilon(plan.delta)
        assert truth <= spent(step) <= plan.guarantee.epsilon
        assert spent(step) > Spent(plan)(step)
    watch = RunWatch(plan, 1, None, None)
    watch.begin(30, [], 390, before, 30)
    watch.after(31, 0.1)
    assert watch.points[0].epsilon == spent(31)


def test_modules_keep_their_modes() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    model[0].eval()
    with judging(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == [True, False, True]


def test_many_rows_are_judged_in_pieces() -> None:
    inputs, targets = rows(curves._JUDGED + 7)
    metric = metric_named("cross-entropy", NamedLoss("cross-entropy"))
    model = nn.Linear(4, 3)
    whole = nn.functional.cross_entropy(model(inputs), targets)
    assert evaluate(model, metric, (inputs, targets)) == pytest.approx(whole.item(), rel=1e-6)
    assert evaluate(model, metric, TensorDataset(inputs, targets)) == pytest.approx(whole.item(), rel=1e-6)


def test_a_metric_of_another_shape_is_refused() -> None:
    metric = Metric("mean", lambda model, batch: model(batch[0]).mean())
    with pytest.raises(ValueError, match=r"metric mean on held_out: .* one value per example, shape \(5,\), got"):
        evaluate(nn.Linear(4, 3), metric, rows(5))


def test_held_out_rows_that_are_not_numbers_are_refused_in_any_form() -> None:
    inputs, targets = rows(9)
    refuse_held_out((inputs, targets), rows(9))
    inputs[8, 1] = math.inf
    for held in ((inputs, targets), {"x": inputs.numpy(), "y": targets}):
        with pytest.raises(ValueError, match=r"held_out\[.*\] holds values that are not finite: remove those rows"):
            refuse_held_out(held, rows(9))
    refuse_held_out(np.arange(3), rows(9))


def test_the_training_rows_are_not_judged() -> None:
    """Shown without noise, a figure on them would not be private."""
    data = inputs, targets = rows(9)
    dataset = TensorDataset(*data)
    for held in (data, (inputs[:5], targets[:5]), {"x": inputs.numpy()}, (rows(9)[0], targets)):
        with pytest.raises(ValueError, match="held_out are rows of the training data"):
            refuse_held_out(held, data)
    with pytest.raises(ValueError, match="held_out are rows of the training data"):
        refuse_held_out(dataset, dataset)
    refuse_held_out((inputs[5:], targets[5:]), (inputs[:5], targets[:5]))


def table(order: Literal["C", "F"]) -> np.ndarray[Any, Any]:
    return np.asarray(np.arange(60.0).reshape(12, 5), order=order)


@pytest.mark.parametrize("order", ["C", "F"])
def test_parts_of_the_same_memory_are_the_same_rows(order: Literal["C", "F"]) -> None:
    rows = table(order)
    same = [rows[1:], rows[::2], rows[::-1], rows[3:4], rows[:, ::-1][2:], rows[:, 0], rows[4:, 0]]
    for held in (*same, *(torch.from_numpy(part) for part in (rows[1:], rows[3::4]))):
        with pytest.raises(ValueError, match="held_out are rows of the training data"):
            refuse_held_out(held, rows)
    with pytest.raises(ValueError, match="held_out are rows of the training data"):
        refuse_held_out(rows[:7], rows[6:])
    for held, trained in (
        (rows[6:], rows[:6]),
        (rows[::2], rows[1::2]),
        (rows[:6][::-1], rows[6:]),
        (rows[:3], rows[9:]),
    ):
        refuse_held_out(held, trained)
    refuse_held_out(rows.copy()[3:], rows)
    refuse_held_out(rows[:, :0], rows)


def test_parts_of_the_same_dataset_are_the_same_rows() -> None:
    data = inputs, targets = rows(9)
    dataset, plain = TensorDataset(*data), Squares()
    part = Subset(dataset, [1, 4, 7])
    for held, trained in (
        (part, dataset), (dataset, part), (part, Subset(dataset, [0, 7])), (Subset(part, [2]), Subset(dataset, [7])),
        (Subset(dataset, [-1]), Subset(dataset, [8])), (part, TensorDataset(*data)), (part, data), (data, dataset),
        (part, (inputs[4:5], rows(9)[1][:1])), (Subset(plain, [1]), plain), (plain, plain),
        (Subset(plain, [1, 2]), Subset(plain, [2, 3])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="held_out are rows of the training data"):
            refuse_held_out(held, trained)
    for held, trained in (
        (part, Subset(dataset, [0, 2])), (part, (inputs[5:7], targets[5:7])), (Subset(plain, [1]), Subset(plain, [2])),
        (dataset, TensorDataset(*rows(9))), (plain, Squares()), (plain, data),
    ):  # fmt: skip
        refuse_held_out(held, trained)


class Squares(Dataset[Tensor]):
    """What it holds cannot be seen."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index**2))


def test_points_go_on_after_a_checkpoint() -> None:
    plan = make("dpsgd", rows=100, batch_size=10, steps=8, noise_multiplier=1.0, delta=1e-3)
    watch = RunWatch(plan, 2, lambda: 0.5, None)
    for step in range(1, 6):
        watch.after(step, 0.1)
    other = RunWatch(plan, 2, lambda: 0.5, None)
    other.begin(3, watch.plain_points(), 8)
    assert [point.step for point in other.points] == [2]
    other.after(4, 0.1)
    assert other.points == watch.points[:2]
    other.finish(5, 0.1)
    other.finish(5, 0.1)
    assert [point.step for point in other.points] == [2, 4, 5]


def test_the_clip_bound_of_groups_is_the_one_they_multiply() -> None:
    plan = make(
        "dpsgd-dynamic", rows=100, batch_size=10, steps=2, noise_multiplier=1.0, delta=1e-3,
        groups=(Group("a*", clip=0.5), Group("b*")),
    )  # fmt: skip
    watch = RunWatch(plan, 1, None, None)
    watch.after(1, 0.1)
    watch.after(2, 0.1)
    assert [point.clip for point in watch.points] == [12.0, 8.0]


def test_time_left_counts_from_where_the_process_began() -> None:
    plan = make("dpsgd", rows=100, batch_size=10, steps=8, noise_multiplier=1.0, delta=1e-3)
    seen: list[Progress] = []
    watch = RunWatch(plan, 8, None, seen.append)
    watch.begin(6, [], 8)
    watch.after(7, 0.1)
    assert seen[0].seconds_left == pytest.approx(seen[0].seconds)


def test_rows_of_the_same_arrow_table_or_file_are_the_same_rows(tmp_path: Path) -> None:
    """However they were chosen, whichever columns are left, and also where a file is opened twice."""
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    made = datasets.Dataset.from_dict({"x": [float(i) for i in range(20)], "y": list(range(20))})
    made.save_to_disk(str(tmp_path / "saved"))
    saved = [datasets.load_from_disk(str(tmp_path / "saved")) for _ in range(2)]
    table = pyarrow.table({"x": np.arange(9.0), "y": np.arange(9)})
    for all_rows, again in ((made, made), saved):
        parts = again.train_test_split(0.25, seed=3)
        for held, trained in (
            (again.select(range(5)), all_rows), (again.select([3, 1]), all_rows), (again.shuffle(seed=1), all_rows),
            (again.shard(4, 1), all_rows), (again.select(range(5, 9)).select([3]), all_rows.select([8])),
            (again.remove_columns("x"), all_rows), (again.with_format("torch").select([2]), all_rows),
            (Subset(again, [7]), all_rows.select([7])), (DataLoader(again.select([7])), all_rows),
            (again.add_column("z", [0] * 20), all_rows), (parts["test"], all_rows),
            (datasets.concatenate_datasets([datasets.Dataset.from_dict({"x": [0.0], "y": [1]}), again]).select([5]),
             all_rows.select([4])),
        ):  # fmt: skip
            with pytest.raises(DataError, match="held_out are rows of the training data"):
                refuse_held_out(held, trained)
        for held, trained in (
            (parts["test"], parts["train"]), (again.select(range(5)), all_rows.select(range(5, 20))),
            (again.shard(4, 1), all_rows.shard(4, 2)), (again.select([1, 3]), all_rows.select([0, 2])),
            (datasets.Dataset.from_dict({"x": made["x"][:], "y": made["y"][:]}), all_rows),
            (Subset(again, [7]), all_rows.select([6])),
        ):  # fmt: skip
            refuse_held_out(held, trained)
    with pytest.raises(DataError, match="held_out are rows of the training data"):
        refuse_held_out((table.slice(4), "y"), (table.slice(0, 5), "y"))
    refuse_held_out((table.slice(5), "y"), (table.slice(0, 5), "y"))
