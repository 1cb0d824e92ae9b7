"""The errors that dpgrad raises: one kind for each thing a caller may want to handle.

Every kind is a `DpgradError`, and a ``ValueError`` as in scikit-learn. The message names what was refused, its value,
its bound and what to do. Errors of the operating system, such as a full disk, stay an ``OSError``.

>>> import dpgrad
>>> try:
...     dpgrad.Mechanism(dpgrad.sampling.Poisson(0.01), steps=100, noise_multiplier=-1)
... except dpgrad.DpgradError as error:
...     print(f"{type(error).__name__}: {error}")
OptionError: noise_multiplier must be positive and finite, got -1
"""

__all__ = [
    "AccountingError",
    "AuditError",
    "BudgetSpentError",
    "CannotCaptureError",
    "DataError",
    "DpgradError",
    "LedgerError",
    "MissingFileError",
    "OptionError",
    "RanksError",
    "ReportError",
    "ResumeError",
    "RunError",
    "UnknownOptionError",
    "UnsupportedModelError",
    "UnsupportedSystemError",
]


class DpgradError(ValueError):
    """Anything that dpgrad refuses. Catch it to handle every kind at once.

    >>> issubclass(DpgradError, ValueError)
    True
    """


class OptionError(DpgradError):
    """An argument, option or setting has a value that is not allowed. Change it as the message says.

    >>> from dpgrad.accounting.events import Gaussian
    >>> Gaussian(noise_multiplier=0)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: noise_multiplier must be positive and finite, got 0
    """


class UnknownOptionError(OptionError, TypeError):
    """A keyword that a function does not have, which Python reports as a ``TypeError``. Use the one that is suggested.

    >>> import dpgrad
    >>> dpgrad.recipes.psasc(lr=0.1)
    Traceback (most recent call last):
    dpgrad.errors.UnknownOptionError: psasc has no option 'lr': did you mean learning_rate?
    """


class AccountingError(DpgradError):
    """The accountant has no valid price for these events under this relation. Use the one that the message names.

    >>> from dpgrad.accounting import account, events
    >>> account(events.Shuffle(10, events.Gaussian(4.0)), events.Relation.ADD_REMOVE)
    Traceback (most recent call last):
    dpgrad.errors.AccountingError: shuffle has no price under add-remove: ...
    """


class AuditError(DpgradError):
    """An audit refuted a claim (`Audit.assert_held`), or its run cannot be audited. The message says which and why."""


class BudgetSpentError(DpgradError):
    """A step would exceed the privacy budget, or the budget is too small for the plan. Stop, or allow more.

    >>> from dpgrad.accounting import calibrate, events
    >>> step = events.Gaussian(noise_multiplier=0.5)
    >>> calibrate.steps(lambda n: events.Repeat(step, n), epsilon=0.1, delta=1e-5)
    Traceback (most recent call last):
    dpgrad.errors.BudgetSpentError: steps: one step already costs epsilon ...
    """


class LedgerError(DpgradError):
    """A ledger is damaged, was shortened, or cannot take this release. Restore its file, or begin another ledger.

    >>> from dpgrad import Ledger, events
    >>> ledger = Ledger()
    >>> ledger.add(events.Gaussian(4.0), events.Relation.ZERO_OUT, "a model")
    >>> ledger.add(events.Gaussian(4.0), events.Relation.REPLACE_ONE, "another")
    Traceback (most recent call last):
    dpgrad.errors.LedgerError: ...
    """


class DataError(DpgradError):
    """Rows, targets or a data file cannot be used. The message names the place and never quotes a row.

    >>> import dpgrad
    >>> dpgrad.data.load("digit")
    Traceback (most recent call last):
    dpgrad.errors.DataError: dataset must be one of adult, ..., got 'digit': did you mean digits?
    """


class MissingFileError(DataError):
    """A data file is missing. The message says where it is published, its checksum, and where to put it."""


class UnsupportedModelError(DpgradError):
    """The model or the loss cannot be trained privately, e.g. it has BatchNorm. Change it as the message says.

    >>> import torch, dpgrad
    >>> dpgrad.grads.convert(torch.nn.LazyLinear(2))
    Traceback (most recent call last):
    dpgrad.errors.UnsupportedModelError: module 'itself' is lazy: run the model once, on public data, to give it sizes
    """


class CannotCaptureError(DpgradError):
    """The step cannot be captured as a CUDA graph. Train without capture, or remove the reason that is given."""


class RunError(DpgradError):
    """A run folder is taken or in use, or steps come out of order. Choose another folder, or the order described."""


class ResumeError(RunError):
    """A run cannot continue from this folder or state. Resume it as it was begun, or count its plan as spent."""


class ReportError(DpgradError):
    """A report or its released weights are missing, damaged or of another format. Use the original files.

    >>> import dpgrad
    >>> dpgrad.report("a model")
    Traceback (most recent call last):
    dpgrad.errors.ReportError: a report needs what dpgrad.fit returned or a fitted estimator of dpgrad.convex, ...
    """


class RanksError(DpgradError):
    """Another rank of the run failed or is gone, or the ranks differ. Start all again with the same code and data."""


class UnsupportedSystemError(DpgradError):
    """dpgrad is one of several processes that are not connected, or has no file locks. Connect them, or use POSIX."""
