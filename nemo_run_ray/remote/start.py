"""First step on the cluster: finds a Python that serves and lets it run the job.

Ray writes the line that starts a job into its dashboard and into the job's log, for people to read:
``python3 -S -m nemo_run_ray_remote.start task train my-experiment.train 5f0c…``. What a longer line
would have to say is done here. Python 3.6 can read this file, and it imports as little as it can
before the user's files are out of the way. ``-S`` leaves out what is installed, which can take
longer than all else here.
"""

import os
import sys

#: The oldest Python for which the rest of the package is written.
OLDEST = (3, 9)
#: ``-I`` keeps the user's files and variables from shadowing the standard library in our process;
#: the folders that Ray put on the path come behind it.
_PROGRAM = (
    'import os,sys;sys.path+=os.environ["PYTHONPATH"].split(":");'
    "from nemo_run_ray_remote.__main__ import main;sys.exit(main(sys.argv[1:]))"
)
#: Ends with 0 in a Python that serves; its argument is a module that it must have.
_TEST = (
    "import sys,importlib.util as u;"
    "sys.exit(sys.version_info<(3,9) or u.find_spec(sys.argv[1]) is None)"
)


def main(argv: "list[str]") -> int:
    """Become the first Python that serves: this one, that of the ``ray`` command, or another one.

    Args:
        argv: the kind of the job, and the words that ``__main__`` gets behind it.

    Returns:
        The exit code when none serves.
    """
    needs_ray = argv[0] in ("group", "array")
    if sys.version_info >= OLDEST and not needs_ray:
        # Run the job in this process: another interpreter would take 15 ms to start.
        given = os.environ["PYTHONPATH"].split(os.pathsep)
        # The current folder is first, and then what Ray has put before the standard library.
        sys.path[:] = [folder for folder in sys.path[1:] if folder not in given] + given
        sys.dont_write_bytecode = False  # the next job finds what this one has compiled
        from .__main__ import main as run

        return run(argv)
    for python in (sys.executable, _python_of_ray(), "python3", "python"):
        test = [python, "-I", "-c", _TEST, "ray" if needs_ray else "sys"]
        if python and os.spawnvp(os.P_WAIT, python, test) == 0:
            os.execvp(python, [python, "-I", "-c", _PROGRAM, *argv])
    having = " that has ray" if needs_ray else ""
    print(
        f"nemo_run_ray| no Python of version 3.9 or newer{having} on this node: set "
        "RayExecutor(python=...), for a group on all of its roles",
        flush=True,
    )
    return 127


def _python_of_ray() -> str:
    """The interpreter in the first line of the ``ray`` command, if there is one."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        try:
            with open(os.path.join(folder, "ray"), "rb") as file:
                first = file.readline(1024)
        except OSError:
            continue
        return os.fsdecode(first[2:].strip()) if first.startswith(b"#!") else ""
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
