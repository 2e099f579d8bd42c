"""Random drops, kills, stops and reloads of a running service, from one seed.

The seed decides what is done and in which order; at which instruction of the service it strikes is the machine's.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml
from accounts import Accounts
from harness import Service

from retraind import fsio

# Producers use the same names again and again; some are not even text.
_NAMES = [*(b"node-%02d.csv" % number for number in range(12)), b"k\xff \n.csv", b"-rf.csv", b"x" * 240 + b".csv"]
_SLOW = [b"slow-%d.csv" % number for number in range(4)]
_BROKEN = [b"refuse-1.csv", b"refuse-2.csv", b"gate-1.csv", b"gate-2.csv"]
# Each is tried again after every restart until the calm: once is enough.
_POISON = [b"crash.csv", b"garbage.csv", b"kill.csv"]
_MAX_WAITING = 40
# Of each spell of blows the end is calm, so that much is published in the course of a run, not only at its end.
_SPELL_SECONDS, _BLOWS_SECONDS = 6.0, 4.0


class Monkey:
    """One service and what is done to it. `counts` says how often."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service, self.accounts, self.counts = service, Accounts(), Counter()
        self._rng = random.Random(seed)
        self._contents: list[bytes] = []
        self._writers: list[tuple[object, list[bytes]]] = []
        self._poison = list(_POISON)
        self._stopped: set[int] = set()
        self._staging = service.root / "staging"
        self._staging.mkdir()
        self._pause = threading.Event()  # never set: waits for a time that a process may end
        self._log_start = 0
        self._is_ready = False
        self._actions = {
            self.drop: 34, self.write_on: 8, self.drop_other: 2, self.kill_service: 14, self.kill_worker: 40,
            self.stop_worker: 4, self.go_on: 4, self.terminate: 1, self.reload: 3, self.reload_broken: 2,
        }  # fmt: skip

    def run(self, seconds: float) -> None:
        """Blows for so long; a service that still runs since the last time is the one that is struck."""
        until = time.monotonic() + seconds
        if self.service.process is None:
            self.start()
        while time.monotonic() < until:
            self._pause.wait(self._rng.uniform(0.0, 0.08))
            action = self._rng.choices(list(self._actions), list(self._actions.values()))[0]
            if (until - time.monotonic()) % _SPELL_SECONDS > _BLOWS_SECONDS:
                action = self._rng.choice([self.drop, self.write_on, self.go_on])
            assert self.service.process.poll() is None, f"the service ended by itself: {self.service.log()[-2000:]}"
            action()

    def calm_down(self) -> None:
        """Ends every writer, goes on with what was stopped, and starts a service that nobody troubles."""
        while self._writers:
            self.write_on()
        self.service.kill()
        self.go_on()
        self.service.settings["worker"]["max_attempts"] = 2  # so that the poison comes to its end soon
        self.start()

    def start(self) -> None:
        self._write_config(yaml.safe_dump(self.service.settings))
        log = self.service.log_path
        self._log_start = log.stat().st_size if log.exists() else 0
        self._is_ready = False
        self.service.start(wait=False)

    def is_ready(self) -> bool:
        """From the log: a notification may be one of the former life."""
        if not self._is_ready:
            with self.service.log_path.open("rb") as file:
                file.seek(self._log_start)
                self._is_ready = b"ready: watching" in file.read()
        return self._is_ready

    def _write_config(self, text: str) -> None:
        """At once: half a configuration may be a valid one."""
        fsio.write_volatile(self.service.config_path, text.encode())

    # ---- drops ----

    def drop(self) -> None:
        kind = self._rng.choices([_NAMES, _SLOW, _BROKEN, _POISON], [80, 10, 9, 1])[0]
        if kind is _POISON and (kind := self._poison or _BROKEN) is self._poison:
            kind = [kind.pop()]
        name, data, how = self._rng.choice(kind), self._content(), self._rng.choice(["mv", "mv", "ln", "cp"])
        if len(os.listdir(self.service.incoming)) > _MAX_WAITING:
            return
        target = os.path.join(os.fsencode(self.service.incoming), name)
        # A name that still waits is left alone: whoever writes over it destroys it before it was handed over.
        with contextlib.suppress(FileExistsError):
            if how == "cp":
                self._begin_to_write(target, data)
            else:
                self._hand_over(target, data, how)
            self.accounts.note(data, is_good=kind in (_NAMES, _SLOW))
            self.counts[f"drops by {how}"] += 1

    def _content(self) -> bytes:
        if self._contents and self._rng.random() < 0.15:
            return self._rng.choice(self._contents)
        data = b"%d " % len(self._contents) * self._rng.randrange(1, 3000)
        self._contents.append(data)
        return data

    def _hand_over(self, target: bytes, data: bytes, how: str) -> None:
        staged = self._staging / "file"
        staged.write_bytes(data)
        try:
            if how == "mv":
                fsio.move(os.fsencode(staged), target)
            else:
                os.link(staged, target)
        finally:
            staged.unlink(missing_ok=True)

    def _begin_to_write(self, target: bytes, data: bytes) -> None:
        file = os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640), "wb", buffering=0)
        third = len(data) // 3
        self._writers.append((file, [data[:third], data[third : 2 * third], data[2 * third :]]))

    def write_on(self) -> None:
        """The next piece of a file that somebody copies in; the last one closes it."""
        if not self._writers:
            return
        file, pieces = self._writers[0]
        file.write(pieces.pop(0))
        if not pieces:
            file.close()
            self._writers.pop(0)

    def drop_other(self) -> None:
        """What is no file: it is put aside and never opened."""
        kind, number = self._rng.choice(["link", "dangling", "fifo", "directory"]), self._rng.randrange(3)
        path = os.path.join(os.fsencode(self.service.incoming), b"other-%d" % number)
        with contextlib.suppress(FileExistsError):
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "directory":
                os.mkdir(path)
            else:
                os.symlink(__file__ if kind == "link" else "nowhere", path)
            # Noted by what was made, since by now it may have been moved away.
            self.accounts.dropped[self._fingerprint(kind)] += 1
            self.counts["drops of what is no file"] += 1

    @staticmethod
    def _fingerprint(kind: str) -> str:
        target = {"link": os.fsencode(__file__), "dangling": b"nowhere"}.get(kind)
        if target is not None:
            return f"link to {target!r}"
        return "kind 10000" if kind == "fifo" else "kind 40000"

    # ---- blows ----

    def kill_service(self) -> None:
        """In a third of the cases while it starts, else at some moment of its work."""
        moment = self._rng.uniform(0.0, 0.3)
        if self._rng.random() > 0.3:
            self._wait_for(self.is_ready, 5.0)
        self._pause.wait(moment)
        self.service.kill()
        self.counts["kills of the service"] += 1
        self.start()

    def _wait_for(self, probe: Callable[[], object], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not probe() and time.monotonic() < until:
            self._pause.wait(0.005)

    def _workers(self) -> list[int]:
        pid = self.service.process.pid
        try:
            return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def kill_worker(self) -> None:
        """At a moment of its life, not at that of its birth: so a worker is waited for first, if there is work."""
        moment = self._rng.uniform(0.0, 0.05)
        if os.listdir(self.service.incoming):
            self._wait_for(self._has_job, 2.0)
        self._pause.wait(moment)
        for pid in self._workers():
            with contextlib.suppress(ProcessLookupError):
                what = "kills of one that is kept ready" if self._is_kept_ready(pid) else "kills of a worker"
                os.kill(pid, signal.SIGKILL)
                self.counts[what] += 1

    def _has_job(self) -> bool:
        return any(not self._is_kept_ready(pid) for pid in self._workers())

    @staticmethod
    def _is_kept_ready(pid: int) -> bool:
        """Whether it has no job yet: until then its standard input is a socket."""
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/fd/0").startswith("socket:")
        return False

    def stop_worker(self) -> None:
        for pid in self._workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._stopped.add(pid)
                self.counts["SIGSTOP of a worker"] += 1

    def go_on(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def terminate(self) -> None:
        was_ready = self.is_ready()
        status = self.service.stop()
        assert status == 0 or (not was_ready and status == -signal.SIGTERM), status
        self.counts["restarts by SIGTERM"] += 1
        self.start()

    def reload(self) -> None:
        """Only keys that do not decide the weights: others would rightly make old content new."""
        quiet = self._rng.choice([0.0, 0.05, 0.1, 0.3])
        level = self._rng.choice(["info", "debug", "warning"]) if self.is_ready() else "info"
        self.service.settings["intake"]["quiet_seconds"] = quiet
        self._signal_reload({**self.service.settings, "log": {"level": level}}, "reloads")

    def reload_broken(self) -> None:
        self._signal_reload({**self.service.settings, "training": {"epochs": "many"}}, "reloads refused")

    def _signal_reload(self, settings: dict[str, object], what: str) -> None:
        if self.is_ready():  # before that a SIGHUP ends it, as it ends every process
            self._write_config(yaml.safe_dump(settings))
            self.service.signal(signal.SIGHUP)
            self.counts[what] += 1
