"""Makes the tree of the source code that was sent, then becomes the user's command.

Runs on a pod as ``python3 -I -c <this> command ...``: standard library, Python 3.6 or newer. No pod
waits for another: each looks at every file of the tree, and writes those that are not as sent.
"""

import base64
import contextlib
import hashlib
import io
import json
import os
import signal
import sys
import tarfile
import tempfile
from typing import Any, Dict, List, Mapping

PREFIX = "_NEMO_RUN_RAY_SRC_"


def received(env: Mapping[str, str], spec: Dict[str, Any]) -> bytes:
    """The archive that was sent, checked."""
    import lzma  # which an image may lack

    text = "".join(env.get(PREFIX + str(number), "") for number in range(spec["count"]))
    try:
        packed = lzma.decompress(base64.b85decode(text.translate(str.maketrans(".,/:", "$<>&"))))
        found = hashlib.sha256(packed).hexdigest()
    except Exception as error:
        found = str(error)
    if found != spec["digest"]:
        raise ValueError(f"changed on its way: expected {spec['digest']}, found {found}")
    return packed


def is_as_sent(path: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> bool:
    try:
        if member.issym():
            return os.readlink(path) == member.linkname
        with open(path, "rb") as stream:
            sent: Any = tar.extractfile(member)
            return not os.path.islink(path) and stream.read() == sent.read()
    except OSError:
        return False


def restore(packed: bytes, tree: str) -> None:
    """Unpack what the tree lacks, and replace what a job has changed in it since."""
    tree = os.path.realpath(tree)
    shared = os.path.dirname(tree)
    os.makedirs(shared, exist_ok=True)
    own = ""  # a tree that is whole needs no right to write
    with contextlib.ExitStack() as stack, tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        # The digest vouches for it. Newer versions of Python warn, or refuse links, without.
        tar.extraction_filter = lambda member, path: member
        for member in tar:
            path = os.path.join(tree, member.name)
            folder = os.path.dirname(path)
            was_there = os.path.lexists(path)  # asked first: another pod may be writing it
            if is_as_sent(path, member, tar):
                continue
            if os.path.realpath(folder) != folder:  # never write outside of the tree
                raise ValueError(f"{path} is behind a link that was not sent; remove {tree}")
            if was_there:
                # exec drops what is buffered.
                print(f"nemo-run-ray: {path} is not as sent; restored", file=sys.stderr, flush=True)
            if not own:
                own = stack.enter_context(tempfile.TemporaryDirectory(prefix=".src-", dir=shared))
            tar.extract(member, own)
            os.makedirs(folder, exist_ok=True)
            os.replace(os.path.join(own, member.name), path)


def main(command: List[str]) -> None:
    env = os.environ
    try:
        spec = json.loads(env[PREFIX + "SPEC"])
        packed = received(env, spec)
        restore(packed, spec["tree"])
        # Commands start in the job's own code folder, though jobs may share the tree.
        os.makedirs(spec["code"], exist_ok=True)
        for name in os.listdir(spec["tree"]):
            with contextlib.suppress(FileExistsError):  # the link already, or the job's own
                os.symlink(os.path.join(spec["tree"], name), os.path.join(spec["code"], name))
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
