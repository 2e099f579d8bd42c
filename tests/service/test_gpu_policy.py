"""What a GPU that is not fit does to jobs, as the operator sees it: log, status, metrics, manifest, exit status.

The driver is the stub, so torch never gets as far as a card here: what is shown is the way around one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpus import UUID, gpu_machine, library
from harness import Service, eventually

ROWS = "cpu,load\n" + "".join(f"{row % 7},{row % 11}\n" for row in range(100))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "fake").mkdir()
    running = Service(tmp_path / "fake")
    yield running
    running.close()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A machine with a GPU whose driver is the stub."""
    (tmp_path / "bin").mkdir()
    return {
        "RETRAIND_SYSROOT": str(gpu_machine(tmp_path / "root")),
        "RETRAIND_NVML_LIB": str(library()),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Callable[[str], Service]]:
    """Services whose worker is the real one, by their `device`."""
    made: list[Service] = []

    def make(device: str) -> Service:
        (tmp_path / f"real-{len(made)}").mkdir()
        made.append(Service(tmp_path / f"real-{len(made)}", fake=False, training={"epochs": 1}))
        made[-1].settings["device"] = device
        made[-1].settings["preflight"] = {"deadline_seconds": 20}
        made[-1].write_config()
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_job_that_goes_to_the_cpu_for_want_of_a_fit_gpu_says_so_everywhere(service: Service) -> None:
    service.start()
    assert service.metric("retraind_preflight_cpu_fallback") == 0
    service.drop("fallback.csv")
    service.wait_for_state("fallback.csv", "published")
    assert service.metric("retraind_preflight_cpu_fallback") == 1
    assert service.metric("retraind_preflight_check", check="gpu.temperature", status="fail") == 1
    assert service.metric("retraind_gpu_temperature_celsius", gpu="0") == 91
    assert service.metric("retraind_gpu_memory_free_bytes", gpu="0") is None
    log = service.log()
    assert log.count("gpu.temperature: 91 C, the limit is 90. see to fans") == 1
    assert "trains on the CPU, since the GPU is not fit for it: gpu.temperature: 91 C" in log
    assert "GPU 0 (chosen): Fake Card, GPU-1, 91 C" in log
    status = eventually(lambda: service.status()["gpus"] and service.status())
    assert status["cpu_fallback"] == "gpu.temperature: 91 C, the limit is 90"
    assert status["faults"] == {}
    shown = service.command("status").stdout
    assert "Fake Card" in shown
    assert "gpu.temperature: 91 C, the limit is 90" in shown
    service.drop("well.csv")
    service.wait_for_state("well.csv", "published")
    assert service.metric("retraind_preflight_cpu_fallback") == 0
    assert service.metric("retraind_gpu_temperature_celsius", gpu="0") is None


def test_with_auto_a_job_is_trained_on_the_cpu_and_its_manifest_has_what_the_driver_said(
    real: Callable[[str], Service], environment: dict[str, str]
) -> None:
    service = real("auto").start(**environment, NVML_VALUE_temperature="91")
    service.drop("a.csv", ROWS)
    service.wait_for_state("a.csv", "published")
    manifest = service.live()
    assert manifest is not None
    assert manifest["training"]["device"] == "cpu"
    checks = {check["name"]: check for check in manifest["checks"]}
    assert (checks["gpu.temperature"]["status"], checks["gpu.handle"]["status"]) == ("fail", "pass")
    (gpu,) = manifest["gpus"]
    assert (gpu["uuid"], gpu["temperature_celsius"], gpu["is_chosen"]) == (UUID, 91, True)
    assert service.metric("retraind_preflight_cpu_fallback") == 1
    page = next(Path(service.models).glob("*/current/report.html")).read_text()
    assert "NVIDIA Stub 0" in page
    assert "NVIDIA Stub 0" in service.command("models", "show", "1").stdout


