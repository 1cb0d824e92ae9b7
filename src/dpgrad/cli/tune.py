"""`dpgrad tune`: choose among settings when only the winner is released, within one budget."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad import _interrupt
from dpgrad.accounting.trials import LAWS
from dpgrad.cli import _data, _options
from dpgrad.errors import OptionError
from dpgrad.training.options import Budget, Privacy, RunFolder, given
from dpgrad.training.recipes import Recipe

if TYPE_CHECKING:
    from dpgrad.cli._options import Commands, Parser
    from dpgrad.training.fit import Fitted
    from dpgrad.tuning import Configuration, Selected, SelectionPlan
    from dpgrad.tuning.scores import Score

_PRIVACY = ("relation", "dataset_size")
_LENGTHS = ("epochs", "steps", "batch_size")
_PAGE = "report.html"


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "tune",
        "choose among settings, releasing only the winner, within one budget",
        "Trains a random number of models, each with one of several settings, and releases the one with the best "
        "score. The budget is for the whole. Trials, scores and their number are private and are deleted. Method auto "
        "needs no tuning: --plan says what each way of choosing would cost.",
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
    add("--ledger", metavar="FILE", help="A file that adds up the cost of all runs on the same data.")
    add(
        "--seed",
        metavar="N",
        type=_options.option(_options.whole, _seed),
        help="Makes it repeatable, and unfit for release.",
    )
    add("--device", metavar="NAME", help="cpu or cuda; without it, cuda where there is one.")
    add("--json", action="store_true", default=None, help=_options.First("Print one JSON object."))


def _job(parser: "Parser") -> None:
    group = parser.add_argument_group("what is trained")
    add = group.add_argument
    add(
        "--data", metavar="NAME|FILE|FOLDER",
        help=_options.First("A dataset by name, or a file or folder of your own; default: digits."),
    )  # fmt: skip
    _data.add_own(group)
    _data.add(group)
    add("--preprocessing", metavar="NAME", help="How the data are prepared; the default reads nothing private.")
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
    add("--score-share", metavar="S", type=_options.open_unit, help="The share of rows that is kept out; default: 0.1.")
    add("--score-std", metavar="STD", type=_options.positive, help="The noise of a private count; default: 5.")


def _answer(args: argparse.Namespace) -> str:
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


class _Tuning:
    """One call of the command."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from dpgrad.training import jobs
        from dpgrad.training.blueprints import blueprint
        from dpgrad.training.models import default

        if args.resume and not args.out:
            raise OptionError("--resume needs --out: the folder of the selection to resume")
        if not args.configuration:
            raise OptionError(
                "--configuration is required: give one for each setting to choose among, such as --configuration auto "
                "--configuration dpsgd,clip=0.1,learning_rate=2; with nothing to choose, dpgrad train puts the whole "
                "budget into one run"
            )
        self.args = args
        self.dataset = _data.load(args.data or "digits", args, args.preprocessing)
        self.job, self.rows = jobs.job(self.dataset), jobs.Rows.of(self.dataset)
        self.blueprint = blueprint(args.model or default(self.rows.kind, self.rows.shape), self.rows.kind)
        self.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise OptionError(f"--device must be cpu or cuda, got {self.device!r:.60}")
        self.out = Path(args.out or f"dpgrad-runs/tune-{self.dataset.name}-{time.strftime('%Y%m%d-%H%M%S')}")

    def model(self) -> Any:
        """Build the model; its initial weights do not depend on the data."""
        import torch

        from dpgrad.training.blueprints import built

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.args.seed or 0)
            return built(self.blueprint, self.rows.shape, self.rows.outputs, self.rows.train[0].dtype, self.device)

    def options(self) -> dict[str, Any]:
        """What `tuning.plan` and `tuning.select` both take."""
        from dpgrad.training.advice import usual_delta

        args, size = self.args, len(self.rows.train[1])
        privacy = Privacy(**given(Privacy, {name: getattr(args, name) for name in _PRIVACY})).of_data(self.dataset)
        return {
            "configurations": [self._configuration(text) for text in args.configuration],
            "score": self._score(), "epsilon": 3.0 if args.epsilon is None else args.epsilon,
            "delta": usual_delta(size) if args.delta is None else args.delta,
            "trials": args.trials or LAWS[0], "mean": args.mean_trials, "privacy": privacy,
        }  # fmt: skip

    def _score(self) -> "Score":
        from dpgrad.tuning import PrivateScore, PublicScore

        args = self.args
        if args.score == "private":
            return PrivateScore(args.score_share or 0.1, args.score_std or 5.0)
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
                lengths.setdefault("batch_size", min(self.job.batch_size, len(self.rows.train[1])))
        return Configuration(named.with_options(**typed), **lengths)

    def plan(self) -> "SelectionPlan":
        """The plan, without training."""
        from dpgrad.tuning import PrivateScore, plan

        options = self.options()
        counted = sum(parameter.numel() for parameter in self.model().parameters() if parameter.requires_grad)
        units = options["privacy"].units
        rows = len(self.rows.train[1] if units is None else set(units.tolist()))
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

    def _release(self, folder: Path, fitted: "Fitted") -> None:
        from dpgrad.reports import report
        from dpgrad.reports.page import page

        named = {**(fitted.described or {}), "shape": list(self.rows.shape), "outputs": self.rows.outputs}
        found = report.privacy(fitted, self.dataset, {**named, **self.blueprint.described()})
        self.blueprint.write(folder)
        report.write(folder, found)
        (folder / _PAGE).write_text(page({fitted.plan.recipe.name: found}), "utf-8")

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


def _seed(value: int) -> None:
    from dpgrad import _validate

    _validate.whole(value=value)


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
