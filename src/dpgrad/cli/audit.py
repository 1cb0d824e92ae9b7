"""`dpgrad audit`: try to refute the privacy of a training job; without arguments, of what `dpgrad train` trains."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad.cli import _config, _options, _training, train
from dpgrad.errors import OptionError

if TYPE_CHECKING:
    from dpgrad.audit.record import Audit
    from dpgrad.cli._options import Commands
    from dpgrad.training.plan import Plan

__all__ = ["add"]

_ROWS = 512  # of the data that are looked at
_OF_MECHANISM = ("sampling", "price", "keys")  # the same for every method with that mechanism


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "audit",
        "try to refute the privacy of a training job",
        "Runs private steps of a training job on neighbouring data, looks at the gradients they leave, and tries to "
        "refute that they are clipped, noised, sampled and priced as claimed. It can refute a claim and never prove "
        "it. Exit status 0: not refuted, 1: refuted, 2: not run. Do not release its output.",
        _answer,
    )
    parser.elsewhere = "write the options of dpgrad train into a file and give it as --config FILE.toml"
    add = parser.add_argument
    add("--config", metavar="FILE.toml", help="The options of dpgrad train in a file; without it, the digits.")
    add("--method", metavar="NAME", nargs="+", help="Only these methods of the job.")
    add(
        "--level",
        metavar="A",
        type=_options.open_unit,
        default=1e-3,
        help="The probability of refuting a true claim, for all methods together; default: 0.001.",
    )
    add("--seed", metavar="N", type=_options.count, default=1, help="The seed of the audit; fix it beforehand.")
    add("--json", action="store_true", help="Print one JSON object.")


def _answer(args: argparse.Namespace) -> str:
    with _options.patience("auditing private steps"):
        found = _audits(args)
    refuted = any(record.refuted for record in found.values())
    if args.json:
        fields: dict[str, Any] = {
            "refuted": refuted,
            "level": args.level,
            "audits": {method: record.to_dict() for method, record in found.items()},
        }
        text = json.dumps(fields, allow_nan=False) + "\n"
    else:
        text = "\n".join(f"{method}\n{record}\n" for method, record in found.items())
    return _options.Answer(text, status=int(refuted))


def _job(config: str | None) -> argparse.Namespace:
    """The options of `dpgrad train` that the file gives."""
    parser = _options.Parser(prog="dpgrad train")
    _training.add(parser)
    given = parser.parse_args([])
    if config is not None:
        given.config = str(Path(config))
        _config.overruled(given, parser, (("steps", "epochs"),))
    given.out = None
    return given


def _audits(args: argparse.Namespace) -> "dict[str, Audit]":
    from dpgrad import audit
    from dpgrad.audit.steps import CHECKS
    from dpgrad.distributed.ranks import Ranks
    from dpgrad.training import jobs
    from dpgrad.training.losses import loss_named
    from dpgrad.training.plan import planned

    given = _job(args.config)
    dataset = train.dataset_of(given)
    methods = list(dict.fromkeys(args.method or given.method or jobs.job(dataset).methods))
    job = train.Training(given, dataset, methods, Ranks.of())
    inputs, targets = job.rows.train
    found: dict[str, Audit] = {}
    plans: dict[str, Plan] = {}
    with jobs.threads(job.job):
        for method in methods:
            budget, privacy, named = job.options(method)
            if privacy.units is not None:
                raise OptionError("an audit of steps needs one row per example: leave out the column of persons")
            model = job.model()
            counted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            plan = planned(named, budget, privacy, job.size, counted, job.rows.outputs)
            same = next((other for other in found if plans[other].mechanism == plan.mechanism), None)
            record = audit.step(
                model, loss_named(job.rows.loss), plan.mechanism, (inputs[:_ROWS], targets[:_ROWS]),
                rule=named.scaling(), claim=plan.guarantee, canaries=2, level=args.level / len(methods), seed=args.seed,
                checks=CHECKS if same is None else [name for name in CHECKS if name not in _OF_MECHANISM],
                inner_momentum=named.inner_momentum, average=named.average, augment=named.augment,
            )  # fmt: skip
            plans[method] = plan
            found[method] = record if same is None else _shared(record, found[same])
    return found


def _shared(record: "Audit", first: "Audit") -> "Audit":
    """The record with the checks that do not depend on the method, from the first audit of the same mechanism."""
    from dpgrad.audit.record import judged

    others = [check for check in first.checks if check.name in _OF_MECHANISM]
    left = tuple(name for name in record.not_tried if name not in {check.name for check in others})
    return dataclasses.replace(record, checks=judged([*record.checks, *others], record.level), not_tried=left)
