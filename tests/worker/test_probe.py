"""The driver asked: by a library that the test compiled, by an nvidia-smi that is a script, and by ones that hang."""

import fcntl
import os
import signal
import subprocess
import time

import pytest
from gpus import ADDRESS, UUID, UUID_1, gpu_machine, library, smi

from retraind.config import PreflightConfig, TrainingConfig
from retraind.errors import HostError
from retraind.worker import gpu_verdicts, nvidia_smi, preflight, probe
from retraind.worker.gpu_facts import Process

LONG, SHORT = 60.0, 0.5


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with two GPUs, whose driver is the stub; no nvidia-smi of this machine's is seen."""
    root = gpu_machine(tmp_path / "root", num_gpus=2)
    monkeypatch.setenv("RETRAIND_NVML_LIB", str(library()))
    monkeypatch.setenv("NVML_VALUE_count", "2")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "torch_cuda", lambda: "12.4")
    return root


def ask(root, seconds=LONG):
    return probe.ask(root, root, seconds)


def run(root, device="auto", **config):
    settings = PreflightConfig(**{"deadline_seconds": LONG, **config})
    return preflight.run(device, root, root, TrainingConfig(), settings, root)


def checks(found):
    return {check.name: check for check in found.checks}


def test_the_library_tells_every_fact(machine, monkeypatch):
    monkeypatch.setenv("NVML_VALUE_pid_1", "4242")
    answer = ask(machine)
    assert (answer.source, answer.code, answer.driver_version, answer.cuda_version) == ("nvml", 0, "550.54.15", 12040)
    assert answer.nodes == dict.fromkeys(("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1"), 0) | {
        "/dev/dxg": 2
    }
    first, second = answer.gpus
    assert (first.uuid, first.address, first.name, first.codes) == (UUID, ADDRESS, "NVIDIA Stub 0", {})
    assert (first.temperature_celsius, first.pstate, first.pcie_generation, first.pcie_max_width) == (45, 8, 1, 16)
    assert (first.memory_total_bytes, first.memory_free_bytes) == (16 * 2**30, 15 * 2**30)
    assert (second.uuid, second.processes) == (UUID_1, [Process(pid=4242, used_bytes=15 * 2**30)])


def test_a_sound_machine_gives_the_first_gpu_by_its_name(machine):
    found = run(machine)
    assert {check.name: check.status for check in found.checks if check.status not in ("pass", "skip")} == {}
    assert checks(found)["pcie.gen"].message == "generation 1 of 4: idle downshift"
    assert (found.cuda_device, found.device, found.fallback, found.owes_context) == (UUID, "auto", "", True)
    (first, second) = found.gpus
    assert (first.is_chosen, second.is_chosen) == (True, False)
    assert (first.name, first.driver_version, first.kernel_module) == ("NVIDIA Stub 0", "550.54.15", "550.54.15")
    assert (first.pcie_generation, first.pcie_max_generation, first.pcie_width) == (1, 4, 16)


