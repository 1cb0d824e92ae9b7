"""Steps of several ranks: the same weights as one process, noise of the accounted size, and errors on all of them."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ranked
import ranked_jobs as jobs
from dpgrad.training.step.graphed import Graphed

RAN = [("loops", 2), ("loops", 3), ("captured", 2), ("empty_lots", 3), ("failing", 3), ("connected_later", 2)]
RAN += [("silent", 3), ("slow", 2)]
TAKEN = [(name, 2) for name in jobs.LOOPS] + [(name, 3) for name in jobs.OF_THREE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    ranked.run_all(found, RAN)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: jobs.trained(**given) for name, given in jobs.LOOPS.items()}


class TestSteps:
    @pytest.mark.parametrize(("name", "ranks"), TAKEN)
    def test_weights_are_those_of_one_process_and_the_same_bits_on_every_rank(
        self, name: str, ranks: int, folder: Path, alone: dict[str, Any]
    ) -> None:
        every = [found[name] for found in ranked.results(folder, "loops", ranks)]
        wanted = alone[name]
        assert all(torch.equal(each["weights"], every[0]["weights"]) for each in every)
        assert all(each["ledger"] == wanted["ledger"] for each in every)
        # Sums of a step are added up in another order: float32 rounds at 6e-8 of values below 2, over at most 40 steps.
        assert float((every[0]["weights"] - wanted["weights"]).abs().max()) < 40 * 2 * 2.0**-23
        assert every[0]["form"] == wanted["form"]

    def test_a_captured_step_is_followed_by_the_exchange(self, folder: Path, alone: dict[str, Any]) -> None:
        every = ranked.results(folder, "captured", 2)
        assert all(each["form"] == Graphed.form for each in every)
        assert all(torch.equal(each["weights"], every[0]["weights"]) for each in every)
        # The pieces have other sizes than those of a CPU: rounding differs by as much as between two microbatches.
        assert float((every[0]["weights"] - alone["pieces"]["weights"]).abs().max()) < 40 * 2 * 2.0**-23

    def test_noise_on_empty_lots_has_the_accounted_size(self, folder: Path) -> None:
        """25 steps of 3,050 values: the variance is within 5 of its standard errors, a false alarm in 1.7 million."""
        every = ranked.results(folder, "empty_lots", 3)
        assert all(torch.equal(each, every[0]) for each in every)
        values = every[0].double() * (1e-9 * jobs.ROWS) / 1.5
        assert abs(float(values.square().mean()) - 1) < 5 * math.sqrt(2 / values.numel())
        # No three neighbouring values of one rank's shard repeat in another's, or at another step.
        triples = values.flatten().unfold(0, 3, 1)
        assert len(triples.unique(dim=0)) == len(triples)

    def test_noise_is_that_of_one_process(self, folder: Path) -> None:
        found = ranked.results(folder, "empty_lots", 3)[0]
        wanted = jobs.empty_lots(0, 1, folder)
        assert float(((found - wanted) / wanted.abs().max()).abs().max()) < 2.0**-22

    def test_a_wrapped_model_is_refused(self, folder: Path) -> None:
        for found in ranked.results(folder, "connected_later", 2):
            assert "give the model unwrapped" in found

    @pytest.mark.parametrize(
        ("name", "own", "others"),
        [
            ("in a step", "UnsupportedModelError|ZeroDivisionError", "RanksError: rank {last} failed"),
            ("other option", "OptionError: microbatch", "RanksError: rank {last} failed"),
            ("other data", "RanksError: ranks 0 and {last} do not have the same data", ""),
            ("one value", "RanksError: ranks 0 and {last} do not have the same data", ""),
            ("other buffer", "RanksError: ranks 0 and {last} do not have the same model", ""),
            ("other mechanism", "RanksError: ranks 0 and {last} do not have the same mechanism", ""),
            ("other clip", "RanksError: ranks 0 and {last} do not have the same mechanism", ""),
            ("other model", "RanksError: ranks 0 and {last} do not have the same model", ""),
            ("other engine", "RanksError: ranks 0 and 1 do not have the same engine", ""),
            ("other batches", "RanksError: ranks 0 and {last} do not have the same batches", ""),
            ("average", "OptionError: average keeps values of single examples", ""),
            ("same part twice", "RanksError: two ranks hold the same rows", ""),
            ("same part in another order", "RanksError: two ranks hold the same rows", ""),
            ("other optimizer", "RanksError: ranks do not have the same weights", ""),
            ("other loss", "RanksError: ranks 0 and {last} do not have the same loss on the same rows", ""),
            ("other loss on parts", "RanksError: ranks 0 and {last} do not have the same loss on the same rows", ""),
            ("other loss later", "RanksError: ranks 0 and {last} do not have the same loss on the same rows", ""),
            ("another run", "RanksError: ranks are not at the same place .*run 2", ""),
            ("charged twice", "RunError: the step charged last was not computed yet", "RanksError: rank {last} failed"),
        ],
    )
    def test_every_rank_raises(self, name: str, own: str, others: str, folder: Path) -> None:
        every = [found[name] for found in ranked.results(folder, "failing", 3)]
        for rank, words in enumerate(every):
            pattern = own if rank == 2 or not others else others
            assert re.match(pattern.format(last=2), words), (rank, words)

    def test_a_rank_that_falls_silent_ends_the_others(self, folder: Path) -> None:
        """A process that is stopped keeps its connections, as a machine without power or network does."""
        *others, stopped = ranked.results(folder, "silent", 3)
        for found in others:
            assert found.startswith(f"after 1 steps: rank 2 gave no sign of life for {jobs.SILENCE:g} s: "), found
        assert stopped is None

    def test_a_rank_that_is_slow_is_waited_for(self, folder: Path) -> None:
        assert ranked.results(folder, "slow", 2) == [2, 2]

    def test_a_full_disk_on_rank_0_stops_all(self, folder: Path) -> None:
        every = [found["at the charge"] for found in ranked.results(folder, "failing", 3)]
        assert every[0].startswith("OSError: [Errno 28]")
        assert all(words.startswith("RanksError: rank 0 failed") for words in every[1:])

    def test_ranks_go_on_together_after_errors(self, folder: Path) -> None:
        every = [found["afterwards"] for found in ranked.results(folder, "failing", 3)]
        assert len(set(every)) == 1
        assert math.isfinite(float(every[0]))
