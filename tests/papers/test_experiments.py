"""Every experiment of the catalogue in its tiny form: really trained, every arm alive, every certain claim true."""

import json
import math
import re
from pathlib import Path

import pytest

from dpgrad.papers import catalogue, figures, running, tables
from dpgrad.papers.experiment import Place

EXPERIMENTS = catalogue.experiments()
PLACE = Place(size="tiny")


# searches of the other rows run the same code as those of MNIST
AGAIN = re.compile(r"huang-(?:search|s|momentum)-(?!mnist$)")
ONCE = [pytest.param(name, marks=[pytest.mark.exhaustive] if AGAIN.match(name) else []) for name in EXPERIMENTS]


class TestEveryExperiment:
    @pytest.mark.parametrize("name", ONCE)
    def test_tiny_form(self, tmp_path: Path, name: str) -> None:
        experiment = EXPERIMENTS[name]
        done = running.reproduce(experiment, PLACE, tmp_path)
        outcomes = done.outcomes
        assert done.complete
        for arm in done.arms:
            assert math.isfinite(outcomes.mean(arm.name, experiment.figure)), f"{arm.name} has no {experiment.figure}"
        for claim in experiment.claims:
            if claim.certain:
                assert claim.holds(outcomes) is True, claim.text
            else:
                assert claim.holds(outcomes) in (True, False, None), claim.text
        assert figures.drawn(experiment, outcomes).axes
        stem = running.stem(experiment, "tiny", tmp_path)
        assert all(path.stat().st_size for path in tables.write(done, stem, drawn=True))

    @pytest.mark.parametrize("name", EXPERIMENTS)
    def test_description(self, name: str) -> None:
        experiment = EXPERIMENTS[name]
        assert experiment.about.endswith(".")
        assert experiment.paper
        assert experiment.item
        arms = experiment.arms("full")
        assert {*experiment.printed} <= {arm.name for arm in arms}
        for size in ("full", "quick", "tiny"):
            names = [arm.name for arm in experiment.arms(size)]
            assert names
            assert len(set(names)) == len(names)
        assert all(json.loads(json.dumps(dict(arm.setting), allow_nan=False)) is not None for arm in arms)
        order = list(EXPERIMENTS)
        assert all(order.index(search) < order.index(name) for search in experiment.after)
