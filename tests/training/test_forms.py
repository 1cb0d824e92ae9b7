"""Data in every form: the same rows make the same weights as tensors, and what cannot be read is refused in words."""

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import spread
from dpgrad import Mechanism, PrivateGradient, sampling
from dpgrad.errors import DataError
from dpgrad.mechanism.keys import Key
from dpgrad.runs.replay import data_digest
from dpgrad.training import forms, source
from dpgrad.training.curves import evaluate, refuse_held_out
from dpgrad.training.fit import Fitted, fit
from dpgrad.training.losses import NamedLoss, metric_named

ROWS, CPU = 48, torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "steps": 3,
    "accountant": "rdp",
    "batch_size": 12,
    "noise_multiplier": 1.0,
    "delta": 1e-3,
    "seed": 3,
}
NAMES = ["a", "b", "c", "d"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def rows(count: int = ROWS, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def fitted(data: Any, **options: Any) -> Fitted:
    return spread.fit(network(), data, **SETTINGS | options)


@pytest.fixture(scope="module")
def wanted() -> Tensor:
    return weights(fitted(rows()).model)


def frame(count: int = ROWS, seed: int = 1) -> pd.DataFrame:
    inputs, targets = rows(count, seed)
    found = pd.DataFrame(inputs.numpy(), columns=NAMES, index=range(1000, 1000 - count, -1))
    return found.assign(y=targets.numpy())


def table(pieces: int = 1) -> pa.Table:
    whole = pa.Table.from_pandas(frame(), preserve_index=False)
    return pa.Table.from_batches(whole.to_batches(max_chunksize=-(-ROWS // pieces)))


class Interchanged:
    """A frame as polars has it: columns by name, to_numpy, and the interchange protocol."""

    def __init__(self, held: pd.DataFrame) -> None:
        self.held, self.columns = held, list(held.columns)

    def __getitem__(self, name: str) -> Any:
        return pa.array(self.held[name].to_numpy())

    def __len__(self) -> int:
        return len(self.held)

    def __dataframe__(self) -> Any:
        raise AssertionError("a matrix is made column by column")


class Plain:
    """A map-style dataset that is no subclass of torch's, as a DataLoader takes it."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, targets = rows()
        return inputs[index], int(targets[index])


def on_disk(folder: Path, form: str) -> pads.Dataset:
    if form == "parquet":
        pyarrow.parquet.write_table(table(), folder / "rows.parquet", row_group_size=7)
    else:
        with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table().schema) as writer:
            writer.write_table(table(), max_chunksize=7)
    return pads.dataset(folder, format="parquet" if form == "parquet" else "ipc")


def mapped(folder: Path) -> pa.Table:
    on_disk(folder, "ipc")
    return pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow"))).read_all()


def saved(folder: Path) -> datasets.Dataset:
    inputs, targets = rows()
    datasets.Dataset.from_dict({"x": inputs.tolist(), "label": targets.tolist()}).save_to_disk(folder / "rows")
    return datasets.load_from_disk(folder / "rows")


def collated(examples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    return torch.stack([one["x"] for one in examples]), torch.tensor([one["label"] for one in examples])


FORMS: dict[str, Callable[[Path], Any]] = {
    "frame and column": lambda _: (frame()[NAMES], frame()["y"]),
    "frame and frame of one column": lambda _: (frame()[NAMES], frame()[["y"]]),
    "frame and name": lambda _: (frame(), "y"),
    "frame in double precision, and array": lambda _: (frame()[NAMES].astype("float64"), rows()[1].numpy()),
    "frame of objects": lambda _: (frame()[NAMES].astype(object), frame()["y"].astype(object)),
    "nullable columns": lambda _: (frame()[NAMES].astype("Float32"), frame()["y"].astype("Int16")),
    "columns of Arrow": lambda _: (frame()[NAMES].astype("float[pyarrow]"), frame()["y"].astype("int8[pyarrow]")),
    "categories of numbers": lambda _: (frame()[NAMES].astype("category"), frame()["y"].astype("category")),
    "another library": lambda _: (Interchanged(frame()), "y"),
    "table in pieces": lambda _: (table(5), "y"),
    "parquet files": lambda folder: (on_disk(folder, "parquet"), "y"),
    "arrow files": lambda folder: (on_disk(folder, "ipc"), "y"),
    "memory-mapped table": lambda folder: (mapped(folder), "y"),
    "loader": lambda _: DataLoader(TensorDataset(*rows()), batch_size=7, shuffle=True, drop_last=True),
    "loader with a collate of its own": lambda folder: DataLoader(
        saved(folder).with_format("torch"),  # type: ignore[arg-type]
        collate_fn=collated,
    ),
    "plain map-style dataset": lambda _: Plain(),
    "hugging face": saved,
    "hugging face with a format": lambda folder: saved(folder).with_format("numpy", columns=["x", "label"]),
    "hugging face with a transform": lambda folder: saved(folder).with_transform(
        lambda batch: {"x": [torch.tensor(x) for x in batch["x"]], "labels": batch["label"]}
    ),
    "dict": lambda _: dict(zip(("x", "labels"), rows(), strict=True)),
}


def private(steps: int = 9) -> PrivateGradient:
    mechanism = Mechanism(sampling.Poisson(0.25), steps, 1.0, batch_size=12)
    return PrivateGradient(network(), NamedLoss("cross-entropy"), mechanism, seed=1)


@pytest.mark.filterwarnings("ignore::dpgrad.training.forms.LoaderWarning")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_rows_of_tensors(form: str, tmp_path: Path) -> None:
    data = forms.taken(FORMS[form](tmp_path))
    chosen = torch.tensor([47, 0, 13, 13])
    found = source.gathered(data, chosen, CPU)
    inputs, targets = found.values() if isinstance(found, dict) else found
    assert source.rows(data) == ROWS
    assert torch.equal(inputs, rows()[0][chosen])
    assert torch.equal(targets, rows()[1][chosen])
    if not isinstance(data, Dataset):  # the tensors themselves
        assert data[0].dtype == torch.float32 if isinstance(data, tuple) else data["x"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore::dpgrad.training.forms.LoaderWarning")
@pytest.mark.parametrize(
    "form", ["frame and name", "memory-mapped table", "hugging face", "loader with a collate of its own"]
)
def test_every_form_makes_the_weights_of_tensors(form: str, wanted: Tensor, tmp_path: Path) -> None:
    assert torch.equal(weights(fitted(FORMS[form](tmp_path)).model), wanted)


@pytest.mark.filterwarnings("ignore::dpgrad.training.forms.LoaderWarning")
@pytest.mark.parametrize("form", ["frame and name", "loader", "hugging face"])
def test_a_private_step_takes_the_same_forms(form: str, tmp_path: Path) -> None:
    """Also on pieces of fixed sizes, with rows fetched ahead, and given anew at every step."""

    def gradient(make: Callable[[Path], Any]) -> Tensor:
        one = private(steps=40)
        for _ in range(2):
            one.step(make(tmp_path))
        return torch.cat(
            [parameter.grad.flatten() for parameter in one.model.parameters() if parameter.grad is not None]
        )

    assert torch.equal(gradient(FORMS[form]), gradient(lambda _: rows()))


def test_arrays_and_frames_take_the_type_of_the_model() -> None:
    double = rows()[0].double().numpy(), rows()[1].numpy()
    wanted = weights(fitted(rows()).model)
    assert torch.equal(weights(fitted(double, held_out=(double[0][:3].copy(), double[1][:3].copy())).model), wanted)
    one, other = private(), private()
    one.step(double)
    other.step(rows())
    for made, plain in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert made.grad is not None
        assert torch.equal(made.grad, plain.grad)  # type: ignore[arg-type]
    precise = nn.Linear(4, 3, dtype=torch.float64)
    for given in (rows()[0].numpy(), frame()[NAMES]):
        assert forms.taken((given, rows()[1].numpy()), model=precise)[0].dtype in (torch.float64, np.float64)
    mapped = rows()[0].numpy(), rows()[0]
    assert forms.taken(mapped, model=precise)[1] is mapped[1]  # a tensor stays as it is


def test_numpy_told_to_raise_does_not_tell_of_a_value() -> None:
    """``np.seterr(all="raise")``: a number that float32 cannot hold is no error, as one beyond it is none."""
    small = np.array([[1e-45, 5e-324], [1e-300, 1e300], [1.0, 2.0]])
    table = pd.DataFrame(small, columns=["a", "b"]).assign(y=[1e-310, 1e300, 1.0])
    arrow = pa.Table.from_pandas(table)
    with np.errstate(all="raise"):
        read = forms.taken((small, np.array([0, 1, 0])), model=nn.Linear(2, 2))[0]
        assert np.asarray(read)[:, 0].tolist() == pytest.approx([0, 0, 1])
        assert forms.taken((table, "y"))[0][:, 0].tolist() == pytest.approx([0, 0, 1])
        inputs, targets = source.gathered(forms.taken((arrow, "y")), torch.arange(3), CPU)
        assert (inputs[:, 0] + targets).tolist() == pytest.approx([0, math.inf, 2])


def test_other_rows_of_a_frame_are_refused_at_the_second_step() -> None:
    one = private()
    one.step((frame(), "y"))
    with pytest.raises(DataError, match="the same rows at every step"):
        one.step((frame(seed=2), "y"))
    one.step((frame(), "y"))


def test_workers_of_a_loader_read_the_rows(tmp_path: Path) -> None:
    """Hugging Face's rows, and the warning comes once for all steps."""
    loader = DataLoader(saved(tmp_path).with_format("torch"), collate_fn=collated, num_workers=1)  # type: ignore[arg-type]
    read, plain = private(steps=40), private(steps=40)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            read.step(loader)
            plain.step(rows())
    assert torch.equal(*(next(one.model.parameters()).grad for one in (read, plain)))
    (told,) = [one for one in said if one.category is forms.LoaderWarning]
    assert "its batches, their size and their order are not" in str(told.message)


@pytest.mark.parametrize(
    "form", ["frame and name", "parquet files", "hugging face", "loader with a collate of its own"]
)
def test_held_out_rows_in_every_form(form: str, tmp_path: Path) -> None:
    held = forms.taken(FORMS[form](tmp_path), "held_out")  # a loader is no cause for a warning here
    refuse_held_out(FORMS[form](tmp_path), rows(30, seed=5))
    accuracy = metric_named("accuracy", NamedLoss("cross-entropy"))
    assert evaluate(network(), accuracy, held) == evaluate(network(), accuracy, rows())


def test_held_out_rows_that_are_training_rows() -> None:
    whole = frame()
    apart = (whole[NAMES][:40], whole["y"][:40]), (whole[NAMES][40:], whole["y"][40:])
    assert fitted(apart[0], held_out=apart[1], steps=1).held_out is not None
    for held in ((whole, "y"), (whole[NAMES], whole["y"]), (whole[39:], "y")):
        with pytest.raises(DataError, match="held_out are rows of the training data"):
            fitted(apart[0], held_out=held)
    dataset = TensorDataset(*rows())
    parts = Subset(dataset, range(40)), Subset(dataset, range(30, 48))
    with pytest.raises(DataError, match="held_out are rows of the training data"):
        fitted(DataLoader(parts[0]), held_out=DataLoader(parts[1]))
    stored = datasets.Dataset.from_dict({"x": [[0.0] * 4] * 9, "label": [0] * 9})
    for same in (stored, (table(), "y")):
        with pytest.raises(DataError, match="held_out are rows of the training data"):
            fitted(same, held_out=same)


class Counted(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(3))


class Streamed:
    """As a dataset of TensorFlow: a length, an iterator, no index."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(range(3))


@pytest.mark.parametrize(
    "make",
    [
        Counted,
        Streamed,
        lambda: DataLoader(Counted()),
        lambda: iter([1]),
        lambda: (row for row in range(3)),
        lambda: map(int, "12"),
        lambda: datasets.Dataset.from_dict({"x": [1.0]}).to_iterable_dataset(),
        lambda: table().to_reader(),
        lambda: (iter([1]), torch.zeros(1)),
        lambda: {1, 2},
    ],
)
def test_streams_are_refused_with_the_reason_and_the_remedy(make: Callable[[], Any]) -> None:
    for refused in (
        lambda: fitted(make()),
        lambda: fitted(rows(), held_out=make()),
        lambda: private().step(make()),
    ):
        with pytest.raises(DataError, match=r"readable by index, got .*, a stream: every step draws .*open_memmap"):
            refused()


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*rows()), **options)


class Every(SequentialSampler):
    """It might go anywhere."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: loader(sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)), "WeightedRandomSampler, which may leave"),
        (lambda: loader(sampler=SubsetRandomSampler(range(5))), r"give torch\.utils\.data\.Subset\(dataset, indices\)"),
        (lambda: loader(sampler=SequentialSampler(range(5))), "SequentialSampler, which may leave rows out"),
        (lambda: loader(sampler=torch.utils.data.RandomSampler(range(ROWS), num_samples=9)), "RandomSampler, which"),
        (lambda: loader(sampler=torch.utils.data.RandomSampler(range(ROWS), replacement=True)), "RandomSampler, which"),
        (lambda: loader(sampler=Every(range(ROWS))), "with a Every, which may leave rows out"),
        (lambda: loader(batch_sampler=[[0, 1]]), "with a list, which may leave rows out"),
        (lambda: loader(batch_size=None), "with batch_size=None, whose dataset makes the batches"),
    ],
)
def test_a_loader_that_chooses_rows_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        forms.taken(make())


HOSTILE: dict[str, tuple[Any, str]] = {
    "frame alone": (frame(), r'^data has no target: .*\(frame\.drop\(columns="y"\), frame\["y"\]\)'),
    "column alone": (frame()["y"], "^data has no target"),
    "table alone": (table(), "^data has no target"),
    "text": (
        (frame().assign(city="Rome"), "y"),
        r"^data\[0\] has column 'city', which holds text, .* schema .*dpgrad\.data\.read",
    ),
    "categories of text": ((frame().assign(c=pd.Categorical(["u"] * ROWS)), "y"), "column 'c', which holds text"),
    "dates": ((frame().assign(born=pd.Timestamp("2020-01-01")), "y"), "'born', which holds dates, .*days since"),
    "time spans": ((frame().assign(t=pd.Timedelta(1)), "y"), "'t', which holds time spans"),
    "complex": ((frame().assign(z=1j), "y"), "'z', which holds complex numbers"),
    "objects": ((frame().assign(o=[[1]] * ROWS), "y"), "'o', which holds values that are no numbers"),
    "mixed": ((frame().assign(o=[1, "1"] * (ROWS // 2)), "y"), "'o', which holds text"),
    "text as target": ((frame()[NAMES], pd.Series(["u"] * ROWS)), r"^data\[1\] holds text"),
    "another column": ((frame(), "yy"), r"^data\[0\] has no column 'yy': did you mean y\?"),
    "columns of one name": ((pd.concat([frame(), frame()[["y"]]], axis=1), "y"), "several columns 'y'"),
    "no features": ((frame()[["y"]], "y"), "no columns of features"),
    "tensor and name": ((rows()[0], "y"), "names the target 'y', which needs a data frame"),
    "rows left out": ((frame()[NAMES][:9], frame()["y"]), r"data\[0\] has 9, data\[1\] has 48"),
    "text in a table": ((table().append_column("s", pa.array(["u"] * ROWS)), "y"), "'s', which holds text"),
    "dates in a table": (
        (table().append_column("s", pa.array([0] * ROWS, pa.date32())), "y"),
        "'s', which holds dates",
    ),
    "lists in a table": ((table().append_column("s", pa.array([[1]] * ROWS)), "y"), "'s', which holds values of type"),
    "table beside targets": ((table(), rows()[1]), r'give \(data, "y"\)'),
    "file that is open": ((pyarrow.parquet.ParquetFile, "y"), r"open files by pyarrow\.dataset\.dataset\(path\)"),
    "splits": (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]})}), r'such as data\["train"\]'),
    "words": (
        datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}),
        r"column 'text' of data holds text .*tokenizer\(.*data\.remove_columns\(\['text'\]\)",
    ),
    "lengths": (
        datasets.Dataset.from_dict({"x": [[1.0] * 4, [1.0] * 5] * 24, "label": [0, 1] * 24}),
        "rows of different shapes: .*max_length",
    ),
    "missing labels": (
        datasets.Dataset.from_dict({"x": [[0.0] * 4] * 4, "label": [None, 1, 0, 1]}),
        "column 'label' of data has missing values",
    ),
    "no labels": (datasets.Dataset.from_dict({"x": [[0.0] * 4] * 4, "z": [0] * 4}), "needs one column labels or label"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_read_is_refused_in_one_line(name: str) -> None:
    data, words = HOSTILE[name]
    with pytest.raises(DataError, match=words) as caught:
        fitted(data)
    assert "\n" not in str(caught.value)
    assert "Rome" not in str(caught.value)


def test_a_row_with_a_missing_value_adds_nothing() -> None:
    def shown(missing: Any) -> Any:
        whole = frame().astype({"a": "Float64"})
        whole.loc[whole.index[:20], "a"] = missing
        one = private()
        one.step((whole, "y"))
        return next(one.model.parameters()).grad

    assert torch.equal(shown(pd.NA), shown(float("inf")))
    assert not torch.equal(shown(pd.NA), shown(0.5))


def test_missing_targets_of_a_table() -> None:
    held = pa.table({"x": [1.0, 2.0], "y": pa.array([0, None])})
    with pytest.raises(DataError, match=r"missing values in the target 'y'"):
        source.gathered(forms.taken((held, "y")), torch.arange(2), CPU)


def test_how_a_row_of_a_table_is_read_does_not_depend_on_others() -> None:
    large = (1 << 53) + 1
    held = pa.table({"i": pa.array([large, None, 3]), "b": [True, None, False], "y": [0.5, 1.5, 2.5]})
    held = held.append_column("f", pa.FixedSizeListArray.from_arrays(pa.array(range(6)), 2))
    rows_of = forms.taken((held, "y"))
    whole, alone = (source.gathered(rows_of, torch.tensor(chosen), CPU) for chosen in ([0, 1, 2], [0]))
    assert torch.equal(whole[0][:1], alone[0])
    assert alone[0].tolist() == [[float(np.float32(float(large))), 1.0, 0.0, 1.0]]
    assert torch.isnan(whole[0][1]).tolist() == [True, True, False, False]
    assert whole[1].tolist() == [0.5, 1.5, 2.5]
    assert [len(part) for part in source.gathered(rows_of, torch.arange(0), CPU)] == [0, 0]


def test_rows_of_a_table_come_in_the_order_asked_for(tmp_path: Path) -> None:
    order = torch.tensor([40, 3, 41, 3, 0, 47])
    inputs, targets = rows()
    for held in (table(7), on_disk(tmp_path, "parquet")):
        found = source.gathered(forms.taken((held, "y")), order, CPU)
        assert torch.equal(found[0], inputs[order])
        assert torch.equal(found[1], targets[order])


def test_only_rows_that_are_asked_for_are_read_from_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    plain = forms.ArrowRows._pair
    monkeypatch.setattr(forms.ArrowRows, "_pair", lambda own, few: (taken.append(len(few)), plain(own, few))[1])
    source.gathered(forms.taken((table(6), "y")), torch.tensor([1, 2, 30]), CPU)
    assert taken == [2, 1]


def test_booleans_and_numbers_of_any_width() -> None:
    held = pd.DataFrame({"u": np.array([255], np.uint8), "t": [True], "d": [1e300], "n": [None]}, index=["row"])
    inputs, targets = forms.taken((held, pd.Series([True])))
    assert inputs.dtype == torch.float32
    assert inputs[0, :3].tolist() == [255.0, 1.0, float("inf")]
    assert inputs[0, 3].isnan()
    assert targets.tolist() == [1]


def test_what_torch_reads_is_left_as_it_is() -> None:
    for data in (rows(), list(rows()), {"x": rows()[0]}, TensorDataset(*rows()), rows()[0], rows()[0].numpy()):
        assert forms.taken(data) is data


class TestResume:
    """A run that is resumed on the same data goes on with the same key, whatever form they are in."""

    @pytest.mark.parametrize(
        "form", ["frame and name", "parquet files", "hugging face", "loader", "memory-mapped table"]
    )
    @pytest.mark.filterwarnings("ignore::dpgrad.training.forms.LoaderWarning")
    def test_the_digest_is_that_of_the_contents(self, form: str, tmp_path: Path) -> None:
        folders = [tmp_path / "one", tmp_path / "other"]
        for folder in folders:
            folder.mkdir()
        key = Key.from_seed(1)
        one, other = (data_digest(key, source.comparable(forms.taken(FORMS[form](folder)))) for folder in folders)
        assert one == other
        assert "not comparable" not in one

    def test_other_contents_have_another_digest(self) -> None:
        key, same = Key.from_seed(1), []
        for label in (0, 1):
            stored = datasets.Dataset.from_dict({"x": [[0.0]] * 5000, "label": [0] * 4999 + [label]})
            same.append(data_digest(key, source.comparable(forms.taken(stored))))
        assert same[0] != same[1]

    def test_a_transform_cannot_be_compared(self, tmp_path: Path) -> None:
        held = source.comparable(forms.taken(FORMS["hugging face with a transform"](tmp_path)))
        assert "not comparable" in data_digest(Key.from_seed(1), held)


class TestHuggingFaceModels:
    """A model and a tokenized dataset of Hugging Face are a complete call."""

    def config(self, **options: Any) -> Any:
        return transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=8, num_labels=3, **options,
        )  # fmt: skip

    def words(self) -> datasets.Dataset:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, 20, (32, 6), generator=generator)
        columns = {"input_ids": tokens.tolist(), "attention_mask": [[1] * 6] * 32, "label": (tokens[:, 0] % 3).tolist()}
        return datasets.Dataset.from_dict(columns)

    def test_sequence_classification(self) -> None:
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(self.config()).eval()
        words = self.words()
        parts = words.select(range(24)), words.select(range(24, 32))
        found = spread.fit(model, parts[0], held_out=parts[1], **SETTINGS | {"steps": 1})
        assert 0 <= (found.held_out or 0.0) <= 1
        assert found.metric == "accuracy"
        losses = NamedLoss("cross-entropy")(model, forms.taken(words).batch([0, 1], torch.utils.data.default_collate))
        one = words.with_format("torch")[[0, 1]]
        logits = model(input_ids=one["input_ids"], attention_mask=one["attention_mask"]).logits
        assert torch.allclose(losses, nn.functional.cross_entropy(logits, one["label"], reduction="none"))

    def test_labels_of_tokens_need_a_loss_of_their_own(self) -> None:
        model = transformers.BertForTokenClassification(self.config()).eval()
        words = self.words().remove_columns("label").add_column("labels", [[0, 1, 2, 0, 1, 2]] * 32)
        with pytest.raises(DataError, match=r"one label per token such as loss=lambda model, batch: ") as caught:
            spread.fit(model, words, **SETTINGS)
        own = eval(str(caught.value).partition("such as loss=")[2], {"F": nn.functional})  # the line works as it is
        assert own(model, forms.taken(words).batch([0, 1], torch.utils.data.default_collate)).shape == (2,)


