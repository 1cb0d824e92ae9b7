"""What `dpgrad train` and `dpgrad tune` train: a dataset as tensors, a model by name, and what its release holds."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad.errors import OptionError

if TYPE_CHECKING:
    from dpgrad.data import Dataset
    from dpgrad.training.fit import Fitted

PAGE = "report.html"


class CommandInputs:
    """The rows, the model and the device of one call of a command."""

    def __init__(self, args: argparse.Namespace, dataset: "Dataset", lora: int | None = None) -> None:
        import torch

        from dpgrad.training import jobs
        from dpgrad.training.blueprints import blueprint
        from dpgrad.training.models import default

        self.args, self.dataset = args, dataset
        self.job, self.rows = jobs.job(dataset), jobs.JobRows.of(dataset)
        self.blueprint = blueprint(args.model or default(self.rows.kind, self.rows.shape), self.rows.kind, lora)
        self.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of training rows, or of persons where the data say whose each row is."""
        units = self.dataset.units
        return len(self.rows.train[1]) if units is None else len(set(units.tolist()))

    def model(self) -> Any:
        """Build the model; its initial weights do not depend on the data and are the same at every call."""
        import torch

        from dpgrad.training.blueprints import built

        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise OptionError(f"--device must be cpu or cuda, got {self.device!r:.60}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.args.seed or 0)
            made = built(self.blueprint, self.rows.shape, self.rows.outputs, self.rows.train[0].dtype, self.device)
        for note in self.blueprint.notes:
            if note not in self.notes:
                print(f"dpgrad: note: {note}", file=sys.stderr, flush=True)
        self.notes = self.blueprint.notes
        return made

    def _release(self, folder: Path, fitted: "Fitted") -> None:
        """Write the report of a finished run to its release folder."""
        from dpgrad.reports import report
        from dpgrad.reports.page import page

        named = {**(fitted.described or {}), "shape": list(self.rows.shape), "outputs": self.rows.outputs}
        found = report.report(fitted, data=self.dataset, model={**named, **self.blueprint.described()})
        self.blueprint.write(folder)
        report.write(folder, found)
        (folder / PAGE).write_text(page({fitted.plan.recipe.name: found}), "utf-8")
