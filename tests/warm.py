"""Commands and programs in processes of their own that need not import NeMo-Run again.

Importing it takes 1.6 of the 1.8 s of processor time that a command takes. Each process is forked
from one that has imported it and has done nothing else; this package is imported by the process.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_run.config import set_nemorun_home

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["nemo_run", __name__])
#: Read by Python itself when it starts.
_PATH = os.environ.get("PYTHONPATH")


def suffices(env: Mapping[str, str]) -> bool:
    """Whether a new interpreter with these variables would have imported the same NeMo-Run."""
    return env.get("PYTHONPATH") == _PATH


def run(
    name: str, *arguments: str, env: Mapping[str, str], cwd: str, timeout: float
) -> subprocess.CompletedProcess:
    """Run a command of this package and capture what it prints."""
    words = [str(Path(sys.executable).parent / name), *arguments]
    return _run(_command, words, env, cwd, timeout)


def python(
    *arguments: str, env: Mapping[str, str], cwd: str, timeout: float = 180
) -> subprocess.CompletedProcess:
    """Run a program, given as Python's own command line has it, and capture what it prints.

    Args:
        arguments: ``-c`` and a text, or a path; and the program's own arguments.
        env: its variables; ``PYTHONPATH`` as in this process.
        cwd: its working directory.
        timeout: seconds after which it is killed.
    """
    assert suffices(env)
    return _run(_program, [sys.executable, *arguments], env, cwd, timeout)


def _run(
    target: Callable[[list[str]], object],
    words: list[str],
    env: Mapping[str, str],
    cwd: str,
    timeout: float,
) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, one)) for one in ("out", "err")]
        arguments = (target, words, dict(env), str(cwd), files)
        process = _CONTEXT.Process(target=_main, args=arguments)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout)
        out, err = (Path(file).read_text(encoding="utf-8") for file in files)
        code = process.exitcode
        process.close()
    return subprocess.CompletedProcess(words, code, out, err)


def _main(
    target: Callable[[list[str]], object],
    words: list[str],
    env: dict[str, str],
    cwd: str,
    files: list[str],
) -> None:
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    set_nemorun_home(env["NEMORUN_HOME"])
    code: object = 0
    try:
        code = target(words)
    except SystemExit as exit:
        code = exit.code
    except BaseException as error:
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename == __file__:
            place = place.tb_next
        sys.excepthook(type(error), error, place)
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.exit(code)


def _command(words: list[str]) -> object:
    sys.argv = words
    (script,) = importlib.metadata.entry_points(
        group="console_scripts", name=os.path.basename(words[0])
    )
    return script.load()()


def _program(words: list[str]) -> None:
    main = types.ModuleType("__main__")
    if words[1] == "-c":
        text, path, folder = words[2], "<string>", ""
        sys.argv = ["-c", *words[3:]]
    else:
        path = main.__file__ = words[1]
        text, folder = Path(path).read_text(encoding="utf-8"), str(Path(path).parent)
        sys.argv = words[1:]
    sys.path.insert(0, folder)
    sys.modules["__main__"] = main
    exec(compile(text, path, "exec"), vars(main))
