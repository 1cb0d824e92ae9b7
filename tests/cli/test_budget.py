"""The command line keeps its contract: the right figures, one JSON object, one line for what is refused."""

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dpgrad
from dpgrad import cli
from dpgrad.accounting import ACCOUNTANTS, events
from dpgrad.accounting.events import Compose, Gaussian, Poisson, Relation, Repeat
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.accounting.moments import MomentsProfile
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.reports import compare, plot

PROGRAM = Path(sys.executable).with_name("dpgrad")
CASE_A = "epsilon --sampling-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5"
CASE_B = "--sampling-rate 512/60000 --epochs 20 --delta 1e-5"
Answer = dict[str, Any]


class TestEpsilon:
    def test_case_a(self, answer: Callable[[str], Answer]) -> None:
        found = answer(CASE_A)
        assert 0.94686 <= found["epsilon"] <= 0.94690
        assert found["epsilon_lower"] <= 0.9468668008 <= found["epsilon"]
        assert found["epsilon_estimate"] == pytest.approx(0.9468668008, abs=2e-6)

    @pytest.mark.parametrize(
        ("accountant", "epsilon", "guarantee"),
        [
            ("rdp", 1.0353840, True),
            ("moments", 1.2585747, True),
            ("moments-closed", 1.2585747, True),
            ("strong", 16.847, True),
            ("strong-printed", 9.339, False),
            ("moments-asymptotic", 1.7693, False),
        ],
    )
    def test_case_a_by_others(
        self, answer: Callable[[str], Answer], accountant: str, epsilon: float, guarantee: bool
    ) -> None:
        found = answer(f"{CASE_A} --accountant {accountant}")
        assert found["epsilon"] == pytest.approx(epsilon, rel=1e-4)
        assert found["guarantee"] is guarantee
        assert found["accountant"] == accountant
        assert found["epsilon_lower"] is None
        assert found["epsilon_estimate"] is None

    def test_replace_one(self, answer: Callable[[str], Answer]) -> None:
        found = answer(f"{CASE_A} --relation replace-one")
        assert 1.9931 < found["epsilon"] < 1.9933

    def test_full_batch(self, answer: Callable[[str], Answer]) -> None:
        command = "epsilon --sampler full-batch --noise-multiplier 8 --steps 128 --delta 1e-5"
        for accountant in ("exact", "pld"):
            found = answer(f"{command} --accountant {accountant}")
            assert found["epsilon"] == pytest.approx(6.5729700670, rel=1e-6)
        assert found["sampling_rate"] is None

    def test_linear_schedule(self, answer: Callable[[str], Answer]) -> None:
        command = "epsilon --sampling-rate 0.01 --noise-multiplier 1 --delta 1e-5 --clip-schedule linear --steps 100"
        found = answer(command)
        assert found["epsilon_lower"] <= 0.407809735 <= found["epsilon"] < 0.40781 * 1.001
        assert found["schedule_steps"] == 100
        assert found["event"] is None
        assert found["distinct_steps"] == 100
        quick = f"{command} --accountant rdp"
        assert answer(f"{quick} --schedule-steps 100")["epsilon"] == answer(quick)["epsilon"]

    @pytest.mark.parametrize(
        ("text", "clip"),
        [
            ("affine", lambda t: max(1 - t / 40, 0.5)),
            ("geometric:0.05", lambda t: max(0.95**t, 0.5)),
            ("arithmetic:0.05", lambda t: max(1 - 0.05 * t, 0.5)),
        ],
    )
    def test_schedules_hold_the_noise(
        self, answer: Callable[[str], Answer], text: str, clip: Callable[[int], float]
    ) -> None:
        found = answer(
            f"epsilon --sampling-rate 0.1 --noise-multiplier 2 --steps 20 --delta 1e-5 --clip-schedule {text} "
            "--accountant rdp"
        )
        event = Compose(tuple(Poisson(0.1, Gaussian(2 / clip(t))) for t in range(20)))
        assert found["epsilon"] == pytest.approx(
            compare.figure(event, Relation.ADD_REMOVE, "rdp", 1e-5).epsilon, rel=1e-9
        )
        assert found["clip_schedule"] == text
        assert found["schedule_steps"] == (20 if text == "affine" else None)
        priced = events.from_dict(found["event"])
        assert sum(events.leaves(priced).values()) == 20

    def test_shuffle(self, answer: Callable[[str], Answer]) -> None:
        # 20 epochs are one Gaussian each; batches from the rate alone, or from the number of rows
        command = f"epsilon --sampler shuffle --noise-multiplier 0.8916415 {CASE_B}"
        found = answer(f"{command} --relation zero-out")
        assert found["epsilon"] == pytest.approx(33.249, abs=2e-3)
        assert found["batches_per_epoch"] == 118
        assert found["steps"] == 2360
        assert answer(f"{command} --relation zero-out --dataset-size 60000")["epsilon"] == found["epsilon"]
        assert answer(f"{command} --relation replace-one")["epsilon"] == pytest.approx(92.3, abs=0.05)

    def test_a_shuffled_epoch_cut_short_costs_a_whole_one(self, answer: Callable[[str], Answer]) -> None:
        command = "epsilon --sampler shuffle --relation zero-out --sampling-rate 0.3 --noise-multiplier 2 --delta 1e-5"
        assert answer(f"{command} --steps 5")["epsilon"] == answer(f"{command} --steps 8")["epsilon"]
        assert answer(f"{command} --steps 5")["batches_per_epoch"] == 4

    def test_fixed_size(self, answer: Callable[[str], Answer]) -> None:
        found = answer(
            f"epsilon --sampler fixed-size --relation replace-one --noise-multiplier 0.8916415 {CASE_B} "
            "--dataset-size 60000"
        )
        assert found["epsilon"] == pytest.approx(28.7, abs=0.02)
        assert (found["batch_size"], found["steps"]) == (512, 2343)
        assert found["event"]["event"]["batch_size"] == 512

    @pytest.mark.parametrize(
        ("rate", "epochs", "steps"),
        [("512/60000", "20", 2343), ("1024/50000", "40", 1953), ("0.01", "3", 300), ("0.1", "3", 30), ("0.3", "1", 3)],
    )
    def test_epochs(self, answer: Callable[[str], Answer], rate: str, epochs: str, steps: int) -> None:
        found = answer(f"epsilon --sampling-rate {rate} --epochs {epochs} --noise-multiplier 4 --delta 1e-5")
        assert found["steps"] == steps
        assert found["sampling_rate"] == pytest.approx(eval(rate))

    def test_epochs_of_a_full_batch(self, answer: Callable[[str], Answer]) -> None:
        assert answer("epsilon --sampler full-batch --epochs 7 --noise-multiplier 9 --delta 1e-5")["steps"] == 7

    def test_whole_numbers_may_have_exponents(self, answer: Callable[[str], Answer]) -> None:
        assert answer(CASE_A.replace("10000", "1e4"))["steps"] == 10_000

    def test_nothing_released(self, answer: Callable[[str], Answer]) -> None:
        assert answer(CASE_A.replace("0.01", "0"))["epsilon"] == 0

    def test_infinite_epsilon_is_null_with_a_reason(
        self, answer: Callable[[str], Answer], told: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(MomentsProfile, "epsilon", lambda self, delta: math.inf)
        found = answer(f"{CASE_A} --accountant moments")
        assert found["epsilon"] is None
        assert "no finite epsilon" in found["reason"]
        text = told(f"{CASE_A} --accountant moments")
        assert "ε = ∞" in text
        assert "Nothing is promised" in text


class TestJson:
    def test_fields(self, answer: Callable[[str], Answer]) -> None:
        found = answer(CASE_A)
        assert found["event"] == events.to_dict(Repeat(Poisson(0.01, Gaussian(4.0)), 10_000))
        expected = {
            "delta": 1e-5, "accountant": "pld", "guarantee": True, "relation": "add-remove", "sampler": "poisson",
            "steps": 10_000, "sampling_rate": 0.01, "noise_multiplier": 4.0, "clip_schedule": None,
            "schedule_steps": None, "dataset_size": None, "distinct_steps": 1,
        }  # fmt: skip
        assert expected.items() <= found.items()
        assert "reason" not in found
        assert all("declared, not read from the data" in item for item in found["assumed_public"])

    def test_the_number_of_rows_is_public_where_it_is(self, answer: Callable[[str], Answer]) -> None:
        assert "the number of rows" in answer(f"{CASE_A} --relation zero-out")["assumed_public"]
        declared = answer(f"{CASE_A} --dataset-size 60000")["assumed_public"]
        assert "the number of rows (60,000), declared, not read from the data" in declared

    @pytest.mark.parametrize("command", ["epsilon", "calibrate", "steps"])
    def test_only_the_chosen_accountant_is_computed(
        self, answer: Callable[[str], Answer], monkeypatch: pytest.MonkeyPatch, command: str
    ) -> None:
        def never(*_: object) -> None:
            pytest.fail("the accountants were compared")

        monkeypatch.setattr(compare, "compare", never)
        asked = {"epsilon": "--noise-multiplier 4 --steps 50", "calibrate": "--epsilon 1 --steps 50"}
        options = asked.get(command, "--epsilon 1 --noise-multiplier 4")
        found = answer(f"{command} --sampling-rate 0.01 --delta 1e-5 --accountant rdp {options}")
        assert found["accountant"] == "rdp"


class TestCalibrate:
    @pytest.mark.parametrize(("accountant", "noise"), [("pld", 0.8916415), ("rdp", 0.93761), ("moments", 1.01056)])
    def test_case_b(self, answer: Callable[[str], Answer], accountant: str, noise: float) -> None:
        found = answer(f"calibrate --epsilon 3 {CASE_B} --accountant {accountant}")
        assert found["noise_multiplier"] == pytest.approx(noise, rel=1e-4)
        assert 2.999 < found["epsilon"] <= 3
        assert (found["steps"], found["target_epsilon"]) == (2343, 3.0)

    def test_precision_is_the_least_multiple(self, answer: Callable[[str], Answer]) -> None:
        command = "--sampling-rate 1024/50000 --epochs 40 --delta 1e-5"
        found = answer(f"calibrate --epsilon 2 {command} --precision 0.01")
        assert found["noise_multiplier"] == 1.97
        assert found["epsilon"] <= 2
        assert answer(f"epsilon {command} --noise-multiplier 1.96")["epsilon"] > 2

    def test_less_noise_with_a_schedule(self, answer: Callable[[str], Answer]) -> None:
        command = "calibrate --epsilon 1 --delta 1e-5 --sampling-rate 0.1 --steps 20 --accountant rdp"
        assert answer(f"{command} --clip-schedule affine")["noise_multiplier"] < answer(command)["noise_multiplier"]


class TestSteps:
    def test_one_more_is_too_many(self, answer: Callable[[str], Answer]) -> None:
        found = answer("steps --epsilon 2 --delta 1e-5 --sampling-rate 0.01 --noise-multiplier 1.1")
        assert found["epsilon"] <= 2
        after = CASE_A.replace("10000", str(found["steps"] + 1)).replace("multiplier 4", "multiplier 1.1")
        assert answer(after)["epsilon"] > 2

    def test_more_steps_with_a_schedule(self, answer: Callable[[str], Answer]) -> None:
        command = "steps --epsilon 1 --delta 1e-5 --sampling-rate 0.1 --noise-multiplier 4 --accountant rdp"
        constant = answer(command)["steps"]
        found = answer(f"{command} --clip-schedule linear --schedule-steps {constant}")
        assert found["steps"] > constant
        assert found["schedule_steps"] == constant
        assert answer(f"{command} --clip-schedule geometric:0.01")["steps"] > constant

    def test_shuffled_steps_are_whole_epochs(self, answer: Callable[[str], Answer]) -> None:
        found = answer(
            "steps --epsilon 2 --delta 1e-5 --sampler shuffle --relation zero-out --sampling-rate 0.1 "
            "--noise-multiplier 10 --accountant exact"
        )
        assert found["steps"] % 10 == 0


class TestForPeople:
    def test_every_accountant_has_its_line(self, told: Callable[[str], str]) -> None:
        text = told(CASE_A)
        assert all(name in text for name in ACCOUNTANTS)
        assert "ε = 0.94687 at δ = 1e-05 (add-remove neighbours, poisson sampling, accountant pld)" in text
        assert "pld (chosen) 0.94687 yes" in text
        assert "rdp 1.0354 yes" in text
        assert "moments 1.2586 yes" in text
        assert "exact – – prices full-batch Gaussians only" in text
        assert "strong-printed 9.3391 no historical" in text

    def test_words(self, told: Callable[[str], str]) -> None:
        text = told(f"{CASE_A} --dataset-size 60000")
        for words in (
            "Whatever anyone sees of the model",
            "at most 2.5777 times",
            "The unit is one row",
            "Poisson sampling",
            "Declared, not read from the data",
            "the number of rows (60,000)",
            "a proven bound on the same truth",
        ):
            assert words in text

    def test_worse_samplers_say_why(self, told: Callable[[str], str]) -> None:
        shuffle = told("epsilon --sampler shuffle --relation zero-out --sampling-rate 0.1 --noise-multiplier 5 "
                       "--steps 20 --delta 1e-5")  # fmt: skip
        assert "much worse than Poisson sampling" in shuffle
        assert "one full Gaussian release" in shuffle
        fixed = told("epsilon --sampler fixed-size --relation replace-one --sampling-rate 0.1 --dataset-size 1000 "
                     "--noise-multiplier 5 --steps 20 --delta 1e-5")  # fmt: skip
        assert "much worse than Poisson sampling" in fixed
        assert "two clip bounds" in fixed

    def test_history_promises_nothing(self, told: Callable[[str], str]) -> None:
        text = told(f"{CASE_A} --accountant strong-printed")
        assert "no guarantee" in text
        assert "Nothing is promised" in text

    def test_calibrate_and_steps_say_what_was_found(self, told: Callable[[str], str]) -> None:
        options = "--delta 1e-5 --sampler full-batch"
        assert "noise multiplier 5.28: the least" in told(f"calibrate --epsilon 1 {options} --steps 2 --precision 0.01")
        assert "51 steps: the most within ε = 3" in told(f"steps --epsilon 3 {options} --noise-multiplier 10")
        assert "the least that is tried" in told("calibrate --epsilon 1 --delta 1e-5 --sampling-rate 0 --steps 9")

    def test_figures_are_never_rounded_towards_comfort(self) -> None:
        assert float(compare.up(0.946885497)) > 0.946885497 > float(compare.down(0.946885497))

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([]) == 0
        assert "epsilon" in capsys.readouterr().out
        for command in ("epsilon", "calibrate", "steps"):
            assert cli.main([command, "--help"]) == 0
            assert "--accountant" in capsys.readouterr().out
        assert cli.main(["--version"]) == 0
        assert capsys.readouterr().out == f"dpgrad {dpgrad.__version__}\n"


REFUSED = {
    "no noise": (f"{CASE_A} --noise-multiplier 0", "--noise-multiplier must be positive"),
    "negative noise": (f"{CASE_A} --noise-multiplier -1", "--noise-multiplier must be positive"),
    "negative noise with an exponent": (f"{CASE_A} --noise-multiplier -1e-3", "--noise-multiplier must be positive"),
    "noise nan": (f"{CASE_A} --noise-multiplier nan", "got nan"),
    "noise inf": (f"{CASE_A} --noise-multiplier inf", "got inf"),
    "noise minus inf": (f"{CASE_A} --noise-multiplier -inf", "got -inf"),
    "noise word": (f"{CASE_A} --noise-multiplier much", "--noise-multiplier must be a number, got 'much'"),
    "noise beyond floats": (
        f"{CASE_A} --noise-multiplier 1e-200 --accountant strong-printed",
        "must lie between 1e-06 and 1e+12",
    ),
    "rate above one": (f"{CASE_A} --sampling-rate 1.5", r"--sampling-rate must lie in [0, 1], got 1.5"),
    "rate below zero": (f"{CASE_A} --sampling-rate -0.1", r"--sampling-rate must lie in [0, 1]"),
    "rate nan": (f"{CASE_A} --sampling-rate nan", "got 'nan'"),
    "rate inf": (f"{CASE_A} --sampling-rate inf", "got 'inf'"),
    "rate over nothing": (f"{CASE_A} --sampling-rate 1/0", "--sampling-rate must be a number"),
    "no rate": ("epsilon --noise-multiplier 1 --steps 5 --delta 1e-5", "--sampling-rate is required"),
    "delta zero": (f"{CASE_A} --delta 0", "--delta must lie strictly between 0 and 1"),
    "delta negative": (f"{CASE_A} --delta -1e-5", "--delta must lie strictly between 0 and 1"),
    "delta one": (f"{CASE_A} --delta 1", "--delta must lie strictly between 0 and 1"),
    "delta nan": (f"{CASE_A} --delta nan", "--delta must be a number, got nan"),
    "no steps": (f"{CASE_A} --steps 0", "--steps must be a whole number of at least 1"),
    "too many steps": (f"{CASE_A} --steps 1e12", "at most 1,000,000,000"),
    "half a step": (f"{CASE_A} --steps 2.5", "--steps must be a whole number, got '2.5'"),
    "steps nan": (f"{CASE_A} --steps nan", "--steps must be a whole number"),
    "steps inf": (f"{CASE_A} --steps inf", "--steps must be a whole number"),
    "steps beyond reason": (f"{CASE_A} --steps 1e999999999", "--steps must be a whole number"),
    "steps and epochs": (f"{CASE_A} --epochs 2", "not allowed with"),
    "neither steps nor epochs": ("epsilon --noise-multiplier 1 --sampling-rate 1 --delta 1e-5", "--steps --epochs"),
    "less than a step": ("epsilon --noise-multiplier 1 --sampling-rate .5 --delta 1e-5 --epochs .1", "less than one"),
    "too many epochs": ("epsilon --noise-multiplier 1 --sampling-rate .01 --delta 1e-5 --epochs 1e9", "at most"),
    "endless epoch": ("epsilon --noise-multiplier 1 --sampling-rate 0 --delta 1e-5 --epochs 1", "above 0"),
    "rows": (f"{CASE_A} --dataset-size 0", "--dataset-size must be a whole number of at least 1"),
    "fixed-size without rows": (f"{CASE_A} --sampler fixed-size --relation replace-one", "--dataset-size is required"),
    "fixed-size, add-remove": (f"{CASE_A} --sampler fixed-size --dataset-size 1000", "use relation replace-one"),
    "shuffle, add-remove": (f"{CASE_A} --sampler shuffle", "use relation zero-out or replace-one"),
    "shuffle, no batch": (f"{CASE_A} --sampler shuffle --relation zero-out --sampling-rate 0", "must be above 0"),
    "full-batch at a rate": (f"{CASE_A} --sampler full-batch", "--sampling-rate is not allowed"),
    "exact, sampled": (f"{CASE_A} --accountant exact", "full-batch Gaussians only"),
    "historical, replace-one": (f"{CASE_A} --accountant strong-printed --relation replace-one", "use accountant"),
    "accountant": (f"{CASE_A} --accountant vibes", "--accountant must be one of pld, "),
    "relation": (
        f"{CASE_A} --relation friends",
        "--relation must be one of add-remove",
    ),
    "sampler": (
        f"{CASE_A} --sampler lottery",
        "--sampler must be one of poisson",
    ),
    "option": (f"{CASE_A} --epsylon 3", "unknown option '--epsylon': dpgrad epsilon --help-all lists the options"),
    "abbreviated option": (f"{CASE_A} --acc rdp", "unknown option '--acc'"),
    "option without value": ("epsilon --delta", "expected one argument"),
    "schedule": (
        f"{CASE_A} --clip-schedule bumpy",
        "clip schedule must be linear",
    ),
    "schedule without rate": (f"{CASE_A} --clip-schedule geometric", "needs a rate"),
    "schedule beyond rate": (f"{CASE_A} --clip-schedule arithmetic:1.5", "strictly between 0 and 1"),
    "schedule steps alone": (f"{CASE_A} --schedule-steps 5", "--schedule-steps needs --clip-schedule"),
    "plot kind": (f"{CASE_A} --plot plot.pdf", "--plot must end in .svg or .png"),
    "command": ("teach --data digits", "command must be one of epsilon, "),
    "budget": ("calibrate --epsilon 0 --delta 1e-5 --sampling-rate 0.1 --steps 9", "--epsilon must be positive"),
    "negative budget": ("steps --epsilon -1 --delta 1e-5 --sampling-rate .1 --noise-multiplier 1", "--epsilon must be"),
    "precision": ("calibrate --epsilon 1 --delta 1e-5 --sampling-rate .1 --steps 9 --precision 0", "--precision must"),
    "budget too small": (
        "calibrate --epsilon 1e-12 --delta 1e-15 --sampler full-batch --steps 1e6 --accountant exact",
        "no noise_multiplier up to",
    ),
    "not even one step": (
        "steps --epsilon 1 --delta 1e-5 --sampling-rate .1 --noise-multiplier .3 --accountant rdp",
        "one step already costs",
    ),
    "steps without end": (
        "steps --epsilon 1 --delta 1e-5 --sampling-rate 0 --noise-multiplier 1 --accountant rdp",
        "no most number of steps",
    ),
    "a schedule without its end": (
        "steps --epsilon 1 --delta 1e-5 --sampling-rate .1 --noise-multiplier 1 --clip-schedule linear",
        "--schedule-steps is required",
    ),
    "steps given to steps": (
        "steps --epsilon 1 --delta 1e-5 --sampling-rate .1 --noise-multiplier 1 --steps 5",
        "unknown option '--steps': dpgrad steps --help-all lists the options",
    ),
}


class TestRefused:
    @pytest.mark.parametrize("json_too", [False, True], ids=["plain", "json"])
    @pytest.mark.parametrize(("command", "message"), REFUSED.values(), ids=REFUSED)
    def test_one_line(self, refused: Callable[..., str], command: str, message: str, json_too: bool) -> None:
        assert message in refused(f"{command} --json" if json_too else command)

    @pytest.mark.parametrize("accountant", ["strong-printed", "moments-asymptotic"])
    @pytest.mark.parametrize("command", ["calibrate --steps 9", "steps --noise-multiplier 4"])
    def test_history_calibrates_nothing(self, refused: Callable[..., str], command: str, accountant: str) -> None:
        options = "--epsilon 1 --delta 1e-5 --sampling-rate 0.1 --json"
        assert "historical comparison" in refused(f"{command} {options} --accountant {accountant}")

    def test_a_line_break_in_an_argument_makes_no_second_line(self, refused: Callable[..., str]) -> None:
        assert "a b" in refused(*CASE_A.split(), "a\nb")

    def test_plot_that_cannot_be_written(self, refused: Callable[..., str], tmp_path: Path) -> None:
        for path in (tmp_path / "absent" / "plot.svg", tmp_path / "folder.svg"):
            if path.parent == tmp_path:
                path.mkdir()
            command = f"epsilon --sampler full-batch --noise-multiplier 4 --steps 5 --delta 1e-5 --plot {path}"
            assert "--plot cannot write" in refused(command)
            assert "--plot cannot write" in refused(f"{command} --json")

    def test_plot_of_nothing(self, refused: Callable[..., str], tmp_path: Path) -> None:
        assert "nothing to draw" in refused(f"{CASE_A} --sampling-rate 0 --plot {tmp_path / 'plot.svg'}")

    def test_interrupted(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(compare, "figure", interrupt)
        assert cli.main(CASE_A.split()) == 130
        assert capsys.readouterr() == ("", "dpgrad: error: interrupted\n")

    def test_a_defect_is_one_line_too(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise AssertionError("of our own")

        monkeypatch.setattr(compare, "figure", fail)
        assert cli.main(CASE_A.split()) == 1
        assert capsys.readouterr() == (
            "", "dpgrad: error: AssertionError: of our own: this is a bug in dpgrad, please report the command\n"
        )  # fmt: skip


class TestPlot:
    FULL = "epsilon --sampler full-batch --noise-multiplier 40 --steps 1000 --delta 1e-5"

    def test_svg_is_the_same_every_time(self, answer: Callable[[str], Answer], tmp_path: Path) -> None:
        one, two = tmp_path / "one.svg", tmp_path / "two.svg"
        assert answer(f"{self.FULL} --plot {one}")["plot"] == str(one)
        answer(f"{self.FULL} --plot {two}")
        assert one.read_bytes() == two.read_bytes()
        assert ET.parse(one).getroot().tag.endswith("svg")
        assert b"<dc:date>" not in one.read_bytes()

    def test_png(self, told: Callable[[str], str], tmp_path: Path) -> None:
        path = tmp_path / "plot.PNG"
        said = told(f"{self.FULL} --plot {path}")
        assert str(path) in said.replace(" ", "")  # a long path is broken into lines
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    def test_steps_and_calibrate_draw_too(self, answer: Callable[[str], Answer], tmp_path: Path) -> None:
        options = f"--sampler full-batch --delta 1e-5 --epsilon 1 --plot {tmp_path / 'plot.svg'}"
        for command in ("calibrate --steps 20", "steps --noise-multiplier 20"):
            answer(f"{command} {options}")
            assert (tmp_path / "plot.svg").stat().st_size > 1000
            (tmp_path / "plot.svg").unlink()

    def test_lines_of_all_that_can_price(self) -> None:
        run = Mechanism(sampling.Poisson(0.01), 1000, 4.0)
        found = plot.lines(run, 1e-5, {})
        assert set(found) == set(ACCOUNTANTS) - {"exact"}
        assert {name for name, line in found.items() if not line[2]} == {"strong-printed", "moments-asymptotic"}
        for steps, epsilons, _ in found.values():
            assert steps[-1] == 1000
            assert epsilons == sorted(epsilons)
        assert found["pld"][1][-1] <= min(line[1][-1] for line in found.values())

    def test_points(self) -> None:
        assert plot.counts(1) == [1]
        assert 12 <= len(plot.counts(10**9)) <= 20
        assert all(n % 7 == 0 or n == 100 for n in plot.counts(100, span=7))

    def test_rounding_noise_down_never_lowers_epsilon(self) -> None:
        clip = schedules.linear(1.0, 300)
        event = Mechanism(sampling.Poisson(0.1), 300, 2.0, clip=clip, hold_noise=True).event()
        rounded = compare.coarse(event, grid=20, most=10)
        assert compare.runs(rounded) < 20
        assert sum(events.leaves(rounded).values()) == 300
        fine, coarse = (
            compare.figure(e, Relation.ADD_REMOVE, "rdp", 1e-5).epsilon for e in (event, rounded)
        )  # fmt: skip
        assert fine < coarse < 1.1 * fine


def run(command: str, **settings: Any) -> "subprocess.CompletedProcess[str]":
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, "encoding": "utf-8"}
    return subprocess.run([PROGRAM, *command.split()], **{**options, **settings})


class TestProcess:
    def test_answers(self) -> None:
        done = run(f"{CASE_A} --json")
        assert done.returncode == 0, done.stderr
        assert 0.94686 <= json.loads(done.stdout)["epsilon"] <= 0.94690
        assert re.fullmatch(r"(dpgrad: [a-z ]+ \.\.\.\n)*", done.stderr)  # a sign of life where the machine is busy

    @pytest.mark.parametrize(
        ("options", "absent"),
        [
            (
                ["--json"],
                {"torch", "matplotlib", "rich", "sklearn", "scipy.stats", "scipy.optimize", "scipy.integrate"},
            ),
            ([], {"torch", "matplotlib", "sklearn", "scipy.stats", "scipy.optimize", "scipy.integrate"}),
        ],
        ids=["json", "table"],
    )
    def test_imports(self, options: list[str], absent: set[str]) -> None:
        code = (
            "import sys\nfrom dpgrad.cli import main\n"
            f"assert main({CASE_A.split() + options!r}) == 0\nprint(' '.join(sys.modules), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert not set(done.stderr.split()) & absent

    def test_help_needs_no_numpy(self) -> None:
        code = "import sys\nfrom dpgrad.cli import main\nmain([])\nassert 'numpy' not in sys.modules"
        assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=600).returncode == 0

    def test_no_terminal_no_colour(self) -> None:
        done = run(CASE_A, env={**os.environ, "NO_COLOR": "1"})
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert "pld (chosen)" in done.stdout

    def test_a_terminal_without_greek(self) -> None:
        done = run(CASE_A, env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        assert "epsilon = 0.94687 at delta = 1e-05" in done.stdout

    def test_refusal(self) -> None:
        done = run(f"{CASE_A} --noise-multiplier 0 --json")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "dpgrad: error: --noise-multiplier must be positive and finite, got 0.0\n"

    def test_closed_pipe(self) -> None:
        read, write = os.pipe()
        os.close(read)
        try:
            done = run(f"{CASE_A} --json", capture_output=False, stdout=write, stderr=subprocess.PIPE)
        finally:
            os.close(write)
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]  # one, after any waiting
        assert "standard output" in line


RUN = "epsilon --sampling-rate 0.02 --noise-multiplier 2 --steps 50 --delta 1e-5"


class TestAttacks:
    def test_json_says_what_attacks_reach(self, answer: Callable[[str], Answer]) -> None:
        found = answer(f"{RUN} --group 3")
        promise = Guarantee(found["epsilon"], 1e-5, Relation.ADD_REMOVE, "pld", events.from_dict(found["event"]))
        assert found["membership_advantage"] == promise.tradeoff().advantage
        assert found["attacks"] == promise.attacks()
        assert found["group"]["attacks"] == promise.for_group(3).attacks()
        assert found["group"]["attacks"]["membership_advantage"] > found["membership_advantage"]

    def test_history_has_none(self, answer: Callable[[str], Answer]) -> None:
        assert "attacks" not in answer(f"{RUN} --accountant strong-printed")

    def test_other_commands_do_not_compute_them(self, answer: Callable[[str], Answer]) -> None:
        found = answer("calibrate --epsilon 2 --delta 1e-5 --sampling-rate 0.02 --steps 50 --accountant rdp")
        assert "attacks" not in found

    def test_text_has_one_sentence(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(RUN.split()) == 0
        assert "what attacks reach" in capsys.readouterr().out

    def test_curve_as_numbers(self, answer: Callable[[str], Answer], tmp_path: Path) -> None:
        path = tmp_path / "curve.csv"
        found = answer(f"{RUN} --curve {path}")
        assert found["curve"] == str(path)
        head, *lines = path.read_text("utf-8").splitlines()
        assert head == "curve,x,y"
        rows = [(name, float(x), float(y)) for name, x, y in (line.split(",") for line in lines)]
        deltas = [(x, y) for name, x, y in rows if name == "delta"]
        assert deltas[0] == (0.0, found["membership_advantage"])
        assert [y for _, y in deltas] == sorted((y for _, y in deltas), reverse=True)
        errors = [{"false_positives": x, "false_negatives": y} for name, x, y in rows if name == "false_negatives"]
        assert errors == found["attacks"]["tradeoff"]

    @pytest.mark.parametrize("kind", ["svg", "png"])
    def test_curve_as_a_picture(self, answer: Callable[[str], Answer], tmp_path: Path, kind: str) -> None:
        one, two = tmp_path / f"one.{kind}", tmp_path / f"two.{kind}"
        for path in (one, two):
            answer(f"{RUN} --curve {path}")
        assert one.read_bytes() == two.read_bytes()
        if kind == "svg":
            ET.parse(one)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ("--curve curve.pdf", "must end in .csv or .svg or .png"),
            ("--curve /nowhere/curve.csv", "cannot write"),
            ("--curve curve.csv --accountant strong-printed", "--curve needs a guarantee"),
        ],
    )
    def test_refuses(
        self,
        options: str,
        said: str,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        try:
            code = cli.main([*RUN.split(), *options.split()])
        except SystemExit as stopped:
            code = int(str(stopped.code))
        assert code == 2
        assert said in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
