"""How many modules of this package a client executes: a debugger has to visit them all."""

import json
import os
import subprocess
import sys
import threading
import time

from tests.fake_ray import FakeRay, fake_ray

_COUNT = """
print("MODULES", json.dumps(sorted(one for one in sys.modules if one.startswith("nemo_run_ray"))))
"""
_RUN = f"""
import json, sys, nemo_run as run
from nemo_run_ray import RayExecutor
run.run(run.Script(inline="true"), executor=RayExecutor(address=sys.argv[1]), name="counted")
{_COUNT}"""
_STATUS = f"""
import contextlib, json, sys
from nemo_run_ray.cli.main import main
sys.argv[1:] = ["status", "counted", "--once"]
with contextlib.suppress(SystemExit):
    main()
{_COUNT}"""


def _modules(program: str, home: str, *words: str) -> list[str]:
    env = {**os.environ, "NEMORUN_HOME": home}
    words = (sys.executable, "-c", program, *words)
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=300)
    assert "SUCCEEDED" in done.stdout
    return json.loads(done.stdout.partition("MODULES ")[2].splitlines()[0])


def _carry_out(ray: FakeRay, is_over: threading.Event) -> None:
    while not is_over.wait(0.2):
        ray.pass_time(time.time() - ray.now)


def test_a_script_and_a_look_at_it_execute_few_modules(tmp_path):
    """Groups, arrays, Slurm, patches, cluster files and other projects are for those who use them.

    The limits may only fall.
    """
    with fake_ray(now=time.time()) as ray:
        is_over = threading.Event()
        thread = threading.Thread(target=_carry_out, args=(ray, is_over))
        thread.start()
        try:
            ran = _modules(_RUN, str(tmp_path), ray.url)
            shown = _modules(_STATUS, str(tmp_path))
        finally:
            is_over.set()
            thread.join()
    assert len(ran) <= 40, ran
    assert len(shown) <= 30, shown
