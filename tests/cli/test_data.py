"""`dpgrad data describe`, and `dpgrad train` on a file of one's own."""

import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpgrad import cli, data
from dpgrad.data import Schema

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV with strings, missing values, dates, ids and a word that occurs once."""
    draw, path = random.Random(3), tmp_path_factory.mktemp("own") / "people.csv"
    lines = ["who;age;job;since;note;income"]
    for row in range(120):
        age = "" if row % 17 == 0 else draw.randint(18, 87)
        job = "astronaut" if row == 60 else "?" if row % 13 == 0 else draw.choice(["cook", "clerk", "tailor, head"])
        lines.append(
            f"p{row:03};{age};{job};20{row % 20 + 10}-02-03;{'x' * (row % 7)}q{row};{'high' if row % 3 else 'low'}"
        )
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def described(capsys: Capture, *words: str) -> tuple[str, str]:
    assert cli.main(["data", "describe", *words]) == 0
    return capsys.readouterr()


def confirmed(text: str) -> str:
    return text.replace("public = false", "public = true")


def test_another_separator_beside_decimal_commas_has_a_remedy(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a;y\n1,5;yes\n2,5;no\n", "utf-8")
    assert cli.main(["data", "describe", str(path), "--separator", ","]) == 2
    assert (
        "(; with decimal commas), name it: separator under [file] of the schema, or --separator"
        in capsys.readouterr().err
    )


class TestDescribe:
    def test_a_table(self, people: Path, capsys: Capture) -> None:
        out, err = described(capsys, str(people))
        found = tomllib.loads(out)
        assert found["columns"]["age"] == {
            "kind": "number", "bounds": [0, 100], "missing": [""], "fill": 50, "public": False
        }  # fmt: skip
        assert found["columns"]["job"]["categories"] == ["clerk", "cook", "tailor, head"]
        assert found["columns"]["job"]["missing"] == ["", "?"]
        assert {found["columns"][name]["kind"] for name in ("who", "since", "note")} == {"ignored"}
        assert found["target"] == {"column": "income", "classes": ["high", "low"], "public": False}
        assert found["file"] == {"separator": ";", "header": True}
        assert "outside the guarantee" in err.lower()
        assert "OUTSIDE THE GUARANTEE" in out
        assert "public = true" in out
        assert err.count("\n") == 1

    def test_nothing_of_it_is_confirmed(self, people: Path, capsys: Capture, tmp_path: Path) -> None:
        out, _ = described(capsys, str(people))
        (tmp_path / "schema.toml").write_text(out, "utf-8")
        with pytest.raises(data.DataError, match=r"\[columns.age\] is not confirmed as public: write public = true"):
            data.read(people, schema=tmp_path / "schema.toml")
        (tmp_path / "schema.toml").write_text(confirmed(out), "utf-8")
        found = data.read(people, schema=tmp_path / "schema.toml")
        assert len(found.y_train) + len(found.y_test) == 120
        assert "first proposed from the private rows" in found.outside_guarantee[0]

    def test_json(self, people: Path, capsys: Capture) -> None:
        out, _ = described(capsys, str(people), "--json", "--target", "job")
        found = json.loads(out)
        assert out.count("\n") == 1
        assert found["guarantee"] is False
        assert Schema.from_dict(found["schema"]).target is not None
        assert found["schema"]["target"]["column"] == "job"

    def test_every_format_is_read_by_what_is_proposed(self, tmp_path: Path, capsys: Capture) -> None:
        image = pytest.importorskip("PIL.Image")
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        labels = ["a", "b"] * 10
        np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(20, 3)), y=np.arange(20) % 2)
        np.save(tmp_path / "x.npy", np.ones((20, 3), np.float32))
        np.save(tmp_path / "y.npy", np.arange(20) % 2)
        parquet.write_table(pyarrow.table({"v": [float(i) for i in range(20)], "y": labels}), tmp_path / "a.parquet")
        texts = [{"text": "some words about a film that was " + label * 9, "label": label} for label in labels]
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, texts)), "utf-8")
        for label in "ab":
            (tmp_path / "pets" / label).mkdir(parents=True)
            for number in range(10):
                image.new("RGB", (5, 4 + number % 2)).save(tmp_path / "pets" / label / f"{number}.png")
        cases = {"a.npz": "y", "x.npy": "y.npy", "a.parquet": "y", "a.jsonl": "label", "pets": "folder"}
        for name, target in cases.items():
            out, _ = described(capsys, str(tmp_path / name), "--target", target)
            (tmp_path / "schema.toml").write_text(confirmed(out), "utf-8")
            found = data.read(tmp_path / name, schema=tmp_path / "schema.toml")
            assert len(found.y_train) + len(found.y_test) == 20, name
            assert len(found.classes or ()) == 2, name

    def test_nested_values_and_bytes_are_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        rows = [{"visit": {"ward": row}, "age": row % 7, "ill": row % 2} for row in range(40)]
        path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
        schema, notes = data.describe(path, "ill")
        assert {column.name: column.kind for column in schema.columns} == {"visit": "ignored", "age": "number"}
        assert notes["visit"] == ["nested values, or bytes that are no image"]
        with pytest.raises(data.DataError, match="the target, column 1, has no numbers or texts, one a row"):
            data.describe(path, "visit")
        path.write_text("\n".join(map(json.dumps, [{"age": 3, "ill": 0}, {"age": {"x": 1}, "ill": 1}])), "utf-8")
        with pytest.raises(data.DataError, match="line 2, column 'age' is nested or of bytes, and others before it"):
            data.describe(path, "ill")

    def test_ids_are_left_out_and_named(self, tmp_path: Path) -> None:
        draw, path = random.Random(1), tmp_path / "a.csv"
        rows = [f"{row},{7 * row % 60},{row // 3},{draw.randint(0, 9)},{row % 2}" for row in range(60)]
        path.write_text("\n".join(["place,orderId,patient_id,visits,ill", *rows]), "utf-8")
        schema, notes = data.describe(path)
        kinds = {column.name: column.kind for column in schema.columns}
        assert kinds == {"place": "id", "orderId": "id", "patient_id": "id", "visits": "number"}
        assert schema.unit == "patient_id"  # whose values come again
        assert "write rows_per_unit = K here" in notes[""][-1]  # and not that a unit is to be written
        assert "numbers the rows" in notes["place"][0]
        assert 'write unit = "orderId"' in notes["orderId"][0]
        path.write_text("\n".join(["rank,ill", *(f"{row},{row % 2}" for row in range(60))]), "utf-8")
        alone, notes = data.describe(path)
        assert alone.features[0].name == "rank"  # there is nothing else
        assert 'write unit = "NAME" here' in notes[""][-1]
        path.write_text("\n".join(["id,ill", *(f"{row},{row % 2}" for row in range(60))]), "utf-8")
        with pytest.raises(data.DataError, match="no column but the target can be used: all look like ids"):
            data.describe(path)

    @pytest.mark.parametrize("value", ["{}", "P{}", "{}{}@example.org"])
    @pytest.mark.parametrize(
        "name",
        ["patient_id", "id", "patientid", "subject_id", "user", "customer_no", "MRN", "ssn", "e-mail", "userName"],
    )
    def test_ids_of_persons_with_many_rows_are_never_listed(self, tmp_path: Path, name: str, value: str) -> None:
        path = tmp_path / "a.csv"
        ids = [value.format(1000 + 7 * (row % 20), "x") for row in range(600)]
        ids[5] = "1e3"  # one that reads as a number
        rows = [f"{row % 3 / 7},{'ab'[row % 2]},{each}" for row, each in enumerate(ids)]
        path.write_text("\n".join([f"dose,ill,{name}", *rows]), "utf-8")
        schema, _ = data.describe(path, target="ill")
        assert {column.name: column.kind for column in schema.columns} == {"dose": "number", name: "id"}
        assert schema.unit == name
        assert not any(each in data.written(schema) for each in set(ids))
        if name != "user":  # which may be whom to predict
            assert data.describe(path)[0].target.column == "ill"

    def test_of_several_ids_persons_are_the_unit_and_the_others_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        rows = [f"{row // 2},{row % 4},{row % 20},{row % 7},{row % 2}" for row in range(600)]
        path.write_text("\n".join(["visit_id,ward_id,mrn,dose,ill", *rows]), "utf-8")
        schema, notes = data.describe(path)
        assert schema.unit == "mrn"
        assert [column.kind for column in schema.columns] == ["id", "id", "id", "number"]
        for other in ("visit_id", "ward_id"):
            assert f'chosen of several: if this one names whom to protect, write unit = "{other}"' in notes[other][0]

    @pytest.mark.parametrize(("name", "kind"), [("user", "category"), ("price_index", "number"), ("covid", "category")])
    def test_a_name_that_leaves_doubt_is_no_id(self, tmp_path: Path, name: str, kind: str) -> None:
        path = tmp_path / "a.csv"
        of = {"category": ["no", "yes"], "number": ["3", "5"]}[kind]
        path.write_text("\n".join([f"{name},ill", *(f"{of[row // 2 % 2]},{row % 2}" for row in range(60))]), "utf-8")
        schema, _ = data.describe(path)
        assert (schema.columns[0].kind, schema.unit) == (kind, None)

    def test_numbers_that_differ_are_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text("\n".join(["pay,ill", *(f"{row * 7919 % 90001},{row % 2}" for row in range(60))]), "utf-8")
        schema, notes = data.describe(path)
        assert schema.columns[0].kind == "number"
        assert 'if it is an id, write kind = "id"' in notes["pay"][1]

    @pytest.mark.parametrize("header", [True, False])
    def test_decimal_commas(self, tmp_path: Path, header: bool) -> None:
        path = tmp_path / "a.csv"
        rows = [f"{row % 7},{row % 10};x;{'no' if row % 2 else 'yes'}" for row in range(40)]
        path.write_text("\n".join([*(["size;kind;ill"] * header), *rows]), "utf-8")
        schema, _ = data.describe(path)
        assert (schema.file.decimal, schema.file.separator, schema.file.header) == (",", ";", header)
        assert schema.columns[0].bounds == (0, 10)
        path.write_text("\n".join(["size;kind;ill", *(row.replace(",", ".") for row in rows)]), "utf-8")
        assert data.describe(path)[0].file.decimal == "."

    @pytest.mark.parametrize("text", ["so good {}", "bad{}", "a rather {} dull film that was too long for me"])
    def test_texts_of_any_length(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "a.jsonl"
        rows = [{"text": text.format(row), "label": "ab"[row % 2]} for row in range(40)]
        path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
        schema, _ = data.describe(path)
        proposed = confirmed(data.written(schema))
        assert schema.kind == "text"
        assert len(data.read(path, schema=Schema.from_dict(tomllib.loads(proposed))).x_train) > 20

    @pytest.mark.parametrize(
        ("content", "header"),
        [
            ("a,b\n1,x\n2,y\n", True),
            ("1,x\n2,y\n3,x\n", False),  # the word comes again
            ("Private,high\nState,low\nPrivate,low\n", False),
            ("name,city\nAda,Rome\nBob,Oslo\n", True),
            ("1.5,7\n2,8\n", False),
            (",v,y\n0,1,a\n1,2,b\n", True),
            ("0,1,2\n5,6,7\n", None),  # names that count, or a row
            ("2001,2002,2003,2004,2005\n1,2,3,4,5\n", None),
            ("age,2001\n30,1\n40,2\n", None),
            ("7,x\n8,y\n", False),
            ("x,7\nq,8\nr,9\n", False),
        ],
    )
    def test_headers(self, tmp_path: Path, content: str, header: bool | None) -> None:
        path = tmp_path / "a.csv"
        path.write_text(content, "utf-8")
        if header is None:
            with pytest.raises(data.DataError, match="could be a header or a row: say --header yes or --header no"):
                data.describe(path)
        else:
            from dpgrad.data import FileFormat, _csv

            assert _csv.has_header(path, FileFormat(separator=",")) is header

    def test_a_header_that_is_told(self, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "a.csv").write_text("0,1,2\n5,6,7\n6,6,8\n", "utf-8")
        out, _ = described(capsys, str(tmp_path / "a.csv"), "--header", "yes")
        assert set(tomllib.loads(out)["columns"]) == {"0", "1"}
        out, _ = described(capsys, str(tmp_path / "a.csv"), "--header", "no")
        assert tomllib.loads(out)["target"]["column"] == "3"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("data", "required"),
            ("data explain a.csv", "must be describe, as in `dpgrad data describe FILE`, got 'explain'"),
            ("data describe none.csv", "none.csv: there is no such file"),
            ("data describe a.csv --separator abcdef", "separator must be 1 to 5 characters"),
            ("data describe a.csv --encoding utf-99", "encoding must be a text encoding"),
            ("data describe a.csv --target z", "target 'z' is no column of"),
        ],
    )
    def test_refused(
        self, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
    ) -> None:
        (tmp_path / "a.csv").write_text("a,b\n1,x\n2,y\n", "utf-8")
        monkeypatch.chdir(tmp_path)
        assert message in refused(words)


class TestTrain:
    def test_from_a_file_to_a_run(self, people: Path, tmp_path: Path, capsys: Capture) -> None:
        """Describe, confirm, train; the release says what was public and carries the names of the classes."""
        out, _ = described(capsys, str(people))
        (tmp_path / "schema.toml").write_text(confirmed(out), "utf-8")
        command = (
            f"train --data {people} --schema {tmp_path / 'schema.toml'} --target income --method dpsgd --steps 3 "
            f"--batch-size 30 --accountant rdp --no-baseline --out {tmp_path / 'run'} --json"
        )
        assert cli.main(command.split()) == 0, capsys.readouterr().err
        capsys.readouterr()
        report: dict[str, Any] = json.loads((tmp_path / "run" / "release" / "report.json").read_text("utf-8"))
        assert report["data"]["classes"] == ["high", "low"]
        assert any(entry.startswith("column age: bounds 0 and 100") for entry in report["public"])
        assert any("proposed from the private rows" in entry for entry in report["outside"])

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                "--data digits --schema s.toml",
                "--schema is for files of your own, and 'digits' is the name of a dataset",
            ),
            ("--data digits --target y", "--target is for files of your own"),
            ("--data {people} --preprocessing raw", "--preprocessing is for datasets by name"),
            ("--data {people}", "needs a schema, since kinds, bounds and categories"),
            ("--data {people} --schema none.toml", "schema none.toml: there is no such file"),
            ("--data hf:none --schema {people}", "is not TOML"),
        ],
    )
    def test_refused(self, refused: Callable[..., str], people: Path, words: str, message: str) -> None:
        assert message in refused(f"train {words.format(people=people)}")
