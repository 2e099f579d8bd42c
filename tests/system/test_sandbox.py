"""What the worker, which reads data from outside, can do to the machine: asked from inside, by trying."""

import json
from collections.abc import Callable

import pytest
from installed import Service, rows
from machine import Machine

# Runs in the worker's place, tries everything, writes down what came of it, and then becomes the worker.
PROBE = r'''#!/usr/bin/python3 -sP
"""Tries what a worker must not be able to do."""
import ctypes, json, os, socket, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def write(path):
    with open(path, "w"):
        pass
    os.unlink(path)

tries = {
    "write /etc": lambda: write("/etc/probe"),
    "write /usr": lambda: write("/usr/lib/probe"),
    "write /home": lambda: write("/home/probe"),
    "write /root": lambda: write("/root/probe"),
    "write /var/lib": lambda: write("/var/lib/probe"),
    "write /boot": lambda: write("/boot/probe"),
    "write the service's code": lambda: write("/usr/lib/python3/dist-packages/retraind/probe"),
    "write its own configuration": lambda: write("/etc/retraind/probe"),
    "see the homes of users": lambda: os.stat("/home/alice"),
    "ptrace": lambda: call("ptrace", 16, os.getppid(), 0, 0),
    "mount": lambda: call("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None),
    "unshare a user namespace": lambda: call("unshare", 0x10000000),
    "load a module": lambda: call("syscall", 175, 0, 0, b""),
    "raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0),
    "set the clock": lambda: call("clock_settime", 0, (ctypes.c_long * 2)(1, 0)),
    "change the host's name": lambda: call("sethostname", b"probe", 5),
    "become root": lambda: os.setuid(0),
    "set the setuid bit": lambda: (open("/tmp/probe", "w").close(), os.chmod("/tmp/probe", 0o4755)),
    "kernel tunables": lambda: open("/proc/sys/kernel/domainname", "w"),
    "kernel log": lambda: call("klogctl", 3, ctypes.create_string_buffer(64), 64),
    "a device": lambda: open("/dev/kmsg", "w"),
    "a keyring of others": lambda: call("syscall", 250, 0, -1),
    "real-time priority": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "see others' processes": lambda: os.stat("/proc/1/status"),
}
allowed = {
    "write below its state": lambda: write("/var/lib/retraind/probe"),
    "write below its cache": lambda: write("/var/cache/retraind/probe"),
    "write to a /tmp of its own": lambda: write("/tmp/probe-2"),
    "read /proc/meminfo": lambda: open("/proc/meminfo").read(),
    "fork": lambda: subprocess.run(["true"], check=True),
    "TCP": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
}
told = {}
for name, attempt in {**tries, **allowed}.items():
    try:
        attempt()
        told[name] = "done"
    except (OSError, subprocess.SubprocessError) as error:
        told[name] = type(error).__name__
told["notify"] = " ".join(sorted(name for name in os.environ if name in ("NOTIFY_SOCKET", "WATCHDOG_USEC")))
told["must fail"], told["must work"] = list(tries), list(allowed)
told["capabilities"] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")]
with open("/var/lib/retraind/probe.json", "w") as file:
    json.dump(told, file)
os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv[1:]])
'''


@pytest.fixture(scope="module")
def told(install: Callable[[str], Service]) -> dict:
    service = install("sandbox")
    machine: Machine = service.machine
    machine.write("/opt/probe-python", PROBE, 0o755)
    service.configure(worker={"python": "/opt/probe-python"})
    service.restart()
    service.drop("probe.csv", rows())
    service.ends("probe.csv")
    return json.loads(service.shell("cat /var/lib/retraind/probe.json"))


def test_nothing_that_would_harm_the_machine_succeeds(told: dict) -> None:
    assert len(told["must fail"]) > 20
    assert {name for name in told["must fail"] if told[name] == "done"} == set()


def test_what_training_needs_is_there(told: dict) -> None:
    assert {name: told[name] for name in told["must work"]} == dict.fromkeys(told["must work"], "done")


def test_the_worker_has_no_capability_and_no_way_to_speak_to_systemd(told: dict) -> None:
    assert set(told["capabilities"]) == {"0000000000000000"}
    assert told["notify"] == ""
