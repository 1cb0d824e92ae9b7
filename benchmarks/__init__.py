"""Speed and correctness measured against peers and an independent oracle; each module is a command.

One thread for every library: set here, before numpy or torch is first imported.
"""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[name] = "1"
