"""`dpgrad epsilon`, `calibrate`, `steps`: what a run costs, how much noise a budget needs, how long it lasts."""

import argparse
import json
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dpgrad import _validate
from dpgrad.accounting.events import Event, Relation
from dpgrad.accounting.guarantee import Guarantee, up
from dpgrad.cli import _options
from dpgrad.cli._options import First
from dpgrad.errors import OptionError
from dpgrad.training.options import Budget, Privacy
from dpgrad.training.recipes import Recipe

if TYPE_CHECKING:
    from dpgrad.cli._options import Commands
    from dpgrad.mechanism.mechanism import Mechanism
    from dpgrad.mechanism.sampling import FixedSize, FullBatch, Poisson, Shuffle
    from dpgrad.reports.compare import Figure

__all__ = ["add"]

_MOST_LEAVES = 50  # in JSON; an event of more is given by their number
_SAMPLERS = ("poisson", "fixed-size", "full-batch", "shuffle")


def add(commands: "Commands") -> None:
    """Register the three commands."""
    epsilon = _options.command(
        commands,
        "epsilon",
        "compute the privacy loss ε of a run",
        "Computes how much a training run can reveal about one row: its ε, by one accountant (--json) or by all.",
        _answer,
    )
    _required(epsilon, "noise-multiplier", "delta")
    _length(_common(epsilon))
    epsilon.add_argument(
        "--group",
        metavar="K",
        type=_options.count,
        help="Also print the guarantee for any K rows together, such as those of one person.",
    )
    epsilon.add_argument(
        "--curve",
        metavar="FILE",
        type=_options.curve_file,
        help="Write bounds on every attack, δ(ε) and the trade-off curve to a .csv, .svg or .png file; with --group K, "
        "for K rows.",
    )
    calibrate = _options.command(
        commands,
        "calibrate",
        "find the noise that a budget needs",
        "Finds the least noise with which a run of a given length stays within a privacy budget. With a clip schedule "
        "this is the reading `less-noise` of Yu et al. (2018): a shrinking clip bound needs less noise.",
        _answer,
    )
    _required(calibrate, "epsilon", "delta")
    run = _common(calibrate)
    _length(run)
    run.add_argument(
        "--precision",
        metavar="P",
        type=_options.positive,
        help="Round the noise multiplier up to a multiple of P, such as 0.01.",
    )
    steps = _options.command(
        commands,
        "steps",
        "find how many steps a budget allows",
        "Finds the most steps that stay within a privacy budget at a given noise multiplier. With a clip schedule this "
        "is the reading `more-steps` of Yu et al. (2018): a shrinking clip bound allows more steps.",
        _answer,
    )
    _required(steps, "epsilon", "noise-multiplier", "delta")
    _common(steps)


def _required(parser: argparse.ArgumentParser, *names: str) -> None:
    group = parser.add_argument_group("required")
    for option, settings in (*_options.declared(Budget), *_options.declared(Privacy)):
        if option.removeprefix("--") in names:
            group.add_argument(option, required=True, **settings)


def _length(run: argparse._ArgumentGroup) -> None:
    either = run.add_mutually_exclusive_group(required=True)
    either.add_argument("--steps", metavar="T", type=_options.steps, help=First("The number of steps, such as 10000."))
    either.add_argument(
        "--epochs",
        metavar="E",
        type=_options.epochs,
        help=First(
            "The number of passes over the data, instead of steps: E / Q steps, rounded down; whole epochs with "
            "shuffle, E steps with full-batch."
        ),
    )