FAULTS = [
    ("gpu.present", {}, {"min_gpus": 3}, "fail"),
    ("driver.nvml", {"NVML_CODE_nvmlInitWithFlags": "9"}, {}, "fail"),
    ("driver.nvml", {"NVML_CODE_nvmlInitWithFlags": "17"}, {}, "fail"),
    ("driver.nvml", {"NVML_CODE_nvmlInitWithFlags": "18"}, {}, "fail"),
    ("driver.nvml", {"NVML_CODE_nvmlInitWithFlags": "4"}, {}, "unknown"),
    ("driver.nvml", {"NVML_CODE_nvmlInitWithFlags": "28"}, {}, "skip"),
    ("driver.nvml", {"NVML_CODE_nvmlDeviceGetCount": "999"}, {}, "unknown"),
    ("driver.nvml", {"NVML_VALUE_count": "0"}, {}, "skip"),
    ("driver.version", {"NVML_VALUE_driver": "535.104.05"}, {}, "fail"),
    ("driver.version", {"NVML_VALUE_cuda": "11080"}, {}, "fail"),
    ("driver.version", {"NVML_CODE_nvmlSystemGetDriverVersion": "999"}, {}, "unknown"),
    ("gpu.handle", {"NVML_CODE_nvmlDeviceGetHandleByIndex_0": "15"}, {}, "fail"),
    ("gpu.handle", {"NVML_CODE_nvmlDeviceGetHandleByIndex_0": "16"}, {}, "fail"),
    ("gpu.handle", {"NVML_CODE_nvmlDeviceGetHandleByIndex_1": "15"}, {}, "warn"),
    ("gpu.handle", {"NVML_VALUE_instances": "0"}, {}, "fail"),
    ("gpu.compute_mode", {"NVML_VALUE_compute_mode": "2"}, {}, "fail"),
    ("gpu.compute_mode", {"NVML_VALUE_compute_mode": "3", "NVML_VALUE_pid": "4242"}, {}, "fail"),
    ("gpu.memory_free", {"NVML_VALUE_memory_free": "104857600", "NVML_VALUE_pid": "4242"}, {}, "fail"),
    ("gpu.memory_free", {"NVML_CODE_nvmlDeviceGetMemoryInfo": "3"}, {}, "pass"),
    ("gpu.memory_free", {"NVML_VALUE_instances": "1", "NVML_VALUE_instance_free": "104857600"}, {}, "fail"),
    ("gpu.memory_free", {"NVML_VALUE_instances": "1", "NVML_VALUE_memory_free": "104857600"}, {}, "pass"),
    ("gpu.temperature", {"NVML_VALUE_temperature": "91"}, {}, "fail"),
    ("gpu.temperature", {"NVML_VALUE_temperature": "85"}, {}, "warn"),
    ("gpu.temperature", {"NVML_VALUE_margin": "3"}, {}, "fail"),
    ("gpu.throttle", {"NVML_VALUE_reasons": "0x48"}, {}, "warn"),
    ("pcie.width", {"NVML_VALUE_width": "4"}, {}, "warn"),
    ("pcie.width", {"NVML_VALUE_width": "4"}, {"min_width": 8}, "fail"),
    ("pcie.gen", {"NVML_VALUE_pstate": "0"}, {}, "warn"),
    ("pcie.gen", {"NVML_VALUE_pstate": "0"}, {"min_gen": 3}, "fail"),
    ("gpu.ecc_uncorrected", {"NVML_VALUE_ecc_errors": "1"}, {}, "fail"),
    ("gpu.ecc_uncorrected", {"NVML_VALUE_sram_errors": "1"}, {}, "fail"),
    ("gpu.ecc_uncorrected", {"NVML_VALUE_ecc": "0", "NVML_VALUE_ecc_errors": "1"}, {}, "skip"),
    ("gpu.row_remap", {"NVML_VALUE_remap_pending": "1"}, {}, "fail"),
    ("gpu.row_remap", {"NVML_VALUE_remap_failed": "1"}, {}, "fail"),
    ("gpu.retired_pages", {"NVML_VALUE_retirement_pending": "1"}, {}, "fail"),
    ("gpu.retired_pages", {"NVML_VALUE_retired": "60"}, {}, "warn"),
    ("gpu.recovery_action", {"NVML_VALUE_recovery": "1"}, {}, "fail"),
    ("gpu.recovery_action", {"NVML_CODE_recovery_field": "3"}, {}, "skip"),
    ("gpu.recovery_action", {"NVML_CODE_recovery_field": "2"}, {}, "skip"),
    ("gpu.persistence", {"NVML_VALUE_persistence": "0"}, {}, "warn"),
    ("gpu.compute_mode", {"NVML_CODE_nvmlDeviceGetComputeMode": "3"}, {}, "skip"),
    ("gpu.temperature", {"NVML_CODE_nvmlDeviceGetTemperature": "4", "NVML_CODE_nvmlDeviceGetMarginTemperature": "4"},
     {}, "unknown"),
    ("gpu.throttle", {"NVML_CODE_nvmlDeviceGetCurrentClocksEventReasons": "15",
                      "NVML_CODE_nvmlDeviceGetCurrentClocksThrottleReasons": "15"}, {}, "fail"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "environment", "config", "status"), FAULTS)
def test_a_fault_of_the_driver_or_the_card_is_found(machine, monkeypatch, name, environment, config, status):
    for key, text in environment.items():
        monkeypatch.setenv(key, text)
    found = run(machine, **config)
    assert checks(found)[name].status == status, checks(found)[name]
    others = [
        check.name for check in found.checks if check.status in ("fail", "warn", "unknown") and check.name != name
    ]
    assert others == [], "one fault is said once"
    assert bool(found.fallback) == (status == "fail")
    assert found.device == ("cpu" if status == "fail" else "auto")


