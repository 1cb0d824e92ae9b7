"""`dpgrad train`: train a model within a budget; without arguments, on the digits that come with the package."""

import argparse
import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad import _files, _interrupt, _validate
from dpgrad.cli import _config, _data, _options, _progress, _ranks, _training
from dpgrad.cli._trained import PAGE, CommandInputs
from dpgrad.errors import OptionError, ResumeError, RunError
from dpgrad.training.options import Budget, Computing, HeldOut, Privacy, RunFolder, given
from dpgrad.training.recipes import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpgrad.accounting.ledger import Ledger
    from dpgrad.cli._options import Commands, Parser
    from dpgrad.data import Dataset
    from dpgrad.distributed.ranks import Ranks
    from dpgrad.mechanism.mechanism import Group
    from dpgrad.reports.page import NonPrivate
    from dpgrad.reports.report import Report
    from dpgrad.training.plan import Plan

__all__ = ["add", "dataset_of"]

_RIVALS = (("steps", "epochs"),)
_LEDGER, _NON_PRIVATE = "ledger", "non-private.json"
_SPENT = "ledger.jsonl"  # in the folder of a run


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "train",
        "train a model within a budget",
        "Trains a model with differential privacy and reports what it costs. Without arguments it trains on the "
        "handwritten digits that come with the package, at ε = 3 and δ = 1e-5, with several methods and, for "
        "comparison, without privacy.",
        lambda args: _answer(args, parser),
    )
    _training.add(parser)


def _answer(args: argparse.Namespace, parser: "Parser") -> str:
    typed = argparse.Namespace(**vars(args))
    if args.config is not None:
        _config.overruled(args, parser, _RIVALS)
    with _ranks.connected(args.device, args.rank_timeout) as ranks:
        return _trained(args, typed, parser, ranks)


def _trained(args: argparse.Namespace, typed: argparse.Namespace, parser: "Parser", ranks: "Ranks") -> str:
    """Train, on all ranks; the answer, on rank 0, and nothing on the others."""
    with _options.late(f"reading {args.data or 'digits'} and building the model"):
        from dpgrad.training import jobs

        dataset = dataset_of(args)
        training = Training(args, dataset, list(dict.fromkeys(args.method or jobs.job(dataset).methods)), ranks)
        training.check()
    with jobs.threads(training.job):
        if args.plan:
            with _options.late("computing the noise and measuring the time of a step"):
                plans = {method: training.plan(method) for method in training.methods}
            return _planned(plans, bool(args.json)) if ranks.first else ""
        ranks.from_first(training.prepare)
        typed.out, typed.resume = str(training.out), True
        from dpgrad.training.fit import ResumeWarning  # torch and all: Ctrl-C meanwhile ends the process at once

        _interrupt.orderly()
        try:
            with _options.warned(ResumeWarning) as warned:
                reports = {method: training.report(method) for method in training.methods}
            return training.answer(reports, [*training.notes, *warned]) if ranks.first else ""
        except KeyboardInterrupt:
            resumed = _options.typed(parser, typed)
            raise KeyboardInterrupt(f"count the whole plan as spent, or resume it with: {resumed}") from None
        except Exception:
            if ranks.first:
                training.clear()
            raise


def dataset_of(args: argparse.Namespace) -> "Dataset":
    """The dataset that was asked for; texts for a model of transformers are read by its own tokenizer."""
    return _data.load(args.data or "digits", args, args.preprocessing, _tokens(args))


def _tokens(args: argparse.Namespace) -> "Callable[[Sequence[str]], Any] | None":
    """The tokenizer of the model's folder, with the length that the schema declares; None for other models and data."""
    from dpgrad import data
    from dpgrad.training.hugging_face import PREFIX, Checkpoint

    if args.schema is None or not (args.model or "").startswith(PREFIX):
        return None
    lengths = [column.length for column in data.schema_of(args.schema).features if column.kind == "text"]
    return Checkpoint.read(args.model.removeprefix(PREFIX), "text").tokens(lengths[0]) if lengths else None


