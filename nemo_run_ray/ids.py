"""Ids on the cluster: the same at every call, and safe in a file's name and a URL."""

from __future__ import annotations

import hashlib
import re

#: Longest id: Ray makes ``job-driver-<id>.log`` of it, and a file's name has 255 bytes.
ID_MAX = 180
#: Name of the torchx scheduler, and the beginning of every handle.
SCHEDULER = "ray_jobs"
#: Name of NeMo-Run's session of torchx, and the beginning of the handles of our jobs.
SESSION = "nemo_run"
HANDLE = f"{SCHEDULER}://{SESSION}/"
#: Name of the ledger in an experiment's folder.
LEDGER = "ray_jobs.jsonl"
#: Name of a dispatcher after its experiment's.
DISPATCHER = "dispatcher"


def job_id(experiment_id: str, job: str) -> str:
    """Submission id of an experiment's job: the same at every call.

    Names with dots can be cut in two ways; ``submit_once`` refuses an id that is another job's.
    """
    name = f"{safe_id(experiment_id)}.{safe_id(job)}"
    if len(name) <= ID_MAX:
        return name
    return f"{name[: ID_MAX - 11]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def dispatcher_id(experiment_or_job: str) -> str:
    """Id of the dispatcher of an experiment, or of a job that is submitted by itself."""
    return job_id(experiment_or_job, DISPATCHER)


def safe_id(name: str) -> str:
    """The name in characters that are safe in an id, a file's name and a URL.

    A name that had to change gets a hash, so that different names stay different.
    """
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    if safe == name and safe.strip("."):
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{safe.strip('.')}-{digest[:8]}"