def test_a_gpu_that_has_cooled_down_is_taken_again(machine, monkeypatch):
    monkeypatch.setenv("NVML_VALUE_temperature", "91")
    with pytest.raises(HostError, match="gpu.temperature: 91 C, the limit is 90"):
        preflight.require(run(machine, "cuda"))
    monkeypatch.setenv("NVML_VALUE_temperature", "60")
    found = run(machine, "cuda")
    preflight.require(found)
    assert (found.device, found.cuda_device) == ("cuda", UUID)


def test_a_bus_with_a_card_that_the_driver_does_not_have_is_a_machine_without_a_gpu(machine, monkeypatch):
    """As in a container that sees the host's bus and was given no device."""
    monkeypatch.setenv("NVML_CODE_nvmlInitWithFlags", "28")
    found = run(machine)
    assert (found.device, found.fallback, found.owes_context, found.cuda_device) == ("auto", "", False, "")
    with pytest.raises(HostError, match="driver.nvml: the driver sees no GPU, but device is cuda"):
        preflight.require(run(machine, "cuda"))


def test_the_machines_own_faults_are_found_through_the_same_door(machine):
    (machine / "dev/nvidiactl").unlink()
    assert checks(run(machine))["driver.device_nodes"].status == "fail"
    (machine / "dev/nvidiactl").mkdir()  # is there and can not be opened
    assert "EISDIR" in checks(run(machine))["driver.device_nodes"].message
    (machine / "proc/driver/nvidia/version").unlink()
    (machine / "sys/module/nvidia/version").unlink()
    (machine / "sys/module/nvidia").rmdir()
    (machine / "sys/module/nouveau").mkdir()
    assert "nouveau" in checks(run(machine))["driver.kernel_module"].message


def test_an_xid_of_the_chosen_card_is_found_in_the_kernels_log(machine):
    (machine / "dev/kmsg").write_text("4,7,99990000000,-;NVRM: Xid (PCI:0000:65:00): 79, pid=1, off the bus\n")
    assert checks(run(machine))["gpu.xid"].status == "fail"
    (machine / "dev/kmsg").write_text("4,7,99990000000,-;NVRM: Xid (PCI:0000:66:00): 79, pid=1, off the bus\n")
    assert checks(run(machine))["gpu.xid"].status == "pass"


def test_what_an_old_driver_can_not_tell_is_skipped(machine, monkeypatch):
    monkeypatch.setenv("RETRAIND_NVML_LIB", str(library(old=True)))
    found = checks(run(machine))
    assert {found[name].status for name in ("gpu.row_remap", "gpu.recovery_action")} == {"skip"}
    assert "too old" in found["gpu.row_remap"].message
    assert {found[name].status for name in ("gpu.throttle", "gpu.temperature", "gpu.memory_free")} == {"pass"}