class Training(CommandInputs):
    """One call of the command: its settings, and the folder it writes."""

    def __init__(self, args: argparse.Namespace, dataset: "Dataset", methods: list[str], ranks: "Ranks") -> None:
        super().__init__(args, dataset, args.lora)
        self.methods, self.several = methods, len(methods) > 1
        self.ranks = ranks
        now = time.strftime("%Y%m%d-%H%M%S")
        self.out = ranks.from_first(lambda: Path(args.out or f"dpgrad-runs/{dataset.name}-{now}"))
        self.ledger_path = Path(args.ledger) if args.ledger else self.out / _LEDGER if self.several else None
        self._ledger: Ledger | None = None
        self._found = self.out.is_dir()

    def check(self) -> None:
        """Refuse what `fit` would refuse, before a plan is shown or a folder is made."""
        from dpgrad.accounting.ledger import Ledger

        for method in self.methods:
            self.options(method)
        self.model()
        if self.ledger_path is None or not self.ranks.first:
            return
        if self.args.ledger and not self.ledger_path.parent.is_dir():
            raise OptionError(f"--ledger {self.ledger_path}: its folder is missing; make it first")
        if self.ledger_path.exists() and not self.ledger_path.is_file():
            raise OptionError(f"--ledger {self.ledger_path} is not a regular file: name a file")
        self._ledger = Ledger(self.ledger_path)

    def options(self, method: str) -> tuple[Budget, Privacy, Recipe]:
        """The options of one method: from the command line, else the file, else the job, else the paper."""
        from dpgrad.training import jobs
        from dpgrad.training.advice import usual_delta
        from dpgrad.training.augment import Shifts
        from dpgrad.training.recipes import recipe

        typed = {name: _plain(value) for name, value in vars(self.args).items() if value is not None}
        budget, privacy, own = (given(kind, typed) for kind in (Budget, Privacy, Recipe))
        named, found = recipe(method), self.job
        size = privacy.get("dataset_size", self.size)  # not read where it is declared
        delta = jobs.DELTA if jobs.DELTA * size < 1 else usual_delta(size)
        defaults: dict[str, Any] = {"epsilon": jobs.EPSILON, "delta": delta}
        if not (named.full_batch or named.by_rule):
            defaults["batch_size"] = min(found.batch_size, size)
        ends = {"epsilon", "noise_multiplier"} <= {*budget, *privacy}
        if not ({"steps", "epochs"} & budget.keys() or ends or named.by_rule):
            defaults |= {"steps": found.steps, "epochs": found.epochs}
        if "noise_multiplier" in privacy:
            del defaults["epsilon"]
        if not named.by_rule:
            own = {"averaging": found.averaging, **jobs.constants(found, named, own.get("clip")), **own}
        if self.args.group:
            own["groups"] = _groups(self.args.group)
        if self.args.augment is not None:
            own["augment"] = Shifts(self.args.augment)
        whose = Privacy(**privacy).of_data(self.dataset)
        return Budget(**{**defaults, **budget}), whose, named.with_options(**own)

    def plan(self, method: str) -> "Plan":
        """The plan of one method, with the time it is expected to take in one process."""
        from dpgrad.training.losses import loss_named
        from dpgrad.training.plan import planned
        from dpgrad.training.prepare import expected_seconds

        model, (budget, privacy, named) = self.model(), self.options(method)
        counted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        plan = planned(named, budget, privacy, self.size, counted, self.rows.outputs)
        if not self.ranks.alone:  # what one process takes for random rows says nothing of several
            return plan
        loss, computing = loss_named(self.rows.loss), self.computing
        seconds = expected_seconds(
            model, self.rows.train, loss, plan, engine=computing.engine, microbatch=computing.microbatch
        )
        return dataclasses.replace(plan, seconds=seconds * (plan.rows_per_unit or 1))

    @property
    def computing(self) -> Computing:
        """How the runs are computed."""
        return Computing(**given(Computing, vars(self.args)))

    def folder(self, method: str) -> Path:
        """The run folder of a method: --out itself, or a folder in it if there are several methods."""
        return self.out / method if self.several else self.out

    def prepare(self) -> None:
        """Refuse a folder that cannot be written or holds something else, before the work begins."""
        if self.args.resume and not self.args.out:
            raise OptionError("--resume needs --out: the folder of the run to resume")
        there = next(path for path in (self.out, *self.out.absolute().parents) if path.exists())
        if not there.is_dir():
            raise RunError(f"--out {self.out} cannot be made, since {there} is a file: choose another folder")
        if self.args.resume and not self._found:
            raise ResumeError(f"--resume: there is no run in {self.out}")
        if not os.access(there, os.W_OK | os.X_OK):
            raise RunError(f"--out {self.out} cannot be written, since {there} is read-only: choose another folder")
        if self._found:
            self._refuse_other_runs()

    def _refuse_other_runs(self) -> None:
        """Refuse a folder that holds anything but the runs to resume: starting another run would spend budget."""
        names = {path.name for path in self.out.iterdir() if not path.name.endswith(_files.PARTIAL)}
        within = sorted(path.parent.name for path in self.out.glob(f"*/{_SPENT}"))
        if self.several and _SPENT in names:
            raise RunError(
                f"--out {self.out} holds the run of one method, and {len(self.methods)} were asked for: to resume it, "
                "give --resume, its --method and its other options; for a new run, choose another folder"
            )
        if not self.args.resume and names:
            raise RunError(f"--out {self.out} is not empty: choose another folder, or resume its run with --resume")
        if not self.several and within:
            raise RunError(
                f"--out {self.out} holds the runs of several methods, and one was asked for: to resume them, give all "
                f"its methods, such as --method {' '.join(within)}; for a new run, choose another folder"
            )
        own = {_LEDGER, f"{_LEDGER}.head", f"{_LEDGER}.lock", *self.methods} if self.several else {"lock", "private"}
        if not within and _SPENT not in names and names - own:
            raise ResumeError(
                f"--resume: there is no run in {self.out}, which holds other files: choose another folder"
            )
        if self.several and set(within) != set(self.methods[: len(within)]):  # they are trained one after another
            raise RunError(
                f"--out {self.out} holds runs of {', '.join(within)} and was not begun with --method "
                f"{' '.join(self.methods)}: to resume, give the methods it was begun with, in their order"
            )

    def clear(self) -> None:
        """After a refusal, restore the folder if no run began in it."""
        if self.args.resume or not self.out.is_dir() or any(self.out.rglob(_SPENT)) or (self.out / _LEDGER).exists():
            return
        for lock in self.out.rglob("lock"):
            try:
                _files.unlock(_files.lock(lock))
            except (OSError, ValueError):  # another process began here at the same time
                return
        with contextlib.suppress(OSError):
            for path in self.out.iterdir():
                _files.remove(path) if path.is_dir() and not path.is_symlink() else _files.discard(path)
        if self._found:
            return
        with contextlib.suppress(OSError):  # the refusal is what the user should read
            self.out.rmdir()
            if not self.args.out:
                self.out.parent.rmdir()  # refused by the system where it holds other runs

    def report(self, method: str) -> "Report":
        """Train with one method and return its report. A finished run is not trained again."""
        from dpgrad.reports import report
        from dpgrad.training.fit import fit

        folder, (budget, privacy, named) = self.folder(method), self.options(method)
        if (found := self.ranks.from_first(lambda: self._finished(method))) is not None:
            return found
        metric = "accuracy" if self.rows.loss == "cross-entropy" else self.rows.loss
        quiet = contextlib.nullcontext(print)  # it is not called
        with _progress.showing(method, metric) if self.ranks.first else quiet as show:
            run = RunFolder(
                folder, resume=bool(self.args.resume) and folder.is_dir() and any(folder.iterdir()),
                keep_private=bool(self.args.keep_private), checkpoint_every=self.args.checkpoint_every,
                release=self._release,
            )  # fmt: skip
            held_out = HeldOut(
                self.rows.held_out, evaluate_every=self.args.evaluate_every, held_out_units=self.dataset.test_units
            )
            model = self.model()
            with self.blueprint.told("on training rows", private=True):
                fitted = fit(
                    model, self.rows.train, self.rows.loss, method=named, held_out=held_out, folder=run,
                    ledger=self._ledger, callbacks=[show, *_diagnostics(self.args.diagnostics)], seed=self.args.seed,
                    privacy=privacy, computing=self.computing, **dataclasses.asdict(budget),
                )  # fmt: skip
        if fitted.stopped == "interrupted":
            raise KeyboardInterrupt
        return self.ranks.from_first(lambda: report.load(folder))

    def _finished(self, method: str) -> "Report | None":
        """The report of a run that was finished before."""
        from dpgrad.reports import report
        from dpgrad.runs.checkpoint import finished

        folder = self.folder(method)
        if not (self.args.resume and finished(folder) and (folder / "release" / report.FILE).is_file()):
            return None
        found = report.load(folder)
        if (other := found["method"]["name"]) != method:
            raise RunError(f"{folder} holds a finished run of {other}, not of {method}: choose another folder")
        return found

    def non_private(self) -> "NonPrivate | None":
        """The result of the same model without privacy, trained now or read from the folder."""
        from dpgrad.reports.page import NOT_COVERED, NonPrivate
        from dpgrad.training.baseline import non_private

        path = self.out / _NON_PRIVATE
        if path.is_file():
            return NonPrivate.read(path)
        wanted = self.args.baseline
        if wanted is None:  # a user's rows are private: a model without privacy must be asked for
            wanted = self.dataset.schema is None
        if not wanted or self.rows.held_out is None:
            return None
        import torch

        with _options.patience("training the same model without privacy"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.args.seed or 0)
            held_out = non_private(
                self.model(), self.rows.train, self.rows.loss, self.rows.held_out, epochs=self.job.baseline_epochs
            )
        metric = "accuracy" if self.rows.loss == "cross-entropy" else self.rows.loss
        with _files.told(path):
            path.write_text(json.dumps({"metric": metric, "held_out": held_out, "note": NOT_COVERED}) + "\n", "utf-8")
        return NonPrivate(metric, held_out)

    def answer(self, reports: "dict[str, Report]", warned: list[str]) -> str:
        """Write the page on all methods; return the text for standard output."""
        from dpgrad.cli import _summary
        from dpgrad.reports.page import page

        non_private = self.non_private()
        together = None
        if self._ledger is not None and len(self._ledger.entries()) > 1:
            first = next(iter(reports.values()))["guarantee"]
            together = self._ledger.guarantee(first["delta"], first["accountant"])
        said = None if together is None else f"{_summary.TOGETHER} {together}"
        with _files.told(self.out / PAGE):
            (self.out / PAGE).write_text(page(reports, non_private, said), "utf-8")
        folders = {method: self.folder(method) for method in reports}
        found = _summary.Summary(reports, folders, non_private, together, self.out / PAGE, warned)
        return json.dumps(found.plain(), allow_nan=False) + "\n" if self.args.json else found.words()


