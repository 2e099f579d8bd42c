"""What NVML tells of the driver and its GPUs: a script that prints two lines of JSON. The only importer of pynvml.

It is run by probe.py in a process of its own, since any call into a driver may hang for ever. It knows nothing of
retraind, so that it starts fast under any interpreter: its answer is a `gpu_facts.Answer`, and what could not be had
stands there as NVML's return code. The device nodes come first, in a line of their own, so that they are known even if
the library never answers. It only asks: no setting of a GPU is changed. Raises nothing that is NVML's.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

INVALID_ARGUMENT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 2, 12, 13
_PR_SET_PDEATHSIG = 1
_UNCORRECTED, _SINCE_BOOT, _SRAM = 1, 0, 7
_SLOWDOWN_THRESHOLD = 1
_RECOVERY_ACTION_FIELD = 230
_MEMORY_V2 = 0x2000028  # the size of the structure and its version, as the driver wants it
_RETIREMENT_CAUSES = (0, 1)

Facts = dict[str, Any]


def _text(value: str | bytes) -> str:
    """Older bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _memory(nv: Any, handle: Any) -> Facts:
    """Version 2 does not count what the driver keeps for itself as free; older drivers have version 1 only."""
    try:
        memory = nv.nvmlDeviceGetMemoryInfo(handle, version=_MEMORY_V2)
    except (nv.NVMLError, AttributeError, TypeError):
        memory = nv.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_total_bytes": memory.total, "memory_free_bytes": memory.free}


def _processes(nv: Any, handle: Any) -> Facts:
    found = nv.nvmlDeviceGetComputeRunningProcesses(handle)
    return {"processes": [{"pid": process.pid, "used_bytes": process.usedGpuMemory} for process in found]}


def _event_reasons(nv: Any, handle: Any) -> Facts:
    """The function was renamed with driver 535; either side may know only one of the names."""
    try:
        return {"event_reasons": nv.nvmlDeviceGetCurrentClocksEventReasons(handle)}
    except (nv.NVMLError, AttributeError):
        return {"event_reasons": nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle)}


def _remapped_rows(nv: Any, handle: Any) -> Facts:
    corrected, uncorrected, pending, failed = nv.nvmlDeviceGetRemappedRows(handle)
    total = corrected + uncorrected
    return {"num_remapped_rows": total, "is_remap_pending": bool(pending), "has_remap_failed": bool(failed)}


def _retired_pages(nv: Any, handle: Any) -> Facts:
    pages = sum(len(nv.nvmlDeviceGetRetiredPages(handle, cause)) for cause in _RETIREMENT_CAUSES)
    return {
        "num_retired_pages": pages,
        "is_retirement_pending": bool(nv.nvmlDeviceGetRetiredPagesPendingStatus(handle)),
    }


def _recovery_action(nv: Any, handle: Any) -> Facts:
    (value,) = nv.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION_FIELD])
    if value.nvmlReturn:
        # A field that a driver has never heard of is an argument that it does not take.
        is_new = value.nvmlReturn == INVALID_ARGUMENT
        raise nv.NVMLError(FUNCTION_NOT_FOUND if is_new else value.nvmlReturn)
    return {"recovery_action": value.value.uiVal}


def _mig(nv: Any, handle: Any) -> Facts:
    """The instances of a GPU that is cut into several: each is a device of its own to CUDA, the whole is none."""
    if not nv.nvmlDeviceGetMigMode(handle)[0]:
        return {"mig_uuids": None}
    uuids: list[str] = []
    free_bytes: dict[str, int] = {}
    for index in range(nv.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nv.NVMLError):  # a place without an instance
            instance = nv.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuids.append(_text(nv.nvmlDeviceGetUUID(instance)))
            free_bytes[uuids[-1]] = _memory(nv, instance)["memory_free_bytes"]
    return {"mig_uuids": uuids, "mig_free_bytes": free_bytes}


