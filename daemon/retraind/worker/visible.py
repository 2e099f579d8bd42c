"""Which GPU a job may have: the operator's CUDA_VISIBLE_DEVICES, read as CUDA reads it. Pure, raises nothing.

NVML counts all GPUs in the order of the bus and knows nothing of the variable; so a number in it is taken in that
order, which CUDA is then told to use as well. What CUDA gets is the one chosen device by its name.
"""

from dataclasses import dataclass

from retraind.worker.gpu_facts import GpuFacts

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Choice:
    """The GPU that is judged, and the name by which CUDA is given it; `gpu` is None when there is no such GPU."""

    gpu: GpuFacts | None
    device: str = ""


def entries(value: str | None) -> list[str] | None:
    """The devices that are named, in order; None without the variable. CUDA stops at the first that is -1 or empty."""
    if value is None:
        return None
    found: list[str] = []
    for entry in value.split(","):
        name = entry.strip()
        if not name or name.startswith("-"):
            break
        found.append(name)
    return found


def choose(gpus: list[GpuFacts], value: str | None) -> Choice:
    """The first device that may be seen. A name that is given twice is one device; only the first name counts."""
    named = entries(value)
    if named is None:
        return _whole_or_first_instance(gpus[0]) if gpus else Choice(None)
    if not named:
        return Choice(None)
    first = named[0]
    for gpu in gpus:
        if first.startswith("MIG-"):
            # Until driver 470 an instance was named by its GPU: MIG-GPU-<uuid>/<instance>/<part>.
            if first in (gpu.mig_uuids or ()) or (gpu.uuid and first.startswith(f"MIG-{gpu.uuid}/")):
                return Choice(gpu, first)
        elif gpu.uuid.startswith(first) if first.startswith("GPU-") else _is_number(first, gpu.index):
            return _whole_or_first_instance(gpu)
    return Choice(None)


def _is_number(text: str, index: int) -> bool:
    return text.isascii() and text.isdecimal() and (text.lstrip("0") or "0") == str(index)


def _whole_or_first_instance(gpu: GpuFacts) -> Choice:
    return Choice(gpu, gpu.mig_uuids[0] if gpu.mig_uuids else gpu.uuid)
