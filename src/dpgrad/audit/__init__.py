"""Audits: attacks that can refute a privacy claim, and never prove it.

`step` looks at the gradients that private steps leave, `game` and `scores` at whole runs of any code, `estimator` at
fits of `dpgrad.convex`. `one_run` is for models too large for more than one run, and gives no verdict.

>>> from dpgrad import Mechanism, audit, sampling
>>> plan = Mechanism(sampling.FullBatch(), steps=1, noise_multiplier=1.0, batch_size=4)
>>> claim = audit.claims.claimed(plan)  # what the attacks try to refute
>>> round(float(claim.curve.deltas.max()), 3)  # δ at ε = 0
0.383
"""

from dpgrad.audit.claims import ClaimCurve
from dpgrad.audit.fits import estimator
from dpgrad.audit.games import game, scores
from dpgrad.audit.record import Audit, Check
from dpgrad.audit.single import one_run
from dpgrad.audit.steps import step
from dpgrad.audit.trials import Trial

__all__ = ["Audit", "Check", "ClaimCurve", "Trial", "estimator", "game", "one_run", "scores", "step"]
