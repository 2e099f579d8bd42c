"""What the kernel says of NVIDIA GPUs: the PCI bus, the modules, the links, and the errors in its log.

Reads /proc, /sys and /dev/kmsg below a root and changes nothing. What can not be read is None or empty; raises nothing.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from retraind.worker.gpu_facts import Link, Machine, Xid

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"
# GT/s of a lane by generation.
_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
# The kernel's ring holds a few MiB at most; what is more is no ring.
_MAX_LOG_BYTES = 32 * 2**20
_XID = re.compile(r"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(PCI:([0-9a-fA-F:]+)[^)]*\): (\d+)", re.MULTILINE)


def gather(root: Path) -> Machine:
    """All of it. Takes milliseconds."""
    addresses = gpu_addresses(root)
    devices = root / "sys/bus/pci/devices"
    return Machine(
        addresses=addresses,
        platform=_platform(root, addresses),
        module_version=driver_version(root),
        is_module_loaded=(root / "sys/module/nvidia").is_dir(),
        is_nouveau_loaded=(root / "sys/module/nouveau").is_dir(),
        bound_drivers={address: _link_name(devices / address / "driver") for address in addresses or ()},
        kernel_release=read(root / "proc/sys/kernel/osrelease").strip(),
        links={address: _link(devices / address) for address in addresses or ()},
        xids=_xids(root) if addresses else None,
        memory_available=memory_available(root),
    )


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
        if read(device / "vendor").strip() == NVIDIA_VENDOR and read(device / "class").startswith(DISPLAY_CLASS)
    )


def driver_version(root: Path) -> str:
    """The version of NVIDIA's loaded kernel module, empty when there is none."""
    text = read(root / "proc/driver/nvidia/version")
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else read(root / "sys/module/nvidia/version").strip()


def memory_available(root: Path) -> int | None:
    """MemAvailable: what new work can have without swapping, page cache that can go included."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def read(path: Path) -> str:
    """A small file's text, empty when it can not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _platform(root: Path, addresses: tuple[str, ...] | None) -> str:
    """Where there is a GPU without a place on the bus: below Windows, and as a part of a Jetson's own chip."""
    if not addresses and (root / "dev/dxg").exists():
        return "wsl"
    return "jetson" if not addresses and (root / "sys/module/nvgpu").is_dir() else "pci"


def _link_name(path: Path) -> str:
    try:
        return path.readlink().name
    except OSError:
        return ""


def _link(device: Path) -> Link:
    """The device's link; its greatest width is bounded by the port above it, which a riser may have made narrow."""
    port = Path(os.path.realpath(device)).parent
    widths = [_number(read(place / "max_link_width")) for place in (device, port)]
    generations = [_generation(read(place / "max_link_speed")) for place in (device, port)]
    return Link(
        width=_number(read(device / "current_link_width")),
        max_width=min((width for width in widths if width), default=None),
        generation=_generation(read(device / "current_link_speed")),
        max_generation=min((generation for generation in generations if generation), default=None),
    )


def _number(text: str) -> int | None:
    """None for what is no number, and for 0 and 255, which the kernel has for a link that it can not tell."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and text not in ("0", "255") else None


def _generation(text: str) -> int | None:
    """Of `16.0 GT/s PCIe`."""
    return _GENERATIONS.get(text.partition(" ")[0])


def _xids(root: Path) -> tuple[Xid, ...] | None:
    """The driver's errors since the boot; None when the log or the clock can not be read."""
    uptime = read(root / "proc/uptime").partition(" ")[0]
    log = _kernel_log(root / "dev/kmsg")
    if log is None or not re.fullmatch(r"\d+(\.\d+)?", uptime):
        return None
    return tuple(
        Xid(address=address.lower(), number=int(number), age_seconds=float(uptime) - int(microseconds) / 1e6)
        for microseconds, address, number in _XID.findall(log)
    )


def _kernel_log(path: Path) -> str | None:
    """All records that there are now: the kernel gives one a read, and blocks for the next unless told not to."""
    records: list[bytes] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        num_bytes = 0
        while num_bytes < _MAX_LOG_BYTES:
            with suppress(BrokenPipeError):  # a record was overwritten meanwhile: the next one is given
                record = os.read(fd, 2**16)
                if not record:
                    break
                records.append(record)
                num_bytes += len(record)
    except BlockingIOError:
        pass  # the end of what there is
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(records).decode("utf-8", "replace")
