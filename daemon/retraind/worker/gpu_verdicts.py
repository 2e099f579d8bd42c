"""The verdicts on the chosen GPU, and the order of all checks of driver and GPU: pure functions of the facts.

A check after one that takes the ground from under it is skipped as blocked by it. A refused question is judged by
NVML's code: what a card or driver does not have is skipped, what can not be told is unknown. No I/O, raises nothing.
"""

from collections.abc import Callable

from retraind.report import Check
from retraind.worker import driver_verdicts, nvml_codes
from retraind.worker.gpu_facts import GpuFacts, Link
from retraind.worker.situation import MIB, Situation, refused, verdict

MIN_FREE_BYTES = 512 * MIB
# What a batch needs is not known before the file is read: free memory is held to half as much again.
HEADROOM = 1.5
WARM_CELSIUS = 80
# A card that is so near to its own slowdown gets there in training.
MARGIN_CELSIUS = 5
COMPUTE_PROHIBITED, COMPUTE_EXCLUSIVE = 2, (1, 3)
THROTTLES = {
    0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "power brake",
}  # fmt: skip
# A card that rests lowers the generation of its link; in these states, or with work to do, it does not.
BUSY_PSTATES = range(3)
MAX_REMAPPED_ROWS, MAX_RETIRED_PAGES = 512, 60
RECOVERY_ACTIONS = {1: "a reset", 2: "a reboot", 4: "a drain and a reset", 6: "a reset of the bus", 7: "a reboot"}
# What the hardware did. The application's own faults (13, 31, 43, 45) say nothing of the card.
XIDS_FAIL = frozenset({79, 95, 119, 120})
XIDS_WARN = frozenset({48, 62, 63, 64, 74, 92, 94})
XID_SECONDS = 24 * 3600.0


def judge(situation: Situation) -> list[Check]:
    """One verdict for each check of driver and GPU, in order; the last, cuda.context, is the worker's to complete."""
    checks: list[Check] = []
    blocker = "device is cpu" if situation.device == "cpu" else ""
    for name, look, blocking in CHECKS:
        # A driver that can not be asked may well work: torch will see.
        is_blocked = blocker and not (name == "cuda.context" and checks[_NVML].status == "unknown")
        check = verdict(name, "skip", blocker) if is_blocked else look(name, situation)
        if check.status in blocking and not blocker:
            blocker = f"blocked by {name}"
        checks.append(check)
    return checks


def _compute_mode(name: str, situation: Situation) -> Check:
    gpu = situation.gpu
    if gpu.compute_mode is None:
        return refused(name, situation, "compute_mode")
    if gpu.compute_mode == COMPUTE_PROHIBITED:
        return verdict(name, "fail", "the compute mode is prohibited", f"nvidia-smi -i {gpu.index} -c DEFAULT")
    if gpu.compute_mode in COMPUTE_EXCLUSIVE:
        if gpu.processes:
            message = f"the compute mode is exclusive and {_list_processes(gpu)} has the GPU"
            return verdict(name, "fail", message, "it goes on when that process has ended")
        return verdict(name, "pass", "exclusive, and no other process is there")
    return verdict(name, "pass", "shared by all processes")


def _list_processes(gpu: GpuFacts) -> str:
    sizes = [
        f"pid {process.pid}" + (f" ({process.used_bytes // MIB} MiB)" if process.used_bytes is not None else "")
        for process in (gpu.processes or ())[:5]
    ]
    return ", ".join(sizes)


def _memory_free(name: str, situation: Situation) -> Check:
    """Of an instance its own; where card and host share their memory, the driver tells none and the host's counts."""
    gpu, needed = situation.gpu, max(MIN_FREE_BYTES, int(situation.need_bytes * HEADROOM))
    free, where = gpu.mig_free_bytes.get(situation.choice.device, gpu.memory_free_bytes), "free"
    if free is None and nvml_codes.meaning(gpu.codes.get("memory", 0))[0] == "skip":
        free, where = situation.machine.memory_available, "available of the memory that it shares with the host"
    if free is None:
        return refused(name, situation, "memory")
    if free < needed:
        users = _list_processes(gpu)
        message = f"{free // MIB} MiB {where}, {needed // MIB} needed" + (f"; in use by {users}" if users else "")
        return verdict(name, "fail", message, "end what uses it; the job starts when there is enough")
    return verdict(name, "pass", f"{free // MIB} MiB {where}")


