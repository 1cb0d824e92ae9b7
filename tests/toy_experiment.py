"""An experiment of two arms for the tests of what runs and shows experiments."""

from typing import Any

from dpgrad.papers.experiment import Arm, Claim, Experiment, Place

__all__ = ["PLACE", "TOY", "arms", "trial"]

PLACE = Place(size="tiny")


def trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    return {"accuracy": arm.setting["mean"] + seed, "curve": [1.0, 2.0 + seed], "nothing": float("nan")}


def arms(size: str) -> tuple[Arm, ...]:
    return (Arm("one, a_b & c", {"mean": 90.0, "sizes": (1, 2)}), Arm("two", {"mean": 95.0}))


TOY = Experiment(
    "toy",
    "Nobody 2026",
    "Table 1",
    "Counts.",
    (),
    arms,
    trial,
    "accuracy",
    {"two": 96.5},
    (
        Claim("two is above one", lambda found: found.above("two", "one, a_b & c", "accuracy")),
        Claim("one is above two", lambda found: found.above("one, a_b & c", "two", "accuracy")),
        Claim("three is above two", lambda found: found.above("three", "two", "accuracy")),
    ),
    seeds=3,
    also=("nothing",),
)
