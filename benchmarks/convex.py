"""Every convex solver on every dataset, beside diffprivlib; the bounds on excess risk; and speed.

    python -m benchmarks.convex run [--peer PYTHON]     what is missing of the tables; continues a stopped run
    python -m benchmarks.convex report                  the tables of the finished trials
    python -m benchmarks.convex speed --peer PYTHON     time and memory of a Covertype fit; cost in n, p and K

Tables 2 to 4, Figure 2 and the ablation of the paper itself are `dpgrad reproduce yu2020`.

The peer needs an interpreter of its own: python -m venv peer; peer/bin/pip install diffprivlib 'scikit-learn<1.6'.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from benchmarks import convex_log, environment
from dpgrad import data
from dpgrad.accounting.events import Relation
from dpgrad.convex import Softmax, bounds, curvature
from dpgrad.convex.solvers import auto, gd
from dpgrad.papers import convex as lab

PEER = "diffprivlib"
EPSILONS = {
    "adult": 0.1, "mnist": 1.0, "covertype": 1.0, "covertype-binary": 0.1, "reuters": 1.0,
    "real-sim": 0.1, "rcv1": 0.1, "gisette": 0.1, "kddcup99": 0.1,
}  # fmt: skip
SPARSE = ("reuters", "real-sim", "rcv1")
SOLVERS = (
    "auto",
    "gd",
    "gd-intercept",
    "sgd",
    "objective",
    "amp",
    "amp-free",
    "amp-published",
    "output",
    "output-full",
)
NAMES = {
    "non-private": "non-private", "auto": "`auto`, nothing tuned", "gd": "DP-GD, paper's grid",
    "gd-intercept": "DP-GD, paper's grid, with an intercept", "sgd": "DP-SGD, paper's grid",
    "objective": "objective perturbation, tight (3 slopes)",
    "amp": "AMP, published grid", "amp-free": "AMP, tuning-free",
    "amp-published": "AMP, tuning-free, its authors' ridge",
    "output": "output perturbation, SGD (grid)", "output-full": "output perturbation, full gradients (grid)",
    PEER: "diffprivlib, best of 6 C",
}  # fmt: skip
PEER_GRID = (0.001, 0.003, 0.01, 0.1, 1.0, 10.0)


def file(dataset: str) -> Path:
    """Where the outcomes of a dataset are kept."""
    return environment.RESULTS / f"convex_{dataset}.json"


# ── running ──


def missing(given: argparse.Namespace) -> Iterator[lab.Scored]:
    """Run what is missing, the most important first."""
    for name in given.datasets:
        try:
            task = lab.task(name, given.data_dir)
        except data.MissingFileError as error:
            print(error, file=sys.stderr)
            continue
        log, epsilon = convex_log.ScoreLog(file(name)), EPSILONS[name]
        yield from convex_log.complete(task, log, "non-private", None, runs=1, pilot=1)
        for solver in given.solvers:
            yield from convex_log.complete(task, log, solver, epsilon, runs=given.runs, pilot=given.pilot)
        if given.peer:
            yield from peer_rows(task, log, epsilon, given.peer, given.peer_runs)
        if name == "adult":
            for trial in risk_trials(epsilon):
                yield from convex_log.repeated(task, log, trial, given.runs)


def risk_trials(epsilon: float) -> list[lab.FitTrial]:
    """DP-GD on unit rows, where the clip bound never binds and the bounds of theory hold."""
    return [
        lab.FitTrial("adult", "gd", epsilon, (("rows", "unit"), ("clip", 1.0), ("rate", 1.0), ("steps", steps)))
        for steps in lab.STEPS
    ]


def peer_rows(
    task: lab.Prepared, log: convex_log.ScoreLog, epsilon: float, peer: str, runs: int
) -> Iterator[lab.Scored]:
    """diffprivlib's fits: one of each C, then the best of them."""
    if task.sparse:
        return  # it cannot clip sparse rows
    first = lab.FitTrial(task.name, PEER, epsilon)
    grid: list[lab.Setting] = [(("C", c),) for c in PEER_GRID]
    for setting in grid:
        yield from peer_fits(task, log, replace(first, setting=setting), peer, min(runs, 1))
    best = convex_log.best(log.outcomes.values(), first, grid, 1)
    yield from peer_fits(task, log, replace(first, setting=best), peer, runs)


