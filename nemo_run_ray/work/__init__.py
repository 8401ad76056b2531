"""CPU work spread over the nodes of a Ray, from any Python program.

from nemo_run_ray import work

with work.connect() as pool:
    for result in pool.map(verify, items, timeout_s=30, retries=2):
        ...
    value = await pool.call(verify, item)      # in a server with an event loop
"""

from nemo_run_ray.errors import (
    CannotBeSent,
    ItemFailed,
    PoolClosed,
    TimedOut,
    VersionMismatch,
    WorkerDied,
)
from nemo_run_ray.work.connection import requirements
from nemo_run_ray.work.executor import PoolExecutor
from nemo_run_ray.work.pool import Pool, connect

__all__ = [
    "CannotBeSent",
    "ItemFailed",
    "Pool",
    "PoolClosed",
    "PoolExecutor",
    "TimedOut",
    "VersionMismatch",
    "WorkerDied",
    "connect",
    "requirements",
]
