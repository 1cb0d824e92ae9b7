"""A run with a folder on a CUDA device, for tests: prints the digest of its weights, how it ended and how it stepped.

python captured_run.py FOLDER [--die STEP] [--resume]
"""

import argparse
import hashlib
import os
import sys
from typing import Any

import torch
from torch import nn

import spread
from dpgrad.training.curves import Progress
from dpgrad.training.step import graphed

forms = {"eager"}


step = graphed.Graphed.step


def noted(self: graphed.Graphed, *given: Any) -> None:
    """Says that the run was captured."""
    forms.clear()
    forms.add("captured")
    step(self, *given)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--die", type=int)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()

    def watch(seen: Progress) -> None:
        if seen.step == given.die:
            print("died", *forms, flush=True)
            os._exit(0)  # as a process that is killed

    graphed.Graphed.step = noted  # type: ignore[method-assign]
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    images, labels = torch.randn(2000, 1, 12, 12, generator=random), torch.randint(4, (2000,), generator=random)
    images[7, 0, 0, 0] = torch.nan  # it is left out within the graph
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 64),
        nn.Tanh(), nn.Linear(64, 4),
    ).cuda()  # fmt: skip
    done = spread.fit(
        model, (images.cuda(), labels.cuda()), "cross-entropy", steps=40, batch_size=200, noise_multiplier=1.0,
        delta=1e-5, seed=3, folder=given.folder, resume=given.resume, checkpoint_every=5, progress=watch,
        learning_rate=0.5, momentum=0.9,
    )  # fmt: skip
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    sys.stdout.write(f"{hashlib.sha256(weights).hexdigest()} {done.stopped} {' '.join(forms)}\n")


if __name__ == "__main__":
    main()
