"""Planted faults against the methods of `dpgrad.audit`, and how often the audits raise a false alarm on honest code.

    python -m benchmarks.audit [--repetitions 1000] [--games 800] [--runs 400] [--only faults|fits|runs|alarms]

Every planted fault (`benchmarks.planted`) is audited by the step audit, by the two-world game over single steps and
over whole runs, and by one run with 1,000 canaries. A game's score reads the noisy sums along the canary (white box),
the final weights along it, or the loss of a mislabelled row at the final weights (black box). Estimators
(`benchmarks.planted_fits`) are audited by fits on neighbouring data, coupled and in a game. For the false alarms each
check is repeated on honest code, on slices of long runs: steps are independent under the claim, so slices are
repetitions.
Results go to results/audit.{json,md}.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import environment, planted, planted_fits
from dpgrad import audit
from dpgrad.accounting.events import Relation
from dpgrad.audit import claims, exact, games, noise, price, sampled
from dpgrad.audit.claims import ClaimCurve
from dpgrad.audit.trials import Canaried, PrivateSteps, Trial, UnderAudit, rows_of
from dpgrad.errors import DpgradError
from dpgrad.mechanism import sampling

LEVELS = (0.05, 0.01, 0.001)
RESULTS = environment.ROOT / "results"
CANARIES = 1000
RUN = 6  # steps of a whole run
GAMES = ("every iterate", "final weights", "black box")
SLICE, FEW = 24, 4  # steps of one repetition of the noise checks, alone and in differences
BATCHES = 40
TITLE = "Audits: planted faults, and false alarms"
UNPLAYED: dict[str, Any] = {"refuted": None, "says": "not played: clip bounds move from step to step"}


def target_of(subject: planted.Subject, seed: int = 0, steps: int | None = None) -> UnderAudit:
    """The subject as `audit.step` sees it, with other steps."""
    mechanism = subject.mechanism if steps is None else subject.mechanism.with_steps(steps)
    run = PrivateSteps(None, subject.options)
    return UnderAudit.of(subject.model, subject.loss, mechanism, subject.data, run, seed)


# ---------------------------------------------------------------- planted faults
def step_audit(case: planted.Case) -> dict[str, Any]:
    """The whole step audit of a case."""
    subject, began = case.subject(), time.process_time()
    with case.fault():
        try:
            found = audit.step(
                subject.model, subject.loss, subject.mechanism, subject.data, steps=case.steps, canaries=2,
                **subject.options,
            )  # fmt: skip
        except DpgradError as error:
            return {"refuted": None, "says": f"dpgrad refuses it: {error}"[:90]}
    refuted = [check for check in found.checks if check.refuted]
    says = "; ".join(f"{c.name}: {c.says if c.p is None else f'p = {c.p:.1g}'}" for c in refuted) or "not refuted"
    return {
        "refuted": found.refuted, "says": says, "measured_multiplier": found.measured_multiplier,
        "claimed_multiplier": found.claimed_multiplier, "seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def step_game(case: planted.Case, runs: int) -> dict[str, Any]:
    """The game over single steps with and without the gradient canary, scored along it."""
    subject = case.subject()
    if subject.mechanism.adaptive_clip is not None:
        return UNPLAYED
    target = target_of(subject, steps=2 * runs)
    full = target.full
    rows = rows_of(target.data, slice(0, 3))
    base = target.columns(rows, 0.0, 0.0)
    push = torch.zeros(3)
    push[-1] = 1.0
    way = np.concatenate([target.directions[name].double().numpy().ravel() for name in target.names])
    scores = []
    with case.fault():
        try:
            for world, data in enumerate((base, target.columns(rows, 0.0, push))):
                found = target.released(data, 50 + world, range(runs), full, canaried=True)
                scores.append((found.sums / target.stds(range(runs))) @ way)
            claim = claims.claimed(full.with_steps(1).profile())
        except DpgradError as error:
            return {"refuted": None, "says": f"dpgrad refuses it: {error}"[:90]}
    return verdict(scores[1], scores[0], claim)


def verdict(inside: Any, outside: Any, claim: claims.Claimed) -> dict[str, Any]:
    """What a game says of scores with and without the row."""
    record = games.scores(inside, outside, claim.curve)
    return {"refuted": record.refuted, "p": record.checks[0].p, "lower_epsilon": record.lower_epsilon}


def run_games(case: planted.Case, runs: int) -> dict[str, dict[str, Any]]:
    """The game over whole runs of `RUN` steps: slices of one long run, whose steps are independent under the claim.

    White box, all other rows are silent, and the score of a run is its likelihood ratio, or the sum along the canary,
    which is what is left of it in the final weights at a fixed learning rate. Black box, a model is trained.
    """
    subject = case.subject()
    if subject.mechanism.adaptive_clip is not None:
        return dict.fromkeys(GAMES, UNPLAYED)
    target = target_of(subject, steps=RUN * runs)
    mechanism, rows = target.mechanism, target.rows
    push = torch.zeros(rows)
    push[-1] = 1.0
    way = np.concatenate([target.directions[name].double().numpy().ravel() for name in target.names])
    found: dict[str, dict[str, Any]] = {}
    with case.fault():
        try:
            claim = claims.claimed(mechanism.with_steps(RUN).profile())
            along, steps = [], range(RUN * runs)
            for world, pushed in enumerate((0.0, push)):
                data = target.columns(target.data, 0.0, pushed)
                sums = target.released(data, 70 + world, steps, mechanism, canaried=True).sums
                along.append(((sums / target.stds(steps)) @ way).reshape(runs, RUN))
            places, norm = target.stds(range(1)).ravel(), float(np.linalg.norm(way))
            clips = np.concatenate([
                np.full(part.stop - part.start, mechanism.clip_at(0, target.group_of(name)))
                for name, part in target.slices().items()
            ])  # fmt: skip
            shift = float((clips * way / places) @ way)  # where the canary takes part
            rate = 1 / mechanism.sampler.steps_per_epoch
            chances = np.log([1 - rate, rate])
            ratios = [
                np.logaddexp(chances[0], chances[1] + shift / norm**2 * (each - shift / 2)).sum(1) for each in along
            ]
            found["every iterate"] = verdict(ratios[1], ratios[0], claim)
            found["final weights"] = verdict(along[1].sum(1), along[0].sum(1), claim)
            losses = [black_box(subject, target, world, runs // 3) for world in (0, 1)]
            found["black box"] = verdict(losses[1], losses[0], claim)
        except DpgradError as error:
            return {"every iterate": {"refuted": None, "says": f"dpgrad refuses it: {error}"[:90]}}
    return found


def black_box(subject: planted.Subject, target: UnderAudit, world: int, runs: int) -> Any:
    """The loss of the last row, with another row's target, at the final weights of runs with and without it."""
    mechanism, wide = subject.mechanism.with_steps(RUN * runs), target.ours is not None and target.ours.several_rows
    inputs, targets = target.data
    wrong = targets.clone()
    wrong[-1] = (targets[-1] + 1) % 2
    weights = torch.ones(len(inputs))
    weights[-1] = float(world)
    data = target.columns((inputs, wrong), weights, 0.0)
    trial = Trial(target.model, Canaried(target.loss, target.directions), mechanism, data, 90 + world, range(1))
    run = (target.ours or PrivateSteps()).canaried()
    model, found = target.model, []
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    one = rows_of((inputs, wrong), slice(len(inputs) - 1, len(inputs)))
    one = tuple(part[:, 0] for part in one) if wide else one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = run.private(trial)
        for _ in range(runs):
            for _ in range(RUN):
                private.step(data)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 1.0 * parameter.grad
            with torch.no_grad():
                found.append(-float(target.loss(model, one).sum()))
                for name, parameter in model.named_parameters():
                    parameter.copy_(first[name])
    return np.array(found)


