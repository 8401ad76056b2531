"""Logs from a real Ray: long, wide, broken, live."""

import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.experiment.job import RemoteJob
from tests.conftest import wait_for
from tests.groups import submit_one

WIDE = 6 * 1024**2  # beyond the 4 MiB that Ray's own WebSocket takes


@pytest.fixture
def start(existing, unique, monkeypatch):
    """Start a Python program as a job and leave it alone."""

    def start(program: str) -> RemoteJob:
        executor = RayExecutor(cluster=existing)
        script = run.Script(inline=f"exec python3 -u - <<'EOF'\n{program}\nEOF\n")
        return submit_one(unique, executor, script)

    return start


def body(text: str) -> str:
    """The command's own output."""
    _, _, rest = text.partition("Running entrypoint")
    return rest.partition("\n")[2].partition("nemo_run_ray| end ")[0]


@pytest.mark.soak
def test_a_line_beyond_the_websockets_limit_arrives_whole(start):
    job = start(f"print('before'); print('x' * {WIDE}); print('after')")

    text = body("".join(job.log(follow=True)))

    assert (len(text), text[:7], text[-7:]) == (WIDE + 14, "before\n", "\nafter\n")
    assert text.count("x") == WIDE


def test_bytes_that_are_not_text_do_not_end_the_log(start):
    job = start(
        "import os; os.write(1, b'caf\\xe9 \\xff\\n'); os.write(1, 'größe \\U0001f680\\n'.encode())"
    )

    assert body("".join(job.log(follow=True))) == "caf\\xe9 \\xff\ngröße \U0001f680\n"


def test_a_progress_bar_arrives_while_the_job_runs(start, tmp_path):
    """Each step waits until the one before it has arrived."""
    job = start(
        "import sys, time; from os.path import exists; end = time.time() + 60\n"
        "for i in range(8):\n"
        "    sys.stdout.write(f'{i}/8\\r'); sys.stdout.flush()\n"
        f"    while not exists(f'{tmp_path}/{{i}}'): assert time.time() < end; time.sleep(0.1)\n"
    )

    arrived = []
    for text in job.log(follow=True):
        arrived += [i for i in range(8) if f"{i}/8" in text]
        for i in arrived:
            (tmp_path / str(i)).touch()

    assert arrived == list(range(8))


def test_a_log_of_many_lines_arrives_whole_and_in_order(start):
    job = start("for i in range(200_000): print(f'line {i} ' + 'y' * 80)")

    found = body("".join(job.log(follow=True)))

    expected = "".join(f"line {i} {'y' * 80}\n" for i in range(200_000))
    assert len(found) == len(expected)
    assert hash(found) == hash(expected), "lines are missing, twice or out of order"


def test_without_tailing_a_running_job_shows_what_there_is(start):
    job = start("import time; print('first'); time.sleep(100)")

    wait_for(lambda: "first" in "".join(job.log(follow=False)))
    job.cancel()


def test_a_program_that_prints_our_last_line_does_not_end_the_log(start):
    job = start(
        "import time\nprint('nemo_run_ray| end 01234567 {}')\ntime.sleep(3)\nprint('goes on')"
    )

    assert "goes on" in "".join(job.log(follow=True))
