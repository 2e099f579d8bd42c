"""Verdicts from written-down facts, and facts from written-down trees."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from retraind.errors import HostError
from retraind.worker import preflight
from retraind.worker.preflight import Facts

MIB = 2**20
GOOD = Facts(
    memory_available=4096 * MIB, disk_free=4096 * MIB, shm_free=1024 * MIB, num_cpus=4, cpu_quota=None, gpu_addresses=()
)
WORK_DIR = Path("/var/lib/retraind/jobs/x")


def judge(name, device="auto", num_workers=0, **changes):
    checks = preflight.verdicts(replace(GOOD, **changes), device, WORK_DIR, num_workers)
    (check,) = [check for check in checks if check.name == name]
    return check


@pytest.mark.parametrize(
    ("name", "changes", "status", "words"),
    [
        ("host.memory", {}, "pass", "4096 MiB"),
        ("host.memory", {"memory_available": 500 * MIB}, "warn", "500 MiB"),
        ("host.memory", {"memory_available": 100 * MIB}, "fail", "100 MiB"),
        ("host.memory", {"memory_available": None}, "unknown", "MemAvailable"),
        ("host.disk", {}, "pass", "4096 MiB"),
        ("host.disk", {"disk_free": 63 * MIB}, "fail", str(WORK_DIR)),
        ("host.disk", {"disk_free": None}, "unknown", str(WORK_DIR)),
        ("host.shm", {"shm_free": 0}, "skip", "num_workers"),
        ("host.shm", {"num_workers": 2}, "pass", "1024 MiB"),
        ("host.shm", {"num_workers": 2, "shm_free": MIB}, "warn", "1 MiB"),
        ("host.shm", {"num_workers": 2, "shm_free": None}, "warn", "/dev/shm"),
        ("host.cpu", {}, "pass", "4 processors"),
        ("host.cpu", {"cpu_quota": 1.5}, "pass", "quota of 1.5"),
        ("gpu.present", {}, "skip", "CPU"),
        ("gpu.present", {"gpu_addresses": None}, "unknown", "can not be read"),
        ("gpu.present", {"gpu_addresses": ("0000:65:00.0",)}, "pass", "0000:65:00.0"),
        ("gpu.present", {"device": "cuda", "gpu_addresses": ("0000:65:00.0",)}, "pass", "1 NVIDIA"),
        ("gpu.present", {"device": "cuda"}, "fail", "device is cuda"),
        ("gpu.present", {"device": "cuda", "gpu_addresses": None}, "fail", "device is cuda"),
        ("gpu.present", {"device": "cpu", "gpu_addresses": ("0000:65:00.0",)}, "skip", "device is cpu"),
        ("driver.kernel_module", {}, "skip", "blocked by gpu.present"),
        ("driver.kernel_module", {"device": "cpu", "gpu_addresses": ("0000:65:00.0",)}, "skip", "device is cpu"),
        ("driver.kernel_module", {"gpu_addresses": ("0000:65:00.0",), "driver_version": "550.54"}, "pass", "550.54"),
        ("driver.kernel_module", {"gpu_addresses": ("0000:65:00.0",)}, "warn", "training on the CPU"),
        ("driver.kernel_module", {"device": "cuda", "gpu_addresses": ("0000:65:00.0",)}, "fail", "not loaded"),
        (
            "driver.kernel_module",
            {"device": "cuda", "gpu_addresses": ("0000:65:00.0",), "nouveau_loaded": True},
            "fail",
            "nouveau",
        ),
    ],
)
def test_the_verdict_follows_from_the_facts(name, changes, status, words):
    check = judge(name, **changes)
    assert check.status == status
    assert words in check.message
    assert bool(check.remedy) >= (status == "fail")


def test_a_failed_check_defers_the_job_and_is_named():
    checks = preflight.verdicts(replace(GOOD, disk_free=0, memory_available=0), "cuda", WORK_DIR, 0)
    with pytest.raises(HostError) as caught:
        preflight.require(checks)
    assert caught.value.code == "preflight_failed"
    assert all(name in caught.value.message for name in ("host.memory", "host.disk", "gpu.present"))
    assert caught.value.remedy


def test_warnings_and_unknowns_do_not_stop_a_job():
    bare = Facts(memory_available=None, disk_free=None, shm_free=None, num_cpus=1, cpu_quota=0.5, gpu_addresses=None)
    preflight.require(preflight.verdicts(bare, "auto", WORK_DIR, 4))


@pytest.fixture
def root(tmp_path):
    """A machine with 2 GiB available, a quota of half a processor above the own group's two, and two PCI devices."""
    files = {
        "proc/meminfo": "MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable:    2097152 kB\n",
        "proc/self/cgroup": "0::/system.slice/retraind.service\n",
        "sys/fs/cgroup/system.slice/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/system.slice/retraind.service/cpu.max": "200000 100000\n",
        "sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:00:1f.0/class": "0x030000\n",
        "sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def add_gpu(root, address, pci_class="0x030200"):
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text(f"{pci_class}\n")


def test_facts_are_read_below_the_root(root):
    facts = preflight.gather(root, root)
    assert facts.memory_available == 2 * 2**30
    assert facts.cpu_quota == 0.5
    assert facts.gpu_addresses == ()  # another maker's display, and this maker's sound
    assert facts.shm_free is None
    assert facts.num_cpus == len(os.sched_getaffinity(0))


def test_gpus_are_found_by_maker_and_class(root):
    add_gpu(root, "0000:65:00.0")
    add_gpu(root, "0000:01:00.0", "0x030000")
    assert preflight.gather(root, root).gpu_addresses == ("0000:01:00.0", "0000:65:00.0")


def test_the_loaded_kernel_modules_are_found(root):
    assert not preflight.gather(root, root).nouveau_loaded
    (root / "sys/module/nouveau").mkdir(parents=True)
    version = root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\n")
    facts = preflight.gather(root, root)
    assert (facts.driver_version, facts.nouveau_loaded) == ("550.54.15", True)


def test_a_machine_that_tells_nothing_is_judged_without_an_error(tmp_path):
    checks = preflight.run("auto", tmp_path / "gone", num_workers=1, root=tmp_path)
    assert {check.name: check.status for check in checks} == {
        "host.memory": "unknown",
        "host.disk": "unknown",
        "host.shm": "warn",
        "host.cpu": "pass",
        "gpu.present": "skip",
        "driver.kernel_module": "skip",
    }


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000\n", None), ("50000 0\n", 50000.0), ("", None), ("nonsense\n", None), ("25000 100000\n", 0.25)],
)
def test_a_quota_is_read_however_it_is_spelled(root, text, quota):
    for name in ("system.slice", "system.slice/retraind.service"):
        (root / "sys/fs/cgroup" / name / "cpu.max").write_text(text)
    assert preflight.gather(root, root).cpu_quota == quota


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n", "550.54.14"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("", ""),
    ],
)
def test_the_drivers_version_is_read_from_the_kernel(root, text, version):
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(text)
    assert preflight.driver_version(root) == version


def test_the_root_may_come_from_the_environment(root, monkeypatch):
    monkeypatch.setenv("RETRAIND_SYSROOT", str(root))
    assert "2048 MiB" in preflight.run("auto", root)[0].message


def test_this_machine_passes_and_torch_is_not_imported():
    code = (
        "import sys; from pathlib import Path; from retraind.worker import preflight\n"
        "print([c.status for c in preflight.run('auto', Path('/tmp'))], 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "fail" not in output
    assert output.strip().endswith("False False")


def test_the_peak_is_at_least_what_was_touched():
    before = preflight.peak_bytes()
    block = bytearray(64 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    assert preflight.peak_bytes() >= before
    assert preflight.peak_bytes() > 64 * MIB