def _temperature(name: str, situation: Situation) -> Check:
    gpu, limit = situation.gpu, situation.config.max_temperature_celsius
    if gpu.slowdown_celsius:
        limit = min(limit, gpu.slowdown_celsius - MARGIN_CELSIUS)
    remedy = "see to fans, airflow and dust; the job starts when it has cooled down"
    if gpu.margin_celsius is not None and gpu.margin_celsius <= MARGIN_CELSIUS:
        return verdict(name, "fail", f"{gpu.margin_celsius} C below the card's own slowdown", remedy)
    degrees = gpu.temperature_celsius
    if degrees is None:
        if gpu.margin_celsius is not None:
            return verdict(name, "pass", f"{gpu.margin_celsius} C below the card's own slowdown")
        return refused(name, situation, "temperature")
    if degrees >= limit:
        return verdict(name, "fail", f"{degrees} C, the limit is {limit}", remedy)
    if degrees >= WARM_CELSIUS:
        return verdict(name, "warn", f"{degrees} C, the limit is {limit}", "see to fans, airflow and dust")
    return verdict(name, "pass", f"{degrees} C")


def _throttle(name: str, situation: Situation) -> Check:
    """Power caps, idleness and clocks that somebody set are no fault; nor is a bit that is new."""
    reasons = situation.gpu.event_reasons
    if reasons is None:
        return refused(name, situation, "event_reasons")
    found = [text for bit, text in THROTTLES.items() if reasons & bit]
    if found:
        return verdict(
            name, "warn", f"slowed down: {', '.join(found)} ({reasons:#x})", "see to cooling and power supply"
        )
    return verdict(name, "pass", f"not slowed down ({reasons:#x})")


def _width(name: str, situation: Situation) -> Check:
    gpu, least = situation.gpu, situation.config.min_width
    link = situation.machine.links.get(gpu.address, Link())
    width = link.width if gpu.pcie_width is None else gpu.pcie_width
    limits = [limit for limit in (gpu.pcie_max_width, link.max_width) if limit]
    if width is None:
        return refused(name, situation, "pcie_width")
    message = f"width {width}" + (f" of {min(limits)}" if limits else "")
    if least is not None and width < least:
        return verdict(
            name, "fail", f"{message}, preflight.min_width is {least}", "reseat the card; check riser and slot"
        )
    if limits and width < min(limits):
        return verdict(
            name, "warn", f"{message}: copies to the GPU are slower", "reseat the card; check riser and slot"
        )
    return verdict(name, "pass", message)


def _generation(name: str, situation: Situation) -> Check:
    gpu, least = situation.gpu, situation.config.min_gen
    link = situation.machine.links.get(gpu.address, Link())
    generation = link.generation if gpu.pcie_generation is None else gpu.pcie_generation
    limits = [limit for limit in (gpu.pcie_max_generation, link.max_generation) if limit]
    if generation is None:
        return refused(name, situation, "pcie_generation")
    message = f"generation {generation}" + (f" of {min(limits)}" if limits else "")
    is_low = bool(limits) and generation < min(limits)
    is_refused = least is not None and generation < least
    if (is_low or is_refused) and not (gpu.pstate in BUSY_PSTATES or gpu.utilization_percent):
        return verdict(name, "skip", f"{message}: idle downshift")
    if is_refused:
        return verdict(
            name, "fail", f"{message} under load, preflight.min_gen is {least}", "check riser, slot and BIOS"
        )
    if is_low:
        return verdict(name, "warn", f"{message} under load", "check riser, slot and BIOS")
    return verdict(name, "pass", message)


def _ecc(name: str, situation: Situation) -> Check:
    gpu = situation.gpu
    if gpu.is_ecc_on is False:
        return verdict(name, "skip", "ECC is off")
    if gpu.num_ecc_uncorrected is None and gpu.num_ecc_sram is None:
        return refused(name, situation, "ecc_uncorrected")
    num_errors = max(gpu.num_ecc_uncorrected or 0, gpu.num_ecc_sram or 0)
    if num_errors:
        message = f"{num_errors} uncorrected errors since the driver was loaded"
        return verdict(
            name, situation.config.ecc_errors, message, "reset the GPU or reboot; replace it if they come again"
        )
    return verdict(name, "pass", "no uncorrected error since the driver was loaded")


