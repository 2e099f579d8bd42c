"""What the verdicts on a GPU are judged from, and the forms that several of them share. No I/O, raises nothing."""

from dataclasses import dataclass

from retraind.config import Device, PreflightConfig
from retraind.report import Check
from retraind.worker import nvml_codes
from retraind.worker.gpu_facts import UNKNOWN, Answer, GpuFacts, Machine
from retraind.worker.visible import Choice, choose

MIB = 2**20
# A context with torch's kernels.
CONTEXT_BYTES = 400 * MIB
# What cuda.context says until it is made.
OWED = "made by the worker, once torch is loaded"


@dataclass(frozen=True)
class Situation:
    """All that the verdicts depend on. `visible` is the operator's CUDA_VISIBLE_DEVICES.

    `torch_cuda` is the CUDA version that torch was built with: empty for a build without, None when that is not told.
    """

    device: Device
    config: PreflightConfig
    machine: Machine
    answer: Answer
    visible: str | None = None
    need_bytes: int = CONTEXT_BYTES
    torch_cuda: str | None = None

    @property
    def choice(self) -> Choice:
        """The GPU that the job would have."""
        return choose(self.answer.gpus, self.visible)

    @property
    def gpu(self) -> GpuFacts:
        """The chosen one; only asked for once gpu.handle has found it."""
        gpu = self.choice.gpu
        assert gpu is not None
        return gpu


def verdict(name: str, status: str, message: str, remedy: str = "") -> Check:
    return Check(name=name, status=status, message=message, remedy=remedy)


def absent(name: str, situation: Situation, message: str, remedy: str) -> Check:
    """No GPU at all is no fault of a machine that need not have one."""
    if situation.device == "cuda":
        return verdict(name, "fail", f"{message}, but device is cuda", f"{remedy}, or set device: auto")
    return verdict(name, "skip", f"{message}: training on the CPU")


def refused(name: str, situation: Situation, question: str) -> Check:
    """The verdict on a question that has no answer."""
    code = situation.gpu.codes.get(question, UNKNOWN)
    status, cause, remedy = nvml_codes.meaning(code)
    return verdict(name, status, f"{cause} ({question}, NVML {code})", remedy)
