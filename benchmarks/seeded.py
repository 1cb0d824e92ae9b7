"""Seeded jobs whose results a change of arrangement must not move: compared with the results that are committed.

    python -m benchmarks.seeded [--write]

Every job is a run, a fit or a price from a fixed seed; its result is a digest of the numbers it made, or the number
itself. The committed file says with which code it was made. Digests depend on the processor and on the libraries, so
that both sides of a comparison have to be made on one machine: ``--write`` on the old code, then this on the new. The
exit status is 1 where anything moved.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpgrad
from benchmarks import environment
from dpgrad import Group, Mechanism, Privacy, PrivateGradient, grads, recipes, sampling, scaling, schedules
from dpgrad.accounting import account
from dpgrad.accounting.events import Compose, Event, Gaussian, Poisson, Repeat
from dpgrad.convex import DPLinearRegression, DPLinearSVC, DPLogisticRegression
from dpgrad.training.augment import Shifts

FILE = environment.ROOT / "benchmarks" / "results" / "seeded.json"
DIGITS = dpgrad.data.load("digits")
ROWS = torch.from_numpy(DIGITS.x_train), torch.from_numpy(DIGITS.y_train)


def digest(*arrays: Any) -> str:
    total = hashlib.sha256()
    for array in arrays:
        plain = np.ascontiguousarray(array.detach().cpu() if isinstance(array, Tensor) else array)
        total.update(str(plain.dtype).encode() + str(plain.shape).encode() + plain.tobytes())
    return total.hexdigest()[:16]


def state(model: nn.Module) -> str:
    return digest(*model.state_dict().values())


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.o = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.o(self.l(x.flatten(1).unflatten(1, (8, 8)))[0][:, -1])
        return found


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def fitted(model: nn.Module, method: Any, **options: Any) -> str:
    given: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-5, "steps": 8, "batch_size": 200, "seed": 11, **options}
    done = dpgrad.fit(model, ROWS, "cross-entropy", method=method, **given)
    return f"{state(model)} {done.guarantee.epsilon!r}"


def in_a_folder() -> str:
    with tempfile.TemporaryDirectory() as folder:
        said = fitted(mlp(), "dpsgd", folder=f"{folder}/run")
        weights = torch.load(f"{folder}/run/release/weights.pt", weights_only=True)
        return f"{said} {digest(*weights.values())}"


def stepped(model: nn.Module, mechanism: Mechanism, steps: int, rate: float, **options: Any) -> str:
    private = PrivateGradient(model, loss, mechanism, seed=5, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        private.step(ROWS)
        optimizer.step()
    return f"{state(model)}"


def own_loop() -> str:
    model, mechanism = cnn(), Mechanism(sampling.Poisson(0.2), 6, 1.0, clip=1.0, batch_size=280)
    private = PrivateGradient(model, loss, mechanism, rule=scaling.Psasc(s=0.9, r=1e-4), seed=5, microbatch=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(6):
        private.step(ROWS)
        optimizer.step()
    return f"{state(model)} {private.spent(delta=1e-5).epsilon!r}"


def jobs() -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {}
    for name in ("dpsgd", "dpsgd-dynamic", "dpsgd-amended", "autos", "psac", "psasc", "psasc-momentum"):
        found[f"fit {name}"] = lambda name=name: fitted(mlp(), name)
    groups = (Group("1.*", clip=0.5), Group("3.*"))
    constants = {"clip": 0.1, "learning_rate": 20.0, "momentum": 0.5, "averaging": "tail:0.5"}
    fixed = Mechanism(
        sampling.FixedSize(len(ROWS[0]), 100),
        3,
        1.0,
        clip=schedules.linear(1.0, 3),
        relation=dpgrad.Relation.REPLACE_ONE,
    )
    inner = Mechanism(sampling.Poisson(0.1), 4, 1.0, clip=1.0, batch_size=140)
    found |= {
        "fit psasc-gd": lambda: fitted(mlp(), "psasc-gd", batch_size=None),
        "fit cnn, psasc with constants": lambda: fitted(
            cnn(), recipes.psasc(**constants, learning_rate_schedule="cosine:0.1")
        ),
        "fit adam, ema": lambda: fitted(
            mlp(), recipes.dpsgd(optimizer="adam", learning_rate=0.01, averaging="ema:0.9", clip=1.0)
        ),
        "fit groups, more steps": lambda: fitted(
            mlp(), recipes.dpsgd_dynamic(groups=groups), privacy=Privacy(reading="more-steps")
        ),
        "fit declared size": lambda: fitted(mlp(), "dpsgd", privacy=Privacy(dataset_size=1400, accountant="rdp")),
        "fit augmented": lambda: fitted(cnn(), recipes.dpsgd(augment=Shifts(2)), steps=4),
        "fit folder": in_a_folder,
        "own loop": own_loop,
        "own loop, LSTM, fixed size": lambda: stepped(Lstm(), fixed, 3, 0.5),
        "own loop, inner momentum": lambda: stepped(mlp(), inner, 4, 0.5, inner_momentum=grads.InnerMomentum(0.2, 2)),
    }
    return found


def convex() -> dict[str, str]:
    random = np.random.default_rng(0)
    rows = random.normal(size=(600, 6))
    rows /= np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True))
    truth = np.array([1.0, -1, 0.5, 0, 0, 0])
    labels = (rows @ truth + 0.1 * random.normal(size=600) > 0).astype(int)
    found, common = {}, {"epsilon": 1.0, "delta": 1e-5, "data_norm": 1.0, "random_state": 7}
    for solver in ("auto", "gd", "sgd", "objective", "output", "amp"):
        for kind in (DPLogisticRegression, DPLinearSVC):
            made = kind(solver=solver, **common).fit(rows, labels)
            found[f"convex {kind.__name__} {solver}"] = digest(made.coef_, made.intercept_)
    for solver in ("adassp", "gd"):
        made = DPLinearRegression(solver=solver, target_bounds=(-2, 2), **common).fit(rows, rows @ truth)
        found[f"convex DPLinearRegression {solver}"] = digest(made.coef_, made.intercept_)
    return found


def prices() -> dict[str, str]:
    events: dict[str, Event] = {
        "poisson": Repeat(Poisson(0.01, Gaussian(1.1)), 1000), "gauss": Repeat(Gaussian(5.0), 10),
        "mixed": Compose((Gaussian(20.0), Repeat(Poisson(0.001, Gaussian(1.0)), 10**4))),
    }  # fmt: skip
    found = {
        f"account {name} {accountant}": repr(account(event, accountant=accountant).epsilon(1e-5))
        for name, event in events.items()
        for accountant in ("pld", "rdp", "moments", "strong", *(("exact",) if name == "gauss" else ()))
    }
    shrinking = Mechanism(sampling.Poisson(0.02), 200, 1.0, schedules.linear(1.0, 200), hold_noise=True)
    plain = Mechanism(sampling.Poisson(0.02), 200, 1.0)
    replaced = Mechanism(sampling.Poisson(0.02), 200, 1.0, relation=dpgrad.Relation.REPLACE_ONE)
    return found | {
        "account schedule": repr(shrinking.guarantee(1e-5).epsilon),
        "account calibrated": repr(plain.calibrated(epsilon=2.0, delta=1e-5).noise_multiplier),
        "account replace": repr(replaced.guarantee(1e-5).epsilon),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="commit to these results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {name: job() for name, job in jobs().items()} | convex() | prices()
    if given.write:
        where = environment.describe("benchmarks.seeded")
        FILE.write_text(json.dumps({"environment": where, "results": found}, indent=1) + "\n", "utf-8")
    known = json.loads(FILE.read_text("utf-8"))["results"]
    moved = [name for name in sorted({*known, *found}) if known.get(name) != found.get(name)]
    for name, value in found.items():
        print(f"{'MOVED' if name in moved else 'same ':6}{name}: {value}")
    print(f"{len(found) - len(moved)} of {len(found)} are the same as in {Path(FILE).name}")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