def single(case: planted.Case) -> dict[str, Any]:
    """One step on many canaries, each in by a coin: a lower bound on ε at 5 %."""
    if case.subject().mechanism.adaptive_clip is not None:
        return UNPLAYED
    coins = np.random.default_rng(1).random(CANARIES) < 0.5
    mechanism = replace(
        case.subject().mechanism,
        sampler=sampling.FullBatch(),
        steps=40,
        clip=1.0,
        groups=(),
        relation=Relation.ZERO_OUT,
    )
    data = torch.eye(CANARIES)[torch.from_numpy(np.flatnonzero(coins))]
    probe = nn.Linear(CANARIES, 1, bias=False)
    target = UnderAudit.of(probe, sampled.steep, mechanism, data, PrivateSteps(), 9)
    with case.fault(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = target.released(data, 9, range(1), mechanism)
        except DpgradError as error:
            return {"says": f"dpgrad refuses it: {error}"[:90]}
    record = audit.one_run(found.sums[0], coins, delta=planted.DELTA, guesses=200)
    return {"lower_epsilon": record.lower_epsilon, "claimed_epsilon": mechanism.with_steps(1).profile().epsilon(1e-5)}


CASES = (
    planted.Case("none", planted.honest, planted.subject, "all", 100),
    planted.Case("none, adaptive clip", planted.honest, planted.following_subject, "all", 100),
    *planted.CASES,
)


def faults(games: int) -> Iterator[dict[str, Any]]:
    """Every fault by every method but whole runs."""
    for case in CASES:
        row = {"fault": case.name, "step": step_audit(case), "game": step_game(case, games), "one_run": single(case)}
        print(case.name, row["step"]["says"][:80], row["game"].get("p"), flush=True)
        yield row


def whole_runs(runs: int) -> dict[str, Any]:
    """Every fault by the game over whole runs."""
    found = {}
    for case in CASES:
        found[case.name] = run_games(case, runs)
        print(case.name, {name: game.get("p") for name, game in found[case.name].items()}, flush=True)
    return found


def fits(trials: int) -> Iterator[dict[str, Any]]:
    """Every fault of every estimator."""
    for name, (audited, own) in planted_fits.FITS.items():
        for fault, made in planted_fits.FAULTS.items():
            with made(own)():
                found = audited(trials)
            print(name, fault, found.refuted, flush=True)
            coupled, game = found.checks
            yield {
                "fit": name, "fault": fault, "coupled": coupled.says, "violated": coupled.refuted,
                "game": {"refuted": game.refuted, "p": game.p},
            }  # fmt: skip


# ---------------------------------------------------------------- false alarms
def noise_alarms(repetitions: int) -> dict[str, list[float]]:
    """The checks of the noise on slices of three long runs."""
    target = target_of(planted.subject(), 11, steps=SLICE * repetitions)
    quiet = target.columns(rows_of(target.data, slice(0, 2)), 0.0, 0.0)
    steps = range(SLICE * repetitions)
    alone = target.released(quiet, 11, steps, target.full, canaried=True).sums / target.stds(steps)
    few = range(FEW * repetitions)
    real = rows_of(target.data, slice(0, 6))
    one, other = (target.released(real, seed, few, target.full).sums for seed in (12, 13))
    apart = (one - other) / (math.sqrt(2) * target.stds(few))
    found: dict[str, list[float]] = {}
    for n in range(repetitions):
        seen = noise.Ratios(
            alone[n * SLICE : (n + 1) * SLICE],
            apart[n * FEW : (n + 1) * FEW],
            target.slices(),
            True,
            {name: noise.strides(p.shape) for name, p in target.model.named_parameters()},
        )
        for check in (
            noise.size("noise size", seen.alone, seen.parts),
            noise.size("noise on real rows", seen.differences, seen.parts),
            noise.law(seen.alone),
            noise.independence(seen),
            noise.precision(seen.alone),
        ):
            found.setdefault(check.name, []).append(float(check.p or 0.0))
    return found


def adaptive_alarms(repetitions: int) -> dict[str, list[float]]:
    """The checks of the noise where clip bounds follow noisy counts, each repetition under a seed of its own."""
    target = target_of(planted.following_subject(), 0, steps=SLICE)
    found: dict[str, list[float]] = {}
    for n in range(repetitions):
        seen = noise.check(replace(target, seed=60_000 + 1000 * n), SLICE, 0.001)
        for check in seen.checks:
            found.setdefault(f"{check.name}, adaptive clip", []).append(float(check.p or 0.0))
    return found


def sampling_alarms(repetitions: int) -> dict[str, list[float]]:
    """Poisson's batches from gradients, on slices of one long run; those of the other samplers as they are drawn."""
    target = target_of(planted.subject(), 21, steps=BATCHES * repetitions)
    drawn = sampled.drawn(target, BATCHES * repetitions).counts
    rates = np.full(BATCHES, 0.2)
    found: dict[str, list[float]] = {
        "sampling, Poisson": [
            sampled.poisson(drawn[n * BATCHES : (n + 1) * BATCHES], rates, n)[0] for n in range(repetitions)
        ]
    }
    fixed, mixed = sampling.FixedSize(40, 8), sampling.Shuffle(40, 8)
    for name, sampler in (("sampling, fixed size", fixed), ("sampling, shuffle", mixed)):
        for n in range(repetitions):
            counts = np.zeros((BATCHES, 40), np.int64)
            for step in range(BATCHES):
                counts[step, sampler.draw(40, step, 5000 + n)] = 1
            batches = sampled.Batches(counts, BATCHES)
            p = sampled.fixed_size(counts, 8)[0] if sampler is fixed else sampled.shuffled(batches, mixed.span)[0]
            found.setdefault(name, []).append(p)
    return found


def price_alarms(repetitions: int) -> dict[str, list[float]]:
    """The price of honest claims, under three relations and samplings."""
    found = []
    mechanisms = (
        planted.poisson(steps=4), planted.poisson(steps=4, relation=Relation.REPLACE_ONE),
        planted.poisson(steps=4, sampler=sampling.FullBatch()),
    )  # fmt: skip
    read = [claims.claimed(mechanism) for mechanism in mechanisms]
    subject = planted.subject()
    for n in range(repetitions):
        target = target_of(replace(subject, mechanism=mechanisms[n % 3]), 100 * n)
        found.append(float(price.check(target, read[n % 3], 4000).p or 0.0))
    return {"price": found}


def game_alarms(repetitions: int) -> dict[str, list[float]]:
    """The game and the e-process where the claim is exactly true: scores N(0, 1) and N(1, 1), claim μ = 1."""
    curve, random = ClaimCurve.gaussian(1.0), np.random.default_rng(31)
    found: dict[str, list[float]] = {"two-world game": [], "e-process": []}
    for _ in range(repetitions):
        inside, outside = random.normal(1, 1, 500), random.normal(0, 1, 500)
        threshold, flip = games.chosen(inside[:150], outside[:150], curve)
        found["two-world game"].append(
            games.p_value(games.counted(inside[150:], outside[150:], threshold, flip), curve)
        )
        bettor = games.Bettor(curve)
        for seen in range(50, 501, 50):
            bettor.look(inside[:seen], outside[:seen])
        found["e-process"].append(bettor.p)
    return found


def sensitivity_alarms(repetitions: int) -> tuple[int, float]:
    """Coupled pairs along a long walk of the weights: how many exceed the bound, and the largest."""
    target = target_of(planted.subject(), 41, steps=repetitions)
    steps, rows = range(repetitions), rows_of(target.data, slice(0, 7))
    weights = torch.ones(7)
    weights[-1] = 0.0
    largest = []
    push = torch.zeros(7)
    push[-1] = 1.0
    without = target.released(target.columns(rows, weights, 0.0), 41, steps, target.full, canaried=True)
    for data in (target.columns(rows, 1.0, 0.0), target.columns(rows, weights, push)):
        with_ = target.released(data, 41, steps, target.full, canaried=True)
        largest.append(np.linalg.norm(with_.sums - without.sums, axis=1) - with_.rounding)
    worst = np.maximum(*largest)
    return int((worst > 1 + 1e-3).sum()), float(worst.max())


def judged(name: str, ps: list[float]) -> dict[str, Any]:
    """Rejections at each level, with Clopper and Pearson's interval and the test that there are too many."""
    from scipy import stats

    row: dict[str, Any] = {"check": name, "repetitions": len(ps)}
    for level in LEVELS:
        count = sum(p <= level for p in ps)
        ends = stats.binomtest(count, len(ps)).proportion_ci(0.95, "exact")
        row[str(level)] = {
            "rejections": count, "interval": [ends.low, ends.high], "p_too_many": exact.above(count, len(ps), level),
        }  # fmt: skip
    return row


def alarms(repetitions: int) -> Iterator[dict[str, Any]]:
    """Every check that involves chance."""
    for part in (game_alarms, price_alarms, sampling_alarms, noise_alarms, adaptive_alarms):
        for name, ps in part(repetitions).items():
            print(name, sum(p <= 0.05 for p in ps), flush=True)
            yield judged(name, ps)


# ---------------------------------------------------------------- the page
def shown(row: dict[str, Any], runs: dict[str, Any]) -> list[str]:
    """One row of the table of faults."""
    step, one = row["step"], row["one_run"]
    bound = one.get("says") or f"ε ≥ {one['lower_epsilon']:.2f} of {one['claimed_epsilon']:.2f}"
    says = f"REFUTED, {step['says']}" if step["refuted"] else step["says"]
    of_runs = [played(runs[name]) if name in runs else "" for name in GAMES]
    return [row["fault"], says, played(row["game"]), *of_runs, bound]


def played(game: dict[str, Any]) -> str:
    """What a game says, in a cell."""
    if game["refuted"] is None:
        return str(game["says"])
    return f"{'REFUTED' if game['refuted'] else 'not refuted'}, p = {game['p']:.1g}"


def rejected(cell: dict[str, Any]) -> str:
    """One cell of the table of false alarms."""
    low, high = cell["interval"]
    return f"{cell['rejections']} [{low:.4f}, {high:.4f}], {cell['p_too_many']:.2g}"


def page(data: dict[str, Any]) -> str:
    """The results in words; each part says when, where and by which command it was made."""
    parts = [f"# {TITLE}"]
    if "faults" in data and "runs" in data:
        part, whole = data["faults"], data["runs"]
        head = [
            "planted fault", "step audit, level 0.001", "game over single steps, white box",
            *(f"game over whole runs, {name}" for name in GAMES), "one run (weak: no verdict)",
        ]  # fmt: skip
        planned = [row for row in part["rows"] if not row["fault"].startswith("none")]
        caught = sum(bool(row["step"]["refuted"]) for row in planned)
        parts += [
            environment.heading(part["environment"], "Planted faults").replace("# ", "## ", 1),
            f"The step audit refutes {caught} of {len(planned)}, by the checks that are named. The game has "
            f"2 × {part['games']:,} single steps on full batches, with and without a canary. One run has {CANARIES:,} "
            "canaries and 200 guesses, at 5 %; its bound is beside the claimed ε of one step, and it gives no verdict. "
            "Two real processes, a user's own loop and scripts of Opacus are audited in tests/audit/test_own_code.py.",
            f"The games over whole runs have 2 × {whole['runs']:,} runs of {RUN} steps, sampled as the mechanism says "
            f"(black box: a third as many): `{whole['environment']['command']}`, {whole['environment']['date']}. They "
            "are cut from one long run, so that a fault that grows with the number of the step is larger there. So few "
            "runs can only find gross faults.",
            environment.table([head, *(shown(row, whole["rows"].get(row["fault"], {})) for row in part["rows"])]),
        ]
    if "fits" in data:
        part = data["fits"]
        rows = [
            [row["fit"], row["fault"], f"{'REFUTED' if row['violated'] else 'not refuted'}, {row['coupled']}",
             played(row["game"])]
            for row in part["rows"]
        ]  # fmt: skip
        parts += [
            environment.heading(part["environment"], "Planted faults of estimators").replace("# ", "## ", 1),
            "One of 100 rows is exchanged, as far as its bounds allow; ε = 1. Coupled fits have one seed, and the game "
            f"has 2 × {part['trials'] // 2:,} fits, and the level is 0.001 for both together.",
            environment.table([["release", "planted fault", "coupled fits", "game over fits"], *rows]),
        ]
    if "alarms" in data:
        part = data["alarms"]
        head = ["check", "repetitions", *(f"rejected at {level:g} [95 % interval], P[as many]" for level in LEVELS)]
        rows = [
            [row["check"], f"{row['repetitions']:,}", *(rejected(row[str(level)]) for level in LEVELS)]
            for row in part["rows"]
        ]
        count, largest = part["sensitivity"]
        chances = [row[str(level)]["p_too_many"] for row in part["rows"] for level in LEVELS]
        least = min(chances)
        parts += [
            environment.heading(part["environment"], "False alarms").replace("# ", "## ", 1),
            "Rejections of true claims, with Clopper and Pearson's interval of the rate. P[as many] is the probability "
            "of at least so many at the stated level (binomial test): small values would speak against the level. "
            "Checks that join tests by the union bound or Markov's inequality stay below it.",
            environment.table([head, *rows]),
            f"The least of the {len(chances)} probabilities is {least:.2g}; true levels give one so small with "
            f"probability at most {min(1.0, len(chances) * least):.2g}.",
            f"Sensitivity involves no chance: {count} of {part['pairs']:,} coupled pairs exceed the bound, and the "
            f"largest contribution is {largest:.4f} of it.",
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run what is asked for, part by part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--games", type=int, default=800)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--only", choices=("faults", "fits", "runs", "alarms"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only in (None, "runs"):
        ran = environment.describe("benchmarks.audit")
        keep(runs={"environment": ran, "runs": args.runs, "rows": whole_runs(args.runs)})
    if args.only in (None, "faults"):
        ran = environment.describe("benchmarks.audit")
        keep(faults={"environment": ran, "games": args.games, "rows": list(faults(args.games))})
    if args.only in (None, "fits"):
        ran, trials = environment.describe("benchmarks.audit"), 2 * args.games
        keep(fits={"environment": ran, "trials": trials, "rows": list(fits(trials))})
    if args.only in (None, "alarms"):
        ran = environment.describe("benchmarks.audit")
        sensitivity = sensitivity_alarms(args.repetitions)
        rows = list(alarms(args.repetitions))
        keep(alarms={"environment": ran, "pairs": args.repetitions, "sensitivity": list(sensitivity), "rows": rows})


def keep(**part: dict[str, Any]) -> None:
    """Write a part as soon as it is there; the others stay as they were."""
    path = RESULTS / "audit.json"
    data = {**(json.loads(path.read_text("utf-8")) if path.exists() else {}), **part}
    path.write_text(json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n", "utf-8")
    (RESULTS / "audit.md").write_text(page(data), "utf-8")
    print(f"wrote {path.relative_to(environment.ROOT)}")


if __name__ == "__main__":
    main()
