"""diffprivlib's LogisticRegression on rows in a file: run by an interpreter that has it, which need not have dpgrad.

    python convex_peer.py ROWS.npz FITS.npz EPSILON C SEED ...

One fit a seed; FITS.npz holds coefficients (fits, outputs, columns), intercepts and seconds of CPU. Rows have norm 1,
as `data_norm` says.
"""

import sys
import time
import warnings

import numpy as np
from diffprivlib.models import LogisticRegression

source, target, epsilon, C, *seeds = sys.argv[1:]
given = np.load(source)
rows, classes = given["rows"], given["classes"]
warnings.simplefilter("ignore")  # that it did not converge, and that classes were read from the data
fits, seconds = [], []
for seed in map(int, seeds):
    began = time.process_time()
    fits.append(
        LogisticRegression(epsilon=float(epsilon), data_norm=1.0, C=float(C), random_state=seed).fit(rows, classes)
    )
    seconds.append(time.process_time() - began)
np.savez(target, coefficients=[fit.coef_ for fit in fits], intercepts=[fit.intercept_ for fit in fits], seconds=seconds)
