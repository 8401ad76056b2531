"""Makes the tree of the source code that was sent, then becomes the user's command.

Runs on a pod as ``python3 -I -c <this> command ...``: standard library, Python 3.6 or newer. No pod
waits for another: each unpacks into a folder of its own and renames it.
"""

import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

PREFIX = "_NEMO_RUN_RAY_SRC_"
STALE_S = 86400
# Each is sent as a byte of its own; longest first.
INDENTS = [b"\n" + b" " * width for width in (16, 12, 8, 4)] + [b" " * 4]


class Refused(Exception):
    pass


def received(env: Mapping[str, str], spec: Mapping[str, Any]) -> bytes:
    """The packed bytes, checked."""
    try:
        import lzma
    except ImportError:
        raise Refused("python3 of this image has no module lzma; use another image") from None
    pieces = []
    for number in range(spec["count"]):
        if PREFIX + str(number) not in env:
            raise Refused(f"piece {number} of {spec['count']} has not arrived")
        pieces.append(env[PREFIX + str(number)])
    text = "".join(pieces).translate(str.maketrans(".,/:", "$<>&"))
    try:
        marks, _, packed = lzma.decompress(base64.b85decode(text)).partition(b"\n")
        for mark, indent in zip(marks, INDENTS):
            packed = packed.replace(bytes([mark]), indent)
        found = hashlib.sha256(packed).hexdigest()
    except (ValueError, lzma.LZMAError, EOFError) as error:
        found = str(error)
    if found != spec["digest"]:
        raise Refused(f"changed on its way: expected {spec['digest']}, found {found}")
    for name, _, _ in entries(packed):
        if os.path.isabs(name) or ".." in name.split("/"):
            raise Refused(f"the file {name!r} would be outside of the tree")
    return packed


def entries(packed: bytes) -> Iterator[Tuple[str, Optional[bytes], Any]]:
    index, _, contents = packed.partition(b"\n")
    start = 0
    for row in json.loads(index.decode()):
        if len(row) == 2:
            yield row[0], None, row[1]
        else:
            yield row[0], contents[start : start + row[1]], row[2]
            start += row[1]


def is_there(path: str, content: Optional[bytes], more: Any) -> bool:
    try:
        if content is None:
            return bool(os.readlink(path) == more)
        with open(path, "rb") as stream:
            return not os.path.islink(path) and stream.read() == content
    except OSError:
        return False


def write(path: str, content: Optional[bytes], more: Any) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        if content is None:
            os.symlink(more, new)
        else:
            with open(new, "wb") as stream:
                stream.write(content)
            os.chmod(new, 0o755 if more else 0o644)
        os.replace(new, path)
    except BaseException:
        if os.path.lexists(new):
            os.unlink(new)
        raise


def unpack(packed: bytes, tree: str) -> None:
    """Unpack the tree, which is whole from the moment that it has its name."""
    folder = os.path.dirname(tree)
    os.makedirs(folder, exist_ok=True)
    start = "." + os.path.basename(tree) + "."
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            if name.startswith(start) and time.time() - os.stat(path).st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)  # of a pod that died
        except FileNotFoundError:
            continue  # another pod was faster
    own = tempfile.mkdtemp(prefix=start, dir=folder)
    try:
        os.chmod(own, 0o755)
        for name, content, more in entries(packed):
            write(os.path.join(own, name), content, more)
        os.rename(own, tree)
    except OSError:
        shutil.rmtree(own, ignore_errors=True)
        if not os.path.isdir(tree):
            raise


def ensure(packed: bytes, tree: str) -> None:
    if not os.path.isdir(tree):
        unpack(packed, tree)
    for name, content, more in entries(packed):  # a job may have changed it since
        path = os.path.join(tree, name)
        if not is_there(path, content, more):
            print(f"nemo-run-ray: {path} is not as sent; restored", file=sys.stderr)
            write(path, content, more)


def link(tree: str, code: str) -> None:
    """Show the tree's entries in the job's own code folder, in which commands start.

    What a command writes beside them is the job's own, though jobs may share the tree.
    """
    os.makedirs(code, exist_ok=True)
    for name in os.listdir(code):
        path = os.path.join(code, name)
        with contextlib.suppress(OSError):  # no link, or another pod has just removed it
            above = os.path.dirname(os.readlink(path))
            if above != tree and os.path.dirname(above) == os.path.dirname(tree):
                os.unlink(path)  # of the source code that the job had before
    for name in os.listdir(tree):
        with contextlib.suppress(FileExistsError):  # the link already, or the job's own
            os.symlink(os.path.join(tree, name), os.path.join(code, name))


def main(env: Dict[str, str], command: List[str]) -> None:
    try:
        try:
            spec = json.loads(env[PREFIX + "SPEC"])
        except (KeyError, ValueError):
            raise Refused("its description has not arrived") from None
        packed = received(env, spec)
        ensure(packed, spec["tree"])
        link(spec["tree"], spec["code"])
    except Refused as error:
        sys.exit(f"nemo-run-ray: the source code was not usable: {error}")
    except (OSError, UnicodeError) as error:
        sys.exit(f"nemo-run-ray: the source code cannot be unpacked: {error}")
    env = {name: value for name, value in env.items() if not name.startswith(PREFIX)}
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as given:
        lines = given.read().split(b"\0")
        env.pop("LC_CTYPE", None)  # which Python itself sets where the locale is C, PEP 538
        for line in lines:
            if line.startswith(b"LC_CTYPE="):
                env["LC_CTYPE"] = os.fsdecode(line).partition("=")[2]
    paths = [os.path.normpath(os.path.join(spec["tree"], root)) for root in spec["roots"]]
    others = env.get("PYTHONPATH", "")
    if "path" in spec:
        os.environ["PYTHONPATH"] = others  # which the user's may extend
        others = os.path.expandvars(spec["path"])
    env["NEMO_RUN_RAY_SRC"] = spec["tree"]
    env["PYTHONPATH"] = os.pathsep.join(paths + ([others] if others else []))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's own doing, which exec would pass on
        signal.signal(ignored, signal.SIG_DFL)
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main(dict(os.environ), sys.argv[1:])