# By the name under which a return code is told, if there is one.
QUESTIONS: dict[str, Callable[[Any, Any], Facts]] = {
    "uuid": lambda nv, h: {"uuid": _text(nv.nvmlDeviceGetUUID(h))},
    "name": lambda nv, h: {"name": _text(nv.nvmlDeviceGetName(h))},
    "pci_address": lambda nv, h: {"pci_address": _text(nv.nvmlDeviceGetPciInfo(h).busId)},
    "compute_mode": lambda nv, h: {"compute_mode": nv.nvmlDeviceGetComputeMode(h)},
    "memory": _memory,
    "processes": _processes,
    "temperature": lambda nv, h: {"temperature_celsius": nv.nvmlDeviceGetTemperature(h, 0)},
    "slowdown": lambda nv, h: {"slowdown_celsius": nv.nvmlDeviceGetTemperatureThreshold(h, _SLOWDOWN_THRESHOLD)},
    "margin": lambda nv, h: {"margin_celsius": nv.nvmlDeviceGetMarginTemperature(h)},
    "pstate": lambda nv, h: {"pstate": nv.nvmlDeviceGetPerformanceState(h)},
    "utilization": lambda nv, h: {"utilization_percent": nv.nvmlDeviceGetUtilizationRates(h).gpu},
    "event_reasons": _event_reasons,
    "pcie_generation": lambda nv, h: {"pcie_generation": nv.nvmlDeviceGetCurrPcieLinkGeneration(h)},
    "pcie_max_generation": lambda nv, h: {"pcie_max_generation": nv.nvmlDeviceGetMaxPcieLinkGeneration(h)},
    "pcie_width": lambda nv, h: {"pcie_width": nv.nvmlDeviceGetCurrPcieLinkWidth(h)},
    "pcie_max_width": lambda nv, h: {"pcie_max_width": nv.nvmlDeviceGetMaxPcieLinkWidth(h)},
    "ecc_mode": lambda nv, h: {"is_ecc_on": bool(nv.nvmlDeviceGetEccMode(h)[0])},
    "ecc_uncorrected": lambda nv, h: {
        "num_ecc_uncorrected": nv.nvmlDeviceGetTotalEccErrors(h, _UNCORRECTED, _SINCE_BOOT)
    },
    "ecc_sram": lambda nv, h: {"num_ecc_sram": nv.nvmlDeviceGetMemoryErrorCounter(h, _UNCORRECTED, _SINCE_BOOT, _SRAM)},
    "remapped_rows": _remapped_rows,
    "retired_pages": _retired_pages,
    "recovery_action": _recovery_action,
    "persistence": lambda nv, h: {"is_persistent": bool(nv.nvmlDeviceGetPersistenceMode(h))},
    "mig": _mig,
}


def gpu_facts(nv: Any, index: int) -> Facts:
    """Everything of one GPU, with the return code of what could not be had."""
    try:
        handle = nv.nvmlDeviceGetHandleByIndex(index)
    except nv.NVMLError as error:
        return {"index": index, "code": error.value}
    facts: Facts = {"index": index}
    codes: dict[str, int] = {}
    for name, ask in QUESTIONS.items():
        try:
            facts |= ask(nv, handle)
        except nv.NVMLError as error:
            codes[name] = error.value
        except AttributeError:  # this binding does not know the function
            codes[name] = FUNCTION_NOT_FOUND
    return facts | {"codes": codes}


def driver_facts() -> Facts:
    """The whole answer of the library. A binding that is not there is a library that is not there."""
    try:
        import pynvml as nv  # noqa: PLC0415  (optional)
    except ImportError:
        return {"source": "nvml", "code": LIBRARY_NOT_FOUND}
    path = os.environ.get("RETRAIND_NVML_LIB")
    try:
        if path:
            nv.nvmlLib = ctypes.CDLL(path)
        nv.nvmlInit()
    except OSError:
        return {"source": "nvml", "code": LIBRARY_NOT_FOUND}
    except nv.NVMLError as error:
        return {"source": "nvml", "code": error.value}
    facts: Facts = {"source": "nvml", "code": 0}
    with suppress(nv.NVMLError, AttributeError):  # the verdict says that it is not known
        facts["driver_version"] = _text(nv.nvmlSystemGetDriverVersion())
        facts["cuda_version"] = nv.nvmlSystemGetCudaDriverVersion()
    try:
        facts["gpus"] = [gpu_facts(nv, index) for index in range(nv.nvmlDeviceGetCount())]
    except nv.NVMLError as error:
        facts["code"] = error.value
    return facts


def nodes(root: Path) -> dict[str, int]:
    """Each device node of the driver, with the error number of opening it, 0 for none. This is what CUDA does first."""
    paths = [root / "dev" / name for name in ("nvidiactl", "nvidia-uvm", "dxg")]
    paths += sorted((root / "dev").glob("nvidia[0-9]*"))
    return {f"/{path.relative_to(root)}": _open_error(path) for path in paths}


def _open_error(path: Path) -> int:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno or 1
    return 0


def main() -> int:
    """Prints the nodes below the root that is the only argument, then what the library says."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # nobody would read the answer
    for answer in (lambda: {"nodes": nodes(Path(sys.argv[1]))}, driver_facts):
        print(json.dumps(answer()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
