"""What is known of a machine's GPUs: facts alone, from whichever source. No I/O, no judgement, raises nothing.

None is what was not told; `codes` has the NVML return code of what was asked for and refused, by the name of the
question in nvml.py. nvidia-smi's spellings are told in the same codes.
"""

from dataclasses import dataclass, field

import msgspec

from retraind import report

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 3, 4, 6, 12, 13
GPU_IS_LOST, RESET_REQUIRED, NO_GPUS, UNKNOWN = 15, 16, 28, 999


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that computes on a GPU."""

    pid: int
    used_bytes: int | None = None


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `code` is not 0 when there is no handle for it, and then nothing else is known.

    `mig_uuids` is None where the GPU is whole, and has its instances where it is cut into such.
    """

    index: int
    code: int = 0
    codes: dict[str, int] = {}
    uuid: str = ""
    name: str = ""
    pci_address: str = ""
    compute_mode: int | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    processes: list[Process] | None = None
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None
    margin_celsius: int | None = None
    pstate: int | None = None
    utilization_percent: int | None = None
    event_reasons: int | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    is_ecc_on: bool | None = None
    num_ecc_uncorrected: int | None = None
    num_ecc_sram: int | None = None
    num_remapped_rows: int | None = None
    is_remap_pending: bool = False
    has_remap_failed: bool = False
    num_retired_pages: int | None = None
    is_retirement_pending: bool = False
    recovery_action: int | None = None
    is_persistent: bool | None = None
    mig_uuids: list[str] | None = None
    mig_free_bytes: dict[str, int] = {}

    @property
    def address(self) -> str:
        """The PCI address as the kernel spells it: NVML has eight digits of domain, the kernel four."""
        domain, colon, rest = self.pci_address.lower().partition(":")
        return f"{domain[-4:]}{colon}{rest}"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver said. `source` is nvml, nvidia-smi or empty; `code` is that of its start, 0 when it is well.

    `silence` says why there is no answer at all: timeout, or stuck when an earlier probe still hangs. `nodes` has the
    error number of opening each device node.
    """

    source: str = ""
    code: int = 0
    driver_version: str = ""
    cuda_version: int | None = None
    gpus: list[GpuFacts] = []
    nodes: dict[str, int] = {}
    silence: str = ""


@dataclass(frozen=True)
class Link:
    """A PCI Express link as sysfs has it; the greatest values are those that card and slot have in common."""

    width: int | None = None
    max_width: int | None = None
    generation: int | None = None
    max_generation: int | None = None


@dataclass(frozen=True)
class Xid:
    """An error that the driver wrote to the kernel's log. The address has no function: `0000:65:00`."""

    address: str
    number: int
    age_seconds: float


@dataclass(frozen=True)
class Machine:
    """What the kernel says. `addresses` is None when the bus can not be read; `platform` is pci, wsl or jetson."""

    addresses: tuple[str, ...] | None = ()
    platform: str = "pci"
    module_version: str = ""
    is_module_loaded: bool = False
    is_nouveau_loaded: bool = False
    bound_drivers: dict[str, str] = field(default_factory=dict)
    kernel_release: str = ""
    links: dict[str, Link] = field(default_factory=dict)
    xids: tuple[Xid, ...] | None = None
    memory_available: int | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether there is hardware to ask about."""
        return bool(self.addresses) or self.platform != "pci"


def reported(gpu: GpuFacts, machine: Machine, answer: Answer, *, is_chosen: bool) -> report.Gpu:
    """What of a GPU is told to people, whatever the verdicts are. sysfs fills in for a source that lacks the link."""
    link = machine.links.get(gpu.address, Link())
    return report.Gpu(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        pci_address=gpu.address,
        driver_version=answer.driver_version,
        kernel_module=machine.module_version,
        memory_total_bytes=gpu.memory_total_bytes,
        memory_free_bytes=gpu.memory_free_bytes,
        temperature_celsius=gpu.temperature_celsius,
        pstate=gpu.pstate,
        pcie_generation=link.generation if gpu.pcie_generation is None else gpu.pcie_generation,
        pcie_max_generation=link.max_generation if gpu.pcie_max_generation is None else gpu.pcie_max_generation,
        pcie_width=link.width if gpu.pcie_width is None else gpu.pcie_width,
        pcie_max_width=link.max_width if gpu.pcie_max_width is None else gpu.pcie_max_width,
        is_chosen=is_chosen,
    )