class Words(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.ones(2) * index, "label": index % 2}


def test_a_dict_with_one_input_that_the_model_does_not_name() -> None:
    torch.manual_seed(0)
    found = spread.fit(nn.Linear(2, 2), Words(), **SETTINGS | {"batch_size": 2})
    assert found.stopped == "plan"


def test_dask_collections_are_refused_with_what_to_do() -> None:
    arrays, frames = pytest.importorskip("dask.array"), pytest.importorskip("dask.dataframe")
    frame = frames.from_pandas(pd.DataFrame({"a": [0.0, 1.0], "t": [0, 1]}), npartitions=1)
    for data in ((frame, "t"), (frame[["a"]], frame["t"]), {"x": arrays.zeros((2, 1))}, arrays.zeros((2, 1)), frame):
        with pytest.raises(DataError, match=r"data must be readable by index, got a Dask .* dpgrad\.convex"):
            forms.taken(data)


class TestMissing:
    @pytest.mark.parametrize("missing", [math.nan, math.inf])
    @pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, pd.DataFrame])
    def test_rows_that_add_nothing_are_told_of(self, kind, missing):
        x, y = np.zeros((40, 2), np.float32), np.arange(40) % 2
        x[7, 1] = missing
        with pytest.warns(UserWarning, match="NaN or infinite numbers.*fill in a public constant") as told:
            fit(nn.Linear(2, 2), (kind(x), y), epsilon=3.0, delta=1e-3, steps=2)
        assert "7" not in str(told[0].message)

    def test_complete_rows_are_not(self, recwarn):
        fit(nn.Linear(2, 2), (np.zeros((40, 2)), np.arange(40) % 2), epsilon=3.0, delta=1e-3, steps=2)
        assert not recwarn.list
