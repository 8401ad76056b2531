"""What NeMo-Skills' commands expect of Slurm, as shell commands that run before them.

They are for bash: a task of NeMo-Skills is a script that bash runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_run_ray.remote.group.addresses import key
from nemo_run_ray.skills import localhost

#: Names of Slurm's for what Ray's replicas know. A Ray that runs on Slurm has its own, for others.
RANKS = (
    'export SLURM_PROCID="${RANK:-0}" SLURM_LOCALID="${LOCAL_RANK:-0}" '
    'SLURM_NODEID="${NODE_RANK:-0}" SLURM_MASTER_NODE="${MASTER_ADDR:-127.0.0.1}"'
)
#: The host names of a list, as ``scontrol show hostnames`` prints them.
_SCONTROL = "scontrol() { printf '%s\\n' \"${@:3}\" | tr , '\\n'; }; export -f scontrol"


def het_groups(roles: Mapping[int, str]) -> list[str]:
    """Commands that tell the addresses of a job of several Slurm groups.

    Args:
        roles: the first role of each of Slurm's groups, by the group's number.
    """
    if not roles:
        return []
    lines = []
    for number, role in sorted(roles.items()):
        hosts = f"NEMO_RUN_{key(role)}_HOST"
        lines.append(
            f'export SLURM_JOB_NODELIST_HET_GROUP_{number}="${hosts}S" '
            f'SLURM_MASTER_NODE_HET_GROUP_{number}="${hosts}"'
        )
    return [*lines, _SCONTROL]


def client(servers: Sequence[str], sandbox: str | None) -> list[str]:
    """Commands for a task that talks to servers and a sandbox of its group.

    Args:
        servers: the roles that serve.
        sandbox: the role that runs code, if there is one.
    """
    lines = []
    if sandbox is not None:
        host = f"$NEMO_RUN_{key(sandbox)}_HOST"
        lines.append(f'export NEMO_SKILLS_SANDBOX_HOST="${{NEMO_SKILLS_SANDBOX_HOST:-{host}}}"')
    if servers:
        # On Slurm the first node of the job is also the server's.
        first = f"NEMO_RUN_{key(servers[0])}_HOST"
        lines.append(f'export SLURM_MASTER_NODE="${{MASTER_ADDR:-${first}}}"')
        hosts = " ".join(f'"$NEMO_RUN_{key(role)}_HOST"' for role in servers)
        program = shlex.quote(_program())
        lines.append(
            f'python3 -c {program} "${{nemo_run_ray_argv[@]: -1}}" {hosts} >/dev/null 2>&1 &'
        )
    return lines


def _program() -> str:
    """The text of the program that serves at ``localhost``, without what is said about it."""
    text = Path(localhost.__file__).read_text(encoding="utf-8")
    return "# Reaches the servers of the group at localhost.\n" + text.partition('"""\n\n')[2]
