"""Arrays on one real Ray: elements, their results, failures and cancel."""

from __future__ import annotations

import json

import nemo_run as run
import psutil
import pytest

from nemo_run_ray import array
from tests import array_tasks
from tests.conftest import processes_of, tool, wait_for
from tests.groups import finish


def lines_of(log: str, element: int) -> list[str]:
    begin = f"{element}| "
    return [line.removeprefix(begin) for line in log.splitlines() if line.startswith(begin)]


@pytest.mark.parametrize(
    # What starts an interpreter for each element is tried without Ray in CI.
    "isolation",
    ["fork", pytest.param("process", marks=pytest.mark.soak)],
)
def test_a_partial_and_its_results(start, isolation):
    task = run.Partial(array_tasks.train, seed=0, model=run.Config(array_tasks.Model, width=1))
    made = array(task, over={"seed": range(4), "model.width": [2, 3]}, isolation=isolation)
    job = start(made)

    state, _, log = finish(job)

    assert state == "SUCCEEDED", log
    expected = [{"seed": seed, "width": width} for seed in range(4) for width in (2, 3)]
    found = job.results()
    assert [found[index]["fields"] for index in range(8)] == expected
    assert len({found[index]["pid"] for index in range(8)}) == 8
    assert len({found[index]["random"] for index in range(8)}) == 8
    assert lines_of(log, 5) == ["trained 2 with 3"]


def test_an_element_that_kills_its_hosts_fails_alone(start):
    task = run.Script(inline='sleep 0.3; eval "$KILLS"')
    job = start(array(task, over={"env.KILLS": ["", "kill -9 $PPID", "", "", ""]}))

    state, _, log = finish(job)

    assert (state, job.elements["succeeded"]) == ("FAILED", 4), log
    (failed,) = job.select_elements("failed")
    assert (failed.index, failed.reason) == (1, "its host has died 4 times")


def test_tasks_of_any_kind_are_elements_with_names_of_their_own(start, tmp_path):
    """One of them leaves a process, which ends with it, and one writes without end."""
    leaves = f"(setsid sleep 1000 & echo $! > {tmp_path}/pid); sleep 0.2"
    writes = "head -c 6000000 /dev/zero | tr '\\0' '\\n' | sed s/^/long-line-of-output/"
    tasks = {
        "good": run.Script(inline='echo "$WORD"', env={"WORD": "a word"}),
        "bad": run.Script(inline="echo broken; exit 5"),
        "function": run.Partial(array_tasks.train, seed=7),
        "leaves": run.Script(inline=leaves),
        "writes": run.Script(inline=writes),
    }
    job = start(array(list(tasks.values()), names=list(tasks)), grace_s=1)

    state, _, log = finish(job)

    assert state == "FAILED", log
    assert lines_of(log, 0) == ["a word"]
    assert job.results()[2]["fields"] == {"seed": 7, "width": 0}
    assert "4| nemo_run_ray: no more of its output is passed on" in log
    assert len(log) < 40 * 2**20, "it does not fill the log"
    table = tool("nemo-run-ray", "status", job.id).stdout
    assert "element 1: bad: exit code 5: broken" in table
    shown = tool("nemo-run-ray", "status", job.id, "--elements", "succeeded").stdout
    names = [line.split()[-1] for line in shown.splitlines()[1:]]
    assert names == ["task=good", "task=function", "task=leaves", "task=writes"]
    wait_for(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())), 30)


def test_what_fails_is_tried_again_and_told(start, tmp_path):
    program = (
        "echo x >> $COUNT$NEMO_RUN_ARRAY_INDEX; "
        "test $NEMO_RUN_ARRAY_INDEX != 1 || test $NEMO_RUN_ATTEMPT = 2 || exit 3; "
        "test $NEMO_RUN_ARRAY_INDEX != 2 || { echo no good; exit 4; }; "
        "test $NEMO_RUN_ARRAY_INDEX != 3 || exit 9"
    )
    script = run.Script(inline=program, env={"COUNT": str(tmp_path / "count")})
    job = start(array(script, over={"env.X": range(5)}), retries=2, permanent_exit_codes=[9])

    state, reason, log = finish(job)

    assert (state, reason) == ("FAILED", "exit code"), log
    assert job.status.detail.startswith("exit code 8: 2 of 5 elements failed, which")
    counts = [len((tmp_path / f"count{index}").read_text().split()) for index in range(5)]
    assert counts == [1, 2, 3, 1, 1]
    found = job.elements
    assert (found["succeeded"], found["failed"]) == (3, 2)
    assert sorted(found["failures"]) == [[2, 4, "exit code 4: no good"], [3, 9, "exit code 9"]]
    table = tool("nemo-run-ray", "status", job.id).stdout
    assert "array has 5 elements: 3 succeeded, 2 failed" in table
    assert "element 2: exit code 4: no good" in table
    assert f"Their output: nemo-run-ray logs {job.id} --element N" in table
    one = tool("nemo-run-ray", "logs", job.id, "--element", "2")
    assert one.stdout.splitlines() == ["2| no good"] * 3
    chosen = tool("nemo-run-ray", "status", job.id, "--elements", "failed", "--json")
    assert [
        (row["index"], row["attempts"], row["exit_code"], row["values"], row["reason"])
        for row in json.loads(chosen.stdout)
    ] == [
        (2, 3, 4, {"env.X": "2"}, "exit code 4: no good"),
        (3, 1, 9, {"env.X": "3"}, "exit code 9"),
    ]
    wrong = tool("nemo-run-ray", "logs", job.id, "--element", "5")
    assert wrong.returncode == 1
    assert "has the elements 0 to 4" in wrong.stderr


def test_too_many_failures_end_it(start):
    made = array(run.Script(inline="exit 1"), over={"env.X": range(2000)}, max_failures=3)
    job = start(made)

    state, _, log = finish(job)

    assert state == "FAILED"
    assert "more than 3 elements have failed (max_failures)" in log
    found = job.elements
    assert 4 <= found["failed"] < 2000
    assert found["failed"] + found["cancelled"] == 2000


def test_a_cancel_ends_what_runs_and_what_hides(start, tmp_path):
    program = (
        f"(setsid sh -c 'trap : TERM; touch {tmp_path}/hides; sleep 1000' &); "
        "trap '' TERM; sleep 1000 & wait; sleep 1000"
    )
    job = start(array(run.Script(inline=program), over={"env.X": range(500)}), grace_s=1)
    wait_for(lambda: (tmp_path / "hides").exists(), 60)

    assert job.cancel().state.value == "CANCELLED"

    wait_for(lambda: not processes_of(job.id), 30)
    log = "".join(job.log())
    assert "cancelled; no process of it is left" in log


def test_a_configuration_that_cannot_be_imported_ends_the_array(start):
    made = array(run.Partial(array_tasks.train, seed=0), over={"seed": range(100)})
    made.inline = made.inline.replace(made.inline, _with_broken_template(made.inline))
    job = start(made)

    state, reason, log = finish(job)

    assert (state, reason) == ("FAILED", "its command could not be started"), log
    assert "JSONDecodeError: Expecting ',' delimiter" in job.status.detail


def _with_broken_template(text: str) -> str:
    first, _, rest = text.partition("\n")
    header = json.loads(first)
    header["template"] = header["template"][:-1]
    return json.dumps(header) + "\n" + rest
