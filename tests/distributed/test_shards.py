"""Models that FSDP2 keeps in shards: the weights of one process, noise of each shard, and refusals by name."""

import math
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ranked
import sharded_jobs as jobs
from dpgrad.accounting.events import leaves
from dpgrad.distributed.rounds import Slices
from dpgrad.grads import fsdp
from dpgrad.mechanism.keys import Key
from dpgrad.randomness import noise
from dpgrad.runs.writeahead import WriteAhead

pytestmark = pytest.mark.slow

COUNTS = (2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    wanted = [("sharded_loops", 2), ("sharded_loops", 3), ("sharded_failing", 3), ("sharded_fits", 2)]
    ranked.run_all(found, [*wanted, ("sharded_states", 3), ("sharded_hybrid", 4), ("low_precision", 2), ("peaks", 2)])
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: jobs.trained(**given) for name, given in jobs.LOOPS.items()}


def farthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in jobs.LOOPS), *((name, 3) for name in jobs.OF_THREE)]
)
def test_weights_are_those_of_one_process(name: str, ranks: int, folder: Path, alone: dict[str, Any]) -> None:
    """Sums of a step are added up in another order, and Adam divides by their size: float32 rounds at 6e-8."""
    wanted = alone[name]
    rounding = 2.0**-8 if "bfloat16" in name else 2.0**-23  # passes over other rows of a batch round differently
    for each in (found[name] for found in ranked.results(folder, "sharded_loops", ranks)):
        near = 8 * rounding / jobs.BATCH
        assert farthest(each["gradients"], wanted["gradients"]) < near
        moved = 2 * 0.01 * near if "bfloat16" in name else 0.0  # by two steps of SGD
        assert farthest(each["weights"], wanted["weights"]) < moved + 8 * 3 * 2.0**-23  # values are below 3
        assert each["ledger"] == wanted["ledger"]
        assert each["way"] == wanted["way"]
        assert each["frozen"] == wanted["frozen"]
        assert each["bounds"] == wanted["bounds"]
        assert each["form"] == "single kernels"


@pytest.mark.parametrize("ranks", COUNTS)
def test_the_noise_of_a_shard_is_the_slice_of_the_whole(ranks: int, folder: Path) -> None:
    """To the bit, at the last of two steps without examples; what all ranks hold makes up every parameter once."""
    likes = dict(jobs.Transformer().named_parameters())
    stds = dict.fromkeys(likes, jobs.plan().std_at(1))
    drawn = noise.gaussians(likes, stds, Key.from_seed(jobs.SEED), step=1)
    every = [found["empty"]["held"] for found in ranked.results(folder, "sharded_loops", ranks)]
    for name, like in likes.items():
        wanted = (drawn[name].double() / jobs.BATCH).float().flatten()
        cuts = Slices.of(like.shape, ranks).cuts
        for rank, held in enumerate(every):
            assert torch.equal(held[name].flatten(), wanted[cuts[rank] : cuts[rank + 1]]), (name, rank)
        assert torch.equal(torch.cat([held[name].flatten() for held in every]), wanted)
    assert len({len(held["words.weight"]) for held in every}) == 2  # 11 rows are uneven


@pytest.mark.parametrize("ranks", COUNTS)
def test_secure_noise_of_a_shard_lies_on_the_grid_of_the_whole(ranks: int, folder: Path, alone: dict[str, Any]) -> None:
    """To the bit: a grid for as many values as a shard has would differ in the last digits."""
    wanted = alone["secure noise"]["gradients"]
    for found in ranked.results(folder, "sharded_loops", ranks):
        assert all(torch.equal(mean, wanted[name]) for name, mean in found["secure noise"]["gradients"].items())


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("offloaded", "UnsupportedModelError: offload_policy of fully_shard is not supported: leave it out"),
        ("crossed", "UnsupportedModelError: parameter .* is sharded over other ranks .*, or in another order"),
        ("read", "UnsupportedModelError: the model or the loss reads a parameter by Tensor.numpy"),
        ("columns", "UnsupportedModelError: parameter weight is placed by .*leave out shard_placement_fn"),
        ("in part", r"UnsupportedModelError: parameter .* is not sharded, .*call fully_shard\(model\)"),
        ("inner momentum", "OptionError: inner_momentum needs whole parameters"),
        ("captured", "OptionError: capture needs whole parameters"),
        ("checked", "UnsupportedModelError: the model is sharded by fully_shard, .* give the plain model"),
    ],
)
def test_other_models_are_refused_by_name(name: str, pattern: str, folder: Path) -> None:
    for found in ranked.results(folder, "sharded_failing", 3):
        assert re.match(pattern, found[name]), found[name]