def _plain(value: Any) -> Any:
    """A number that was kept exactly as typed, as a float."""
    from fractions import Fraction

    return float(value) if isinstance(value, Fraction) else value


def _groups(texts: "list[str] | tuple[()]") -> "tuple[Group, ...]":
    from dpgrad.mechanism.mechanism import Group

    found = []
    for text in texts:
        pattern, *numbers = text.split(":")
        try:
            clip, noise, *more = [*map(float, numbers), *[1.0] * (2 - len(numbers))]
        except ValueError:
            raise OptionError(f"--group must be PATTERN[:CLIP[:NOISE]], got {text!r:.60}") from None
        if more:
            raise OptionError(f"--group must be PATTERN[:CLIP[:NOISE]], got {text!r:.60}")
        found.append(Group(pattern, clip, noise))
    return tuple(found)


def _diagnostics(epochs: float | None) -> list[Any]:
    from dpgrad.training.diagnostics import Diagnostics

    return [] if epochs is None else [Diagnostics(last_epochs=epochs)]


def _planned(plans: "dict[str, Plan]", as_json: bool) -> str:
    if as_json:
        first = next(iter(plans.values()))
        promise = first.guarantee
        head = {
            "epsilon": _validate.json_number(promise.epsilon),
            "delta": promise.delta,
            "relation": promise.relation.value,
            "accountant": promise.accountant,
        }
        return json.dumps({**head, "plans": {name: plan.to_dict() for name, plan in plans.items()}}) + "\n"
    return "\n".join("\n".join(plan.lines()) + "\n" for plan in plans.values())
