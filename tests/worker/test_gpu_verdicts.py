"""Every row of the preflight's table, from written-down facts: what passes, what fails, and what is said."""

import errno
from dataclasses import replace

import msgspec
import pytest

from retraind import events
from retraind.config import PreflightConfig
from retraind.report import Check
from retraind.worker import gpu_verdicts, nvml_codes
from retraind.worker.gpu_facts import Answer, GpuFacts, Link, Machine, Process, Xid
from retraind.worker.situation import CONTEXT_BYTES, MIB, Situation

ADDRESS = "0000:65:00.0"
GPU = GpuFacts(
    index=0,
    uuid="GPU-0000",
    name="NVIDIA Stub",
    pci_address="00000000:65:00.0",
    compute_mode=0,
    memory_total_bytes=16384 * MIB,
    memory_free_bytes=16000 * MIB,
    processes=[],
    temperature_celsius=45,
    slowdown_celsius=98,
    margin_celsius=40,
    pstate=8,
    utilization_percent=0,
    event_reasons=1,
    pcie_generation=4,
    pcie_max_generation=4,
    pcie_width=16,
    pcie_max_width=16,
    is_ecc_on=True,
    num_ecc_uncorrected=0,
    num_ecc_sram=0,
    num_remapped_rows=0,
    num_retired_pages=0,
    recovery_action=0,
    is_persistent=True,
)
NODES = {"/dev/nvidiactl": 0, "/dev/nvidia0": 0, "/dev/nvidia-uvm": 0, "/dev/dxg": errno.ENOENT}
ANSWER = Answer(source="nvml", driver_version="550.54.15", cuda_version=12040, gpus=[GPU], nodes=NODES)
MACHINE = Machine(
    addresses=(ADDRESS,), module_version="550.54.15", is_module_loaded=True, xids=(), memory_available=8192 * MIB
)
WELL = Situation(device="cuda", config=PreflightConfig(), machine=MACHINE, answer=ANSWER, torch_cuda="12.4")


def with_gpu(codes=(), **changes):
    """A situation whose GPU differs; a fact that is refused has its code and no value."""
    gpu = msgspec.structs.replace(GPU, codes=dict(codes), **changes)
    return replace(WELL, answer=msgspec.structs.replace(ANSWER, gpus=[gpu]))


def with_answer(**changes):
    return replace(WELL, answer=msgspec.structs.replace(ANSWER, **changes))


def with_machine(**changes):
    return replace(WELL, machine=replace(MACHINE, **changes))


def with_nodes(**changes):
    return with_answer(nodes={**NODES, **{f"/dev/{name.replace('_', '-')}": code for name, code in changes.items()}})


def configured(situation, **changes):
    return replace(situation, config=PreflightConfig(**changes))


def on_cpu_too(situation):
    return replace(situation, device="auto")


def judge(name, situation):
    (found,) = [check for check in gpu_verdicts.judge(situation) if check.name == name]
    return found


