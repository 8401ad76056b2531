"""The half that runs on the cluster.

It is sent with every submission as the package ``nemo_run_ray_remote`` and needs nothing there but
a Python of version 3.9 or newer: standard library and relative imports only.
"""

import os
import sys

#: The folder of this package.
FOLDER = os.path.dirname(os.path.abspath(__file__))
#: An embedded Ray's variable with the TMPDIR of who has started it, empty when there was none. Its
#: own TMPDIR is removed with it, so jobs get the caller's again.
CALLERS_TMPDIR = "NEMO_RUN_RAY_TMPDIR"

if CALLERS_TMPDIR in os.environ:
    os.environ["TMPDIR"] = os.environ.pop(CALLERS_TMPDIR)
    if not os.environ["TMPDIR"]:
        del os.environ["TMPDIR"]
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # looked for again
