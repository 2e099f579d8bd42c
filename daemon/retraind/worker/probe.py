"""The driver asked in a process that may hang: NVML first, nvidia-smi where the binding or the library is missing.

A call into a broken driver may never return, and not even SIGKILL ends it. So it is made by a child, which is given up
at the deadline; and as long as one that was given up still hangs, which a lock that it holds tells everybody, no other
is started. Changes no setting. Raises nothing.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from retraind import typed_json
from retraind.worker import nvidia_smi
from retraind.worker.gpu_facts import LIBRARY_NOT_FOUND, UNKNOWN, Answer

LOCK_NAME = "gpu-probe.lock"
TIMEOUT, STUCK = "timeout", "stuck"
_SCRIPT = Path(__file__).with_name("nvml.py")
# A child that is killed is gone at once, unless the driver holds it.
_KILL_SECONDS = 1.0
# nvidia-smi's exit status is NVML's code; these are other troubles of a process.
_LARGEST_CODE = 63

# Children that were given up: kept, so that Python does not complain of them at its end.
_abandoned: list[subprocess.Popen[bytes]] = []


def ask(state_dir: Path, root: Path, deadline_seconds: float) -> Answer:
    """What the driver says, within the deadline and little more. `state_dir` is where the lock lies."""
    lock = _lock_file(state_dir)
    try:
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not _wait_for(lock, deadline_seconds):
                    return Answer(silence=STUCK)
            except OSError:
                pass  # a filesystem without locks: nobody else can be seen
        return _ask(root, deadline_seconds, lock)
    finally:
        if lock is not None:
            os.close(lock)  # the child's copy holds the lock for as long as the child lives


def _wait_for(lock: int, seconds: float) -> bool:
    """Another probe is at work: a sound one is done within the deadline."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def _lock_file(state_dir: Path) -> int | None:
    """The lock as a descriptor, for any user who can see it; None where there can be none."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = os.open(state_dir / LOCK_NAME, flags | os.O_CREAT, 0o644)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # another user's is as it should be already
        os.fchmod(lock, 0o644)  # one that root made with a strict umask would shut the service out
    return lock


def _ask(root: Path, deadline_seconds: float, lock: int | None) -> Answer:
    ends_at = time.monotonic() + deadline_seconds
    # -P: the directory of the script has modules whose names are others' too.
    _, out, is_late = _run([sys.executable, "-s", "-P", str(_SCRIPT), str(root)], ends_at, lock)
    answer = _decode(out)
    if is_late:
        return msgspec.structs.replace(answer, silence=TIMEOUT)
    if answer.code != LIBRARY_NOT_FOUND:
        return answer
    return msgspec.structs.replace(_ask_nvidia_smi(ends_at, lock), nodes=answer.nodes)


def _decode(out: bytes) -> Answer:
    """Both lines of the script as one answer; what is no line of its is left out."""
    facts: dict[str, object] = {"source": "nvml", "code": UNKNOWN}
    for line in out.splitlines():
        with contextlib.suppress(typed_json.Malformed):
            facts |= typed_json.decode(line, dict[str, object])
    try:
        return msgspec.convert(facts, Answer)
    except msgspec.ValidationError:
        return Answer(source="nvml", code=UNKNOWN)


def _ask_nvidia_smi(ends_at: float, lock: int | None) -> Answer:
    """Asks again without a field that this version does not know, as often as there are fields."""
    fields = list(nvidia_smi.FIELDS)
    while True:
        status, out, is_late = _run(nvidia_smi.command(fields), ends_at, lock)
        text = out.decode("utf-8", "replace")
        if is_late:
            return Answer(source="nvidia-smi", silence=TIMEOUT)
        if status is None:
            return Answer(code=LIBRARY_NOT_FOUND)
        refused = nvidia_smi.refused_field(text)
        if refused in fields:
            fields.remove(refused)
            continue
        answer = nvidia_smi.parse(text, fields)
        if answer.gpus or not status:
            return answer
        return msgspec.structs.replace(answer, code=status if 0 < status <= _LARGEST_CODE else UNKNOWN)


def _run(arguments: list[str], ends_at: float, lock: int | None) -> tuple[int | None, bytes, bool]:
    """Exit status, None when it could not be started; what it printed; and whether it was given up."""
    fds = () if lock is None else (lock,)
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            pass_fds=fds, env=environment,
        )  # fmt: skip
    except OSError:
        return None, b"", False
    try:
        out, _ = process.communicate(timeout=max(ends_at - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired as error:
        process.kill()
        try:
            process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            _abandoned.append(process)
        assert process.stdout is not None
        process.stdout.close()
        return process.returncode, error.output or b"", True
    return process.returncode, out, False
