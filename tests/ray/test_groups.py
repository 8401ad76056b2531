"""Groups on one real Ray: what the roles see, what a user sees, what is refused."""

import hashlib
import json
import secrets
import sys

import nemo_run as run
import pytest
from nemo_run.core.execution.base import ExecutorMacros

from nemo_run_ray import CommandProbe, RayExecutor
from nemo_run_ray.experiment.job import find_job
from tests.conftest import python
from tests.groups import client, finish, server, submit


def lines_of(log: str, who: str) -> list[str]:
    return [
        line.removeprefix(f"{who}| ") for line in log.splitlines() if line.startswith(f"{who}| ")
    ]


def test_services_are_ready_before_the_primaries_and_end_after_them(existing, unique, tmp_path):
    mark = tmp_path / "ready"
    slow = server(
        f"sleep 1; touch {mark}\ntrap 'echo ends; exit 0' TERM\nwhile :; do sleep 0.1; done",
        ready=None,
    )
    slow.fields["ready"] = CommandProbe(["test", "-e", str(mark)], interval_s=0.1)
    job = submit(unique, existing, slow, client(f"test -e {mark} && echo it was ready"))

    state, _, log = finish(job)

    assert state == "SUCCEEDED", log
    assert lines_of(log, "client/0") == ["it was ready"]
    assert "ends" in lines_of(log, "server/0")
    assert log.index("client/0 on") < log.index("server/0| ends")


def test_a_service_is_started_again(existing, unique, tmp_path):
    count = tmp_path / "count"
    program = f"echo x >> {count}; if [ $(wc -l < {count}) -lt 3 ]; then exit 7; fi; sleep 600"
    # The client may come first, before there is a file to count: that must not end its waiting.
    waits = client(f"touch {count}; until [ $(wc -l < {count}) -ge 3 ]; do sleep 0.1; done")
    job = submit(unique, existing, server(program, ready=None, retries=2), waits)

    state, _, log = finish(job)

    assert state == "SUCCEEDED", log
    assert log.count("server/0 is started again") == 2


@pytest.mark.soak
def test_the_first_failing_primary_decides_and_the_others_go_on(existing, unique):
    roles = [client("sleep 2; echo done", role="slow"), client("exit 3", role="fails")]
    job = submit(unique, existing, *roles)

    state, reason, log = finish(job)

    assert (state, reason) == ("FAILED", "exit code")
    assert "exit code 3: fails/0: exit code 3" in job.status.detail
    assert lines_of(log, "slow/0") == ["done"]


def test_ranks_addresses_and_macros(existing, unique):
    program = "echo $RANK $WORLD_SIZE $LOCAL_RANK $NODE_RANK $MASTER_ADDR $MASTER_PORT"
    ranks = client(program, role="ranks", nodes=2, ntasks_per_node=2)
    macros = [
        f"$${ExecutorMacros.HEAD_NODE_IP_VAR}",
        f"$${ExecutorMacros.NUM_NODES_VAR}",
        f"$${ExecutorMacros.NODE_RANK_VAR}",
        f"$${ExecutorMacros.NPROC_PER_NODE_VAR}",
        ExecutorMacros.group_host(0),
    ]
    with run.Experiment(unique) as experiment:
        experiment.add(
            [
                run.Script(inline=ranks.program),
                run.Script("/bin/echo", args=macros, entrypoint="env"),
            ],
            executor=[
                RayExecutor(cluster=existing, python=sys.executable, **ranks.fields),
                RayExecutor(cluster=existing, role="macros", nodes=2, python=sys.executable),
            ],
            name="group",
        )
        experiment.run(detach=True)
    job = find_job(f"{experiment._id}.group")

    state, _, log = finish(job)

    assert state == "SUCCEEDED", log
    found = sorted(lines_of(log, "ranks/0") + lines_of(log, "ranks/1"))
    assert [line.split()[:4] for line in found] == [
        ["0", "4", "0", "0"],
        ["1", "4", "1", "0"],
        ["2", "4", "0", "1"],
        ["3", "4", "1", "1"],
    ]
    assert len({tuple(line.split()[4:]) for line in found}) == 1
    head = found[0].split()[4]
    assert lines_of(log, "macros/0") == [f"{head} 2 0 1 {head}"]
    assert lines_of(log, "macros/1") == [f"{head} 2 1 1 {head}"]


def test_every_role_has_its_own_secrets_code_and_environment(
    existing, unique, tmp_path, monkeypatch
):
    value = f"s3cr3t{secrets.token_hex(16)}"
    monkeypatch.setenv("MY_TOKEN", value)
    show = 'printf %s "$MY_TOKEN" | sha256sum | cut -c1-64; cat own.txt; echo "$COLOR$FROM_RAY"'
    roles = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "own.txt").write_text(f"code of {name}\n")
        packager = run.PatternPackager(include_pattern=str(folder), relative_path=str(folder))
        fields = {"packager": packager, "env_vars": {"COLOR": name}}
        roles.append(client(show, role=name, **fields))
    roles[0].fields["secrets"] = ["MY_TOKEN"]
    roles[1].fields["runtime_env"] = {"env_vars": {"FROM_RAY": "given"}}
    job = submit(unique, existing, *roles)

    state, _, log = finish(job)

    assert state == "SUCCEEDED", log
    nothing = hashlib.sha256(b"").hexdigest()
    digest = hashlib.sha256(value.encode()).hexdigest()
    assert lines_of(log, "one/0") == [digest, "code of one", "one"]
    assert lines_of(log, "two/0") == [nothing, "code of two", "twogiven"]
    assert value not in log
    assert value not in json.dumps(job.api().job(job.id))


@pytest.mark.soak  # tests/hosts/test_ray_program.py has a task that is one
def test_a_role_that_is_a_ray_program(existing, unique, tmp_path):
    (tmp_path / "shipped.py").write_text("def double(number):\n    return 2 * number\n")
    (tmp_path / "program.py").write_text(
        "import ray\nray.init()\n"
        "@ray.remote(num_cpus=0.1)\n"
        "def work():\n    import shipped\n    return shipped.double(21)\n"
        "print('RESULT', ray.get(work.remote()))\n"
    )
    packager = run.PatternPackager(include_pattern=str(tmp_path), relative_path=str(tmp_path))
    program = client(f"{sys.executable} program.py", packager=packager)
    job = submit(unique, existing, program, client("true", role="other"))

    state, _, log = finish(job)

    assert state == "SUCCEEDED", log
    assert "RESULT 42" in lines_of(log, "client/0")


def test_functions_in_a_group(local_cluster, unique, tmp_path):
    (tmp_path / "both.py").write_text(
        "import nemo_run as run\nfrom nemo_run_ray import RayExecutor\n\n"
        "def say(word):\n    print('word is', word)\n\n"
        "if __name__ == '__main__':\n"
        f"    with run.Experiment('{unique}') as experiment:\n"
        "        tasks = [run.Partial(say, word=word) for word in ('first', 'second')]\n"
        "        experiment.add(tasks, executor=RayExecutor(), name='group', tail_logs=True)\n"
        "        experiment.run()\n"
    )
    done = python("both.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "group-0/0| word is first" in done.stdout + done.stderr
    assert "group-1/0| word is second" in done.stdout + done.stderr
