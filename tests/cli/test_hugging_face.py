"""`dpgrad train --model hf:FOLDER` with a tiny random classifier of texts or images in a folder, and adapters."""

import contextlib
import io
import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpgrad import cli
from dpgrad.training import hugging_face
from dpgrad.training.blueprints import blueprint

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "fine", "awful", "the", "film", "was"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be downloaded: whoever opens a connection fails the test."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier in the shape of BERT with two labels, and its tokenizer of a few words."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-bert"
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=12, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    with quiet():
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
        words = {word: number for number, word in enumerate(WORDS)}
        plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
        ).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


SCHEMA = """
[columns.text]
kind = "text"
length = 8
public = true

[target]
column = "label"
classes = [{}]
public = true
"""


def train(bert: Path, folder: Path, options: str, capsys: Capture, classes: str = '"no", "yes"') -> tuple[Any, str]:
    """The report of a short run on a few texts, and what it wrote to standard error."""
    said = {"good": "yes", "bad": "no", "fine": "yes", "awful": "no"}
    lines = [{"text": f"the film was {word}", "label": label} for word, label in said.items()] * 10
    (folder / "reviews.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    (folder / "schema.toml").write_text(SCHEMA.format(classes), "utf-8")
    command = (
        f"train --data {folder / 'reviews.jsonl'} --schema {folder / 'schema.toml'} --model hf:{bert} --method dpsgd "
        f"--steps 2 --batch-size 20 --delta 0.001 --no-baseline --out {folder / 'run'} {options} --json"
    )
    code = cli.main(command.split())
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)["methods"]["dpsgd"]["report"], err


