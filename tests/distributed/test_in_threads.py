"""Ranks that are threads of this process: what they add up and give noise to, without connections."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpgrad.distributed.exchange import Exchange
from dpgrad.distributed.rounds import Held, Rounds, Slices, Spread, Totals
from dpgrad.errors import RunError
from dpgrad.mechanism import sampling, secure
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.randomness import noise
from dpgrad.training.step import release
from dpgrad.training.step.release import Exchanged, Figures, Sharded

SHAPES = {"0.weight": (7, 5), "0.bias": (7,), "2.weight": (1, 7), "2.bias": (1,)}
GROUPS = (Group("0.*", clip=0.5), Group("2.*", noise_multiplier=2.0))
PLACES = {name: int(name.startswith("2.")) for name in SHAPES}


class Rank:
    """One of several ranks, with as much of `Ranks` as exchanges need."""

    alone, backend, group = False, "gloo", None

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.size, self._meeting, self._slots = rank, size, meeting, slots

    def together(self) -> Any:
        return nullcontext()

    committed = together

    def meet(self, phase: int, step: int = 0, wish: int = 0) -> list[int]:
        every = self._every((phase, step, wish))
        assert len({each[:2] for each in every}) == 1
        return [each[2] for each in every]

    def exchange(
        self, received: Tensor, sent: Tensor, lengths: Any = None, given: Any = None, meanwhile: Any = None
    ) -> None:
        parts = torch.split(sent, len(sent) // self.size if given is None else list(given))
        if meanwhile is not None:
            meanwhile()
        found = [each[self.rank] for each in self._every([part.clone() for part in parts])]
        assert lengths is None or [len(part) for part in found] == list(lengths)
        received.copy_(torch.cat(found))

    def _every(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._meeting.wait(60)
        found = list(self._slots)
        self._meeting.wait(60)
        return found


def on_ranks(size: int, job: Callable[[Any], Any]) -> list[Any]:
    """What ``job`` returns on each of some ranks."""
    meeting, found = threading.Barrier(size), [None] * size
    slots: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = job(Rank(rank, size, meeting, slots))
        except BaseException:
            meeting.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each is not None for each in found)
    return found


def mechanism(source: str) -> Mechanism:
    values = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    return Mechanism(
        sampling.Poisson(0.1), 6, 0.7, clip=0.3, batch_size=8, groups=GROUPS,
        secure_values=values if source == "secure" else 0,
    )  # fmt: skip


def sums(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {name: torch.randn(shape, generator=generator).double() for name, shape in SHAPES.items()}


def whole(size: int, step: int) -> dict[str, Tensor]:
    """The sums over all ranks."""
    return {name: torch.stack([sums(rank, step)[name] for rank in range(size)]).sum(0) for name in SHAPES}


def wanted(size: int, step: int, plan: Mechanism, key: Key) -> dict[str, Tensor]:
    """(sum over all ranks + noise) / divisor of every parameter, as one process would form it."""
    total = whole(size, step)
    stds = {name: plan.std_at(step, plan.groups[PLACES[name]]) for name in SHAPES}
    if not key.secure:
        likes = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        drawn = noise.gaussians(likes, stds, key, step)
        return {name: (total[name] + drawn[name]) / plan.divisor for name in SHAPES}
    found = {}
    for place, group in enumerate(plan.groups):
        names = [name for name in SHAPES if PLACES[name] == place]
        values = sum(total[name].numel() for name in names)
        unit = secure.grid(plan.std_at(step, group), plan.clip_at(step, group), values)
        for name in names:
            drawn = torch.from_numpy(secure.draw(key, 0, total[name].numel(), "noise", name, str(step))).double()
            units = torch.from_numpy(secure.rounded(total[name].numpy(), unit)) + drawn.view(total[name].shape)
            found[name] = units * unit / plan.divisor
    return found


def key_of(source: str) -> Key:
    key = Key.from_seed(3)
    return key.secured() if source == "secure" else key


@pytest.mark.parametrize("source", ["ordinary", "secure"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_of_all_ranks_get_the_noise_of_one_process(size: int, source: str) -> None:
    plan, key = mechanism(source), key_of(source)

    def job(ranks: Any) -> list[dict[str, Tensor]]:
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        made = Exchanged(parameters, Figures(plan, PLACES), key, plan.divisor, ranks)
        found = []
        for step in (0, 2):
            own = sums(ranks.rank, step)
            made.at(step)
            for part in made.parts:
                made.add(part, part.joined(own))
            made.finish()
            made.show()
            found.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        made.at(2)
        with pytest.raises(RunError, match="the sums of step 2 were already exchanged"):
            made.show()
        return found

    every = on_ranks(size, job)
    for place, step in enumerate((0, 2)):
        for name, mean in wanted(size, step, plan, key).items():
            assert all(torch.equal(each[place][name], every[0][place][name]) for each in every)
            torch.testing.assert_close(every[0][place][name], mean.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_makes_the_means_of_its_own_shard(size: int) -> None:
    """What follows from where a shard begins is right at every place of the whole."""

    def job(ranks: Any) -> Tensor:
        made = Exchange(ranks, 30, torch.device("cpu"), torch.float64)
        made.sums.fill_(1 + ranks.rank)
        return made.run(0, lambda total, first: total + torch.arange(first, first + len(total))).clone()

    for means in on_ranks(size, job):
        assert torch.equal(means, size * (size + 1) / 2 + torch.arange(len(means)).double())


def held(size: int, rank: int, spread: Spread) -> list[list[Held]]:
    """Shards of parameters that hold 0, 1, 2 ... in two units."""
    found = []
    for names in (("0.weight", "0.bias"), ("2.weight", "2.bias")):
        unit = []
        for name in names:
            slices = Slices.of(torch.Size(SHAPES[name]), spread.shards)
            whole = torch.zeros(SHAPES[name])
            first, last = slices.cuts[spread.shard(rank)], slices.cuts[spread.shard(rank) + 1]
            unit.append(Held(torch.arange(whole.numel()).float()[first:last], whole, slices))
            whole.untyped_storage().resize_(0)
        found.append(unit)
    return found


def taken(ranks: Any, spread: Spread, totals: Totals, step: int) -> Rounds:
    """The passes of a step: every rank uses units and gives sums at its own pace, some in two parts."""
    units = held(ranks.size, ranks.rank, spread)
    rounds = Rounds(ranks, step, units, spread, totals)
    totals.begin(step)
    for wished in ([{0}, {1}, {0}], [{0, 1}], [], [{1}, {0}])[ranks.rank]:
        rounds.have(wished)
        for unit in wished:
            for each in units[unit]:
                assert torch.equal(each.whole.flatten(), torch.arange(each.whole.numel()).float())
    own = sums(ranks.rank, step)
    for bucket, names in enumerate(totals.buckets):
        total = torch.cat([own[name].flatten() for name in names])
        if ranks.rank % 2:
            rounds.give(bucket, total.float())
            rounds.give(bucket, total - total.float().double())
        else:
            rounds.give(bucket, total)
    rounds.end()
    rounds.close()
    return rounds


def totals_of(ranks: Any, spread: Spread) -> Totals:
    units: Sequence[dict[str, torch.Size]] = [
        {name: torch.Size(SHAPES[name]) for name in SHAPES if name.startswith(prefix)} for prefix in ("0.", "2.")
    ]
    return Totals(ranks, units, spread, torch.device("cpu"))


@pytest.mark.parametrize("source", ["ordinary", "secure"])
@pytest.mark.parametrize("spread", [Spread(1, 1), Spread(2, 2), Spread(3, 3), Spread(4, 2)], ids=str)
def test_shards_of_the_sums_get_their_part_of_the_noise(
    spread: Spread, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, key = mechanism(source), key_of(source)
    monkeypatch.setattr(release, "totals_of", lambda model, ranks: totals_of(ranks, spread))
    monkeypatch.setattr(release, "as_shard", lambda values, like: torch.zeros_like(like))
    model = nn.ModuleDict({"0": nn.Linear(5, 7), "2": nn.Linear(7, 1)})

    def job(ranks: Any) -> list[Any]:
        made = Sharded(model, Figures(plan, PLACES), key, plan.divisor, ranks)
        found = []
        for step in (0, 2):
            made.at(step)
            taken(ranks, spread, made.totals, step)
            for names, total in zip(made.totals.buckets, made.totals.sums, strict=True):
                parts = [whole(spread.ranks, step)[name].flatten()[slice(*made.totals.ends(name))] for name in names]
                torch.testing.assert_close(total, torch.cat(parts), rtol=0, atol=1e-14)  # float64 all the way
            found.append({name: mean.flatten() for name, mean in made.show().items()})
        with pytest.raises(RunError, match="the sums of step 2 were already exchanged"):
            made.totals.begin(2)
        return found

    every = on_ranks(spread.ranks, job)
    for place, step in enumerate((0, 2)):
        for name, mean in wanted(spread.ranks, step, plan, key).items():
            cuts = Slices.of(torch.Size(SHAPES[name]), spread.shards).cuts
            for rank, each in enumerate(every):
                own = slice(cuts[spread.shard(rank)], cuts[spread.shard(rank) + 1])
                torch.testing.assert_close(each[place][name], mean.flatten()[own].float(), rtol=1e-6, atol=1e-7)


def test_a_block_of_rounds_that_failed_does_not_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever caught the failure, as a model may, comes to it again: sums are missing."""
    spread = Spread(1, 1)

    def job(ranks: Any) -> str:
        totals = totals_of(ranks, spread)
        totals.begin(0)
        rounds = Rounds(ranks, 0, held(1, 0, spread), spread, totals)
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "exchange", None)
            with pytest.raises(TypeError):
                rounds.give(0, torch.ones(42))
        with pytest.raises(TypeError):
            rounds.end()
        return "raised again"

    assert on_ranks(1, job) == ["raised again"]