def _common(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of all three commands; return the group of those that describe the run."""
    run = parser.add_argument_group("the run")
    add = run.add_argument
    add(
        "--sampling-rate",
        metavar="Q",
        type=_options.sampling_rate,
        help=First("The probability that a row is in a batch: batch size over number of rows, as 0.01 or 512/60000."),
    )
    add(
        "--sampler",
        choices=_SAMPLERS,
        default="poisson",
        help=First(
            "How batches are drawn. poisson, the default: each row independently; fixed-size: a fixed number without "
            "replacement; full-batch: every row in every step; shuffle: shuffled epochs."
        ),
    )
    for option, settings in _options.declared(Recipe, "clip_schedule", "schedule_steps"):
        add(option, **settings)
    add(
        "--dataset-size",
        metavar="N",
        type=_options.count,
        help="The number of rows, which is then public; the fixed-size sampler requires it.",
    )
    _guarantee(parser)
    answer = parser.add_argument_group("the answer")
    answer.add_argument(
        "--json", action="store_true", help=First("Print one JSON object, by the chosen accountant only.")
    )
    answer.add_argument(
        "--plot", metavar="FILE", type=_options.plot_file, help=First("Plot ε against steps to a .svg or .png file.")
    )
    return run


def _guarantee(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the guarantee").add_argument
    defaults = {"relation": Relation.ADD_REMOVE.value, "accountant": "pld"}
    for option, settings in _options.declared(Privacy, *defaults):
        default = defaults[settings["dest"]]
        settings["help"] = First(f"{settings['help']} Default: {default}.")
        add(option, default=default, **settings)


def _sampler(args: argparse.Namespace) -> "Poisson | FixedSize | FullBatch | Shuffle":
    from dpgrad.mechanism import sampling

    sampling_rate, rows = args.sampling_rate, args.dataset_size
    if args.sampler == "full-batch":
        if sampling_rate is not None:
            raise OptionError(
                "--sampling-rate is not allowed with --sampler full-batch: every row takes part each step"
            )
        return sampling.FullBatch()
    if sampling_rate is None:
        raise OptionError(f"--sampling-rate is required with --sampler {args.sampler}: batch size over number of rows")
    if args.sampler == "poisson":
        return sampling.Poisson(float(sampling_rate))
    if args.sampler == "fixed-size" and rows is None:
        raise OptionError("--dataset-size is required with --sampler fixed-size: the public number of rows")
    if not sampling_rate:
        raise OptionError(f"--sampling-rate must be above 0 with --sampler {args.sampler}, got 0")
    if rows is None:  # only the number of batches is priced
        batches = math.ceil(1 / sampling_rate)
        _validate.step_count(**{"batches in an epoch": batches})
        return sampling.Shuffle(batches, 1)
    size = min(math.ceil(sampling_rate * rows), rows)  # up, the dearer way
    return sampling.FixedSize(rows, size) if args.sampler == "fixed-size" else sampling.Shuffle(rows, size)


def _step_count(args: argparse.Namespace, sampler: "Poisson | FixedSize | FullBatch | Shuffle") -> int:
    """T, as given or as the whole steps within the epochs."""
    from dpgrad.mechanism import sampling

    if args.epochs is None:
        return int(args.steps)
    match sampler:
        case sampling.FullBatch():
            an_epoch = Fraction(1)
        case sampling.Shuffle():
            an_epoch = Fraction(sampler.span)
        case sampling.FixedSize(rows, size):
            an_epoch = Fraction(rows, size)
        case _:
            if not args.sampling_rate:
                raise OptionError("--epochs needs a --sampling-rate above 0: at 0 no epoch ends; give --steps")
            an_epoch = 1 / args.sampling_rate
    found = int(args.epochs * an_epoch)
    if not found:
        raise OptionError(
            f"--epochs {float(args.epochs):g} is less than one step: give at least {float(1 / an_epoch):g}"
        )
    _validate.step_count(**{f"steps in {float(args.epochs):g} epochs": found})
    return found


def _run(args: argparse.Namespace, sampler: Any, steps: int | None, noise_multiplier: float) -> "Mechanism":
    """The run as accounted; ``steps`` None where they are to be found."""
    from dpgrad.mechanism import schedules
    from dpgrad.mechanism.mechanism import Mechanism

    relation = Relation(args.relation)
    if args.clip_schedule is None:
        if args.schedule_steps is not None:
            raise OptionError("--schedule-steps needs --clip-schedule: without one the clip bound is constant")
        return Mechanism(sampler, steps or 1, noise_multiplier, relation=relation)
    timed = args.clip_schedule in ("linear", "affine")
    if timed and steps is None and args.schedule_steps is None:
        raise OptionError(
            f"--schedule-steps is required with --clip-schedule {args.clip_schedule}: the step at which the clip bound "
            "has reached one half"
        )
    args.schedule_steps = args.schedule_steps or (steps if timed else None)
    clip = schedules.parse_clip(args.clip_schedule, 1.0, args.schedule_steps or 1)
    return Mechanism(sampler, steps or 1, noise_multiplier, clip=clip, hold_noise=True, relation=relation)


def _solved(args: argparse.Namespace) -> "Mechanism":
    """The run that is asked about, its noise or its steps found where they were the question."""
    sampler = _sampler(args)
    match args.command:
        case "epsilon":
            return _run(args, sampler, _step_count(args, sampler), args.noise_multiplier)
        case "calibrate":
            run = _run(args, sampler, _step_count(args, sampler), 1.0)
            return run.calibrated(args.epsilon, args.delta, args.accountant, args.precision)
        case _:
            run = _run(args, sampler, None, args.noise_multiplier)
            return run.longest(args.epsilon, args.delta, args.accountant)


def _answer(args: argparse.Namespace) -> str:
    with _options.patience("pricing every step of the run"):
        return _found(args)


def _found(args: argparse.Namespace) -> str:
    """The whole of what goes to standard output; a plot is written on the way."""
    from dpgrad.reports import compare, plain

    run = _solved(args)
    event = run.event()
    chosen = compare.figure(event, run.relation, args.accountant, args.delta, chosen=True)
    public = compare.assumed_public(run, args.dataset_size)
    group = _group(args, run, event, chosen)
    rows = [] if args.json else compare.compare(event, run.relation, args.delta, chosen)
    if args.plot is not None:
        from dpgrad.reports import plot

        known = {name: found for name, found in rows if isinstance(found, compare.Figure)}
        plot.draw(args.plot, run, args.delta, known or {args.accountant: chosen})
    attacks = _attacks(args, run, event, chosen, group)
    if args.json:
        told: dict[str, object] = {}
        if attacks is not None:
            told |= {"membership_advantage": attacks["membership_advantage"], "attacks": attacks}
        if args.command == "epsilon" and args.curve is not None:
            told["curve"] = args.curve
        if group is not None:
            epsilon = _validate.json_number(group.epsilon)
            size = {"size": group.group, "epsilon": epsilon, "accountant": group.accountant}
            told["group"] = {**size, "attacks": group.attacks()}
        return json.dumps({**_fields(args, run, event, chosen, public), **told}, allow_nan=False) + "\n"
    rough = any(isinstance(found, compare.Figure) and found.rounded for _, found in rows)
    explained = compare.words(chosen, run, args.delta, public, rough)
    if attacks is not None:
        explained.insert(1, ("what attacks reach", plain.attack({"attacks": attacks, "relation": run.relation}) or ""))
        if args.curve is not None:
            explained.append(("curve", f"δ(ε) and the trade-off of an attack's errors are in {args.curve}."))
    if args.plot is not None:
        explained.append(("plot", f"ε against steps is drawn in {args.plot}."))
    headline = [*_headline(args, run, chosen), *([] if group is None else [str(group)])]
    return compare.page(headline, rows, explained, *_options.screen())


def _group(args: argparse.Namespace, run: "Mechanism", event: Event, chosen: "Figure") -> "Guarantee | None":
    """The guarantee for a group of rows, if asked for."""
    if args.command != "epsilon" or args.group is None:
        return None
    if not chosen.guarantee:
        raise OptionError(f"--group needs a guarantee, and accountant {args.accountant} gives none: use pld")
    return Guarantee(chosen.epsilon, args.delta, run.relation, chosen.accountant, event).for_group(args.group)


def _attacks(
    args: argparse.Namespace, run: "Mechanism", event: Event, chosen: "Figure", group: "Guarantee | None"
) -> dict[str, Any] | None:
    """Bounds on every attack on one row. Also writes the curve, of the group if there is one."""
    if args.command != "epsilon":
        return None
    if not chosen.guarantee:
        if args.curve is not None:
            raise OptionError(f"--curve needs a guarantee, and accountant {args.accountant} gives none: use pld")
        return None
    promise = Guarantee(chosen.epsilon, args.delta, run.relation, chosen.accountant, event)
    if args.curve is not None:
        from dpgrad.reports import curve

        curve.write(args.curve, (group or promise).tradeoff(), (group or promise).attacks())
    return promise.attacks()


def _fields(
    args: argparse.Namespace, run: "Mechanism", event: Event, chosen: "Figure", public: list[str]
) -> dict[str, object]:
    from dpgrad.accounting import events
    from dpgrad.mechanism import sampling
    from dpgrad.reports import compare

    distinct = compare.runs(event)
    infinite = math.isinf(chosen.epsilon)
    declared = ", declared, not read from the data" if run.relation is Relation.ADD_REMOVE else ""
    found: dict[str, object] = {
        "epsilon": None if infinite else chosen.epsilon,
        "epsilon_lower": None if chosen.lower is None or math.isinf(chosen.lower) else chosen.lower,
        "epsilon_estimate": None if chosen.estimate is None or math.isinf(chosen.estimate) else chosen.estimate,
        "delta": args.delta,
        "accountant": chosen.accountant,
        "guarantee": chosen.guarantee,
        "relation": run.relation.value,
        "sampler": run.sampler.name,
        "steps": run.steps,
        "sampling_rate": None if args.sampling_rate is None else float(args.sampling_rate),
        "noise_multiplier": run.noise_multiplier,
        "clip_schedule": args.clip_schedule,
        "schedule_steps": args.schedule_steps,
        "dataset_size": args.dataset_size,
        "batch_size": run.sampler.batch_size if args.dataset_size is not None else None,
        "batches_per_epoch": run.sampler.span if isinstance(run.sampler, sampling.Shuffle) else None,
        "distinct_steps": distinct,
        "event": events.to_dict(event) if distinct < _MOST_LEAVES else None,
        "assumed_public": [item + declared for item in public],
    }
    if infinite:
        found["reason"] = "no finite epsilon is certified at this delta: add noise, sample less or take fewer steps"
    if args.command != "epsilon":
        found["target_epsilon"] = args.epsilon
    if args.plot is not None:
        found["plot"] = args.plot
    return found


def _headline(args: argparse.Namespace, run: "Mechanism", chosen: "Figure") -> list[str]:
    from dpgrad.accounting.calibrate import LEAST_NOISE

    lines = []
    if args.command == "calibrate":
        noise = up(run.noise_multiplier) if args.precision is None else f"{run.noise_multiplier:.10g}"
        least = "the least that is tried, and it" if run.noise_multiplier <= LEAST_NOISE else "the least that"
        lines.append(f"noise multiplier {noise}: {least} keeps {run.steps:,} steps within ε = {args.epsilon:g}")
    if args.command == "steps":
        lines.append(f"{run.steps:,} steps: the most within ε = {args.epsilon:g} at noise {run.noise_multiplier:g}")
    kind = "" if chosen.guarantee else ", a historical figure and no guarantee"
    lines.append(
        f"ε = {up(chosen.epsilon)} at δ = {args.delta:g} ({run.relation} neighbours, {run.sampler.name} "
        f"sampling, accountant {chosen.accountant}{kind})"
    )
    return lines