def test_adapters_and_head_alone_are_trained(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    found, err = train(bert, tmp_path, "--lora 2", capsys)
    assert all(": step " in line for line in err.splitlines()), err  # nothing of the library's own
    assert found["model"] == {
        "name": "hf", "shape": [8], "outputs": 2, "dtype": "int64",
        "source": {"file": "tiny-bert", "digest": None, "kind": "text", "lora": 2},
        # queries and values: two matrices of rank 2 on 8 numbers each; the head: 8 × 2 and 2
        "parameters": 2 * (2 * 8 + 8 * 2) + 8 * 2 + 2,
    }  # fmt: skip
    assert str(tmp_path) not in json.dumps(found)
    assert str(bert) not in json.dumps(found)
    release = tmp_path / "run" / "release"
    state = torch.load(release / "weights.pt", weights_only=True)
    before = blueprint(f"hf:{bert}", "text", 2).build((8,), 2).state_dict()
    moved = {name for name in state if not torch.equal(state[name], before[name])}
    assert all("lora_B" in name or "lora_A" in name or ".classifier." in name for name in moved)
    assert any("lora_B" in name for name in moved)
    assert any(".classifier." in name for name in moved)
    assert_predicted(release, bert, tmp_path, capsys)


def assert_predicted(release: Path, bert: Path, folder: Path, capsys: Capture) -> None:
    """Predictions need nothing but the release folder, and are those of the trained model."""
    shutil.copytree(release, folder / "shared")
    (folder / "new.jsonl").write_text('{"text": "good film"}\n{"text": "the film was awful awful"}\n', "utf-8")
    rows = torch.tensor([[4, 9, 0, 0, 0, 0, 0, 0], [8, 9, 10, 7, 7, 0, 0, 0]])  # by the places of WORDS
    model = blueprint(f"hf:{bert}", "text", 2).build((8,), 2)
    model.load_state_dict(torch.load(release / "weights.pt", weights_only=True))
    with torch.no_grad():
        wanted = model(rows).softmax(1).numpy()
    command = ["predict", str(folder / "shared"), "--input", str(folder / "new.jsonl")]
    for given in ([], ["--model", f"hf:{bert}"]):
        assert cli.main([*command, *given, "--json"]) == 0, capsys.readouterr().err
        np.testing.assert_allclose(json.loads(capsys.readouterr().out)["probabilities"], wanted, atol=1e-6)
    (folder / "shared" / "model" / "config.json").unlink()
    assert cli.main(command) == 2
    assert "the release is not complete; name the folder of the checkpoint" in capsys.readouterr().err


def test_another_number_of_labels_replaces_the_head(bert: Path, tmp_path: Path, capsys: Capture) -> None:
    found, err = train(bert, tmp_path, "", capsys, '"no", "yes", "perhaps"')
    assert "tiny-bert has 2 labels and the data have 3: its head is replaced by one that begins at random" in err
    assert err.count("its head is replaced") == 1
    assert found["model"]["outputs"] == 3
    assert found["model"]["source"]["lora"] is None
    assert found["model"]["parameters"] > 500  # all of it


def test_what_a_checkpoint_lacks_is_trained_beside_adapters(bert: Path, tmp_path: Path) -> None:
    """The body alone was saved, without its pooler: both begin at random, and are not frozen there."""
    with quiet():
        whole = transformers.BertForSequenceClassification.from_pretrained(bert)
        body = transformers.BertModel(whole.config, add_pooling_layer=False)
        body.load_state_dict(whole.bert.state_dict(), strict=False)
        body.save_pretrained(tmp_path / "body")
    source = hugging_face.Checkpoint.read(str(tmp_path / "body"), "text", 2)
    trained = {name for name, value in source.build((8,), 2).named_parameters() if value.requires_grad}
    assert {name.split(".")[-2] for name in trained if "lora_" not in name} == {"classifier", "dense"}
    assert "body has no weights for bert.pooler.dense.bias, bert.pooler.dense.weight" in source.notes[0]
    assert any("word_embeddings" in name for name, _ in whole.named_parameters())
    assert not any("word_embeddings" in name for name in trained)


def test_padding_does_not_matter(bert: Path) -> None:
    model = hugging_face.Checkpoint.read(str(bert), "text").build((8,), 2)
    rows = torch.tensor([[8, 9, 10, 4, 0, 0, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(model(rows), model(rows[:, :4]))
        assert model(0 * rows).isfinite().all()


def test_images(tmp_path: Path) -> None:
    """Small images of one channel are enlarged, repeated and normalized as the checkpoint's own were."""
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4,
        num_labels=10,
    )  # fmt: skip
    with quiet():
        whole = transformers.ViTForImageClassification(config).eval()
        whole.save_pretrained(tmp_path)
    public = {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(public), "utf-8")
    model = blueprint(f"hf:{tmp_path}", "image").build((1, 4, 4), 10)
    pixels = torch.rand(2, 1, 4, 4)
    large = torch.nn.functional.interpolate(pixels, (8, 8), mode="bilinear").expand(-1, 3, -1, -1)
    mean, std = (torch.tensor(public[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    with torch.no_grad():
        torch.testing.assert_close(model(pixels), whole((large - mean) / std).logits)
    with pytest.raises(ValueError, match=r"takes images of 3 channels, or of one, got rows of shape \(2, 4, 4\)"):
        blueprint(f"hf:{tmp_path}", "image").build((2, 4, 4), 10)


def damaged(folder: Path, what: str) -> None:
    match what:
        case "no config":
            (folder / "config.json").unlink()
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "torn weights":
            (folder / "model.safetensors").write_bytes(b"\0" * 40)
        case "torn config":
            (folder / "config.json").write_text("{", "utf-8")
        case "unknown model":
            (folder / "config.json").write_text('{"model_type": "mine"}', "utf-8")
        case "code":
            found = json.loads((folder / "config.json").read_text("utf-8"))
            found |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
            (folder / "config.json").write_text(json.dumps(found), "utf-8")
            (folder / "mine.py").write_text("raise SystemExit('run')\n", "utf-8")
        case "other weights":
            found = json.loads((folder / "config.json").read_text("utf-8"))
            (folder / "config.json").write_text(json.dumps({**found, "model_type": "distilbert"}), "utf-8")
        case "torn tokenizer":
            (folder / "tokenizer.json").write_text("{", "utf-8")
        case "other tokenizer":
            config = transformers.BertConfig.from_pretrained(folder)
            config.vocab_size = 5
            with quiet():
                transformers.BertForSequenceClassification(config).save_pretrained(folder)
        case "no tokenizer":
            for path in folder.glob("*token*"):
                path.unlink()


DAMAGED = {
    "no config": "is no folder of transformers: it has no config.json",
    "no weights": "transformers cannot read the folder as AutoModelForSequenceClassification",
    "torn weights": "transformers cannot read the folder as AutoModelForSequenceClassification",
    "torn config": "transformers cannot read the folder as AutoConfig",
    "unknown model": "transformers cannot read the folder as AutoConfig",
    "code": "transformers cannot read the folder as AutoConfig",
    "other weights": "its weights are of another model than its config.json names",
    "no tokenizer": "has no tokenizer: save it to the same folder with save_pretrained",
    "torn tokenizer": "transformers cannot read its tokenizer",
    "other tokenizer": "its tokenizer has 11 tokens and its model takes 5",
}


@pytest.mark.parametrize(("what", "message"), DAMAGED.items(), ids=DAMAGED)
def test_folders_that_cannot_be_used(bert: Path, tmp_path: Path, what: str, message: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bert, folder)
    damaged(folder, what)

    def used() -> None:
        found = hugging_face.Checkpoint.read(str(folder), "text")
        found.build((8,), 2)
        found.tokens()

    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        used()
    assert "\n" not in str(refused.value)


def test_tables_are_refused(bert: Path) -> None:
    with pytest.raises(ValueError, match="is for texts and images, and the data are of kind table"):
        blueprint(f"hf:{bert}", "table")


def test_a_missing_package_is_one_line(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(hugging_face.importlib, "import_module", absent)
    with pytest.raises(ValueError, match=r"needs the package transformers \(.*\): pip install 'dpgrad\[text\]'"):
        blueprint(f"hf:{bert}", "text")
