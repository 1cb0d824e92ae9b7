"""A classifier of transformers from a folder on this machine, whole or with LoRA adapters; nothing is downloaded.

The folder is one that ``save_pretrained`` wrote: configuration, weights and, for texts, the tokenizer. It is taken to
be public, as every model is that a run begins with. The library and peft are imported where first used.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad import _validate
from dpgrad.errors import DpgradError, OptionError

__all__ = ["LENGTH", "PREFIX", "Checkpoint", "ImageClassifier", "TextClassifier"]

PREFIX = "hf:"
LENGTH = 128  # tokens of a text, where neither schema nor model has fewer
_FOLDER = "model"  # in a release: the configuration and the tokenizer
_CLASSES = {"text": "AutoModelForSequenceClassification", "image": "AutoModelForImageClassification"}


class TextClassifier(nn.Module):
    """A sequence classifier of transformers as a function of token numbers; ``padding`` is the number left out."""

    def __init__(self, inner: nn.Module, padding: int) -> None:
        super().__init__()
        self.inner, self.padding = inner, padding

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) whole numbers to (rows, outputs)."""
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0  # attention over nothing would be NaN
        seen = (tokens != self.padding) | first
        logits: Tensor = self.inner(input_ids=tokens, attention_mask=seen.long()).logits
        return logits


class ImageClassifier(nn.Module):
    """An image classifier of transformers as a function of pixels in 0..1, made as large as it needs and normalized."""

    def __init__(self, inner: nn.Module, size: tuple[int, int] | None, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.inner, self.size = inner, size
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])
        self.mean: Tensor
        self.std: Tensor

    def forward(self, pixels: Tensor) -> Tensor:
        """(rows, channels, height, width) to (rows, outputs); one channel is repeated where the model has more."""
        if pixels.shape[1] == 1:
            pixels = pixels.expand(-1, len(self.mean), -1, -1)
        if self.size is not None and tuple(pixels.shape[2:]) != self.size:
            pixels = F.interpolate(pixels, self.size, mode="bilinear", align_corners=False)
        logits: Tensor = self.inner(pixel_values=(pixels - self.mean) / self.std).logits
        return logits


