"""The last check before CUDA is used: does torch compute on this GPU what it computes on the CPU?

Owns `cuda.context`: a context, memory, a product of two matrices whose answer is exact, and everything given back.
Only torch can tell, so it is made by the worker, once, and only for a job that would use CUDA. It waits no longer than
its deadline for a driver that hangs; then a thread stays behind, for which the end of a worker does not wait. Raises
nothing.
"""

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from retraind.report import Check

NAME = "cuda.context"
DEADLINE_SECONDS = 30.0
_SIZE = 256
_TOLERANCE = 1e-3
_REMEDY = "see `nvidia-smi` and dmesg; the driver must fit this build of torch"
_BUILD = "install a build of torch for this card: its page lists CUDA versions, older cards need an older one"


def look(num_expected: int | None = None, deadline_seconds: float = DEADLINE_SECONDS) -> Check:
    """The verdict. `num_expected` is how many GPUs torch should see, None where that is not known."""
    return within(deadline_seconds, lambda: _look(num_expected))


def within(seconds: float, work: Callable[[], Check]) -> Check:
    """What `work` says, or that it hangs. Whatever it raises is a fail."""
    answers: list[Check] = []

    def run() -> None:
        try:
            answers.append(work())
        except Exception as error:  # noqa: BLE001  (torch raises what its libraries raise)
            answers.append(failed(error))

    thread = threading.Thread(target=run, daemon=True, name=NAME)
    thread.start()
    thread.join(seconds)
    if not answers:
        message = f"no answer within {seconds:g} s"
        return Check(name=NAME, status="fail", message=message, remedy="a driver that hangs needs a reboot; read dmesg")
    return answers[0]


def failed(error: Exception) -> Check:
    """The verdict on an error of CUDA's, in one line: what follows the first is advice for programmers."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return Check(name=NAME, status="fail", message=text, remedy=_BUILD if "no kernel image" in text else _REMEDY)


def has_kernels(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether this torch can run on a card: by code for its generation, or by code that the driver can translate."""
    major, minor = capability
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        if not digits.isdecimal():
            continue
        built = divmod(int(digits), 10)
        is_same_generation = built[0] == major and built[1] <= minor
        if is_same_generation if kind == "sm" else built <= (major, minor):
            return True
    return False


def _look(num_expected: int | None) -> Check:
    if torch.version.cuda is None:
        return Check(name=NAME, status="fail", message="torch is a build without CUDA", remedy=_BUILD)
    # Called by ctypes, which lets other threads run meanwhile, as torch's own start does not: this is where a driver
    # that is broken hangs, and the deadline must be kept then.
    with suppress(OSError, AttributeError):
        if code := ctypes.CDLL("libcuda.so.1").cuInit(0):
            return Check(name=NAME, status="fail", message=f"CUDA does not start: error {code}", remedy=_REMEDY)
    num_found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_found == 0 or num_expected not in (None, num_found):
        message = f"torch {torch.__version__} finds {num_found} CUDA devices"
        return Check(name=NAME, status="fail", message=message, remedy=_REMEDY)
    capability = torch.cuda.get_device_capability(0)
    if not has_kernels(capability, torch.cuda.get_arch_list()):
        message = (
            f"torch {torch.__version__} has no kernel image for compute capability {capability[0]}.{capability[1]}"
        )
        return Check(name=NAME, status="fail", message=message, remedy=_BUILD)
    return _compute(torch.device("cuda", 0))


def _compute(device: torch.device) -> Check:
    """Whole numbers, so that the product is exact in every precision and order of summing."""
    left = torch.arange(_SIZE * _SIZE, dtype=torch.float32).reshape(_SIZE, _SIZE).remainder(7)
    right = left.T.contiguous()
    product = (left.to(device) @ right.to(device)).cpu()
    difference = float((product - left @ right).abs().max())
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not difference <= _TOLERANCE:  # NaN is no answer either
        message = f"the product of two matrices is off by {difference:g}"
        return Check(name=NAME, status="fail", message=message, remedy="the card computes wrongly: replace it")
    return Check(name=NAME, status="pass", message="a context, memory, and a product as the CPU has it")
