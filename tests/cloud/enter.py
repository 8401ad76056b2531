"""Becomes a container's first process: ``enter.py <file>``, in a root folder of its own.

The file is JSON: ``root`` (an empty folder), ``mounts`` (target to source), ``env``, ``argv``.
The environment of the command is exactly that one, and the kernel's limits on it are the real ones.
"""

import ctypes
import json
import os
import sys

_NEW_NAMESPACE, _NEW_USER = 0x00020000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _must(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, flags: int) -> None:
    _must(_libc.mount(source.encode(), target.encode(), None, flags, None), f"{source} on {target}")


def main(path: str) -> None:
    with open(path, encoding="utf-8") as stream:
        pod = json.load(stream)
    root, uid, gid = pod["root"], os.getuid(), os.getgid()
    if uid or _libc.unshare(_NEW_NAMESPACE):  # the superuser of a container may not
        _must(_libc.unshare(_NEW_USER | _NEW_NAMESPACE), "unshare")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {uid} 1"),
            ("gid_map", f"0 {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as stream:
                stream.write(text)
    _mount("none", "/", _RECURSIVE | _PRIVATE)
    for name in os.listdir("/"):
        place = os.path.join(root, name)
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), place)
        elif os.path.isdir(f"/{name}") and name not in ("tmp", "nemo_run"):
            os.mkdir(place)
            _mount(f"/{name}", place, _BIND | _RECURSIVE)
    os.makedirs(f"{root}/tmp")
    for target, source in pod["mounts"].items():
        os.makedirs(root + target, exist_ok=True)
        _mount(source, root + target, _BIND | _RECURSIVE)
    os.chroot(root)
    os.chdir("/")
    for folder in pod["env"].get("PATH", "").split(":"):
        program = os.path.join(folder, pod["argv"][0])
        if os.access(program, os.X_OK):
            os.execve(program, pod["argv"], pod["env"])
    raise FileNotFoundError(pod["argv"][0])


if __name__ == "__main__":
    main(sys.argv[1])
