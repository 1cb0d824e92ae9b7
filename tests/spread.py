"""`dpgrad.fit` with every option by its own name, for tests that vary one at a time."""

from typing import Any

import dpgrad
from dpgrad.training.options import Budget, Computing, HeldOut, Privacy, RunFolder, given
from dpgrad.training.recipes import recipe

OWN = {"ledger", "seed"}


def fit(model: Any, data: Any, loss: Any = "cross-entropy", *, method: Any = "dpsgd", **options: Any) -> dpgrad.Fitted:
    """The options sorted into the records that `dpgrad.fit` takes; unknown ones are given to the recipe."""
    options = {name: value for name, value in options.items() if value is not None}
    callbacks = [*options.pop("callbacks", ())]
    callbacks += [options.pop(name) for name in ("progress", "diagnostics") if name in options]
    held_out, folder = options.pop("held_out", None), options.pop("folder", None)
    held_out = HeldOut(held_out, options.pop("metric", None), options.pop("evaluate_every", None))
    kinds = {kind: given(kind, options) for kind in (Budget, Privacy, Computing, RunFolder)}
    taken = {name for found in kinds.values() for name in found} | OWN
    own = {name: value for name, value in options.items() if name not in taken}
    return dpgrad.fit(
        model, data, loss, method=recipe(method).with_options(**own), held_out=held_out,
        folder=None if folder is None else RunFolder(folder, **kinds[RunFolder]), callbacks=callbacks,
        privacy=Privacy(**kinds[Privacy]), computing=Computing(**kinds[Computing]),
        **kinds[Budget], **{name: options[name] for name in OWN if name in options},
    )  # fmt: skip