@pytest.mark.parametrize(
    ("visible", "device"),
    [("1", UUID_1), (f"{UUID_1},0", UUID_1), ("0,0", UUID), ("GPU-00000001", UUID_1)],
)
def test_the_operators_choice_is_checked_and_handed_on_by_name(machine, monkeypatch, visible, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("NVML_CODE_nvmlDeviceGetHandleByIndex_" + ("0" if device == UUID_1 else "1"), "15")
    found = run(machine)
    assert (found.cuda_device, checks(found)["gpu.handle"].status) == (device, "warn")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    preflight.expose(found)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == (device, "PCI_BUS_ID")


def test_a_gpu_that_is_cut_up_is_given_by_its_first_instance(machine, monkeypatch):
    monkeypatch.setenv("NVML_VALUE_instances", "2")
    assert run(machine).cuda_device == "MIG-00000000-0000-0000-0000-000000000000"


# What a library that can not be loaded leaves to the second source.
GOOD_ROW = (
    f"0, {UUID}, NVIDIA GeForce RTX 3060, 00000000:65:00.0, 550.54.15, 12288, 11900, 41, P8, 0, Default, Enabled, "
    "1, 4, 16, 16, 0x0000000000000001, [N/A], [N/A]"
)
ROW_1 = GOOD_ROW.replace(UUID, UUID_1).replace("0, ", "1, ", 1).replace(":65:", ":66:")


@pytest.fixture
def smi_only(machine, tmp_path, monkeypatch):
    """A machine without NVML's library; gives the root, and a function that sets what nvidia-smi does."""
    monkeypatch.setenv("RETRAIND_NVML_LIB", str(tmp_path / "nowhere.so"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def says(script):
        smi(tmp_path / "bin", script)
        return machine

    return says


def printing(*lines, end="\\n"):
    return f"printf '%s{end}' " + " ".join(f"'{line}'" for line in lines)


def test_nvidia_smi_is_the_second_source(smi_only):
    root = smi_only(printing(GOOD_ROW))
    found = run(root)
    assert checks(found)["driver.nvml"].message == "nvidia-smi answers, 1 GPU"
    assert (found.cuda_device, found.fallback) == (UUID, "")
    assert {name for name, check in checks(found).items() if check.status in ("fail", "warn", "unknown")} == set()
    (gpu,) = found.gpus
    assert (gpu.name, gpu.temperature_celsius, gpu.memory_free_bytes) == ("NVIDIA GeForce RTX 3060", 41, 11900 * 2**20)
    assert checks(found)["gpu.ecc_uncorrected"].status == "skip"


def test_two_gpus_with_the_line_ends_of_windows_and_a_blank_line(smi_only, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    root = smi_only(printing(GOOD_ROW, ROW_1, "", end="\\r\\n"))
    found = run(root)
    assert ([gpu.uuid for gpu in found.gpus], found.cuda_device) == ([UUID, UUID_1], UUID_1)
    assert found.gpus[1].driver_version == "550.54.15"


@pytest.mark.parametrize("spelling", ["[N/A]", "N/A", "[Not Supported]", "Not Supported"])
def test_what_a_card_does_not_have_is_skipped_however_it_is_spelled(smi_only, spelling):
    root = smi_only(printing(f"0, {UUID}, Card, 00000000:65:00.0, 550.54.15, " + ", ".join([spelling] * 14)))
    found = run(root)
    assert {check.status for check in found.checks} <= {"pass", "skip"}
    assert checks(found)["gpu.memory_free"].message == "8192 MiB available of the memory that it shares with the host"
    assert (found.gpus[0].temperature_celsius, found.gpus[0].pstate) == (None, None)


@pytest.mark.parametrize("spelling", ["[Unknown Error]", "ERR!", "", "nan", "inf", "many", "[GPU access blocked]"])
def test_what_can_not_be_told_is_unknown_however_it_is_spelled(smi_only, spelling):
    root = smi_only(printing(f"0, {UUID}, Card, 00000000:65:00.0, 550.54.15, " + ", ".join([spelling] * 14)))
    found = checks(run(root))
    assert {found[name].status for name in ("gpu.temperature", "gpu.compute_mode", "gpu.throttle")} == {"unknown"}
    assert found["gpu.memory_free"].status == "unknown"


def test_a_lost_card_is_lost_also_in_csv(smi_only):
    root = smi_only(printing(f"0, {UUID}, Card, 00000000:65:00.0, 550.54.15, " + ", ".join(["[GPU is lost]"] * 14)))
    assert checks(run(root))["gpu.temperature"].status == "fail"


def test_a_row_that_breaks_off_leaves_the_rest_unknown(smi_only):
    root = smi_only(printing(f"0, {UUID}, Card, 00000000:65:00.0, 550.54.15, 12288, 11"))
    found = checks(run(root))
    assert (found["gpu.handle"].status, found["gpu.temperature"].status) == ("pass", "unknown")


def test_noise_is_no_gpu(smi_only):
    root = smi_only(f"echo 'Failed to initialize something' >&2; {printing('WARNING: infoROM is corrupted', GOOD_ROW)}")
    assert [gpu.index for gpu in run(root).gpus] == [0]


@pytest.mark.parametrize(
    ("status", "verdict"), [(9, "fail"), (15, "fail"), (18, "fail"), (6, "skip"), (200, "unknown")]
)
def test_its_exit_status_is_the_librarys_code(smi_only, status, verdict):
    root = smi_only(f"echo 'NVIDIA-SMI has failed'; exit {status}")
    assert checks(run(root))["driver.nvml"].status == verdict


def test_a_field_that_a_version_does_not_know_is_left_out(smi_only):
    field = "clocks_throttle_reasons.active"
    shorter = GOOD_ROW.replace("0x0000000000000001, ", "")
    root = smi_only(
        f'case "$1" in *{field}*) echo \'Field "{field}" is not a valid field to query.\'; exit 2;; esac\n'
        + printing(shorter)
    )
    found = run(root)
    assert checks(found)["gpu.throttle"].status == "skip"
    assert (found.gpus[0].pcie_width, checks(found)["gpu.ecc_uncorrected"].status) == (16, "skip")


def test_a_field_of_nobodys_is_not_asked_without_for_ever(smi_only):
    root = smi_only("echo 'Field \"x\" is not a valid field to query.'; exit 2")
    assert checks(run(root))["driver.nvml"].status == "unknown"
    assert nvidia_smi.refused_field('Field "pstate" is not a valid field to query.') == "pstate"


def test_without_any_source_torch_is_left_to_see(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("RETRAIND_NVML_LIB", str(tmp_path / "nowhere.so"))
    found = run(machine)
    assert checks(found)["driver.nvml"].status == "unknown"
    assert "neither NVML nor nvidia-smi" in checks(found)["driver.nvml"].message
    assert (found.device, found.cuda_device, found.owes_context, found.gpus) == ("auto", "", True, [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    preflight.expose(found)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0", "what the operator set is left alone"


def test_a_library_that_hangs_is_given_up_and_its_process_ended(machine, monkeypatch):
    monkeypatch.setenv("NVML_CODE_nvmlInitWithFlags", "hang")
    found = run(machine, deadline_seconds=2.0)
    assert "unresponsive" in checks(found)["driver.nvml"].message
    assert found.fallback
    assert probe._abandoned == []
    monkeypatch.delenv("NVML_CODE_nvmlInitWithFlags")
    assert not run(machine).fallback, "the next one asks anew"


def test_an_nvidia_smi_that_hangs_is_given_up(smi_only):
    root = smi_only("exec sleep 3600")
    assert "unresponsive" in checks(run(root, deadline_seconds=2.0))["driver.nvml"].message


def test_no_second_probe_is_started_while_the_first_is_stuck(machine, monkeypatch):
    """A process in the driver does not end by SIGKILL either: here the signal is what does not arrive."""
    monkeypatch.setenv("NVML_CODE_nvmlInitWithFlags", "hang")
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", lambda self: None)
        patched.setattr(probe, "_KILL_SECONDS", 0.1)
        assert ask(machine, SHORT).silence == "timeout"
        (stuck,) = probe._abandoned
    try:
        started = []
        with monkeypatch.context() as patched:
            patched.setattr(probe, "_run", lambda *arguments: started.append(arguments))
            assert ask(machine, SHORT).silence == "stuck"
            assert ask(machine, SHORT).silence == "stuck"
        assert started == []
        assert stuck.poll() is None
    finally:
        os.kill(stuck.pid, signal.SIGKILL)
        stuck.wait()
        probe._abandoned.clear()
    monkeypatch.delenv("NVML_CODE_nvmlInitWithFlags")
    assert ask(machine).silence == "", "when it has ended, the driver is asked again"


def test_a_probe_of_another_process_is_waited_for(machine):
    descriptor = os.open(machine / probe.LOCK_NAME, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    waits_from = time.monotonic()
    assert ask(machine, SHORT).silence == "stuck"
    assert time.monotonic() - waits_from >= SHORT
    os.close(descriptor)
    assert ask(machine).silence == ""


def test_the_lock_is_open_to_the_service_whoever_makes_it_first(machine):
    before = os.umask(0o077)
    try:
        ask(machine)
    finally:
        os.umask(before)
    assert (machine / probe.LOCK_NAME).stat().st_mode & 0o777 == 0o644


def test_a_lock_that_can_not_be_made_keeps_nothing_from_being_asked(machine):
    assert probe.ask(machine / "nowhere", machine, LONG).code == 0


def test_every_question_of_the_library_has_its_name_in_the_second_source():
    from retraind.worker import nvml

    told = {nvidia_smi.QUESTION_OF.get(fact, fact) for fact, _ in nvidia_smi.FIELDS.values()}
    assert set(nvml.QUESTIONS) == (told | set(nvidia_smi.NOT_ASKED)) - {"index", "driver_version"}


def test_nothing_is_asked_of_a_machine_without_a_gpu_or_for_a_job_on_the_cpu(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(probe, "_run", lambda *_: pytest.fail("a driver was asked"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(empty).device == "auto"
    assert list(empty.iterdir()) == []
    assert {check.message for check in run(machine, "cpu").checks[4:]} == {"device is cpu"}


def test_no_setting_is_changed():
    """The sources as they are: no call that sets, resets or clears, and no option of nvidia-smi but its query."""
    from pathlib import Path

    from retraind.worker import nvml

    asked = Path(nvml.__file__).read_text()
    assert not [
        word for word in ("nvmlDeviceSet", "nvmlDeviceClear", "nvmlDeviceReset", "nvmlDeviceFreeze") if word in asked
    ]
    assert [option.partition("=")[0] for option in nvidia_smi.command(["uuid"])] == [
        "nvidia-smi",
        "--query-gpu",
        "--format",
    ]
    assert len(gpu_verdicts.CHECKS) == 19