class Checkpoint:
    """A classifier in a local folder, of texts or images; with ``lora`` only adapters of that rank and the head learn.

    LoRA (Hu et al., 2022) adds a trained product of two thin matrices to the linear maps that peft chooses for the
    architecture, with factor 1; every other weight of the checkpoint but the head stays as it is. Modules are in
    evaluation mode, as transformers loads them: dropout is off.

    Guarantee: what the folder holds is assumed to be public. Weights that the checkpoint lacks begin at random.
    """

    name = "hf"

    def __init__(self, folder: Path, kind: str, lora: int | None, whole: bool = True) -> None:
        self._folder, self.kind, self._lora, self._whole = folder, kind, lora, whole
        self._fresh: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._config = self._loaded("AutoConfig")
        self._labels = self._config.num_labels

    @classmethod
    def read(cls, folder: str, kind: str, lora: int | None = None) -> "Checkpoint":
        """The checkpoint in ``folder``, refused where there is none or no classifier of this kind of data."""
        path = Path(folder).expanduser()  # a shell leaves hf:~ as it is
        if not os.path.isdir(path):  # a Path would raise over a name that is too long
            raise OptionError(
                f"--model {PREFIX}{folder:.200}: there is no such folder: save a model with save_pretrained, and name "
                "its folder; nothing is downloaded"
            )
        _refuse_kind(kind)
        if lora is not None:
            _validate.whole(least=1, **{"--lora": lora})
        if not (path / "config.json").is_file():
            raise OptionError(f"--model {PREFIX}{folder:.200} is no folder of transformers: it has no config.json")
        return cls(path, kind, lora)

    @classmethod
    def released(cls, release: Path, source: dict[str, Any] | None, given: str | None = None) -> "Checkpoint":
        """The architecture in a release folder, or in the folder that is given again; its weights are read elsewhere.

        Guarantee for who reads it: configuration and tokenizer are data; no code of the folder is run.
        """
        folder = release / _FOLDER if given is None else Path(given.removeprefix(PREFIX)).expanduser()
        if not os.path.isfile(folder / "config.json"):
            raise OptionError(
                f"{folder!s:.200} has no config.json: the release is not complete; name the folder of the checkpoint "
                f"that was trained, with --model {PREFIX}FOLDER"
            )
        told = source or {"kind": None, "lora": None}
        _refuse_kind(told["kind"])
        return cls(folder, told["kind"], told["lora"], whole=False)

    def described(self) -> dict[str, Any]:
        """Its description in a report: the name of the folder, without its path."""
        source = {"file": self._folder.resolve().name, "digest": None, "kind": self.kind, "lora": self._lora}
        return {"name": self.name, "source": source}

    def write(self, release: Path) -> None:
        """Add the configuration and the tokenizer to a release: with the weights they are the whole classifier."""
        with self._quiet():
            self._config.save_pretrained(release / _FOLDER)
            if self.kind == "text":
                self._tokenizer().save_pretrained(release / _FOLDER)

    @contextlib.contextmanager
    def told(self, doing: str = "", private: bool = False) -> Iterator[None]:
        """Within the block what the library raises on public values becomes one line."""
        with self._quiet():
            try:
                yield
            except DpgradError:
                raise
            except Exception as error:
                if private:
                    raise
                said = " ".join(filter(None, (type(error).__name__, doing)))
                raise OptionError(f"--model {self._text} raised {said}: {_line(error)}") from None

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """The classifier with as many outputs; from the checkpoint's weights, or from none for weights to be loaded."""
        _validate.whole(least=1, outputs=outputs)
        self._config.num_labels = outputs
        inner = self._weighted(outputs) if self._whole else self._bare()
        if self._lora is not None:
            self._adapt(inner, self._lora)
        if self.kind == "text":
            return TextClassifier(inner, self._padding())
        return self._image_classifier(inner, shape)

    def tokens(self, length: int = LENGTH) -> Callable[[Sequence[str]], NDArray[np.int64]]:
        """A function of texts: the numbers of their tokens, cut or padded to ``length``, or to what the model takes.

        Each row depends on its own text alone.
        """
        tokenizer = self._tokenizer()
        positions = getattr(self._config, "max_position_embeddings", None) or length
        longest = min(length, positions, tokenizer.model_max_length)

        def numbers(texts: Sequence[str]) -> NDArray[np.int64]:
            if not len(texts):
                return np.zeros((0, longest), np.int64)
            found = tokenizer(list(texts), padding="max_length", truncation=True, max_length=longest)
            return np.asarray(found["input_ids"], dtype=np.int64)

        return numbers

    @property
    def _text(self) -> str:
        return f"{PREFIX}{self._folder}"

    def _weighted(self, outputs: int) -> Any:
        """The model with the checkpoint's weights; what it lacks begins at random, and is noted."""
        inner, info = self._loaded(
            _CLASSES[self.kind], config=self._config, ignore_mismatched_sizes=True, output_loading_info=True
        )
        resized = {str(entry[0]) for entry in info["mismatched_keys"]}
        self._fresh = tuple(sorted({*info["missing_keys"], *resized}))
        base = _base(inner)
        inside = [name for name, _ in inner.named_parameters() if name.startswith(base)]
        if inside and not set(inside) - set(self._fresh):
            raise OptionError(f"--model {self._text}: its weights are of another model than its config.json names")
        self.notes = _notes(self._folder.name, self._labels, outputs, resized, self._fresh)
        return inner

    def _bare(self) -> Any:
        """The model without weights of its own."""
        with self.told(), torch.random.fork_rng(devices=[]):
            return getattr(_library("transformers"), _CLASSES[self.kind]).from_config(
                self._config, trust_remote_code=False
            )

    def _adapt(self, inner: Any, rank: int) -> None:
        """Add adapters to the model below the head; freeze all but them, the head, and what begins at random."""
        peft = _library("peft")
        usual = _library("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        # The library maps some names to nothing.
        target = usual.get(self._config.model_type) or "all-linear"
        try:
            with self._quiet():
                settings = peft.LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=target)
                peft.inject_adapter_in_model(settings, inner.base_model)
        except Exception as error:  # an architecture without linear maps, among others
            raise OptionError(f"--lora cannot be used with {self._text}: {_line(error)}") from None
        base = _base(inner)
        for name, parameter in inner.named_parameters():
            plain = name.replace(".base_layer", "")
            parameter.requires_grad_("lora_" in name or not name.startswith(base) or plain in self._fresh)

    def _padding(self) -> int:
        number = self._config.pad_token_id
        return 0 if number is None else int(number)

    def _image_classifier(self, inner: nn.Module, shape: Sequence[int]) -> nn.Module:
        size = getattr(self._config, "image_size", None)
        sides = None
        if isinstance(size, int):
            sides = size, size
        elif isinstance(size, list | tuple) and len(size) == 2:
            sides = int(size[0]), int(size[1])
        channels = int(getattr(self._config, "num_channels", 3))
        if len(shape) != 3 or shape[0] not in (1, channels):
            raise OptionError(
                f"--model {self._text} takes images of {channels} channels, or of one, got rows of shape {tuple(shape)}"
            )
        mean, std = self._normalization(channels)
        return ImageClassifier(inner, sides, mean, std)

    def _normalization(self, channels: int) -> tuple[list[float], list[float]]:
        """The public constants by which the checkpoint shifts and scales pixels; 0 and 1 where it says none."""
        from dpgrad.reports import strict_json

        path = self._folder / "preprocessor_config.json"
        found = strict_json.read(path) if path.is_file() else {}
        plain: list[list[float]] = []
        for name, usual in (("image_mean", 0.0), ("image_std", 1.0)):
            value = found.get(name) if isinstance(found, dict) and found.get("do_normalize", True) else None
            plain.append([float(part) for part in value] if isinstance(value, list) else [usual] * channels)
        return plain[0], plain[1]

    def _tokenizer(self) -> Any:
        tokenizer = self._loaded("AutoTokenizer")
        known, most = len(tokenizer), getattr(self._config, "vocab_size", None)
        if known <= len(tokenizer.all_special_ids):  # where there are no files the library makes up an empty one
            raise OptionError(f"--model {self._text} has no tokenizer: save it to the same folder with save_pretrained")
        if most is not None and known > most:
            raise OptionError(
                f"--model {self._text}: its tokenizer has {known:,} tokens and its model takes {most:,}: save the two "
                "that belong together"
            )
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise OptionError(f"--model {self._text}: its tokenizer has no token for padding: give it one")
            tokenizer.pad_token = tokenizer.eos_token
        if self._config.pad_token_id is None:
            self._config.pad_token_id = tokenizer.pad_token_id
        return tokenizer

    def _loaded(self, kind: str, **options: Any) -> Any:
        """What a class of transformers reads from the folder; nothing is downloaded, and no code in it is run."""
        loader = getattr(_library("transformers"), kind)
        try:
            with self._quiet():
                return loader.from_pretrained(
                    str(self._folder), local_files_only=True, trust_remote_code=False, **options
                )
        except Exception as error:  # the library raises many kinds over files that are missing or damaged
            what = "its tokenizer" if kind == "AutoTokenizer" else "the folder"
            raise OptionError(
                f"--model {self._text}: transformers cannot read {what} as {kind}: {_line(error)}"
            ) from None

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Within the block the library shows no warnings and no bars: what matters of them is in ``notes``."""
        logging = _library("transformers").utils.logging
        before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(before)
            if bars:
                logging.enable_progress_bar()


def _notes(folder: str, before: int, outputs: int, resized: set[str], fresh: Sequence[str]) -> tuple[str, ...]:
    """Notes about the weights that do not come from the checkpoint."""
    notes = []
    if resized:
        notes.append(
            f"{folder} has {before} labels and the data have {outputs}: its head is replaced by one that begins at "
            "random"
        )
    missing = [name for name in fresh if name not in resized]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        notes.append(f"{folder} has no weights for {shown}: they begin at random")
    return tuple(notes)


def _refuse_kind(kind: str | None) -> None:
    if kind not in _CLASSES:
        raise OptionError(
            f"--model {PREFIX}FOLDER is for texts and images, and the data are of kind {kind or 'unknown'}: choose "
            "another model"
        )


def _base(inner: Any) -> str:
    """How the names of all parameters below the head begin."""
    return f"{inner.base_model_prefix}."


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _library(name: str) -> Any:
    """A module of transformers or peft, or one line on how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(
            f"--model {PREFIX}FOLDER needs the package {name.partition('.')[0]} ({_line(error)}): pip install "
            "'dpgrad[text]'"
        ) from None
