"""What NeMo-Skills' commands expect of Slurm, as shell commands that run before them.

They are for bash: a task of NeMo-Skills is a script that bash runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_run_ray.remote.spec import env_key
from nemo_run_ray.skills import localhost

#: Slurm's names for what a replica knows. On a Ray cluster that itself runs on Slurm, Slurm has set
#: them for its own tasks, so they are overwritten.
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
        hosts = f"NEMO_RUN_{env_key(role)}_HOST"
        lines.append(
            f'export SLURM_JOB_NODELIST_HET_GROUP_{number}="${hosts}S" '
            f'SLURM_MASTER_NODE_HET_GROUP_{number}="${hosts}"'
        )
    return [*lines, _SCONTROL]


def client(role: str, servers: Sequence[str], sandbox: str | None) -> list[str]:
    """Commands for a task that talks to servers and a sandbox of its group.

    Args:
        role: of the task.
        servers: the roles that serve.
        sandbox: the role that runs code, if there is one.
    """
    lines = []
    if sandbox is not None:
        host = f"$NEMO_RUN_{env_key(sandbox)}_HOST"
        lines.append(f'export NEMO_SKILLS_SANDBOX_HOST="${{NEMO_SKILLS_SANDBOX_HOST:-{host}}}"')
    if servers:
        # On Slurm the first node of the job is also the server's.
        first = f"NEMO_RUN_{env_key(servers[0])}_HOST"
        lines.append(f'export SLURM_MASTER_NODE="${{MASTER_ADDR:-${first}}}"')
        # The replica's own address is that of its number in the list of its role's.
        own = f'"$(cut -d, -f$((NODE_RANK + 1)) <<< "$NEMO_RUN_{env_key(role)}_HOSTS")"'
        hosts = " ".join(f'"$NEMO_RUN_{env_key(server)}_HOST"' for server in servers)
        program = shlex.quote(_program())
        lines.append(f'python3 -I -c {program} "${{nemo_run_ray_argv[@]: -1}}" {own} {hosts}')
    return lines


def _program() -> str:
    """The text of the program that serves at ``localhost``, without what is said about it."""
    text = Path(localhost.__file__).read_text(encoding="utf-8")
    return "# Reaches the servers of the group at localhost.\n" + text.partition('"""\n\n')[2]
