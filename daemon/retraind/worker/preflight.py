"""Checks of the machine before a job: memory, disk, shared memory, processors, and whether a GPU is there at all.

Facts are gathered first and judged by a pure function, so that every verdict can be tested from written-down facts.
Looks only: changes nothing, imports no torch. Files below /proc and /sys are read under a root that
RETRAIND_SYSROOT may name. Raises HostError preflight_failed from `require`, nothing from the checks themselves.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from retraind.config import Device
from retraind.errors import HostError
from retraind.report import Check

# Measured peak of a job of half a million rows is about 400 MiB; below this torch's import alone would not pass.
MIN_MEMORY_BYTES = 384 * 2**20
# The same with room for a full window of rows and a machine that goes on with its other work.
COMFORTABLE_MEMORY_BYTES = 768 * 2**20
# Weights, report and the cache of a small file. A cache that does not fit ends as disk_full, which waits as well.
MIN_DISK_BYTES = 64 * 2**20
# What containers get by default, and about what two loader processes with 2048 rows of 512 metrics need.
MIN_SHM_BYTES = 64 * 2**20
MIB = 2**20
# What the suite is run with at least; pyproject.toml says the same.
MIN_PYTHON, MIN_TORCH = (3, 11), (2, 6)

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"


@dataclass(frozen=True)
class Facts:
    """What was found; None is what could not be read. Sizes in bytes, `cpu_quota` in processors."""

    memory_available: int | None
    disk_free: int | None
    shm_free: int | None
    num_cpus: int
    cpu_quota: float | None
    gpu_addresses: tuple[str, ...] | None
    driver_version: str = ""
    nouveau_loaded: bool = False


def run(device: Device, work_dir: Path, *, num_workers: int = 0, root: Path | None = None) -> list[Check]:
    """Gathers and judges. Takes milliseconds."""
    return verdicts(gather(work_dir, sysroot() if root is None else root), device, work_dir, num_workers)


def require(checks: list[Check]) -> None:
    """Raises HostError preflight_failed with every failed check in its message."""
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        message = "; ".join(f"{check.name}: {check.message}" for check in failed)
        raise HostError("preflight_failed", message, remedy=failed[0].remedy)


def require_torch(version: str) -> None:
    """Raises HostError no_torch for a torch that is too old, by its `__version__`."""
    if torch_version(version) < MIN_TORCH:
        needed = ".".join(map(str, MIN_TORCH))
        remedy = f"install {needed} or newer there, or set worker.python to an interpreter with it"
        raise HostError("no_torch", f"{sys.executable} has torch {version}, {needed} is needed", remedy=remedy)


def torch_version(text: str) -> tuple[int, int]:
    """Major and minor of `2.6.0+debian`; zeros for what is no version."""
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def sysroot() -> Path:
    """Where /proc and /sys are looked for."""
    return Path(os.environ.get("RETRAIND_SYSROOT", "/"))


def gather(work_dir: Path, root: Path) -> Facts:
    """Reads all facts; what can not be read is None."""
    return Facts(
        memory_available=_memory_available(root),
        disk_free=_free_bytes(work_dir),
        shm_free=_free_bytes(root / "dev/shm"),
        num_cpus=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(root),
        gpu_addresses=gpu_addresses(root),
        driver_version=driver_version(root),
        nouveau_loaded=(root / "sys/module/nouveau").is_dir(),
    )


def verdicts(facts: Facts, device: Device, work_dir: Path, num_workers: int) -> list[Check]:
    """The judgement, from the facts alone."""
    return [
        _judge_memory(facts),
        _judge_disk(facts, work_dir),
        _judge_shm(facts, num_workers),
        _judge_cpu(facts),
        _judge_gpu(facts, device),
        _judge_kernel_module(facts, device),
    ]


def _judge_memory(facts: Facts) -> Check:
    name, free = "host.memory", facts.memory_available
    if free is None:
        return Check(name=name, status="unknown", message="/proc/meminfo does not tell MemAvailable")
    message = f"{free // MIB} MiB available"
    if free < MIN_MEMORY_BYTES:
        remedy = "stop something, or give the machine more memory; the job starts when there is enough"
        return Check(name=name, status="fail", message=f"{message}, {MIN_MEMORY_BYTES // MIB} needed", remedy=remedy)
    if free < COMFORTABLE_MEMORY_BYTES:
        return Check(name=name, status="warn", message=f"{message}, a wide dataset may need more")
    return Check(name=name, status="pass", message=message)


def _judge_disk(facts: Facts, work_dir: Path) -> Check:
    name, free = "host.disk", facts.disk_free
    if free is None:
        return Check(name=name, status="unknown", message=f"can not tell the free space of {work_dir}")
    message = f"{free // MIB} MiB free below {work_dir}"
    if free < MIN_DISK_BYTES:
        remedy = "free space there, or move state.dir to a larger filesystem"
        return Check(name=name, status="fail", message=f"{message}, {MIN_DISK_BYTES // MIB} needed", remedy=remedy)
    return Check(name=name, status="pass", message=message)


def _judge_shm(facts: Facts, num_workers: int) -> Check:
    name, free = "host.shm", facts.shm_free
    if num_workers == 0:
        return Check(name=name, status="skip", message="training.num_workers is 0")
    remedy = "enlarge /dev/shm, or set training.num_workers: 0, which is faster for a model this small"
    if free is None:
        return Check(name=name, status="warn", message="there is no /dev/shm for loader processes", remedy=remedy)
    message = f"{free // MIB} MiB free in /dev/shm"
    if free < MIN_SHM_BYTES:
        return Check(name=name, status="warn", message=f"{message}: loader processes may not fit", remedy=remedy)
    return Check(name=name, status="pass", message=message)


def _judge_cpu(facts: Facts) -> Check:
    quota = "" if facts.cpu_quota is None else f", quota of {facts.cpu_quota:g}"
    return Check(name="host.cpu", status="pass", message=f"{facts.num_cpus} processors usable{quota}")


def _judge_gpu(facts: Facts, device: Device) -> Check:
    name, found = "gpu.present", facts.gpu_addresses
    if device == "cpu":
        return Check(name=name, status="skip", message="device is cpu")
    if found:
        return Check(name=name, status="pass", message=f"{len(found)} NVIDIA GPU at {', '.join(found)}")
    message = "no NVIDIA GPU on the PCI bus" if found == () else "the PCI bus can not be read"
    if device == "auto":
        return Check(name=name, status="skip" if found == () else "unknown", message=f"{message}: training on the CPU")
    remedy = "check the card and the virtual machine's passthrough, or set device: auto"
    return Check(name=name, status="fail", message=f"{message}, but device is cuda", remedy=remedy)


def _judge_kernel_module(facts: Facts, device: Device) -> Check:
    """A GPU whose driver is not loaded is of no use to torch, which would only say that there is none."""
    name = "driver.kernel_module"
    if device == "cpu":
        return Check(name=name, status="skip", message="device is cpu")
    if not facts.gpu_addresses:
        return Check(name=name, status="skip", message="blocked by gpu.present")
    if facts.driver_version:
        return Check(name=name, status="pass", message=f"NVIDIA's kernel module {facts.driver_version} is loaded")
    message = "NVIDIA's kernel module is not loaded"
    remedy = "install the driver for this kernel (dkms status, uname -r), then modprobe nvidia and read dmesg"
    if facts.nouveau_loaded:
        message, remedy = f"{message}, nouveau is", "blacklist nouveau, rebuild the initramfs and reboot"
    if device == "auto":
        return Check(name=name, status="warn", message=f"{message}: training on the CPU", remedy=remedy)
    return Check(name=name, status="fail", message=f"{message}, but device is cuda", remedy=remedy)


def _memory_available(root: Path) -> int | None:
    """MemAvailable: what new work can have without swapping, page cache that can go included."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _free_bytes(directory: Path) -> int | None:
    """What a process without privileges can still write there."""
    try:
        facts = os.statvfs(directory)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


