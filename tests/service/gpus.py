"""Machines with GPUs for tests: trees of /proc, /sys and /dev, a libnvidia-ml.so.1 and an nvidia-smi."""

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FAKES = Path(__file__).resolve().parents[1] / "fakes"
ADDRESS = "0000:65:00.0"
UUID = "GPU-00000000-aaaa-bbbb-cccc-000000000000"
UUID_1 = "GPU-00000001-aaaa-bbbb-cccc-000000000000"


@functools.cache
def library(*, old: bool = False) -> Path:
    """The stub, compiled once a run. Skips the test where that can not be done, or where the binding is missing."""
    compiler = shutil.which("cc", path=f"{os.environ.get('PATH', '')}:{os.defpath}")
    if compiler is None:
        pytest.skip("no cc: the stub of NVML can not be compiled")
    pytest.importorskip("pynvml", reason="no nvidia-ml-py: NVML has no binding here")
    directory = tempfile.mkdtemp(prefix="retraind-nvml-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = Path(directory) / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", *(["-DOLD"] if old else [])]
    environment = {**os.environ, "PATH": os.defpath}  # of a test that hides this machine's programs
    subprocess.run([compiler, *flags, "-o", str(path), str(FAKES / "nvml.c")], check=True, timeout=120, env=environment)
    return path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def add_gpu(root: Path, address: str = ADDRESS, pci_class: str = "0x030200", port_width: int = 16) -> Path:
    """A card on the bus, as the kernel has it: the entry of the bus is a link to the place below its port."""
    port = root / "sys/devices/pci0000:00" / f"port-{address}"
    link = {"current_link_width": "16", "current_link_speed": "2.5 GT/s PCIe", "max_link_speed": "16.0 GT/s PCIe"}
    write(port, {"max_link_width": f"{port_width}\n", "max_link_speed": "16.0 GT/s PCIe\n"})
    write(port / address, {"vendor": "0x10de\n", "class": f"{pci_class}\n", "max_link_width": "16\n", **link})
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / address).symlink_to(port / address)
    return port / address


def gpu_machine(root: Path, *, num_gpus: int = 1) -> Path:
    """A machine on which all is well: its cards, its driver, its nodes, and an empty log."""
    for index in range(num_gpus):
        add_gpu(root, f"0000:{0x65 + index:02x}:00.0")
        write(root, {f"dev/nvidia{index}": ""})
    write(
        root,
        {
            "proc/meminfo": "MemAvailable:    8388608 kB\n",
            "proc/uptime": "100000.00 5.00\n",
            "proc/sys/kernel/osrelease": "6.12.0-test\n",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\n",
            "sys/module/nvidia/version": "550.54.15\n",
            **dict.fromkeys(("dev/nvidiactl", "dev/nvidia-uvm", "dev/kmsg"), ""),
        },
    )
    return root


def smi(directory: Path, script: str) -> Path:
    """An nvidia-smi that is a shell script. Gives its directory, to stand first on PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return directory