def peer_fits(
    task: lab.Prepared, log: convex_log.ScoreLog, trial: lab.FitTrial, peer: str, runs: int
) -> Iterator[lab.Scored]:
    left = [one for run in range(runs) if (one := replace(trial, run=run)) not in log.outcomes]
    if not left:
        return
    fits = peer_run(task, peer, trial.epsilon or 0.0, float(dict(trial.setting)["C"]), [one.seed for one in left])
    for one, coefficients, intercept, seconds in zip(left, *fits, strict=True):
        found = lab.judged(task, one, (coefficients.T, intercept, task.within(1.0)), seconds)
        log.add(found)
        yield found


def peer_run(
    task: lab.Prepared, peer: str, epsilon: float, C: float, seeds: list[int]
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Coefficients (fits, outputs, columns), intercepts and seconds of the peer on unit rows."""
    rows = np.asarray(task.rows, np.float64)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "rows.npz"), Path(folder, "fits.npz")
        np.savez(source, rows=rows, classes=task.targets)
        script = Path(__file__).with_name("convex_peer.py")
        subprocess.run([peer, script, source, target, str(epsilon), str(C), *map(str, seeds)], check=True)
        found = np.load(target)
        return found["coefficients"], found["intercepts"], found["seconds"].tolist()


# ── tables ──


def cells(outcomes: Iterable[lab.Scored], like: lab.FitTrial) -> dict[lab.Setting, list[lab.Scored]]:
    """The outcomes of one solver at one ε by setting."""
    found: dict[lab.Setting, list[lab.Scored]] = {}
    for one in outcomes:
        if (one.trial.dataset, one.trial.solver, one.trial.epsilon) == (like.dataset, like.solver, like.epsilon):
            found.setdefault(one.trial.setting, []).append(one)
    return found


def chosen(outcomes: Iterable[lab.Scored], like: lab.FitTrial) -> lab.Setting | None:
    """The setting that was run most often among those of the solver's grid: the best of the pilot."""
    plain = {
        setting: ran
        for setting, ran in cells(outcomes, like).items()
        if "noise" not in dict(setting) and (like.solver != "gd" or ("rows", "raw") in setting)
    }
    return max(plain, key=lambda s: (len(plain[s]), _mean(plain[s])), default=None)


def _mean(ran: list[lab.Scored]) -> float:
    return statistics.fmean(one.accuracy for one in ran)


def spread(values: list[float], digits: int = 1) -> str:
    """Mean and standard deviation."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def table_4(name: str, outcomes: list[lab.Scored]) -> list[list[str]]:
    """One dataset's rows: the paper's accuracy, ours, the excess empirical risk, the setting."""
    rows = [["solver", "paper", "accuracy, %", "AUC", "excess risk", "runs", "tried", "setting"]]
    floors = {one.trial.label: one.risk for one in outcomes if one.trial.solver == "non-private"}
    for solver, title in NAMES.items():
        like = lab.FitTrial(name, solver, None if solver == "non-private" else EPSILONS[name])
        setting = chosen(outcomes, like)
        if setting is None:
            continue
        ran = cells(outcomes, like)[setting]
        raw = "rows=raw" if ("rows", "raw") in setting else "rows=unit"
        comparable = raw in floors and float(dict(setting).get("radius", 1)) == 1
        excess = spread([one.risk - floors[raw] for one in ran], 3) if comparable and solver != "non-private" else "–"
        paper = lab.PAPER.get(name, {}).get(solver)
        rows.append(
            [
                title,
                "–" if paper is None else f"{paper:.1f}",
                spread([one.accuracy for one in ran]),
                spread([one.auc for one in ran if one.auc is not None], 3) if ran[0].auc is not None else "–",
                excess,
                str(len(ran)),
                tried(name, like, outcomes),
                ran[0].trial.label or "–",
            ]
        )
    return rows


def tried(name: str, like: lab.FitTrial, outcomes: list[lab.Scored]) -> str:
    """How many settings of the solver's grid were tried."""
    if like.solver == PEER:
        grid: list[lab.Setting] = [(("C", c),) for c in PEER_GRID]
    else:
        rows = sparse.csr_array((1, 1)) if name in SPARSE else np.zeros((1, 1))
        grid = lab.SOLVERS[like.solver].grid(lab.Prepared(name, rows, rows, lab.Logistic(), rows, rows))
    return "–" if len(grid) == 1 else f"{len(set(grid) & set(cells(outcomes, like)))} of {len(grid)}"


def risk_table(given: argparse.Namespace, outcomes: list[lab.Scored]) -> list[list[str]]:
    """DP-GD on Adult's unit rows: excess risk measured, and its two bounds with the curvature along a run."""
    epsilon = EPSILONS["adult"]
    task = lab.task("adult", given.data_dir)
    objective = task.objective(task.within(1.0))
    best = curvature.minimiser(objective)
    floor, beta = objective.value(best), curvature.smoothness(objective)
    distance = float(np.linalg.norm(best))
    rows = [["T", "ν along a run", "excess risk measured", "bound by ν (Eq. 9)", "bound of the mean iterate (Eq. 12)"]]
    for trial in risk_trials(epsilon):
        ran = cells(outcomes, trial).get(trial.setting, [])
        if not ran:
            continue
        steps, rate = int(dict(trial.setting)["steps"]), float(dict(trial.setting)["rate"])
        mechanism = gd.calibrated(
            objective.design.rows, steps, clip=1.0, epsilon=epsilon, delta=task.delta, relation=Relation.REPLACE_ONE
        )
        std = mechanism.std_at(0) / objective.design.rows
        nu = float(
            curvature.along(objective, iterates(objective, std, rate, steps), best, learning_rate=rate, std=std).min()
        )
        problem = bounds.Problem(objective.design.rows, objective.dimension, 1.0, beta, max(nu, 0.0), distance)
        settings = {"std": std, "learning_rate": rate, "steps": steps}
        rows.append(
            [
                str(steps),
                f"{nu:.2g}",
                spread([one.risk - floor for one in ran], 4),
                f"{bounds.gd_risk(problem, **settings):.3g}",
                f"{bounds.gd_average_risk(problem, **settings):.3g}",
            ]
        )
    return rows


def iterates(objective: curvature.Objective, std: float, rate: float, steps: int) -> list[np.ndarray]:
    """Iterates of one run of DP-GD, sixteen of them spread over its length."""
    random, x, kept = np.random.default_rng(0), np.zeros(objective.shape), []
    every = max(1, steps // 16)
    for step in range(steps):
        if step % every == 0:
            kept.append(x)
        x = x - rate * (objective.gradient(x) + std * random.standard_normal(objective.shape))
    return kept


def report(given: argparse.Namespace) -> None:
    """Write convex.md from the finished trials."""
    logs = {name: list(convex_log.ScoreLog(file(name)).outcomes.values()) for name in EPSILONS if file(name).exists()}
    sections = [NOTE, DIFFERENCES, ELSEWHERE]
    for name, outcomes in logs.items():
        sections += [f"## Table 4: {name}, ε = {EPSILONS[name]:g}", environment.table(table_4(name, outcomes))]
    adult = logs.get("adult", [])
    sections += [
        "## Excess empirical risk and its bounds: DP-GD, Adult, unit rows, η = 1",
        environment.table(risk_table(given, adult)),
        RISK_NOTE,
    ]
    where = environment.describe("benchmarks.convex")
    environment.write("convex", {"environment": where}, "Convex solvers beside the paper and diffprivlib", sections)


NOTE = (
    "Replace-one neighbours, δ = 1/n², test accuracy, mean ± standard deviation over runs with other noise on the "
    "split of the benchmark (Iyengar et al. 2019); the columns say how many runs, and how many settings of a grid "
    "were tried; a grid that is tried in part was not run to its end. diffprivlib promises δ = 0, which is more at "
    "the same ε; it has no row on Reuters, since it cannot clip sparse rows. As in the paper, the setting of a solver "
    "with a grid has the best accuracy on the test split, uncharged, among those tried (a few runs each). `auto` has "
    "nothing to set, but its constants were chosen on Adult, Covertype and MNIST: most on held-out parts of their "
    "training rows, some (momentum, the constant column, two shares, the spread) with an eye on earlier test accuracy "
    "on these three, so that Reuters alone is a dataset that they have not seen. Excess risk: F(w) − min F of the "
    "mean loss with l2 = 1e-4, without intercept, on raw rows for DP-GD and DP-SGD and on unit rows for others "
    "(`auto`, diffprivlib and one row of DP-GD fit an intercept, which min F lacks). That of `auto` is large in part "
    "since it clips gradients far below the Lipschitz constant: its scores are too large for F at any ε "
    "(`dpgrad.convex.solvers.auto`), and F is not what it minimises. The non-private row minimises F on raw rows or on "
    "unit rows: it is the floor of the risk, not a ceiling of the accuracy, which centred rows with an intercept can "
    "pass, as on Covertype."
)
DIFFERENCES = (
    "Where this differs from the paper. Non-private: here without intercept and with l2 = 1e-4, there scikit-learn's "
    "default. DP-GD: the noise is exact, 14 to 22 % less than by Algorithm 1's formula, which asks for 17 to 28 % "
    "more than it takes. DP-SGD: the noise is that of the certified accountant for replace-one neighbours. The paper "
    "does not say whether its DP-GD has an intercept; the private methods of its benchmark have none. Both are given, "
    "and [other readings](convex_readings.md) of DP-GD on Adult with hundreds of fits each: by the paper's formula it "
    "has the paper's accuracy. With exact noise the last iterate on raw rows has 81.4 to 81.5 at η = 1 and 81.2 to "
    "81.5 at η = 5, with an intercept, a softmax of two scores or a halved rate or without; the mean of the iterates "
    "has 81.0 to 81.1, rows of norm 1 have 80.0 to 80.2. A mean of twenty fits has an error of 0.1. Output "
    "perturbation: the exact Gaussian mechanism, and fits of several classes that compose exactly where the paper's "
    "code divides ε by their number. On MNIST that is a quarter of its noise, which is why it is far better there; "
    "besides, a strongly convex sensitivity without the ball's radius, and l2 = 0.01 added to the published grid. "
    "AMP: the true curvature of the logistic loss, a quarter of the published code's, and the output noise of two "
    "approximate minimisers. The share of the tuning-free AMP was fitted to the larger ridge of that code, which is a "
    "row of its own."
)
ELSEWHERE = (
    "The paper's own [Table 2](../../results/yu2020-table2.md), [Table 3](../../results/yu2020-table3.md), Figure 2 ("
    "[Adult](../../results/yu2020-figure2-adult.md), [MNIST](../../results/yu2020-figure2-mnist.md), "
    "[Reuters](../../results/yu2020-figure2-reuters.md)) and [ablation](../../results/yu2020-ablation.md) are made by "
    "`dpgrad reproduce yu2020`."
)
RISK_NOTE = (
    "ν is the least expected curvature at sixteen points of one run: read from the private rows, it explains and is "
    "not for release. The last iterate is measured; Eq. 12 speaks of the mean of the iterates."
)


# ── speed ──


def speed(given: argparse.Namespace) -> None:
    """Time of a Covertype fit beside the peer's, memory, and cost over n, p and K."""
    where = environment.describe("benchmarks.convex")
    rounds = []
    for name in ("covertype", "covertype-binary"):
        task = lab.task(name, given.data_dir)
        for seed in range(given.rounds):
            ours = lab.outcome(task, lab.FitTrial(name, "auto", 1.0, run=seed))
            record: dict[str, Any] = {"task": name, "ours": ours.seconds, "accuracy": ours.accuracy}
            if given.peer:
                coefficients, intercepts, seconds = peer_run(task, given.peer, 1.0, 1.0, [seed])
                model = (coefficients[0].T, intercepts[0], task.within(1.0))
                record |= {"peer": seconds[0], "peer_accuracy": lab.judged(task, ours.trial, model, 0.0).accuracy}
            rounds.append(record)
            print(record, flush=True)
    memory = json.loads(
        subprocess.run(
            [sys.executable, "-m", "benchmarks.convex", "memory"], check=True, capture_output=True, text=True
        ).stdout
    )
    costs = list(scaling())
    heads = ["task", "dpgrad `auto`, s", "accuracy, %", "diffprivlib, s", "accuracy, %", "times faster"]
    lines = [heads]
    for name in ("covertype", "covertype-binary"):
        those = [r for r in rounds if r["task"] == name]
        line = [
            name,
            f"{statistics.median(r['ours'] for r in those):.2f}",
            f"{statistics.fmean(r['accuracy'] for r in those):.1f}",
        ]
        if given.peer:
            line += [
                f"{statistics.median(r['peer'] for r in those):.2f}",
                f"{statistics.fmean(r['peer_accuracy'] for r in those):.1f}",
                f"{statistics.median(r['peer'] / r['ours'] for r in those):.1f}",
            ]
        else:
            line += ["–"] * 3
        lines.append(line)
    counted = "one round" if given.rounds == 1 else f"medians of {given.rounds} rounds"
    sections = [
        f"One thread each, ε = 1, 464,809 × 54 rows, {counted} in which one runs after the "
        "other; seconds of CPU of the fit alone, since the machine had other work.",
        environment.table(lines),
        f"Peak memory of a 7-class fit beyond the process before it: {memory['fit']:.0f} MiB for an input of "
        f"{memory['input']:.0f} MiB (float32), so input and fit together take "
        f"{(memory['fit'] + memory['input']) / memory['input']:.2f} times the input. The estimators copy other "
        "types to float32 first, half as much as float64 or int64 and four times as much as uint8: below twice the "
        "input where a number takes eight bytes, six to seven times the input where it takes one.",
        "Cost: seconds of a step of `auto` without its releases (five steps of DP-GD), random rows; the last column is "
        "flat where the cost is linear in n·p·K, and larger where p or K is so small that residuals outweigh products.",
        environment.table([["n", "p", "K", "ms a step", "ns / (n·p·K)"], *costs]),
    ]
    environment.write(
        "convex_speed",
        {"environment": where, "rounds": rounds, "memory": memory, "costs": costs},
        "Speed of the convex solver",
        sections,
    )


def scaling() -> Iterator[list[str]]:
    """Milliseconds of a DP-GD step over n, p and K, each doubled on its own."""
    random = np.random.default_rng(0)
    for n, p, classes in (
        (50_000, 100, 10), (100_000, 100, 10), (200_000, 100, 10),
        (50_000, 200, 10), (50_000, 400, 10), (50_000, 100, 20), (50_000, 100, 40),
    ):  # fmt: skip
        rows = random.standard_normal((n, p), dtype=np.float32)
        design = lab.Design(rows, radius=1.0)
        targets = random.integers(0, classes, n)
        mechanism = gd.calibrated(n, 5, clip=1.0, epsilon=1.0, delta=n**-2.0, relation=Relation.REPLACE_ONE)
        taken = []
        for _ in range(3):
            began = time.process_time()
            gd.solve(design, targets, Softmax(classes), mechanism, learning_rate=1.0, key=0)
            taken.append((time.process_time() - began) / 5)
        yield [f"{n:,}", str(p), str(classes), f"{min(taken) * 1e3:.1f}", f"{min(taken) * 1e9 / (n * p * classes):.3f}"]


def memory() -> None:
    """MiB that a fit takes at most beyond what the process holds with its input, and the input's own."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((464_809, 54), dtype=np.float32)
    targets = random.integers(0, 7, len(rows))
    small = {"epsilon": 1.0, "delta": 1e-12, "relation": Relation.REPLACE_ONE, "key": 0}
    auto.solve(rows[:2000], targets[:2000], Softmax(7), **small)  # loads what is loaded at first use
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _resident("VmRSS")
    auto.solve(rows, targets, Softmax(7), steps=5, **small)
    print(json.dumps({"fit": _resident("VmHWM") - before, "input": rows.nbytes / 2**20}))


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report", "speed", "memory"))
    parser.add_argument("--data-dir", help="default: DPGRAD_DATA")
    parser.add_argument("--peer", help="an interpreter that has diffprivlib")
    parser.add_argument("--datasets", nargs="+", choices=EPSILONS, default=list(EPSILONS))
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=list(SOLVERS))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--pilot", type=int, default=3, help="runs of each setting of a grid")
    parser.add_argument("--peer-runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison of speed")
    given = parser.parse_args()
    match given.what:
        case "run":
            for one in missing(given):
                print(
                    one.trial.dataset,
                    one.trial.solver,
                    one.trial.epsilon,
                    one.trial.label,
                    one.trial.run,
                    round(one.accuracy, 2),
                    flush=True,
                )
        case "report":
            report(given)
        case "speed":
            speed(given)
        case _:
            memory()
    return 0  # a measurement, not a gate


if __name__ == "__main__":
    sys.exit(main())