@pytest.mark.parametrize(
    ("name", "own"), [("in a step", "UnsupportedModelError: .* raised ZeroDivisionError"), ("on one rank", "Option")]
)
def test_an_error_on_one_rank_is_raised_on_all(name: str, own: str, folder: Path) -> None:
    *others, last = (found[name] for found in ranked.results(folder, "sharded_failing", 3))
    assert re.match(own, last), last
    assert all(words.startswith("RanksError: rank 2 failed") for words in others), others


def test_ranks_go_on_together_after_errors(folder: Path) -> None:
    every = {found["afterwards"] for found in ranked.results(folder, "sharded_failing", 3)}
    assert len(every) == 1
    assert math.isfinite(float(every.pop()))


def test_a_fit_is_that_of_one_process(folder: Path) -> None:
    wanted = jobs.fitted(jobs.Classifier())
    for rank, each in enumerate(ranked.results(folder, "sharded_fits", 2)):
        assert farthest(each["weights"], wanted["weights"]) < 6 * 2.0**-22
        assert each["whole"]
        assert each["saved"].keys() == wanted["weights"].keys()
        assert all(torch.equal(value, each["weights"][name]) for name, value in each["saved"].items())
        assert [step for step, _ in each["scores"]] == [step for step, _ in wanted["scores"]]
        for (_, found), (_, score) in zip(each["scores"], wanted["scores"], strict=True):
            assert abs(found - score) <= 1 / 50  # one of 50 rows at the edge of two classes
        assert each["seen"] == (wanted["seen"] if rank == 0 else [])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    ends = [(f"{kind}_{end}", 2) for kind in ("ended", "resumed") for end in jobs.ENDS]
    more = [("resumed_in_a_step", 3), ("plainly", 2), ("sharded_disk", 2), ("sharded_scaled", 2)]
    ranked.run_all(found, [("sharded_runs", 2), ("sharded_runs", 3), *ends, *more])
    return found


def spent(own: Path) -> int:
    """The steps that the ledger of a run has as spent."""
    return sum(leaves(WriteAhead.read(own / "run" / "ledger.jsonl").event()).values())


@pytest.mark.parametrize("ranks", COUNTS)
def test_a_run_in_a_folder_releases_whole_weights(ranks: int, runs: Path) -> None:
    own, every = runs / f"sharded_runs-{ranks}", ranked.results(runs, "sharded_runs", ranks)
    released = torch.load(own / "run" / "release" / "weights.pt")
    assert set(released) == {"scale", *every[0]["weights"]}
    for each in every:
        assert each["whole"]
        assert each["seen"] == ([1, 2, 3, 4, 5, 6] if each is every[0] else [])
        assert all(torch.equal(released[name], value) for name, value in each["weights"].items())
    assert not (own / "run" / "private").exists()
    assert spent(own) == 6
    wanted = jobs.fitted(jobs.Unlike(), "adam")["weights"]
    assert farthest(every[0]["weights"], wanted) < 6 * 2.0**-20  # Adam divides sums of another order by their size


@pytest.mark.parametrize("end", jobs.ENDS)
def test_a_rank_that_is_killed_loses_nothing_and_the_run_resumes_to_the_bit(end: str, runs: Path) -> None:
    dead = jobs.ENDS[end][0]
    every = ranked.results(runs, f"ended_{end}", 2)
    assert every[dead] is None
    assert every[1 - dead].startswith("RanksError: another rank is gone: ")
    assert 2 <= spent(runs / f"ended_{end}-2") <= 6
    wanted = ranked.results(runs, "sharded_runs", 2)[0]["weights"]
    for each in ranked.results(runs, f"resumed_{end}", 2):
        assert not each["new key"]
        assert each["whole"]
        assert all(torch.equal(value, wanted[name]) for name, value in each["weights"].items())
    assert spent(runs / f"resumed_{end}-2") == 6
    assert not (runs / f"resumed_{end}-2" / "run" / "private").exists()


@pytest.mark.parametrize(("name", "ranks", "differs"), [("resumed_in_a_step", 3, "ranks"), ("plainly", 2, "shards")])
def test_other_ranks_resume_a_sharded_run_with_a_new_key(name: str, ranks: int, differs: str, runs: Path) -> None:
    """Also a model that is not sharded: from the same checkpoint and key it trains the same weights."""
    every = ranked.results(runs, name, ranks)
    for each in every:
        assert all(torch.equal(value, every[0]["weights"][name]) for name, value in each["weights"].items())
    assert differs in every[0]["new key"][0]
    attempts = WriteAhead.read(runs / f"{name}-{ranks}" / "run" / "ledger.jsonl").attempts
    assert [attempt.began for attempt in attempts] == [0, 2]
    assert attempts[1].last < 6
    near = ranked.results(runs, "plainly", 2)[0]["weights"]
    assert farthest(every[0]["weights"], near) < 6 * 2.0**-20


