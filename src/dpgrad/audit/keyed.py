"""Keys: whether runs without a seed have keys of their own. A seed that comes again is noise that comes again."""

from dataclasses import replace

from dpgrad.audit.record import Check
from dpgrad.audit.trials import PrivateSteps, Trial, UnderAudit
from dpgrad.mechanism.keys import Key

__all__ = ["check"]

_KEYS = 20_000  # of random keys of 27 bits, two are the same with probability 0.77


def check(target: UnderAudit, ours: PrivateSteps) -> Check:
    """Whether two of many fresh keys are the same, or a run without a seed has another key than a fresh one."""
    trial = Trial(target.model, target.loss, target.full, target.data, None, range(1))
    taken = [ours.private(trial).key for _ in range(2)]
    keys = [replace(key, secure=False) for key in taken] + [Key.fresh() for _ in range(_KEYS)]
    same = len(keys) - len({key.secret for key in keys})
    known = sum(key.reproducible for key in keys)
    says = f"{len(keys):,} keys without a seed: {same} came again, {known} follow from a number"
    return Check("keys", None, says, violated=bool(same or known))