def test_a_driver_that_hangs_costs_its_deadline_and_no_job(
    real: Callable[[str], Service], environment: dict[str, str]
) -> None:
    service = real("auto")
    service.settings["preflight"] = {"deadline_seconds": 1}
    service.write_config()
    service.start(**environment, NVML_CODE_nvmlInitWithFlags="hang")
    service.drop("a.csv", ROWS)
    service.wait_for_state("a.csv", "published")
    assert "driver.nvml: the driver is unresponsive: no answer in time (1 s)" in service.log()


def test_with_cuda_a_job_waits_uses_no_attempt_and_the_service_lives(
    real: Callable[[str], Service], environment: dict[str, str], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "proc/driver/nvidia/version").unlink()
    (root / "sys/module/nvidia/version").unlink()
    (root / "sys/module/nvidia").rmdir()
    (root / "sys/module/nouveau").mkdir()
    service = real("cuda").start(**environment)
    service.drop("a.csv", ROWS)
    service.wait_for_state("a.csv", "deferred")
    assert service.metric("retraind_fault", fault="preflight") == 1
    assert service.metric("retraind_preflight_check", check="driver.kernel_module", status="fail") == 1
    assert service.metric("retraind_preflight_cpu_fallback") == 0
    assert "nouveau" in str(service.status()["faults"])
    service.settings["device"] = "auto"
    service.write_config()
    service.signal(1)
    job = service.wait_for_state("a.csv", "published")
    assert job["attempts"] == 1
    assert service.names("quarantine") == []


def preflight(
    tmp_path: Path, environment: dict[str, str], *arguments: str, device: str
) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "retraind.yaml"
    config.write_text(f"device: {device}\nstate: {{dir: {tmp_path}}}\npreflight: {{deadline_seconds: 20}}\n")
    return subprocess.run(
        [sys.executable, "-m", "retraind", "preflight", "--config", str(config), *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=120,
    )  # fmt: skip


def test_preflight_shows_each_check_and_the_figures_of_each_gpu(tmp_path: Path, environment: dict[str, str]) -> None:
    environment = {**environment, "NVML_VALUE_count": "2", "CUDA_VISIBLE_DEVICES": "1", "NVML_VALUE_persistence_1": "0"}
    told = json.loads(preflight(tmp_path, environment, "--json", device="auto").stdout)
    checks = {check["name"]: check["status"] for check in told["checks"]}
    assert (checks["gpu.handle"], checks["gpu.persistence"], checks["pcie.gen"]) == ("pass", "warn", "skip")
    assert [gpu.get("is_chosen", False) for gpu in told["gpus"]] == [False, True]
    for_people = preflight(tmp_path, environment, device="auto").stdout
    assert "gpu.persistence" in for_people
    assert "GPU 1 *  NVIDIA Stub 1" in for_people
    assert "15.0 of 16.0 GiB free, 45 C, P8, PCIe gen 1 of 4, width 16 of 16" in for_people


@pytest.mark.parametrize(("device", "exit_status"), [("auto", 1), ("cuda", 2), ("cpu", 0)])
def test_the_exit_status_says_what_would_become_of_a_job(
    tmp_path: Path, environment: dict[str, str], device: str, exit_status: int
) -> None:
    done = preflight(tmp_path, {**environment, "NVML_VALUE_temperature": "91"}, device=device)
    assert done.returncode == exit_status, done.stdout
    assert ("91 C, the limit is 90" in done.stdout) == (device != "cpu")
    assert ("Jobs run on the CPU" in done.stdout) == (device == "auto")


def test_what_is_skipped_for_one_reason_is_one_line_for_people(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    done = preflight(tmp_path, {"RETRAIND_SYSROOT": str(tmp_path / "bare")}, device="auto")
    assert "driver.kernel_module and 17 more   skip" in done.stdout
    assert "GPUs" not in done.stdout
    told = preflight(tmp_path, {"RETRAIND_SYSROOT": str(tmp_path / "bare")}, "--json", device="auto").stdout
    assert len([check for check in json.loads(told)["checks"] if check["message"] == "blocked by gpu.present"]) == 18
