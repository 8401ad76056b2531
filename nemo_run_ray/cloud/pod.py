"""Makes the tree of the source code that was sent, then becomes the user's command.

Runs on a pod as ``python3 -I -c <this> command ...``: standard library, Python 3.6 or newer. No pod
waits for another: each unpacks into a folder of its own and renames it.
"""

import base64
import contextlib
import glob
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from typing import Any, Dict, List, Tuple

PREFIX = "_NEMO_RUN_RAY_SRC_"
STALE_S = 86400
#: A file or a link, and the content of a file.
Entry = Tuple[tarfile.TarInfo, bytes]


def received(env: Dict[str, str], spec: Dict[str, Any]) -> List[Entry]:
    """The files and links that were sent, checked."""
    import lzma  # which an image may lack

    text = "".join(env.get(PREFIX + str(number), "") for number in range(spec["count"]))
    try:
        packed = lzma.decompress(base64.b85decode(text.translate(str.maketrans(".,/:", "$<>&"))))
        found = hashlib.sha256(packed).hexdigest()
    except Exception as error:
        found = str(error)
    if found != spec["digest"]:
        raise ValueError(f"changed on its way: expected {spec['digest']}, found {found}")
    entries = []
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in tar:
            stream = None if member.issym() else tar.extractfile(member)
            entries.append((member, stream.read() if stream else b""))
    return entries


def is_there(path: str, member: tarfile.TarInfo, content: bytes) -> bool:
    try:
        if member.issym():
            return bool(os.readlink(path) == member.linkname)
        with open(path, "rb") as stream:
            return not os.path.islink(path) and stream.read() == content
    except OSError:
        return False


def write(path: str, member: tarfile.TarInfo, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = f"{path}.{os.urandom(8).hex()}"
    if member.issym():
        os.symlink(member.linkname, new)
    else:
        with open(new, "wb") as stream:
            stream.write(content)
        os.chmod(new, member.mode)
    os.replace(new, path)


def unpack(entries: List[Entry], tree: str) -> None:
    """Unpack the tree, which is whole from the moment that it has its name."""
    folder, name = os.path.split(tree)
    os.makedirs(folder, exist_ok=True)
    for other in glob.glob(os.path.join(glob.escape(folder), ".src-*")):
        with contextlib.suppress(OSError):  # another pod was faster
            if time.time() - os.stat(other).st_mtime > STALE_S:  # of a pod that died
                shutil.rmtree(other)
    own = tempfile.mkdtemp(prefix=f".{name}.", dir=folder)
    try:
        os.chmod(own, 0o755)
        for member, content in entries:
            write(os.path.join(own, member.name), member, content)
        os.rename(own, tree)
    except OSError:
        shutil.rmtree(own, ignore_errors=True)
        if not os.path.isdir(tree):
            raise


def ensure(entries: List[Entry], tree: str) -> None:
    if not os.path.isdir(tree):
        unpack(entries, tree)
    for member, content in entries:  # a job may have changed it since
        path = os.path.join(tree, member.name)
        if not is_there(path, member, content):
            print(f"nemo-run-ray: {path} is not as sent; restored", file=sys.stderr)
            write(path, member, content)


def main(env: Dict[str, str], command: List[str]) -> None:
    try:
        spec = json.loads(env[PREFIX + "SPEC"])
        ensure(received(env, spec), spec["tree"])
        # Commands start in the job's own code folder, though jobs may share the tree.
        os.makedirs(spec["code"], exist_ok=True)
        for name in os.listdir(spec["code"]):
            path = os.path.join(spec["code"], name)
            with contextlib.suppress(OSError):  # no link, or another pod was faster
                of = os.path.dirname(os.readlink(path))
                if of != spec["tree"] and os.path.dirname(of) == os.path.dirname(spec["tree"]):
                    os.unlink(path)  # of the source code that the job had before
        for name in os.listdir(spec["tree"]):
            with contextlib.suppress(FileExistsError):  # the link already, or the job's own
                os.symlink(os.path.join(spec["tree"], name), os.path.join(spec["code"], name))
    except Exception as error:
        sys.exit(f"nemo-run-ray: the source code was not usable: {error}")
    env = {name: value for name, value in env.items() if not name.startswith(PREFIX)}
    others = env.get("PYTHONPATH", "")
    if "path" in spec:
        os.environ["PYTHONPATH"] = others  # which the user's may extend
        others = os.path.expandvars(spec["path"])
    env["NEMO_RUN_RAY_SRC"] = spec["tree"]
    env["PYTHONPATH"] = spec["root"] + (os.pathsep + others if others else "")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's own doing, which exec would pass on
        signal.signal(ignored, signal.SIG_DFL)
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main(dict(os.environ), sys.argv[1:])