SECOND = msgspec.structs.replace(GPU, index=1, uuid="GPU-1111", pci_address="00000000:66:00.0")
LOST = GpuFacts(index=0, code=15)
NO_BUS = {"addresses": (), "module_version": "", "is_module_loaded": False}
FOREIGN = [Process(pid=4242, used_bytes=15900 * MIB)]
RESTING = {"pcie_generation": 1, "pstate": 8, "utilization_percent": 0}
ROWS = [
    ("gpu.present", WELL, "pass", ADDRESS),
    ("gpu.present", with_machine(**NO_BUS), "fail", "device is cuda"),
    ("gpu.present", on_cpu_too(with_machine(**NO_BUS)), "skip", "training on the CPU"),
    ("gpu.present", with_machine(addresses=None), "fail", "can not be read"),
    ("gpu.present", on_cpu_too(with_machine(addresses=None)), "unknown", "can not be read"),
    ("gpu.present", configured(WELL, min_gpus=2), "fail", "min_gpus is 2"),
    ("gpu.present", with_machine(**NO_BUS, platform="wsl"), "pass", "wsl"),
    ("gpu.present", with_machine(**NO_BUS, platform="jetson"), "pass", "jetson"),
    ("gpu.present", replace(WELL, visible=""), "fail", "CUDA_VISIBLE_DEVICES hides every GPU"),
    ("gpu.present", on_cpu_too(replace(WELL, visible="-1")), "skip", "hides every GPU"),
    ("driver.kernel_module", WELL, "pass", "550.54.15"),
    ("driver.kernel_module", with_machine(module_version=""), "pass", "nvidia is loaded"),
    ("driver.kernel_module", with_machine(module_version="", is_module_loaded=False), "fail", "not loaded"),
    (
        "driver.kernel_module",
        with_machine(module_version="", is_module_loaded=False, is_nouveau_loaded=True),
        "fail",
        "nouveau is",
    ),
    ("driver.kernel_module", with_machine(bound_drivers={ADDRESS: "nouveau"}), "fail", "nouveau has the GPU"),
    ("driver.kernel_module", with_machine(bound_drivers={ADDRESS: "nvidia"}, is_nouveau_loaded=True), "pass", "550"),
    ("driver.kernel_module", with_machine(**NO_BUS, platform="wsl"), "skip", "Windows"),
    ("driver.kernel_module", with_machine(**NO_BUS, platform="jetson"), "pass", "nvgpu"),
    ("driver.device_nodes", WELL, "pass", "/dev/nvidia0"),
    ("driver.device_nodes", with_nodes(nvidiactl=errno.EPERM), "fail", "/dev/nvidiactl (EPERM)"),
    ("driver.device_nodes", with_nodes(nvidia0=errno.EACCES), "fail", "/dev/nvidia0 (EACCES)"),
    ("driver.device_nodes", with_nodes(nvidia1=errno.EACCES), "warn", "/dev/nvidia1 (EACCES)"),
    ("driver.device_nodes", with_answer(nodes={"/dev/nvidiactl": 0}), "fail", "/dev/nvidia0 (ENOENT)"),
    ("driver.device_nodes", with_nodes(nvidia_uvm=errno.ENOENT), "warn", "first use of CUDA"),
    ("driver.device_nodes", with_answer(nodes={}), "unknown", "did not come to an end"),
    (
        "driver.device_nodes",
        replace(with_machine(**NO_BUS, platform="wsl"), answer=with_nodes(dxg=0).answer),
        "pass",
        "dxg",
    ),
    ("driver.device_nodes", with_machine(**NO_BUS, platform="wsl"), "fail", "/dev/dxg (ENOENT)"),
    ("driver.device_nodes", with_machine(**NO_BUS, platform="jetson"), "skip", "Jetson"),
    ("driver.nvml", WELL, "pass", "nvml answers"),
    ("driver.nvml", with_answer(code=9), "fail", "not loaded"),
    ("driver.nvml", with_answer(code=10), "fail", "interrupt"),
    ("driver.nvml", with_answer(code=17), "fail", "blocks access"),
    ("driver.nvml", with_answer(code=18), "fail", "different versions"),
    ("driver.nvml", with_answer(code=4), "unknown", "no permission"),
    ("driver.nvml", with_answer(source="", code=12), "unknown", "neither NVML nor nvidia-smi"),
    ("driver.nvml", with_answer(code=999), "unknown", "no reason"),
    ("driver.nvml", with_answer(code=4711), "unknown", "code 4711"),
    ("driver.nvml", with_answer(code=28), "fail", "sees no GPU, but device is cuda"),
    ("driver.nvml", on_cpu_too(with_answer(code=28)), "skip", "sees no GPU: training on the CPU"),
    ("driver.nvml", with_answer(gpus=[]), "fail", "sees no GPU"),
    ("driver.nvml", with_answer(silence="timeout"), "fail", "unresponsive: no answer in time (5 s)"),
    ("driver.nvml", with_answer(silence="stuck"), "fail", "unresponsive: an earlier probe still hangs"),
    ("driver.version", WELL, "pass", "550.54.15, CUDA 12"),
    ("driver.version", with_answer(driver_version="535.1"), "fail", "535.1, the kernel module is of 550.54.15"),
    ("driver.version", replace(WELL, torch_cuda="13.0"), "fail", "built for CUDA 13.0"),
    ("driver.version", replace(WELL, torch_cuda="12.9"), "pass", "CUDA 12"),
    ("driver.version", replace(WELL, torch_cuda=None), "pass", "CUDA 12"),
    ("driver.version", with_answer(cuda_version=None), "pass", "550.54.15"),
    ("driver.version", with_answer(driver_version=""), "unknown", "does not tell"),
    ("gpu.handle", WELL, "pass", "NVIDIA Stub"),
    ("gpu.handle", with_answer(gpus=[LOST, SECOND]), "fail", "GPU 0: the GPU is lost"),
    ("gpu.handle", with_answer(gpus=[GpuFacts(index=0, code=16)]), "fail", "needs a reset"),
    ("gpu.handle", with_answer(gpus=[GPU, GpuFacts(index=1, code=15)]), "warn", "GPU 1: the GPU is lost"),
    ("gpu.handle", replace(with_answer(gpus=[LOST, SECOND]), visible="GPU-1111"), "warn", "GPU 1 answers; GPU 0"),
    ("gpu.handle", with_gpu({"uuid": 15}, uuid=""), "fail", "is lost"),
    ("gpu.handle", with_gpu({"uuid": 3}, uuid=""), "pass", "GPU 0"),
    ("gpu.handle", with_answer(gpus=[GpuFacts(index=0, code=4)]), "unknown", "no permission"),
    ("gpu.handle", replace(WELL, visible="7"), "fail", "CUDA_VISIBLE_DEVICES=7 names no GPU"),
    ("gpu.handle", with_gpu(mig_uuids=[]), "fail", "MIG on and no instance"),
    ("gpu.handle", with_gpu(mig_uuids=["MIG-1"]), "pass", "GPU 0"),
    ("gpu.compute_mode", WELL, "pass", "shared"),
    ("gpu.compute_mode", with_gpu(compute_mode=2), "fail", "prohibited"),
    ("gpu.compute_mode", with_gpu(compute_mode=3), "pass", "exclusive"),
    ("gpu.compute_mode", with_gpu(compute_mode=3, processes=FOREIGN), "fail", "pid 4242"),
    ("gpu.compute_mode", with_gpu({"compute_mode": 3}, compute_mode=None), "skip", "not supported"),
    ("gpu.memory_free", WELL, "pass", "16000 MiB free"),
    ("gpu.memory_free", with_gpu(memory_free_bytes=100 * MIB, processes=FOREIGN), "fail", "100 MiB free, 600 needed"),
    ("gpu.memory_free", with_gpu(memory_free_bytes=100 * MIB, processes=FOREIGN), "fail", "pid 4242 (15900 MiB)"),
    ("gpu.memory_free", with_gpu(memory_free_bytes=599 * MIB), "fail", "599 MiB"),
    ("gpu.memory_free", with_gpu(memory_free_bytes=600 * MIB), "pass", "600 MiB"),
    ("gpu.memory_free", replace(with_gpu(memory_free_bytes=600 * MIB), need_bytes=CONTEXT_BYTES * 2), "fail", "1200"),
    ("gpu.memory_free", replace(with_gpu(memory_free_bytes=511 * MIB), need_bytes=MIB), "fail", "512 needed"),
    ("gpu.memory_free", with_gpu({"memory": 3}, memory_free_bytes=None), "pass", "8192 MiB available"),
    ("gpu.memory_free", with_gpu({"memory": 4}, memory_free_bytes=None), "unknown", "no permission"),
    ("gpu.memory_free", with_gpu(mig_uuids=["MIG-1"], mig_free_bytes={"MIG-1": 99 * MIB}), "fail", "99 MiB free"),
    ("gpu.temperature", WELL, "pass", "45 C"),
    ("gpu.temperature", with_gpu(temperature_celsius=79), "pass", "79 C"),
    ("gpu.temperature", with_gpu(temperature_celsius=80), "warn", "80 C, the limit is 90"),
    ("gpu.temperature", with_gpu(temperature_celsius=91), "fail", "91 C, the limit is 90"),
    ("gpu.temperature", with_gpu(temperature_celsius=89, slowdown_celsius=94), "fail", "the limit is 89"),
    ("gpu.temperature", configured(with_gpu(temperature_celsius=75), max_temperature_celsius=70), "fail", "is 70"),
    ("gpu.temperature", with_gpu(margin_celsius=5), "fail", "5 C below the card's own slowdown"),
    ("gpu.temperature", with_gpu(margin_celsius=-2), "fail", "-2 C"),
    ("gpu.temperature", with_gpu(temperature_celsius=None), "pass", "40 C below"),
    (
        "gpu.temperature",
        with_gpu({"temperature": 3, "margin": 13}, temperature_celsius=None, margin_celsius=None),
        "skip",
        "not supported",
    ),
    ("gpu.throttle", with_gpu(event_reasons=0x5), "pass", "0x5"),
    ("gpu.throttle", with_gpu(event_reasons=0x48), "warn", "hardware slowdown, hardware thermal slowdown"),
    ("gpu.throttle", with_gpu(event_reasons=0x80), "warn", "power brake"),
    ("gpu.throttle", with_gpu(event_reasons=0x20), "warn", "software thermal"),
    ("gpu.throttle", with_gpu(event_reasons=0x400 | 0x117), "pass", "0x517"),
    ("gpu.throttle", with_gpu({"event_reasons": 13}, event_reasons=None), "skip", "too old"),
    ("pcie.width", WELL, "pass", "width 16 of 16"),
    ("pcie.width", with_gpu(pcie_width=4), "warn", "width 4 of 16"),
    ("pcie.width", configured(with_gpu(pcie_width=4), min_width=8), "fail", "min_width is 8"),
    ("pcie.width", configured(with_gpu(pcie_width=8), min_width=8), "warn", "width 8 of 16"),
    ("pcie.width", replace(with_gpu(pcie_width=8), machine=replace(MACHINE, links={ADDRESS: Link(max_width=8)})),
     "pass", "width 8 of 8"),
    ("pcie.width", replace(with_gpu(pcie_width=None), machine=replace(MACHINE, links={ADDRESS: Link(width=4)})),
     "warn", "width 4 of 16"),
    ("pcie.width", with_gpu({"pcie_width": 3}, pcie_width=None), "skip", "not supported"),
    ("pcie.gen", WELL, "pass", "generation 4 of 4"),
    ("pcie.gen", with_gpu(**RESTING), "skip", "generation 1 of 4: idle downshift"),
    ("pcie.gen", configured(with_gpu(**RESTING), min_gen=3), "skip", "idle downshift"),
    ("pcie.gen", with_gpu(**RESTING | {"pstate": 0}), "warn", "generation 1 of 4 under load"),
    ("pcie.gen", with_gpu(**RESTING | {"utilization_percent": 1}), "warn", "under load"),
    ("pcie.gen", configured(with_gpu(**RESTING | {"pstate": 2}), min_gen=3), "fail", "min_gen is 3"),
    ("pcie.gen", with_gpu({"pcie_generation": 3}, pcie_generation=None), "skip", "not supported"),
    ("gpu.ecc_uncorrected", WELL, "pass", "no uncorrected"),
    ("gpu.ecc_uncorrected", with_gpu(num_ecc_uncorrected=2), "fail", "2 uncorrected"),
    ("gpu.ecc_uncorrected", with_gpu(num_ecc_sram=1), "fail", "1 uncorrected"),
    ("gpu.ecc_uncorrected", configured(with_gpu(num_ecc_uncorrected=2), ecc_errors="warn"), "warn", "2 uncorrected"),
    ("gpu.ecc_uncorrected", with_gpu(is_ecc_on=False, num_ecc_uncorrected=2), "skip", "off"),
    (
        "gpu.ecc_uncorrected",
        with_gpu({"ecc_uncorrected": 3}, is_ecc_on=None, num_ecc_uncorrected=None, num_ecc_sram=None),
        "skip",
        "not supported",
    ),
    ("gpu.row_remap", WELL, "pass", "0 rows"),
    ("gpu.row_remap", with_gpu(is_remap_pending=True), "fail", "waits for a reset"),
    ("gpu.row_remap", with_gpu(has_remap_failed=True), "fail", "could not be"),
    ("gpu.row_remap", with_gpu(num_remapped_rows=512), "pass", "512 rows"),
    ("gpu.row_remap", with_gpu(num_remapped_rows=513), "warn", "513 rows"),
    ("gpu.row_remap", with_gpu({"remapped_rows": 13}, num_remapped_rows=None), "skip", "too old"),
    ("gpu.retired_pages", WELL, "pass", "0 pages"),
    ("gpu.retired_pages", with_gpu(is_retirement_pending=True), "fail", "waits for a reset"),
    ("gpu.retired_pages", with_gpu(num_retired_pages=59), "pass", "59 pages"),
    ("gpu.retired_pages", with_gpu(num_retired_pages=60), "warn", "60 pages"),
    ("gpu.retired_pages", with_gpu({"retired_pages": 3}, num_retired_pages=None), "skip", "not supported"),
    ("gpu.recovery_action", WELL, "pass", "nothing"),
    ("gpu.recovery_action", with_gpu(recovery_action=1), "fail", "a reset"),
    ("gpu.recovery_action", with_gpu(recovery_action=2), "fail", "a reboot"),
    ("gpu.recovery_action", with_gpu(recovery_action=3), "warn", "action 3"),
    ("gpu.recovery_action", with_gpu({"recovery_action": 13}, recovery_action=None), "skip", "too old"),
    ("gpu.xid", WELL, "pass", "no Xid"),
    ("gpu.xid", with_machine(xids=None), "skip", "can not be read"),
    ("gpu.xid", with_machine(xids=(Xid("0000:65:00", 79, 60.0),)), "fail", "Xid 79"),
    ("gpu.xid", with_machine(xids=(Xid("0000:65:00", 63, 60.0),)), "warn", "Xid 63"),
    ("gpu.xid", with_machine(xids=(Xid("0000:65:00", 63, 1.0), Xid("0000:65:00", 119, 2.0))), "fail", "Xid 63, 119"),
    ("gpu.xid", with_machine(xids=tuple(Xid("0000:65:00", number, 1.0) for number in (13, 31, 43, 45))), "pass", "no"),
    ("gpu.xid", with_machine(xids=(Xid("0000:66:00", 79, 60.0),)), "pass", "no Xid"),
    ("gpu.xid", with_machine(xids=(Xid("0000:65:00", 79, 90_000.0),)), "pass", "no Xid"),
    ("gpu.persistence", WELL, "pass", "on"),
    ("gpu.persistence", with_gpu(is_persistent=False), "warn", "off"),
    ("gpu.persistence", with_gpu({"persistence": 3}, is_persistent=None), "skip", "not supported"),
    ("cuda.context", WELL, "skip", "by the worker"),
    ("cuda.context", replace(WELL, torch_cuda=""), "fail", "a build without CUDA"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "situation", "status", "says"), ROWS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_verdict_follows_from_the_facts(name, situation, status, says):
    check = judge(name, situation)
    assert (check.status, says in check.message) == (status, True), check
    assert check.remedy or status not in ("fail", "warn"), "what is not well has a remedy"


@pytest.mark.parametrize("name", [name for name, _, _ in gpu_verdicts.CHECKS])
def test_every_check_has_a_case_that_is_well_and_one_that_is_not(name):
    statuses = {status for row, _, status, _ in ROWS if row == name}
    assert statuses & {"pass", "skip"}
    assert statuses & {"fail", "warn"}


def test_the_checks_are_those_of_the_protocol_in_its_order():
    names = [check.name for check in gpu_verdicts.judge(WELL)]
    assert names == [name for name in events.CHECKS if not name.startswith("host.")]


def statuses(situation):
    return {check.name: (check.status, check.message) for check in gpu_verdicts.judge(situation)}


@pytest.mark.parametrize(
    ("situation", "blocker", "num_before"),
    [
        (with_machine(**NO_BUS), "gpu.present", 1),
        (on_cpu_too(with_machine(addresses=None)), "gpu.present", 1),
        (with_machine(module_version="", is_module_loaded=False), "driver.kernel_module", 2),
        (with_nodes(nvidiactl=errno.EPERM), "driver.device_nodes", 3),
        (with_answer(silence="timeout"), "driver.nvml", 4),
        (with_answer(driver_version="1.2"), "driver.version", 5),
        (with_answer(gpus=[LOST]), "gpu.handle", 6),
    ],
)
def test_what_follows_a_check_that_fails_is_blocked_by_it(situation, blocker, num_before):
    found = list(statuses(situation).values())
    assert all("blocked" not in message for _, message in found[:num_before])
    assert found[num_before:] == [("skip", f"blocked by {blocker}")] * (len(found) - num_before)


def test_a_fault_of_the_card_hides_no_other_and_blocks_nothing():
    found = statuses(with_gpu(temperature_celsius=95, num_ecc_uncorrected=1))
    assert [name for name, (status, _) in found.items() if status == "fail"] == [
        "gpu.temperature",
        "gpu.ecc_uncorrected",
    ]
    assert not any("blocked" in message for _, message in found.values())


def test_a_driver_that_can_not_be_asked_is_left_to_torch():
    found = statuses(with_answer(source="", code=12, gpus=[]))
    assert found["gpu.temperature"] == ("skip", "blocked by driver.nvml")
    assert found["cuda.context"] == ("skip", "made by the worker, once torch is loaded")


def test_device_cpu_looks_at_no_gpu():
    assert set(statuses(replace(WELL, device="cpu")).values()) == {("skip", "device is cpu")}


@pytest.mark.parametrize("code", [*nvml_codes.MEANINGS, 0, 1, 5000])
def test_every_code_has_a_verdict_and_what_is_broken_a_remedy(code):
    status, cause, remedy = nvml_codes.meaning(code)
    assert status in events.CHECK_STATUSES
    assert cause
    assert remedy or status == "skip"


def test_no_verdict_is_outside_of_the_closed_set():
    assert {judge(name, situation).status for name, situation, _, _ in ROWS} == set(events.CHECK_STATUSES)
    assert all(isinstance(check, Check) for check in gpu_verdicts.judge(WELL))
