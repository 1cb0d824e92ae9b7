"""`dpgrad tune`: choose among settings when only the winner is released, within one budget."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad import _interrupt
from dpgrad.accounting.trials import LAWS
from dpgrad.cli import _data, _options, _training
from dpgrad.cli._trained import CommandInputs
from dpgrad.errors import OptionError
from dpgrad.training.options import SCORE_SHARE, SCORE_STD, Budget, Privacy, RunFolder, given
from dpgrad.training.recipes import Recipe

if TYPE_CHECKING:
    from dpgrad.cli._options import Commands, Parser
    from dpgrad.tuning import Configuration, Selected, SelectionPlan
    from dpgrad.tuning.scores import Score

__all__ = ["add"]

_PRIVACY = ("relation", "dataset_size")
_LENGTHS = ("epochs", "steps", "batch_size")


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "tune",
        "choose among settings, releasing only the winner, within one budget",
        "Trains a random number of models, each with one of several settings, and releases the one with the best "
        "score. The budget covers the whole selection. Trials, scores and their number are private and deleted. Method "
        "auto needs no tuning: --plan shows what each way of choosing would cost.",
        _answer,
    )
    _job(parser)
    _choice(parser)
    add = parser.add_argument_group("the run").add_argument
    add(
        "--plan", action="store_true", default=None,
        help=_options.First("Print the noise of every trial and what each way of choosing costs, without training."),
    )  # fmt: skip
    add("--out", metavar="DIR", help=_options.First("The folder; without it, a new one under dpgrad-runs/."))
    for option, settings in _options.declared(RunFolder, "resume"):
        add(option, **settings)
    _training.add_records(add)
    _training.add_device(add)
    add("--json", action="store_true", default=None, help=_options.First("Print one JSON object."))


def _job(parser: "Parser") -> None:
    group = parser.add_argument_group("what is trained")
    _training.add_data(group)
    add = group.add_argument
    add("--model", metavar="NAME|FILE", help=_options.First("As in dpgrad train; the default depends on the data."))
    for option, settings in (*_options.declared(Budget, "epsilon", "delta"), *_options.declared(Privacy, *_PRIVACY)):
        add(option, **settings)


def _choice(parser: "Parser") -> None:
    add = parser.add_argument_group("the choice").add_argument
    add(
        "--configuration", metavar="METHOD[,OPTION=VALUE...]", action="append",
        help=_options.First(
            "Settings to choose among, such as dpsgd,clip=0.1,learning_rate=2,epochs=10; give it once for each."
        ),
    )  # fmt: skip
    add(
        "--trials", choices=list(LAWS),
        help=_options.First("The law of the number of trials; default: logarithmic, mostly the cheapest."),
    )  # fmt: skip
    add("--mean-trials", metavar="M", type=_options.positive, help="Its mean; default: twice the configurations.")
    add(
        "--score", choices=["held-out", "private"],
        help=_options.First(
            "held-out: on the test rows, which are then not protected. private: by a noisy count on training rows that "
            "are kept out, which every trial pays for. Default: held-out."
        ),
    )  # fmt: skip
    add(
        "--score-share",
        metavar="S",
        type=_options.open_unit,
        help=f"The share of rows to keep out; default: {SCORE_SHARE:g}.",
    )
    add(
        "--score-std",
        metavar="STD",
        type=_options.positive,
        help=f"The noise of a private count; default: {SCORE_STD:g}.",
    )


def _answer(args: argparse.Namespace) -> str:
    with _options.late(f"reading {args.data or 'digits'}"):
        from dpgrad.training import jobs

        tuning = _Tuning(args)
    with jobs.threads(tuning.job):
        if args.plan:
            found = tuning.plan()
            return json.dumps(found.to_dict(), allow_nan=False) + "\n" if args.json else f"{found}\n"
        _interrupt.orderly()
        try:
            with _options.patience("tuning, for a random number of trials"):
                return tuning.answer(tuning.select())
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"count the whole selection as spent, or resume it with the same options, --out {tuning.out} --resume"
            ) from None


class _Tuning(CommandInputs):
    """One call of the command."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.resume and not args.out:
            raise OptionError("--resume needs --out: the folder of the selection to resume")
        if not args.configuration:
            raise OptionError(
                "--configuration is required: give one for each setting to choose among, such as --configuration auto "
                "--configuration dpsgd,clip=0.1,learning_rate=2; with nothing to choose, dpgrad train puts the whole "
                "budget into one run"
            )
        super().__init__(args, _data.load(args.data or "digits", args, args.preprocessing))
        self.out = Path(args.out or f"dpgrad-runs/tune-{self.dataset.name}-{time.strftime('%Y%m%d-%H%M%S')}")

    def options(self) -> dict[str, Any]:
        """What `tuning.plan` and `tuning.select` both take."""
        from dpgrad.training import jobs
        from dpgrad.training.advice import usual_delta

        args = self.args
        privacy = Privacy(**given(Privacy, {name: getattr(args, name) for name in _PRIVACY})).of_data(self.dataset)
        return {
            "configurations": [self._configuration(text) for text in args.configuration],
            "score": self._score(), "epsilon": jobs.EPSILON if args.epsilon is None else args.epsilon,
            "delta": usual_delta(privacy.dataset_size or self.size) if args.delta is None else args.delta,
            "trials": args.trials or LAWS[0], "mean": args.mean_trials, "privacy": privacy,
        }  # fmt: skip

    def _score(self) -> "Score":
        from dpgrad.tuning import PrivateScore, PublicScore

        args = self.args
        if args.score == "private":
            return PrivateScore(args.score_share or SCORE_SHARE, args.score_std or SCORE_STD)
        for option in ("score_share", "score_std"):
            if getattr(args, option) is not None:
                raise OptionError(f"--{option.replace('_', '-')} is for --score private: add it, or leave this out")
        if self.rows.held_out is None:
            raise OptionError(f"{self.dataset.name} has no test rows to score on: give --score private")
        return PublicScore(self.rows.held_out, units=self.dataset.test_units)

    def _configuration(self, text: str) -> "Configuration":
        from dpgrad.training.recipes import recipe
        from dpgrad.tuning import Configuration

        method, *words = text.split(",")
        named, typed = recipe(method.strip()), _typed(words, text)
        lengths = {name: typed.pop(name) for name in _LENGTHS if name in typed}
        if not named.by_rule:
            if not lengths.keys() & {"epochs", "steps"}:
                lengths |= {"epochs": self.job.epochs, "steps": self.job.steps}
            if not named.full_batch:
                lengths.setdefault("batch_size", min(self.job.batch_size, self.args.dataset_size or self.size))
        return Configuration(named.with_options(**typed), **lengths)

    def plan(self) -> "SelectionPlan":
        """The plan, without training."""
        from dpgrad.tuning import PrivateScore, plan

        options = self.options()
        counted = sum(parameter.numel() for parameter in self.model().parameters() if parameter.requires_grad)
        rows = self.size
        if isinstance(options["score"], PrivateScore):
            rows -= round(options["score"].share * rows)
        return plan(options.pop("configurations"), rows=rows, parameters=counted, **options)

    def select(self) -> "Selected":
        """Train and choose."""
        from dpgrad.accounting.ledger import Ledger
        from dpgrad.tuning import select

        folder = RunFolder(self.out, resume=bool(self.args.resume), release=self._release)
        ledger = None if self.args.ledger is None else Ledger(self.args.ledger)
        return select(
            self.model(), self.rows.train, self.rows.loss, folder=folder, ledger=ledger, seed=self.args.seed,
            **self.options(),
        )  # fmt: skip

    def answer(self, found: "Selected") -> str:
        """What was chosen, and what it cost."""
        texts = self.args.configuration
        if self.args.json:
            told = {
                "configuration": texts[found.configuration], "epsilon": found.guarantee.epsilon,
                "delta": found.guarantee.delta, "relation": found.guarantee.relation.value,
                "accountant": found.guarantee.accountant, "statement": str(found.guarantee), "folder": str(self.out),
            }  # fmt: skip
            return json.dumps(told, allow_nan=False) + "\n"
        lines = [f"chosen      {texts[found.configuration]}", f"privacy     {found.guarantee}"]
        lines += [f"            {note}" for note in found.fitted.notes]
        return "\n".join([*lines, f"release     {self.out / 'release'}", ""])


def _typed(words: list[str], text: str) -> dict[str, Any]:
    """The options of a configuration, each read as its declaration says."""
    from fractions import Fraction

    known = {settings["dest"]: settings for record in (Recipe, Budget) for _, settings in _options.declared(record)}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.strip().partition("=")
        name = name.replace("-", "_")
        if not equals or name not in known or name in ("epsilon", "delta"):
            raise OptionError(f"--configuration must be METHOD[,OPTION=VALUE...], got {word!r:.40} in {text!r:.80}")
        try:
            read = known[name].get("type", str)(value)
        except argparse.ArgumentTypeError as error:
            raise OptionError(f"{name} of --configuration {error}") from None
        found[name] = float(read) if isinstance(read, Fraction) else read
    return found
