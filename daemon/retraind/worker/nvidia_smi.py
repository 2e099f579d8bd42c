"""What nvidia-smi's CSV tells, in the same facts and codes as NVML's: the second source. Pure, raises nothing.

Its output carries no promise: fields come and go, and one that has no value is spelled in many ways. A field that this
version does not know is named in its complaint, so that it can be asked again without it.
"""

import csv
import re
from collections.abc import Callable

import msgspec

from retraind.worker.gpu_facts import (
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNKNOWN,
    Answer,
    GpuFacts,
)

MIB = 2**20
_COMPUTE_MODES = {"default": 0, "exclusive_thread": 1, "prohibited": 2, "exclusive_process": 3}


def _whole(text: str) -> int:
    return int(text, 16) if text.startswith("0x") else int(float(text))


def _on(text: str) -> bool:
    return {"enabled": True, "disabled": False}[text.lower()]


# The field of nvidia-smi: the fact, and the value of its text; any ValueError or KeyError is a text that means nothing.
FIELDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "index": ("index", _whole),
    "uuid": ("uuid", str),
    "name": ("name", str),
    "pci.bus_id": ("pci_address", str),
    "driver_version": ("driver_version", str),
    "memory.total": ("memory_total_bytes", lambda text: _whole(text) * MIB),
    "memory.free": ("memory_free_bytes", lambda text: _whole(text) * MIB),
    "temperature.gpu": ("temperature_celsius", _whole),
    "pstate": ("pstate", lambda text: _whole(text.removeprefix("P"))),
    "utilization.gpu": ("utilization_percent", _whole),
    "compute_mode": ("compute_mode", lambda text: _COMPUTE_MODES[text.lower()]),
    "persistence_mode": ("is_persistent", _on),
    "pcie.link.gen.current": ("pcie_generation", _whole),
    "pcie.link.gen.max": ("pcie_max_generation", _whole),
    "pcie.link.width.current": ("pcie_width", _whole),
    "pcie.link.width.max": ("pcie_max_width", _whole),
    "clocks_throttle_reasons.active": ("event_reasons", _whole),
    "ecc.mode.current": ("is_ecc_on", _on),
    "ecc.errors.uncorrected.volatile.total": ("num_ecc_uncorrected", _whole),
}
# The question in nvml.py by the fact that answers it, where they are called differently.
QUESTION_OF = {
    "memory_total_bytes": "memory", "memory_free_bytes": "memory", "temperature_celsius": "temperature",
    "utilization_percent": "utilization", "is_persistent": "persistence", "is_ecc_on": "ecc_mode",
    "num_ecc_uncorrected": "ecc_uncorrected",
}  # fmt: skip
# What has no field here, or none that all versions know: as if the driver were too old for it.
NOT_ASKED = ("processes", "slowdown", "margin", "remapped_rows", "retired_pages", "recovery_action", "ecc_sram", "mig")
_CODES = {
    "n/a": NOT_SUPPORTED, "not supported": NOT_SUPPORTED, "insufficient permissions": NO_PERMISSION,
    "gpu is lost": GPU_IS_LOST, "gpu requires reset": RESET_REQUIRED, "requires reset": RESET_REQUIRED,
}  # fmt: skip


def command(fields: list[str]) -> list[str]:
    """The arguments; they only ask."""
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def refused_field(text: str) -> str:
    """The field that this version does not know, by its complaint; empty when that is not what it says."""
    found = re.search(r'Field "([^"]+)" is not a valid field', text)
    return found[1] if found and found[1] in FIELDS else ""


def parse(text: str, fields: list[str]) -> Answer:
    """One GPU a line. A line that does not name its GPU is noise; a value that is missing is an unknown one."""
    gpus: list[GpuFacts] = []
    version = ""
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        values = dict(zip(fields, (cell.strip() for cell in row), strict=False))
        index = values.get("index", "")
        if not (index.isascii() and index.isdecimal()):
            continue
        facts, codes = _facts(values, fields)
        version = str(facts.pop("driver_version", version))
        gpus.append(msgspec.convert({**facts, "codes": codes}, GpuFacts))
    return Answer(source="nvidia-smi", code=0 if gpus else UNKNOWN, driver_version=version, gpus=gpus)


def _facts(values: dict[str, str], fields: list[str]) -> tuple[dict[str, object], dict[str, int]]:
    """What has a value, and the code of what has none."""
    facts: dict[str, object] = {}
    codes = dict.fromkeys((*NOT_ASKED, *(_question(field) for field in FIELDS if field not in fields)), NOT_SUPPORTED)
    for field in fields:
        name, read = FIELDS[field]
        text = values.get(field, "").strip("[]")
        code = _CODES.get(text.lower())
        if code is None:
            try:
                facts[name] = read(text) if text and "error" not in text.lower() and text != "ERR!" else None
            except (ValueError, KeyError, OverflowError):
                facts[name] = None
            code = UNKNOWN if facts[name] is None else 0
            if facts[name] is None:
                del facts[name]
        if code:
            codes[_question(field)] = code
    return facts, codes


def _question(field: str) -> str:
    name = FIELDS[field][0]
    return QUESTION_OF.get(name, name)