def _row_remap(name: str, situation: Situation) -> Check:
    gpu = situation.gpu
    if gpu.num_remapped_rows is None:
        return refused(name, situation, "remapped_rows")
    message = f"{gpu.num_remapped_rows} rows of memory remapped"
    if gpu.has_remap_failed:
        return verdict(name, "fail", f"{message}, and one could not be", "replace the card")
    if gpu.is_remap_pending:
        return verdict(name, "fail", f"{message}, another waits for a reset", "reset the GPU or reboot")
    if gpu.num_remapped_rows > MAX_REMAPPED_ROWS:
        return verdict(name, "warn", message, "the spare rows run out: plan to replace the card")
    return verdict(name, "pass", message)


def _retired_pages(name: str, situation: Situation) -> Check:
    """How cards before those that remap rows put bad memory out of use."""
    gpu = situation.gpu
    if gpu.num_retired_pages is None:
        return refused(name, situation, "retired_pages")
    message = f"{gpu.num_retired_pages} pages of memory retired"
    if gpu.is_retirement_pending:
        return verdict(name, "fail", f"{message}, another waits for a reset", "reset the GPU or reboot")
    if gpu.num_retired_pages >= MAX_RETIRED_PAGES:
        return verdict(name, "warn", message, "plan to replace the card")
    return verdict(name, "pass", message)


def _recovery_action(name: str, situation: Situation) -> Check:
    action = situation.gpu.recovery_action
    if action is None:
        return refused(name, situation, "recovery_action")
    if action in RECOVERY_ACTIONS:
        remedy = "do it; nvidia-smi -q names it"
        return verdict(name, "fail", f"the driver asks for {RECOVERY_ACTIONS[action]}", remedy)
    if action:  # of links to other GPUs, which one GPU alone does not need, or new
        return verdict(name, "warn", f"the driver asks for action {action}", "nvidia-smi -q names it")
    return verdict(name, "pass", "the driver asks for nothing")


def _xid(name: str, situation: Situation) -> Check:
    xids, address = situation.machine.xids, situation.gpu.address.rpartition(".")[0]
    if xids is None:
        return verdict(name, "skip", "the kernel's log can not be read")
    recent = {xid.number for xid in xids if xid.age_seconds <= XID_SECONDS and address and xid.address == address}
    for status, numbers in (("fail", recent & XIDS_FAIL), ("warn", recent & XIDS_WARN)):
        if numbers:
            listed = ", ".join(map(str, sorted(recent & (XIDS_FAIL | XIDS_WARN))))
            return verdict(
                name, status, f"Xid {listed} within 24 h", "`journalctl -k -g Xid`; a reset or a reboot may help"
            )
    return verdict(name, "pass", "no Xid of the hardware within 24 h")


def _persistence(name: str, situation: Situation) -> Check:
    is_persistent = situation.gpu.is_persistent
    if is_persistent is None:
        return refused(name, situation, "persistence")
    if not is_persistent:
        remedy = "enable nvidia-persistenced; retraind changes no setting of a GPU"
        return verdict(name, "warn", "off: the driver is loaded anew for each job, which takes seconds", remedy)
    return verdict(name, "pass", "on")


_FAIL = frozenset({"fail"})
_NOT_SEEN = frozenset({"fail", "unknown", "skip"})
# Name, verdict, and the verdicts that take the ground from under all that follow.
CHECKS: tuple[tuple[str, Callable[[str, Situation], Check], frozenset[str]], ...] = (
    ("gpu.present", driver_verdicts.present, _NOT_SEEN),
    ("driver.kernel_module", driver_verdicts.kernel_module, _FAIL),
    ("driver.device_nodes", driver_verdicts.device_nodes, _FAIL),
    ("driver.nvml", driver_verdicts.nvml, _NOT_SEEN),
    ("driver.version", driver_verdicts.version, _FAIL),
    ("gpu.handle", driver_verdicts.handle, _NOT_SEEN),
    ("gpu.compute_mode", _compute_mode, frozenset()),
    ("gpu.memory_free", _memory_free, frozenset()),
    ("gpu.temperature", _temperature, frozenset()),
    ("gpu.throttle", _throttle, frozenset()),
    ("pcie.width", _width, frozenset()),
    ("pcie.gen", _generation, frozenset()),
    ("gpu.ecc_uncorrected", _ecc, frozenset()),
    ("gpu.row_remap", _row_remap, frozenset()),
    ("gpu.retired_pages", _retired_pages, frozenset()),
    ("gpu.recovery_action", _recovery_action, frozenset()),
    ("gpu.xid", _xid, frozenset()),
    ("gpu.persistence", _persistence, frozenset()),
    ("cuda.context", driver_verdicts.context, frozenset()),
)
_NVML = [name for name, _, _ in CHECKS].index("driver.nvml")
