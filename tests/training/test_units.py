"""Rows of the same person: one example per person, whose contribution is bounded whatever they own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpgrad
from dpgrad import HeldOut, Privacy, recipes
from dpgrad.data import Dataset as Named
from dpgrad.errors import DataError, OptionError
from dpgrad.grads.accumulate import clipped_sum
from dpgrad.grads.scaling import Bounded, Hard
from dpgrad.training.losses import NamedLoss
from dpgrad.training.units import ByWeight, Owned, _hash, numbered

IDS = ["b", "a", "b", "c", "b", "b", "a", "b", "d"]  # five rows of b, two of a, one each of c and d
ROWS = len(IDS)
CLIP = 0.3


def rows(count: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=source).double(), torch.randint(0, 2, (count,), generator=source)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def one_by_one(net: nn.Module, data: tuple[Tensor, Tensor], used: dict[str, list[int]]) -> Tensor:
    """The sum over persons of the clipped mean gradient of their rows, by autograd of one row at a time."""
    total = torch.zeros(sum(p.numel() for p in net.parameters())).double()
    for own in used.values():
        mean = torch.zeros_like(total)
        for row in own:
            loss = nn.functional.cross_entropy(net(data[0][row : row + 1]), data[1][row : row + 1])
            grads = torch.autograd.grad(loss, list(net.parameters()))
            mean += torch.cat([g.reshape(-1) for g in grads]) / len(own)
        total += mean * min(1.0, CLIP / float(mean.norm()))
    return total


def summed(net: nn.Module, data: tuple[Tensor, Tensor], ids: Any, most: int, rule: str = "first") -> Tensor:
    owned = Owned.of(ids, len(data[1]), most, rule, "person")
    found = clipped_sum(
        net, ByWeight(NamedLoss("cross-entropy")), owned.examples(data), Bounded(Hard(), CLIP), several_rows=True
    )
    return torch.cat([found.sums[name].reshape(-1) for name, _ in net.named_parameters()])


FIRST = {
    1: {"b": [0], "a": [1], "c": [3], "d": [8]},
    3: {"b": [0, 2, 4], "a": [1, 6], "c": [3], "d": [8]},
    9: {"b": [0, 2, 4, 5, 7], "a": [1, 6], "c": [3], "d": [8]},
}


@pytest.mark.parametrize("most", FIRST)
def test_the_mean_gradient_of_a_person_is_clipped_once(most: int) -> None:
    net, data = model(), rows()
    assert torch.allclose(summed(net, data, IDS, most), one_by_one(net, data, FIRST[most]), atol=1e-6)


@pytest.mark.parametrize("rule", ["first", "hash"])
def test_leaving_one_person_out_changes_one_contribution_by_at_most_the_clip_bound(rule: str) -> None:
    net, data = model(), rows()
    inputs = data[0] * torch.tensor([100.0 if one == "b" else 1.0 for one in IDS])[:, None]
    whole = summed(net, (inputs, data[1]), IDS, 3, rule)
    for person in sorted(set(IDS)):
        kept = [row for row, one in enumerate(IDS) if one != person]
        without = summed(net, (inputs[kept], data[1][kept]), [IDS[row] for row in kept], 3, rule)
        assert 0 < float((whole - without).norm()) <= CLIP * (1 + 1e-5)


def test_which_rows_are_used_depends_on_the_persons_own_rows_alone() -> None:
    many = ["x"] * 40
    for rule in ("first", "hash"):
        alone = Owned.of(many, 40, 5, rule, "person").rows[0]
        mixed = ["a", *(name for pair in zip(many, ["z"] * 40, strict=True) for name in pair)]
        among = Owned.of(mixed, 81, 5, rule, "person").rows[1]
        assert torch.equal((among - 1) // 2, alone)
        assert len(set(alone.tolist())) == 5
    assert alone.tolist() != list(range(5))  # a hash spreads


class Listed(Dataset[Any]):
    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[1])

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.data[0][row], int(self.data[1][row])


def trained(
    data: Any, privacy: Privacy, net: nn.Module | None = None, **options: Any
) -> tuple[Tensor, dpgrad.training.fit.Fitted]:
    """One full-batch step of plain gradient descent with next to no noise: the sum of contributions, divided by n."""
    net = net or model()
    before = torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()])
    fitted = dpgrad.fit(
        net, data, method=recipes.dpgd(clip=CLIP, learning_rate=1.0), steps=1, delta=1e-3, privacy=privacy, seed=0,
        **options,
    )  # fmt: skip
    return before - torch.cat([p.detach().reshape(-1) for p in net.parameters()]), fitted


def quiet(**options: Any) -> Privacy:
    return Privacy(noise_multiplier=1e-6, rows_per_unit=3, unit_rule="first", **options)


def test_the_hash_is_the_published_one() -> None:
    """The first outputs of splitmix64 from seed 0, whose state grows by a constant."""
    states = np.array([0, 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A], np.uint64)
    assert _hash(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # type: ignore[arg-type]


def test_fit_takes_tensors_arrays_datasets_and_memory_maps(tmp_path: Path) -> None:
    data = rows()
    wanted = one_by_one(model(), data, FIRST[3]) / 4
    kept = np.memmap(tmp_path / "x", np.float64, "w+", shape=(ROWS, 3))
    kept[:] = data[0].numpy()
    named = Named(
        "mine", data[0].numpy(), data[1].numpy(), data[0].numpy()[:0], data[1].numpy()[:0], ("no", "yes"), "default",
        "none", (), units=numbered(IDS, ROWS)[0],
    )  # fmt: skip
    ids = np.array(IDS)
    for given, privacy in (
        (data, quiet(units=IDS)),
        (data, quiet(units=torch.from_numpy(numbered(IDS, ROWS)[0]))),
        ((data[0].numpy(), data[1].numpy()), quiet(units=ids)),
        (Listed(data), quiet(units=pandas.Series(IDS))),
        ((kept, data[1].numpy()), quiet(units=pandas.Series(IDS).astype("category"))),
        (named, quiet()),
    ):
        found, fitted = trained(given, privacy, net=model().float() if given is named else model())
        assert torch.allclose(found.double(), wanted, atol=1e-3 if given is named else 1e-5)  # one is of float32
        assert fitted.plan.dataset_size == 4
        assert fitted.guarantee.unit == "person"


@pytest.mark.parametrize("engine", ["vmap", "single"])
def test_every_engine_gives_the_same(engine: str) -> None:
    found, _ = trained(rows(), quiet(units=IDS), computing=dpgrad.Computing(engine=engine))
    assert torch.allclose(found, one_by_one(model(), rows(), FIRST[3]) / 4, atol=1e-5)


def test_a_run_is_counted_in_persons_and_says_so() -> None:
    count = 60
    data, ids = rows(count), [row // 3 for row in range(count)]
    fitted = dpgrad.fit(
        model(), data, method=recipes.dpsgd(clip=1.0), epsilon=8.0, delta=1e-3, epochs=2, batch_size=5, seed=0,
        privacy=Privacy(units=ids, rows_per_unit=2, unit_name="patient"),
        held_out=HeldOut(rows(4, 9), held_out_units=[100] * 4),
    )  # fmt: skip
    assert fitted.plan.dataset_size == 20
    assert fitted.plan.steps == 8
    assert fitted.plan.mechanism.sampler.sampling_rate_at(0) == 5 / 20
    said = str(fitted.guarantee)
    assert "public number of patients, one patient's contribution replaced by nothing" in said
    assert "the number of patients (20, taken from the data)" in fitted.public
    assert any(entry.startswith("that at most 2 rows of one patient are used") for entry in fitted.public)
    report = fitted.report()
    assert report["guarantee"]["privacy_unit"] == "one patient"
    shown = dpgrad.reports.report.text(report) + dpgrad.reports.page.page({"run": report}) + str(fitted.plan.lines())
    assert "one patient" in shown
    assert "one row" not in shown.replace("the shape of one row", "")
    assert "out of 20 patients" in shown
    json.dumps(report, allow_nan=False)
    # the same persons with one row each cost the same: ε does not depend on how many rows are used
    single = dpgrad.plan.make(recipes.dpsgd(clip=1.0), rows=20, epsilon=8.0, delta=1e-3, epochs=2, batch_size=5)
    assert single.mechanism == fitted.plan.mechanism


def test_the_default_bound_and_a_run_in_pieces_of_fixed_sizes() -> None:
    count = 40
    data, ids = rows(count), np.arange(count) // 8
    fitted = dpgrad.fit(
        model(), data, method=recipes.dpsgd(clip=1.0), delta=1e-2, steps=40, batch_size=2, seed=0,
        privacy=Privacy(units=ids, noise_multiplier=2.0),
    )  # fmt: skip
    assert (fitted.plan.rows_per_unit, fitted.plan.unit_rule) == (4, "hash")
    assert fitted.described is not None
    assert fitted.described["shape"] == [3]


def test_a_run_on_persons_resumes(tmp_path: Path) -> None:
    count = 24
    data, ids = rows(count), np.arange(count) // 4

    def run(net: nn.Module, folder: dpgrad.RunFolder, **more: Any) -> Tensor:
        dpgrad.fit(
            net, data, method=recipes.dpsgd(clip=1.0), delta=1e-2, steps=6, batch_size=2, seed=0, folder=folder,
            privacy=Privacy(units=ids, noise_multiplier=1.0), **more,
        )  # fmt: skip
        return torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    whole = run(model(), dpgrad.RunFolder(tmp_path / "whole"))
    net, cut = model(), tmp_path / "cut"
    run(net, dpgrad.RunFolder(cut, checkpoint_every=1), callbacks=lambda seen: seen.step == 3)
    assert torch.equal(run(net, dpgrad.RunFolder(cut, checkpoint_every=1, resume=True)), whole)
    promise = json.loads((cut / "release" / "report.json").read_text("utf-8"))["guarantee"]
    assert promise["privacy_unit"] == "one person"
    assert [group["size"] for group in promise["groups"]] == [1, 2, 5, 10]


def test_one_person_who_owns_everything_contributes_no_more() -> None:
    found, fitted = trained(rows(), quiet(units=["x"] * ROWS))
    assert float(found.norm()) <= CLIP * (1 + 1e-3)
    assert fitted.plan.dataset_size == 1
    with pytest.raises(OptionError, match="publishes one person at random has delta 1/n"):
        dpgrad.fit(model(), rows(), epsilon=1.0, delta=0.5, steps=1, batch_size=1, privacy=Privacy(units=IDS))


NAN = float("nan")


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1.0, 2.0, NAN], "whole numbers or texts, got a float among them: a missing id"),
        (np.array([1.0, 2.0, NAN]), "whole numbers or texts, got float64"),
        (torch.tensor([1.0, 2.0, 2.0]), "whole numbers or texts, got float32"),
        (np.array([True, False, True]), "got bool"),
        (["a", None, "b"], "got a NoneType among them"),
        (["a", 1, "b"], "got both: convert all ids to text"),
        (["a", " ", "b"], "must not hold an empty text"),
        (pandas.Series([1, None, 2]), "got float64"),
        (pandas.Series(["a", None, "b"], dtype="string"), "among them: a missing id"),
        (np.array(["2020-01-01"] * 3, "datetime64[D]"), "got datetime64"),
        ([1, 2], "one id per row, got 2 ids for 3 rows"),
        (np.zeros((3, 1), int), "an array of 2 dimensions"),
        ("abc", "one id per row, such as an array or a column, got a str"),
        (7, "one id per row, such as an array or a column, got a int"),
        ({1, 2, 3}, "got a set"),
    ],
)
def test_refuses_what_names_nobody(ids: Any, said: str) -> None:
    with pytest.raises(DataError, match="units must") as refused:
        trained(rows(3), quiet(units=ids))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_large_numbers_and_order_do_not_matter() -> None:
    assert numbered([2**70, 5, 2**70], 3)[0].tolist() in ([0, 1, 0], [1, 0, 1])
    assert numbered(np.array([3, 1, 3], np.uint64), 3)[0].tolist() == [1, 0, 1]
    assert numbered(np.array([b"x", b"y", b"x"]), 3)[0].tolist() == [0, 1, 0]


def test_refuses_held_out_rows_of_training_persons() -> None:
    with pytest.raises(DataError, match="some held-out rows belong to a person who also has training rows"):
        trained(rows(), quiet(units=IDS), held_out=HeldOut(rows(2, 5), held_out_units=["z", "a"]))
    with pytest.raises(DataError, match="units of the held-out rows must hold one id per row"):
        trained(rows(), quiet(units=IDS), held_out=HeldOut(rows(2, 5), held_out_units=["z"]))
    with pytest.raises(OptionError, match=r"held_out has rows and no owners.*held_out_units=ids"):
        trained(rows(), quiet(units=IDS), held_out=rows(2, 5))
    with pytest.raises(OptionError, match="held_out has held_out_units and the training rows have none"):
        trained(rows(), Privacy(noise_multiplier=1.0), held_out=HeldOut(rows(2, 5), held_out_units=["z", "y"]))


def test_refuses_options_that_do_not_go_together() -> None:
    with pytest.raises(OptionError, match="rows_per_unit must be a whole number of at least 1, got 0"):
        Privacy(units=IDS, rows_per_unit=0)
    with pytest.raises(OptionError, match="unit_rule must be"):
        Privacy(units=IDS, unit_rule="last")
    with pytest.raises(OptionError, match="units and several_rows both"):
        Privacy(units=IDS, several_rows=True)
    with pytest.raises(OptionError, match="also_released was priced for one row"):
        Privacy(units=IDS, also_released=dpgrad.events.Gaussian(4.0))
    with pytest.raises(OptionError, match="unit_name must not be empty"):
        Privacy(units=IDS, unit_name=" ")
    for options in ({"rows_per_unit": 2}, {"unit_rule": "first"}, {"unit_name": "patient"}):
        with pytest.raises(OptionError, match="about rows of the same person, and the data name none"):
            trained(rows(), Privacy(noise_multiplier=1.0, **options))
    with pytest.raises(OptionError, match="augment makes the rows of an example"):
        dpgrad.fit(
            model(), rows(), method=recipes.dpsgd(augment=dpgrad.augment.Shifts(2)), epsilon=1.0, delta=1e-3, steps=1,
            batch_size=2, privacy=Privacy(units=IDS),
        )  # fmt: skip


def test_shows_no_ids() -> None:
    privacy = Privacy(units=IDS)
    assert "units" not in repr(privacy)
    assert "private" in repr(Owned.of(IDS, ROWS, 2, "hash", "person"))


def test_a_wrong_label_is_refused_before_a_step_is_charged() -> None:
    inputs, labels = rows()
    with pytest.raises(DataError, match="targets must be class indices"):
        trained((inputs, labels + 5), quiet(units=IDS))


def test_a_file_names_persons_and_how_many_rows_of_each_count(tmp_path: Path) -> None:
    lines = ["patient,age,sick", *(f"p{row // 3},{20 + row % 50},{row % 2}" for row in range(90))]
    (tmp_path / "rows.csv").write_text("\n".join(lines), "utf-8")
    schema = {
        "unit": "patient", "rows_per_unit": 2, "split": {"rule": "none"},
        "target": {"column": "sick", "classes": ["0", "1"], "public": True},
        "columns": {"patient": {"kind": "id"}, "age": {"kind": "number", "bounds": [0, 100], "public": True}},
    }  # fmt: skip
    people = dpgrad.data.read(tmp_path / "rows.csv", schema=schema)
    for privacy, most in ((Privacy(), 2), (Privacy(rows_per_unit=1), 1)):
        fitted = dpgrad.fit(
            nn.Linear(1, 2), people, epsilon=3.0, delta=1e-4, steps=2, batch_size=10, method="dpsgd", privacy=privacy
        )
        assert (fitted.plan.dataset_size, fitted.plan.rows_per_unit, fitted.guarantee.unit) == (30, most, "person")
