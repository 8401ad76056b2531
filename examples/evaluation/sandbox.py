"""Runs Python programs that it is sent, each in a process with little time and memory.

It limits what a program can use up, not what it can reach: let nobody but your own roles send any.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

CPU_S = 5  # of the processor, for each process: a busy machine fails no correct program
TIME_S = 30  # for a program that sleeps or waits, and for its children
MEMORY_BYTES = 512 * 2**20
# The process sets its limits itself: Popen's preexec_fn is not safe in a server with threads.
RUNNER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
exec(compile(sys.stdin.read(), "program", "exec"))
"""
app = FastAPI()


class Program(BaseModel):
    code: str


class Outcome(BaseModel):
    exit_code: int  # -9, for SIGKILL, when it took too long
    stdout: str
    stderr: str


@app.get("/health")
def health() -> str:
    return "ready"


@app.post("/run")
def run(program: Program) -> Outcome:
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            cwd=folder,
            env={},  # ours may hold tokens
            start_new_session=True,  # so that its children can be killed with it
        ) as process,
    ):
        try:
            stdout, stderr = process.communicate(program.code, timeout=TIME_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        with suppress(ProcessLookupError):  # it has left no child
            os.killpg(process.pid, signal.SIGKILL)
    return Outcome(exit_code=process.returncode, stdout=stdout, stderr=stderr)


if __name__ == "__main__":
    port = int(os.environ["NEMO_RUN_SANDBOX_PORT_HTTP"])
    uvicorn.run(app, host="0.0.0.0", port=port, access_log=False)