def test_a_full_disk_ends_a_sharded_run_on_all_ranks(runs: Path) -> None:
    first, other = ranked.results(runs, "sharded_disk", 2)
    assert first.startswith("OSError: [Errno 28]")
    assert other.startswith("RanksError: rank 0 failed")
    held = sorted(path.name.partition("-")[0] for path in (runs / "sharded_disk-2" / "run" / "private").iterdir())
    assert held == ["README.txt", "checkpoint.pt", "values"]
    assert spent(runs / "sharded_disk-2") >= 2


def test_a_state_that_holds_a_scalar_is_stored_and_resumed_to_the_bit(runs: Path) -> None:
    """Every rank holds all of it: the scale of SelfScaled, which is made of the gradients of all parameters."""
    for rank, (one, again) in enumerate(ranked.results(runs, "sharded_scaled", 2)):
        assert again["seen"] == ([] if rank else [4, 5, 6])
        assert not again["new key"]
        assert again["whole"]
        assert all(torch.equal(value, one["weights"][name]) for name, value in again["weights"].items())


def test_states_are_read_as_they_were_written_or_refused_on_all_ranks(folder: Path) -> None:
    """Sums that are not formed yet, columns, and other tensors on one rank; nothing of them stays on the disk.

    What every rank keeps for itself, of which rank 0's alone would be stored, as well.
    """
    every = ranked.results(folder, "sharded_states", 3)
    for found in every:
        assert found["alike"] is True
        assert re.match(r"UnsupportedModelError: the state holds a tensor of shape \(3,\) placed by", found["partial"])
        assert re.match(r"UnsupportedModelError: the state holds a tensor of shape \(9, 7\)", found["columns"])
        assert re.match("RanksError: ranks 0 and 1 do not have the same shards to store", found["unlike"])
        assert re.match("RanksError: ranks 0 and 1 do not have the same tensors to store", found["own"])
    assert every[0]["left"] == [""]


def test_adapters_of_a_sharded_language_model_are_trained_as_in_one_process(tmp_path: Path) -> None:
    ranked.run_all(tmp_path, [("sharded_adapters", 2)])
    wanted = jobs.sharded_adapters(0, 1, tmp_path)
    assert all("lora" in name for name in wanted)
    for found in ranked.results(tmp_path, "sharded_adapters", 2):
        assert farthest(found, wanted) < 2.0**-21


def test_replicas_of_shards_train_as_one_process(folder: Path) -> None:
    """Two ranks hold each shard (HSDP), and must stay the same to the bit."""
    wanted = jobs.trained(taken=1, optimizer="SGD")
    every = ranked.results(folder, "sharded_hybrid", 4)
    for found in every:
        assert farthest(found["gradients"], wanted["gradients"]) < 8 * 2.0**-23 / jobs.BATCH
        assert farthest(found["weights"], wanted["weights"]) < 8 * 3 * 2.0**-23
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(value, every[other]["held"][name]) for name, value in every[one]["held"].items())
    assert not torch.equal(every[0]["held"]["places"], every[1]["held"]["places"])


def test_passes_in_bfloat16_leave_weights_and_sums_in_float32(tmp_path: Path, folder: Path) -> None:
    """As one process that computes with a copy of the weights in bfloat16, and trains those in float32."""
    wanted = jobs.low_precision(0, 1, tmp_path)["weights"]
    for found in ranked.results(folder, "low_precision", 2):
        assert found["types"] == {"torch.float32"}
        # Passes over other rows of a batch round differently, at 2^-8 of clipped gradients: two steps of rate 0.01.
        assert farthest(found["weights"], wanted) < 2 * 0.01 * 8 * 2.0**-8 / jobs.BATCH + 8 * 3 * 2.0**-23


def test_no_rank_holds_the_whole_model(tmp_path: Path, folder: Path) -> None:
    """Of 8 units on 2 ranks: shards in float32, their sums in float64, and a few units; the whole model is 1.

    The first step is the one that is prepared, and the second compares examples with autograd.
    """
    ranks, units = 2, 8
    for found in ranked.results(folder, "peaks", ranks):
        *steps, writing = found
        assert max(steps) < (1 + 2) / ranks + 8 / units
        assert writing < 6.5 / 64  # six pieces as they are sent, received and written, and single numbers
    assert min(jobs.peaks(0, 1, tmp_path)) > 4


def test_shards_make_up_a_parameter() -> None:
    for rows in range(1, 9):
        for ranks in range(1, 6):
            parts: Iterable[torch.Tensor] = torch.arange(rows).chunk(ranks)
            lengths = [3 * len(part) for part in parts]
            cuts = Slices.of(torch.Size([rows, 3]), ranks).cuts
            found = [stop - start for start, stop in pairwise(cuts)]
            assert [length for length in found if length] == lengths
            assert cuts[0] == 0
            assert cuts[-1] == 3 * rows


def test_this_version_of_torch_is_verified() -> None:
    fsdp.refuse_version()