def _cpu_quota(root: Path) -> float | None:
    """The smallest cpu.max of this process's control group and those above it, in processors (cgroup v2 only)."""
    found = re.search(r"^0::/(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    if not found:
        return None
    mount = root / "sys/fs/cgroup"
    group = mount / found[1]
    quotas = []
    for directory in (group, *group.parents):
        if directory != mount and mount not in directory.parents:
            break
        fields = _read(directory / "cpu.max").split()
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
            quotas.append(int(fields[0]) / max(int(fields[1]), 1))
    return min(quotas, default=None)


def gpu_addresses(root: Path) -> tuple[str, ...] | None:
    """PCI addresses of NVIDIA's display controllers; None when the bus can not be read, () when there are none."""
    try:
        devices = sorted((root / "sys/bus/pci/devices").iterdir())
    except FileNotFoundError:
        return ()  # a machine with no PCI bus, as many virtual ones are
    except OSError:
        return None
    return tuple(
        device.name
        for device in devices
        if _read(device / "vendor").strip() == NVIDIA_VENDOR and _read(device / "class").startswith(DISPLAY_CLASS)
    )


def driver_version(root: Path | None = None) -> str:
    """The version of NVIDIA's loaded kernel module, empty when there is none."""
    text = _read((sysroot() if root is None else root) / "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def peak_bytes() -> int:
    """The most memory this process has had resident. Not getrusage's figure, which an exec inherits from its parent."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> str:
    """A small file's text, empty when it can not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
