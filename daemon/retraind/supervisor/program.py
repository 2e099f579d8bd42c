"""A program of the operator's beside the service: spawned in a session of its own, ended as a whole.

It gets nothing of what systemd gave the service to speak with, and no standard input. Never waits without a bound.
`ask` waits for an answer and is for programs that take no longer than a publication may; hook.py polls instead.
Raises OSError when a program can not be started.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

# A child must not notify systemd in the service's name, nor answer its watchdog.
PRIVATE_ENVIRONMENT = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
_READ_BYTES = 2**16
# After SIGKILL a process is gone at once, unless a driver or a disk holds it.
_REAP_SECONDS = 1.0


class Failed(Exception):
    """What a program that was asked did instead of answering, in words."""


def environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """The service's environment without what is private to it, and what is extra."""
    return {key: value for key, value in os.environ.items() if key not in PRIVATE_ENVIRONMENT} | dict(extra)


def spawn(
    command: Sequence[str], extra: Mapping[str, str] = {}, *, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts it; what it prints goes where the service's own lines go, unless `stdout` says otherwise."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, env=environment(extra), cwd="/", start_new_session=True
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the program and what it started. Does not wait. To be called before it is reaped: its id is its group's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ask(command: Sequence[str], seconds: float, max_bytes: int) -> bytes:
    """What the program printed, once it ended with 0. Raises Failed for anything else, within the time."""
    process = spawn(command, stdout=subprocess.PIPE)
    try:
        return _answer(process, time.monotonic() + seconds, seconds, max_bytes)
    finally:
        if process.returncode is None:
            kill(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def _answer(process: subprocess.Popen[bytes], until: float, seconds: float, max_bytes: int) -> bytes:
    assert process.stdout is not None
    answer = b""
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    while True:
        if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
            raise Failed(f"no answer within {seconds:g} s")
        block = os.read(process.stdout.fileno(), _READ_BYTES)
        answer += block
        if len(answer) > max_bytes:
            raise Failed(f"printed more than {max_bytes} bytes")
        if not block:
            break
    try:
        status = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise Failed(f"no end within {seconds:g} s") from None
    if status:
        raise Failed(f"ended by signal {-status}" if status < 0 else f"exit status {status}")
    return answer
