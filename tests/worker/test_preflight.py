"""Verdicts on the host from written-down facts and trees, and what becomes of a job with a GPU that is not fit."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from retraind import events
from retraind.config import PreflightConfig, TrainingConfig
from retraind.errors import HostError
from retraind.report import Check
from retraind.worker import preflight
from retraind.worker.preflight import Facts
from retraind.worker.situation import OWED

MIB = 2**20
GOOD = Facts(memory_available=4096 * MIB, disk_free=4096 * MIB, shm_free=1024 * MIB, num_cpus=4, cpu_quota=None)
WORK_DIR = Path("/var/lib/retraind/jobs/x")


def judge(name, num_workers=0, **changes):
    checks = preflight.verdicts(replace(GOOD, **changes), WORK_DIR, num_workers)
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
    ],
)
def test_the_verdict_follows_from_the_facts(name, changes, status, words):
    check = judge(name, **changes)
    assert check.status == status
    assert words in check.message
    assert bool(check.remedy) >= (status == "fail")


def found(asked="auto", strict=False, **statuses):
    """What a preflight found, with these verdicts on single checks; all others pass."""
    told = {name.replace("_", ".", 1): status for name, status in statuses.items()}
    checks = [
        Check(name=name, status=told.get(name, "skip" if name == "cuda.context" else "pass"), message=f"as {name} is",
              remedy=f"mend {name}")
        for name in events.CHECKS
    ]  # fmt: skip
    return preflight.Found(checks=checks, asked=asked, config=PreflightConfig(strict=strict), cuda_device="GPU-1")


@pytest.mark.parametrize(
    ("preflighted", "device", "is_deferred"),
    [
        (found(), "auto", False),
        (found("cuda"), "cuda", False),
        (found("cpu"), "cpu", False),
        (found(gpu_temperature="fail"), "cpu", False),
        (found("cuda", gpu_temperature="fail"), "cuda", True),
        (found(driver_nvml="fail"), "cpu", False),
        (found(cuda_context="fail"), "cpu", False),
        (found("cuda", cuda_context="fail"), "cuda", True),
        (found(host_memory="fail"), "auto", True),
        (found("cpu", host_memory="fail"), "cpu", True),
        (found(gpu_temperature="fail", host_disk="fail"), "cpu", True),
        (found("cuda", gpu_temperature="warn", gpu_throttle="unknown"), "cuda", False),
        (found("cuda", strict=True, gpu_throttle="unknown"), "cuda", True),
        (found(strict=True, gpu_throttle="unknown"), "cpu", False),
        (found(strict=True, host_memory="unknown"), "auto", True),
        (found(strict=True, gpu_throttle="warn"), "auto", False),
    ],
)
def test_the_verdicts_decide_on_the_device_and_on_the_job(preflighted, device, is_deferred):
    assert preflighted.device == device
    assert bool(preflighted.fallback) == (preflighted.asked == "auto" and device == "cpu")
    if is_deferred:
        with pytest.raises(HostError, match="as ") as caught:
            preflight.require(preflighted)
        assert caught.value.code == "preflight_failed"
        assert caught.value.remedy.startswith("mend ")
    else:
        preflight.require(preflighted)


def test_a_failed_check_is_named_and_one_that_the_cpu_does_not_need_is_not():
    with pytest.raises(HostError) as caught:
        preflight.require(found("cuda", host_memory="fail", host_disk="fail", gpu_present="fail"))
    assert all(name in caught.value.message for name in ("host.memory", "host.disk", "gpu.present"))
    with pytest.raises(HostError) as caught:
        preflight.require(found("auto", host_memory="fail", gpu_handle="fail"))
    assert "gpu.handle" not in caught.value.message
    assert found(gpu_handle="fail", driver_version="fail").fallback == (
        "driver.version: as driver.version is; gpu.handle: as gpu.handle is"
    )


@pytest.mark.parametrize(
    ("preflighted", "shown"),
    [
        (found(), ("GPU-1", "PCI_BUS_ID")),
        (found("cuda"), ("GPU-1", "PCI_BUS_ID")),
        (found(gpu_handle="fail"), ("", "as it was")),
        (found("cpu"), ("7", "as it was")),
        (replace(found(), cuda_device=""), ("7", "as it was")),
    ],
)
def test_cuda_sees_the_gpu_that_was_checked_and_no_other(preflighted, shown, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "as it was")
    preflight.expose(preflighted)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == shown


def test_the_check_that_torch_owes_takes_its_place_and_is_then_owed_no_more():
    first = found().with_context(Check(name="cuda.context", status="skip", message=OWED))
    assert first.owes_context
    second = first.with_context(Check(name="cuda.context", status="fail", message="no kernel image"))
    assert (second.owes_context, second.device, len(second.checks)) == (False, "cpu", len(first.checks))
    assert not found().owes_context, "it was skipped for another reason"
    assert not replace(first, asked="cpu").owes_context
    assert not found(gpu_handle="fail").with_context(first.checks[-1]).owes_context, "the job goes to the CPU"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cuda: Optional[str] = '12.4'\n", "12.4"),
        ('cuda = "11.8"\n', "11.8"),
        ("__version__ = '2.6.0'\ncuda: Optional[str] = None\nhip = None\n", ""),
        ("debug = False\n", None),
        (None, None),
    ],
)
def test_torch_is_asked_for_its_cuda_without_being_loaded(tmp_path, monkeypatch, text, version):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('loaded')\n")
    if text is not None:
        (package / "version.py").write_text(text)
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; from retraind.worker import preflight\n"
        "print(repr(preflight.torch_cuda()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == repr(version)


def test_an_interpreter_without_torch_tells_none(monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    assert preflight.torch_cuda() is None


@pytest.fixture
def root(tmp_path):
    """A machine with 2 GiB available, a quota of half a processor above the own group's two."""
    files = {
        "proc/meminfo": "MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable:    2097152 kB\n",
        "proc/self/cgroup": "0::/system.slice/retraind.service\n",
        "sys/fs/cgroup/system.slice/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/system.slice/retraind.service/cpu.max": "200000 100000\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_facts_are_read_below_the_root(root):
    facts = preflight.gather(root, root)
    assert facts.memory_available == 2 * 2**30
    assert facts.cpu_quota == 0.5
    assert facts.shm_free is None
    assert facts.num_cpus == len(os.sched_getaffinity(0))


def run(root, work_dir=None, device="auto", num_workers=0):
    return preflight.run(
        device, work_dir or root, root, TrainingConfig(num_workers=num_workers), PreflightConfig(), root
    )


def test_a_machine_that_tells_nothing_is_judged_without_an_error(tmp_path):
    preflighted = run(tmp_path, tmp_path / "gone", num_workers=1)
    statuses = {check.name: check.status for check in preflighted.checks}
    assert tuple(statuses) == events.CHECKS
    assert {name: status for name, status in statuses.items() if status != "skip"} == {
        "host.memory": "unknown",
        "host.disk": "unknown",
        "host.shm": "warn",
        "host.cpu": "pass",
    }
    preflight.require(preflighted)
    assert (preflighted.device, preflighted.fallback, preflighted.gpus) == ("auto", "", [])


def test_a_machine_without_a_gpu_keeps_a_job_waiting_that_must_have_one(root):
    preflighted = run(root, device="cuda")
    with pytest.raises(HostError, match="gpu.present: no NVIDIA GPU on the PCI bus, but device is cuda"):
        preflight.require(preflighted)
    assert not preflighted.fallback


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000\n", None), ("50000 0\n", 50000.0), ("", None), ("nonsense\n", None), ("25000 100000\n", 0.25)],
)
def test_a_quota_is_read_however_it_is_spelled(root, text, quota):
    for name in ("system.slice", "system.slice/retraind.service"):
        (root / "sys/fs/cgroup" / name / "cpu.max").write_text(text)
    assert preflight.gather(root, root).cpu_quota == quota


def test_the_root_may_come_from_the_environment(root, monkeypatch):
    monkeypatch.setenv("RETRAIND_SYSROOT", str(root))
    preflighted = preflight.run("auto", root, root, TrainingConfig(), PreflightConfig())
    assert "2048 MiB" in preflighted.checks[0].message


def test_this_machine_passes_and_torch_is_not_imported():
    code = (
        "import sys; from pathlib import Path; from retraind.worker import preflight\n"
        "from retraind.config import PreflightConfig, TrainingConfig\n"
        "found = preflight.run('auto', Path('/tmp'), Path('/tmp'), TrainingConfig(), PreflightConfig())\n"
        "preflight.require(found)\n"
        "print([name for name in ('torch', 'numpy', 'pynvml') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


def test_the_peak_is_at_least_what_was_touched():
    before = preflight.peak_bytes()
    block = bytearray(64 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    assert preflight.peak_bytes() >= before
    assert preflight.peak_bytes() > 64 * MIB
