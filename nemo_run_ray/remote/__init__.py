"""The half that runs on the cluster.

It is sent with every submission as the package ``nemo_run_ray_remote`` and needs nothing there but
a Python of version 3.9 or newer: standard library and relative imports only.
"""

import os

#: The folder of this package.
FOLDER = os.path.dirname(os.path.abspath(__file__))
