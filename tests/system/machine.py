"""Debian machines for the system tests: a root filesystem made once, booted with a real systemd as often as needed.

mmdebstrap makes the root, kept between runs below CACHE and made anew when its list of packages changes. A machine is
an overlay on it, booted by systemd-nspawn without a network of its own beyond loopback. Needs root, and a kernel that
allows namespaces; leaves no process and no mount behind. Every step has a time-out.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from harness import eventually

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("RETRAIND_SYSTEM_CACHE", "/var/tmp/retraind-test-system"))
SUITE = "trixie"
NEEDED_COMMANDS = ("mmdebstrap", "systemd-nspawn", "nsenter", "mount")
# What the tests use beside what debian/control names. The supervisor's libraries are found by dh_python3 at the build.
TOOLS = (
    "autopkgtest", "bash-completion", "build-essential", "curl", "dbus", "lintian", "man-db", "openssl", "procps",
    "prometheus", "promtool", "python3-prometheus-client", "python3-pytest", "python3-rich", "python3-sdnotify",
    "python3-watchdog", "systemd", "systemd-sysv",
)  # fmt: skip
# Roomy: an archive that is slow, processors that are busy. They bound what hangs, and say nothing of what is usual.
MAKE_SECONDS, BOOT_SECONDS, COMMAND_SECONDS, WAIT_SECONDS = 1500, 180, 300, 240
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def named_packages(control: str) -> set[str]:
    """The packages of Build-Depends, Depends and Recommends, the first of each alternative, without versions."""
    fields = re.findall(r"^(?:Build-Depends|Depends|Recommends):((?:.*\n)(?:[ \t].*\n)*)", control, re.MULTILINE)
    names = [item.split("|")[0].split("(")[0].strip() for item in ",".join(fields).split(",")]
    virtual = {"debhelper-compat": "debhelper", "dh-sequence-python3": "dh-python", "dh-sequence-installsysusers": ""}
    return {virtual.get(name, name) for name in names if name and not name.startswith("$")} - {""}


def base_root() -> Path:
    """The root filesystem that all machines lie on; made on first use."""
    packages = sorted(named_packages((ROOT / "debian/control").read_text()) | set(TOOLS))
    digest = hashlib.sha256(json.dumps([SUITE, packages]).encode()).hexdigest()[:12]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        base = CACHE / f"base-{digest}"
        if not base.exists():
            for old in CACHE.glob("base-*"):
                shutil.rmtree(old)
            _make_root(base.with_suffix(".partial"), packages)
            base.with_suffix(".partial").rename(base)
    return base


def _make_root(target: Path, packages: list[str]) -> None:
    # The lists of packages stay, so that apt can judge dependencies without a network.
    options = ["--variant=minbase", "--aptopt=Apt::Install-Recommends false", "--skip=cleanup/apt/lists"]
    services = (
        "prometheus.service prometheus-node-exporter.service apt-daily.timer apt-daily-upgrade.timer man-db.timer"
    )
    _host(
        "mmdebstrap", *options, f"--include={','.join(packages)}",
        f'--customize-hook=chroot "$1" systemctl mask {services} e2scrub_all.timer fstrim.timer dpkg-db-backup.timer',
        """--customize-hook=echo 'APT::Get::Assume-Yes "true";' > "$1/etc/apt/apt.conf.d/99assume-yes" """.strip(),
        SUITE, target, seconds=MAKE_SECONDS,
    )  # fmt: skip


def _host(*command: str | Path, seconds: float = COMMAND_SECONDS) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=_environment())
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def _environment() -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    return {**keep, "PATH": _PATH, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


class Machine:
    """One Debian machine. `shell` runs in it: in a chroot before `boot`, within its namespaces afterwards."""

    def __init__(self, place: Path, base: Path) -> None:
        self.place = place
        self.root = place / "root"
        for name in ("root", "upper", "work"):
            (place / name).mkdir()
        layers = f"lowerdir={base},upperdir={place / 'upper'},workdir={place / 'work'}"
        _host("mount", "-t", "overlay", "overlay", "-o", layers, self.root)
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def boot(self) -> "Machine":
        """Starts systemd and waits until it has started what it starts."""
        with (self.place / "console.log").open("ab") as console:
            self._nspawn = subprocess.Popen(
                ["systemd-nspawn", "-D", self.root, "--boot", "--register=no", "--keep-unit", "--console=pipe",
                 "--private-network", f"--machine=rt-{os.getpid()}-{self.place.name}", "--timezone=off"],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=_environment(), start_new_session=True,
            )  # fmt: skip
        self._leader = eventually(self._find_leader, f"systemd boots: {self.console()}", BOOT_SECONDS)
        states = ("running", "degraded")
        self.wait(lambda: self.shell("systemctl is-system-running", check=False).strip() in states, "it has booted")
        return self

    def _find_leader(self) -> int:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, self.console()
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        for child in children:
            # nspawn's helper processes come first; the leader is PID 1 of a namespace of its own.
            status = Path(f"/proc/{child}/status").read_text()
            if re.search(r"^NSpid:\s+\d+\s+1$", status, re.MULTILINE):
                return int(child)
        return 0

    def console(self) -> str:
        path = self.place / "console.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def command(self, script: str, user: str = "root") -> list[str]:
        """The command that runs a script in the machine as that user."""
        inner = ["bash", "-euc", f"cd /\n{script}"]
        if user != "root":
            inner = ["runuser", "-u", user, "--", *inner]
        if self._leader:
            clean = ["env", "-i", *(f"{name}={value}" for name, value in _environment().items()), "HOME=/root"]
            return ["nsenter", "-t", str(self._leader), "-a", *clean, *inner]
        return ["chroot", str(self.root), *inner]

    def run(self, script: str, *, user: str = "root", seconds: float = COMMAND_SECONDS) -> subprocess.CompletedProcess:
        """Runs a script; its status is the caller's to look at."""
        command = self.command(script, user)
        return subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, env=_environment(),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def shell(self, script: str, *, user: str = "root", check: bool = True, seconds: float = COMMAND_SECONDS) -> str:
        """Standard output of a script, which must end well."""
        done = self.run(script, user=user, seconds=seconds)
        assert not check or done.returncode == 0, (
            f"{script}\n{done.returncode}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
        return done.stdout

    def wait(self, probe: Callable[[], T], what: str, seconds: float = WAIT_SECONDS) -> T:
        return eventually(probe, what, seconds)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Writes a file of root's, its directory included."""
        script = f"mkdir -p {Path(path).parent}; printf %s {shlex.quote(text)} > {path}; chmod {mode:o} {path}"
        self.shell(script)

    def stop(self) -> None:
        """Shuts it down and gives everything back."""
        if self._nspawn is not None and self._nspawn.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._leader, signal.SIGRTMIN + 4)  # poweroff
            try:
                self._nspawn.wait(60)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait(60)
        clear(self.place)


def clear(place: Path) -> None:
    """Takes down what a machine has mounted, and removes it."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((one for one in mounts if one.startswith(f"{place}/")), reverse=True):
        _host("umount", "--lazy", mount)
    shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def place_of_this_run() -> Iterator[Path]:
    """A directory for machines; what runs that were killed have left behind is cleared first."""
    for old in CACHE.glob("run-*"):
        if not Path(f"/proc/{old.name.removeprefix('run-')}").exists():
            for place in old.iterdir():
                clear(place)
            shutil.rmtree(old, ignore_errors=True)
    place = CACHE / f"run-{os.getpid()}"
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
