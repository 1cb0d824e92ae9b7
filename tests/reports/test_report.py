"""The privacy report names all it must, keeps its format, and never flatters."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dpgrad import data
from dpgrad.accounting import account, events
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.grads.certified import COST
from dpgrad.grads.ways import Way
from dpgrad.reports import report
from dpgrad.training.fit import Fitted

MODEL = {"name": "linear", "shape": [3], "outputs": 2}


@pytest.fixture(scope="module")
def made(fitted: Fitted) -> report.Report:
    return report.report(fitted, data=data.load("digits"), model=MODEL, outside=["one thing more"])


class TestPrivacy:
    def test_guarantee(self, made: report.Report, fitted: Fitted) -> None:
        promise = made["guarantee"]
        interval = account(fitted.guarantee.event, fitted.guarantee.relation, "pld").interval(1e-4)  # type: ignore[attr-defined]
        assert promise["epsilon"] == fitted.guarantee.epsilon
        assert promise["epsilon_lower"] == pytest.approx(interval.lower)
        assert promise["epsilon_lower"] <= promise["epsilon"] <= 2.0
        assert (promise["delta"], promise["relation"], promise["accountant"]) == (1e-4, "zero-out", "pld")
        assert promise["sampling"] == "Poisson sampling"
        assert promise["privacy_unit"] == "one row"
        assert promise["neighbours"].startswith("datasets of the same public size")
        assert promise["statement"] == str(fitted.guarantee)

    def test_the_event_can_be_priced_again(self, made: report.Report) -> None:
        event = events.from_dict(made["event"])
        relation = events.Relation(made["guarantee"]["relation"])
        assert account(event, relation, "pld").epsilon(1e-4) == made["guarantee"]["epsilon"]
        assert made["distinct_steps"] == 1

    def test_public_and_outside(self, made: report.Report) -> None:
        public, outside = made["public"], made["outside"]
        assert "the pixel range 0..16" in public
        assert sum("number of rows" in entry for entry in public) == 1
        assert any("held-out rows" in entry for entry in outside)
        assert any("choices of method and settings" in entry for entry in outside)
        assert outside[-1] == "one thing more"

    def test_what_preparation_read_is_outside(self, fitted: Fitted) -> None:
        read = dataclasses.replace(
            data.load("digits"), public=("the classes", "outside the guarantee: the column means")
        )
        found = report.report(fitted, data=read, model=MODEL)
        assert "the column means" in found["outside"]
        assert not any("means" in entry for entry in found["public"])

    def test_curves_end_at_the_guarantee(self, made: report.Report, fitted: Fitted) -> None:
        points = made["curves"]
        assert [point["step"] for point in points] == [1, 2, 3]
        assert points[-1]["epsilon"] == made["guarantee"]["epsilon"]
        assert [point["epsilon"] for point in points] == sorted(point["epsilon"] for point in points)
        for point, given in zip(points, fitted.curves, strict=True):
            assert point["epsilon"] == given.epsilon == fitted.plan.epsilon_after(point["step"])
        assert made["result"]["steps"] == 3

    def test_a_schedule(self, short: Any) -> None:
        fitted = short(method="dpsgd-dynamic")
        found = report.report(fitted)
        assert [point["epsilon"] for point in found["curves"]] == [fitted.plan.epsilon_after(n) for n in (1, 2, 3)]
        assert [point["clip"] for point in found["curves"]] == [12.0, pytest.approx(9.0), pytest.approx(7.2)]
        wanted = {"name": "own", "shape": [3], "outputs": 2, "parameters": 8, "dtype": "float32", "source": None}
        assert found["model"] == wanted
        assert found["data"] is None

    def test_a_seeded_run_is_not_for_release(self, made: report.Report, short: Any) -> None:
        assert made["release"]["allowed"]
        seeded = report.report(short(seed=7))
        assert not seeded["release"]["allowed"]
        assert "subtract the noise" in seeded["release"]["reason"]
        assert "NOT FOR RELEASE" in report.text(seeded)

    def test_an_interrupted_run_costs_its_plan(self, short: Any) -> None:
        found = report.report(short(progress=lambda now: now.step == 1))
        assert found["stopped"] == "interrupted"
        assert not found["release"]["allowed"]
        assert found["guarantee"]["epsilon"] == pytest.approx(2.0, rel=1e-3)
        assert found["result"]["steps"] == 1

    def test_infinite_epsilon_is_null_with_a_reason(self, fitted: Fitted) -> None:
        infinite = Guarantee(math.inf, 1e-4, fitted.guarantee.relation, "rdp", fitted.guarantee.event)
        found = report.report(dataclasses.replace(fitted, guarantee=infinite))
        assert found["guarantee"]["epsilon"] is None
        assert found["guarantee"]["reason"]
        assert "infinite" in report.text(found)


class TestWay:
    def test_a_plain_model(self, made: report.Report) -> None:
        assert made["way"] == {"name": "batched", "reason": "no operation depends on values", "cost": None}
        assert dict(report.facts(made))["gradients"] == "batched: no operation depends on values"

    @pytest.mark.parametrize("engine", ["vmap", "single"])
    def test_an_engine_of_the_caller(self, short: Any, engine: str) -> None:
        found = report.report(short(engine=engine))
        assert found["way"] == {"name": engine, "reason": None, "cost": None}
        assert dict(report.facts(found))["gradients"] == engine

    def test_certified(self, fitted: Fitted) -> None:
        found = report.report(dataclasses.replace(fitted, way=Way("certified", "it is odd")))
        assert found["way"]["cost"] == COST
        assert f"certified: it is odd; every batch is checked, which costs {COST}" in dict(report.facts(found)).values()

    def test_no_step(self, fitted: Fitted) -> None:
        assert report.report(dataclasses.replace(fitted, way=None))["way"] is None

    @pytest.mark.parametrize(
        ("why", "kept"),
        [
            ("sort; vmap does not take it: of 17 rows; Smith (m.py, line 3); else", "sort; vmap does not take it"),
            ("vmap does not take it: one\nline of 4", "vmap does not take it"),
            ("a tensor of shape torch.Size([21, 7]) has 7 rows in more than one", "a tensor has rows in more than one"),
            ("it calls requires_grad_() (m.py, line 3)", "it calls requires_grad_()"),
            ("conv2d combines l.0.weight with whole numbers", "conv2d combines l.0.weight with whole numbers"),
        ],
    )  # fmt: skip
    def test_what_a_reason_holds_of_the_data_is_left_out(self, fitted: Fitted, why: str, kept: str) -> None:
        found = report.report(dataclasses.replace(fitted, way=Way("lifted", why)))
        assert found["way"]["reason"] == kept


class TestFormat:
    def test_json_round_trip(self, made: report.Report) -> None:
        again = json.loads(json.dumps(made, allow_nan=False))
        report.check(again)
        assert again == made

    def test_every_field_is_documented_and_required(self) -> None:
        def walk(schema: dict[str, Any]) -> None:
            if "properties" in schema:
                assert schema["additionalProperties"] is (schema is plan)  # what else a plan has depends on the method
                assert set(schema["required"]) == set(schema["properties"])
                for inner in schema["properties"].values():
                    walk(inner)
            walk(schema["items"]) if "items" in schema else None

        plan = report.SCHEMA["properties"]["plan"]
        walk({**report.SCHEMA})

    @pytest.mark.parametrize("field", report.SCHEMA["required"])
    def test_a_missing_field_is_refused(self, made: report.Report, field: str) -> None:
        less = {name: value for name, value in made.items() if name != field}
        with pytest.raises(ValueError, match=f"{field} is missing"):
            report.check(less)

    @pytest.mark.parametrize(
        ("path", "value", "fault"),
        [
            (("format",), "dpgrad privacy report 4", "must be one of dpgrad privacy report 3"),
            (("format",), "dpgrad privacy report 2", "must be one of dpgrad privacy report 3"),  # which had no kind
            (("format",), "dpgrad privacy report 1", "must be one of dpgrad privacy report 3"),  # nor a way
            (("kind",), "guess", "kind must be one of run, plan, estimator"),
            (("plain", "odds", "sure"), "much", "plain.odds.sure must be of type number or null"),
            (("values", "clip"), -1, "values.clip must be at least 0"),
            (("way", "name"), "guessed", "way.name must be one of batched, lifted, certified, vmap, single"),
            (("way", "cost"), 2, "way.cost must be of type string or null"),
            (("guarantee", "epsilon"), -1, "guarantee.epsilon must be at least 0"),
            (("guarantee", "delta"), 1, "guarantee.delta must be below 1"),
            (("guarantee", "relation"), "friends", "guarantee.relation must be one of"),
            (("release", "allowed"), "yes", "release.allowed must be of type boolean"),
            (("result", "held_out"), "good", "result.held_out must be of type number or null"),
            (("plan",), {}, "plan.batch_size is missing"),
        ],
        ids=str,
    )
    def test_an_edited_field_is_refused(
        self, made: report.Report, path: tuple[str, ...], value: Any, fault: str
    ) -> None:
        edited = copy.deepcopy(made)
        place = edited
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        with pytest.raises(ValueError, match=fault):
            report.check(edited)

    @pytest.mark.parametrize("number", [1, 2])
    def test_a_report_of_an_earlier_format(self, made: report.Report, tmp_path: Path, number: int) -> None:
        """Both were for runs alone; the first, of 0.1.0, had no way."""
        added = {"kind", "date", "environment", "schema", "preprocessing", "plain", "values", "releases", "notes"}
        added |= {"noise"}
        missing = added | ({"way"} if number == 1 else set())
        old = {name: value for name, value in made.items() if name not in missing}
        old["format"] = f"dpgrad privacy report {number}"
        report.check(old)
        (tmp_path / report.FILE).write_text(json.dumps(old), "utf-8")
        found = report.load(tmp_path)
        assert found["plain"] == made["plain"]
        assert found["values"]["noise_multiplier"] == made["values"]["noise_multiplier"]
        assert {name for name in found if found[name] != made[name]} <= missing | {"format"}
        for one in (old, found):
            assert ("gradients" in dict(report.facts(one))) is (number == 2)
            assert "batches of 20 out of 100 rows" in report.text(one)
        with pytest.raises(ValueError, match="stopped is missing"):
            report.check({name: value for name, value in old.items() if name != "stopped"})
        with pytest.raises(ValueError, match="guarantee must be of type object"):
            report.check({**old, "guarantee": None})

    def test_the_page_of_the_format_names_every_field(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "report.md").read_text("utf-8")
        for name, inner in report.SCHEMA["properties"].items():
            assert f"`{name}`" in page
            for field in inner.get("properties", inner.get("items", {}).get("properties", {})):
                assert f"`{field}`" in page, field


class TestFiles:
    def test_written_and_read(self, made: report.Report, tmp_path: Path) -> None:
        (tmp_path / "release").mkdir()
        report.write(tmp_path / "release", made)
        assert report.load(tmp_path) == made
        assert report.load(tmp_path / "release") == made  # what was shared, by itself
        assert report.released(tmp_path) == report.released(tmp_path / "release") == tmp_path / "release"
        assert (tmp_path / "release" / "report.txt").read_text("utf-8") == report.text(made)

    def test_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="holds no finished run"):
            report.load(tmp_path)
        with pytest.raises(ValueError, match="there is no such folder"):
            report.load(tmp_path / "absent")

    def test_several_runs(self, made: report.Report, tmp_path: Path) -> None:
        (tmp_path / "dpsgd" / "release").mkdir(parents=True)
        report.write(tmp_path / "dpsgd" / "release", made)
        with pytest.raises(ValueError, match=r"several runs: choose .*dpsgd"):
            report.load(tmp_path)

    @pytest.mark.parametrize(("content", "fault"), [("{", "is not JSON"), ("{}", "format is missing")])
    def test_damaged(self, tmp_path: Path, content: str, fault: str) -> None:
        (tmp_path / "release").mkdir()
        (tmp_path / "release" / "report.json").write_text(content, "utf-8")
        with pytest.raises(ValueError, match=fault):
            report.load(tmp_path)


class TestText:
    def test_it_names_all_it_must(self, made: report.Report) -> None:
        text = " ".join(report.text(made).split())
        for words in (
            "ε at most", "by any proof", "δ 0.0001", "neighbours zero-out", "privacy unit one row", "Poisson sampling",
            "batches of 20 out of 100 rows", "accountant pld", "public the sampling rate", "not covered",
            "the held-out rows", "3, as planned", "digits", "gradients batched: no operation depends on values",
        ):  # fmt: skip
            assert words in text

    def test_lines_are_short(self, made: report.Report) -> None:
        assert max(map(len, report.text(made).splitlines())) <= 100
