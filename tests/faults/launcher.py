"""Runs the real service, or a worker, with a disk that counts, records, kills or fails at a chosen call.

Stands between the code and the os module (and fsio's renameat2), below `root` only; the code itself has no hooks.
A call that would change nothing (unlink of what is not there) is passed on and not counted. As a program it is a
zygote: one line of JSON on stdin starts one process by fork, its pid and then its wait status are answered on stdout.
A fork costs 10 ms where an interpreter costs 300. With `--worker SCRIPT ARGS` it runs a worker in this process.
"""

import base64
import contextlib
import ctypes
import errno
import json
import os
import re
import runpy
import shutil  # noqa: F401  (before anything is wrapped: it looks at os once, to see what takes dir_fd)
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAN = "RETRAIND_FAULT_PLAN"
# Of the root's entries, those that are the service's; the rest is the test's.
TREES = re.compile(r"(\.?(spool|models|state)(\.tmp)?(/|$)|\.$)")
_WRITING = os.O_WRONLY | os.O_RDWR
_PR_SET_PDEATHSIG = 1


class Disk:
    """The calls of this process that change the disk. The plan:

    `log`      where each call is written down, one line of JSON, before it is made (with `record`: after it)
    `record`   write down data and inodes too, as the power-cut model needs them
    `only`, `but`  regular expressions on "<operation> <path>": which calls count
    `nth`      the call that is struck, from 1; 0 strikes none
    `kill`     "before" or "after": SIGKILL to this process
    `error`    the errno that is raised instead; `short`: a write takes half of its bytes, and the next one fails
    `once`     no strike while this path exists; a strike makes it
    `until`    with `error`: every further call that counts fails as well, as long as this path does not exist
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._root = plan["root"]
        self._log = os.open(plan["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._only, self._but = re.compile(plan.get("only", "")), re.compile(plan.get("but", "(?!)"))
        self._num_calls = 0
        self._num_struck = 0
        self._put, self._is_inside, self._is_short = os.write, False, False

    def install(self) -> None:
        """From here to the end of the process."""
        for name in ("open", "write", "fsync", "fchmod", "mkdir", "chmod", "rmdir", "unlink", "symlink"):
            setattr(os, name, getattr(self, f"_wrap_{name}")(getattr(os, name)))
        for name in ("rename", "replace", "link"):
            setattr(os, name, self._pair(name, getattr(os, name)))
        if "retraind.fsio" in sys.modules:
            fsio = sys.modules["retraind.fsio"]
            fsio._libc = _Libc(self, fsio._libc)  # type: ignore[attr-defined]

    def call(self, operation: str, path: str, make: Callable[[], Any], **facts: Any) -> Any:
        """Makes one call, unless the plan has something else for it."""
        below = os.path.relpath(path, self._root)
        if self._is_inside or not TREES.match(below):
            return make()
        self._is_inside = True  # what the wrappers ask of the disk is not the service's
        try:
            return self._struck(operation, below, make, facts)
        finally:
            self._is_inside = False

    def _struck(self, operation: str, path: str, make: Callable[[], Any], facts: dict[str, Any]) -> Any:
        plan, what = self._plan, f"{operation} {path}"
        if not self._only.search(what) or self._but.search(what):
            return make()
        self._num_calls += 1
        if not plan.get("record"):
            self._tell({"operation": operation, "path": path})
        is_it = self._num_calls == plan.get("nth", 0) and self._is_first()
        if is_it and plan.get("short"):
            self._is_short = True
            return facts["half"]()
        if plan.get("error") and (self._is_short or (is_it and not plan.get("short")) or self._is_lasting()):
            self._num_struck, self._is_short = self._num_struck + 1, False
            self._tell({"struck": what})
            raise OSError(plan["error"], os.strerror(plan["error"]), str(Path(self._root) / path))
        if is_it and plan.get("kill") == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = make()
        if plan.get("record"):
            self._tell({"operation": operation, "path": path, **self._facts(operation, path, facts, result)})
        if is_it and plan.get("kill") == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def _is_first(self) -> bool:
        once = self._plan.get("once")
        if once and os.path.lexists(once):
            return False
        if once:
            Path(once).touch()
        return True

    def _is_lasting(self) -> bool:
        until = self._plan.get("until")
        return bool(until) and self._num_struck > 0 and not os.path.lexists(until)

    def _facts(self, operation: str, path: str, facts: dict[str, Any], result: Any) -> dict[str, Any]:
        found = {key: value for key, value in facts.items() if key not in ("fd", "bytes", "half")}
        if "target" in facts:
            found["target"] = os.path.relpath(facts["target"], self._root)
        fd = result if operation == "create" else facts.get("fd")
        if fd is not None:
            found["inode"] = os.fstat(fd).st_ino
        if operation == "write":
            found["data"] = base64.b64encode(facts["bytes"][:result]).decode()
        if operation in ("create", "mkdir", "chmod"):
            found["mode"] = stat.S_IMODE(os.stat(Path(self._root) / path).st_mode)
        return found

    def _tell(self, entry: dict[str, Any]) -> None:
        self._put(self._log, json.dumps(entry).encode() + b"\n")

    def _wrap_open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            place = _place(path, dir_fd)
            make = lambda: real(path, flags, mode, dir_fd=dir_fd)  # noqa: E731
            if flags & os.O_CREAT and (flags & os.O_EXCL or not os.path.lexists(place)):
                return int(self.call("create", place, make))
            return int(self.call("open", place, make)) if flags & _WRITING and os.path.isfile(place) else make()

        return call

    def _wrap_write(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, data: Any) -> int:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return real(fd, data)
            half = lambda: real(fd, bytes(data)[: len(data) // 2 or 1])  # noqa: E731
            return int(self.call("write", _of_fd(fd), lambda: real(fd, data), fd=fd, bytes=bytes(data), half=half))

        return call

    def _wrap_fsync(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(fd: int) -> None:
            kind = "fsync_dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync"
            self.call(kind, _of_fd(fd), lambda: real(fd), fd=fd)

        return call

    def _wrap_fchmod(self, real: Callable[..., None]) -> Callable[..., None]:
        return lambda fd, mode: self.call("chmod", _of_fd(fd), lambda: real(fd, mode))

    def _wrap_chmod(self, real: Callable[..., None]) -> Callable[..., None]:
        return lambda path, mode, **rest: self.call("chmod", _place(path), lambda: real(path, mode, **rest))

    def _wrap_mkdir(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, mode: int = 0o777) -> None:
            place = _place(path)
            make = lambda: real(path, mode)  # noqa: E731
            if os.path.lexists(place) or not os.path.isdir(os.path.dirname(place)):
                return make()
            return self.call("mkdir", place, make)

        return call

    def _wrap_rmdir(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._removing("rmdir", real)

    def _wrap_unlink(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._removing("unlink", real)

    def _removing(self, operation: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            place = _place(path, dir_fd)
            make = lambda: real(path, dir_fd=dir_fd)  # noqa: E731
            return self.call(operation, place, make) if os.path.lexists(place) else make()

        return call

    def _wrap_symlink(self, real: Callable[..., None]) -> Callable[..., None]:
        return lambda target, path, *rest: self.call(
            "symlink", _place(path), lambda: real(target, path, *rest), link=os.fsdecode(target)
        )

    def _pair(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        operation = "link" if name == "link" else "rename"

        def call(source: Any, target: Any) -> None:
            self.call(operation, _place(source), lambda: real(source, target), target=_place(target))

        return call


class _Libc:
    """fsio's door to renameat2(2): an exclusive rename."""

    def __init__(self, disk: Disk, real: Any) -> None:
        self._disk, self._real = disk, real

    def renameat2(self, source_fd: int, source: bytes, target_fd: int, target: bytes, flags: int) -> int:
        def make() -> None:
            if self._real.renameat2(source_fd, source, target_fd, target, flags) != 0:
                raise OSError(ctypes.get_errno(), "")

        if not os.path.lexists(source):
            return int(self._real.renameat2(source_fd, source, target_fd, target, flags))
        try:
            self._disk.call("rename", _place(source), make, target=_place(target))
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1
        return 0


def _place(path: Any, dir_fd: int | None = None) -> str:
    if isinstance(path, int):
        return _of_fd(path)
    return os.path.abspath(os.path.join(_of_fd(dir_fd) if dir_fd is not None else "", os.fsdecode(path)))


def _of_fd(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _serve(order: dict[str, Any]) -> None:
    """In the child: its own output, its own environment, and the service as its command would start it."""
    from retraind import cli

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, fd)
    os.chdir("/")
    os.environ.clear()
    os.environ.update(order["environment"])
    if order["plan"]:
        Disk(order["plan"]).install()
    sys.exit(cli.main(order["arguments"]))


def _zygote() -> None:
    import retraind.cli
    import retraind.supervisor.main  # noqa: F401  (loaded once, for every fork)

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _serve(json.loads(line))
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:  # noqa: BLE001  (the child must not go on as a zygote)
                traceback.print_exc()
            os._exit(status)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def main() -> None:
    """Zygote, or worker."""
    if sys.argv[1:2] == ["--worker"]:
        sys.argv = sys.argv[2:]
        with contextlib.suppress(KeyError):
            Disk(json.loads(os.environ[PLAN])).install()
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        _zygote()


if __name__ == "__main__":
    main()
