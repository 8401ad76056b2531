"""Makes the tree of the source code that was sent, then becomes the user's command.

Runs on a pod as ``python3 -I -c <this> command ...``: standard library, Python 3.6 or newer. No pod
waits for another: each looks at every file of the tree, and writes those that are not as sent.
"""

import base64
import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
from typing import Any, Dict, Iterator, List, Mapping, Tuple

PREFIX = "_NEMO_RUN_RAY_SRC_"
#: Each is sent as one byte that occurs in no file, which makes source code a sixth smaller.
INDENTS = [b"\n" + b" " * width for width in (16, 12, 8, 4)] + [b" " * 4]


def received(env: Mapping[str, str], spec: Dict[str, Any]) -> bytes:
    """The files that were sent, checked."""
    import lzma  # which an image may lack

    text = "".join(env.get(f"{PREFIX}{number}", "") for number in range(spec["count"]))
    try:
        sent = base64.b85decode(text.translate(str.maketrans(".,/:", "$<>&")))
        marks, _, packed = lzma.decompress(sent).partition(b"\n")
        for mark, indent in zip(marks, INDENTS):
            packed = packed.replace(bytes([mark]), indent)
        found = hashlib.sha256(packed).hexdigest()
    except Exception as error:
        found = str(error)
    if found != spec["digest"]:
        raise ValueError(f"changed on its way: expected {spec['digest']}, found {found}")
    return packed


def entries(packed: bytes) -> Iterator[Tuple[str, bytes, Any]]:
    """The path, content and mode of each file; in place of a mode a link has its target."""
    index, _, contents = packed.partition(b"\n")
    start = 0
    for path, mode, size in json.loads(index.decode()):
        yield path, contents[start : start + size], mode
        start += size


def is_as_sent(path: str, content: bytes, mode: Any) -> bool:
    try:
        if isinstance(mode, str):
            return os.readlink(path) == mode
        with open(path, "rb") as stream:
            return not os.path.islink(path) and stream.read() == content
    except OSError:
        return False


def restore(packed: bytes, tree: str) -> None:
    """Unpack what the tree lacks, and replace what a job has changed in it since."""
    tree = os.path.realpath(tree)
    shared = os.path.dirname(tree)
    os.makedirs(shared, exist_ok=True)
    own = ""  # a tree that is whole needs no right to write
    with contextlib.ExitStack() as stack:
        for name, content, mode in entries(packed):
            path = f"{tree}/{name}"
            folder = os.path.dirname(path)
            was_there = os.path.lexists(path)  # asked first: another pod may be writing it
            if is_as_sent(path, content, mode):
                continue
            if os.path.realpath(folder) != folder:  # never write outside of the tree
                raise ValueError(f"{path} is behind a link that was not sent; remove {tree}")
            if was_there:
                # exec drops what is buffered.
                print(f"nemo-run-ray: {path} is not as sent; restored", file=sys.stderr, flush=True)
            if not own:
                own = stack.enter_context(tempfile.TemporaryDirectory(prefix=".src-", dir=shared))
            new = f"{own}/new"
            if isinstance(mode, str):
                os.symlink(mode, new)
            else:
                with open(new, "wb") as stream:
                    stream.write(content)
                os.chmod(new, mode)
            os.makedirs(folder, exist_ok=True)
            os.replace(new, path)


def main(command: List[str]) -> None:
    env = os.environ
    try:
        spec = json.loads(env[f"{PREFIX}SPEC"])
        restore(received(env, spec), spec["tree"])
        # Commands start in the job's own code folder, though jobs may share the tree.
        os.makedirs(spec["code"], exist_ok=True)
        for name in os.listdir(spec["tree"]):
            with contextlib.suppress(FileExistsError):  # the link already, or the job's own
                os.symlink(f"{spec['tree']}/{name}", f"{spec['code']}/{name}")
    except Exception as error:
        sys.exit(f"nemo-run-ray: the source code was not usable: {error}")
    for name in [name for name in env if name.startswith(PREFIX)]:
        del env[name]
    env.setdefault("PYTHONPATH", "")  # which the user's may extend
    others = os.path.expandvars(spec["path"])
    env["NEMO_RUN_RAY_SRC"] = spec["tree"]
    env["PYTHONPATH"] = spec["root"] + (os.pathsep + others if others else "")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's own doing, which exec would pass on
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
