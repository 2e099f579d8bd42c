"""What NVML's return codes mean for a check: verdict, cause, remedy. nvidia-smi ends with the same numbers. Pure."""

from retraind.worker.gpu_facts import UNKNOWN

_DMESG = "read dmesg for NVRM and Xid"
_RESET = "reset the GPU (nvidia-smi --gpu-reset) or reboot"

# What the driver or the card does not have is skipped; what can not be told is unknown; the rest is broken.
MEANINGS: dict[int, tuple[str, str, str]] = {
    3: ("skip", "not supported here", ""),
    4: ("unknown", "no permission to ask", "run it as root, or give the service's user the device nodes"),
    6: ("fail", "the driver does not find it", _DMESG),
    9: ("fail", "the driver is not loaded", "modprobe nvidia, and read dmesg for what it says"),
    10: ("fail", "the driver has trouble with the card's interrupt", f"{_DMESG}; another slot may help"),
    12: ("skip", "neither NVML nor nvidia-smi can be asked", "install python3-pynvml (nvidia-ml-py) or nvidia-smi"),
    13: ("skip", "the driver is too old to tell", ""),
    14: ("warn", "the card's inforom is corrupted", "plan to replace the card"),
    15: ("fail", "the GPU is lost: it fell off the bus or overheated", f"{_DMESG}; power the machine off and on"),
    16: ("fail", "the GPU needs a reset", _RESET),
    17: (
        "fail",
        "the operating system blocks access",
        "the unit's hardening or a control group keeps the device out: DeviceAllow=, DevicePolicy=, PrivateDevices=",
    ),
    18: ("fail", "library and kernel module are of different versions", "reboot, or reload the nvidia modules"),
    28: ("skip", "the driver sees no GPU", ""),
    UNKNOWN: ("unknown", "the driver gives no reason", _DMESG),
}


def meaning(code: int) -> tuple[str, str, str]:
    """Verdict, cause and remedy of a code; one that is new is unknown."""
    return MEANINGS.get(code, ("unknown", f"the driver answers with code {code}", _DMESG))
