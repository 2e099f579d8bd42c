"""The verdicts on what stands between the kernel and a GPU: bus, module, nodes, library, versions, handle, torch.

Pure functions of the facts, one a check; gpu_verdicts has their order. Raises nothing.
"""

import errno

from retraind.report import Check
from retraind.worker import nvml_codes
from retraind.worker.gpu_facts import NO_GPUS, NOT_FOUND
from retraind.worker.situation import OWED, Situation, absent, verdict
from retraind.worker.visible import VARIABLE, entries


def present(name: str, situation: Situation) -> Check:
    machine, least = situation.machine, situation.config.min_gpus
    if machine.addresses is None:
        message = "the PCI bus can not be read"
        if situation.device == "auto":
            return verdict(name, "unknown", f"{message}: training on the CPU")
        return verdict(name, "fail", f"{message}, but device is cuda", "see why /sys/bus/pci is closed to the service")
    if not machine.has_gpu:
        remedy = "check the card and the virtual machine's passthrough"
        return absent(name, situation, "no NVIDIA GPU on the PCI bus", remedy)
    if entries(situation.visible) == []:
        return absent(name, situation, f"{VARIABLE} hides every GPU", f"take {VARIABLE} out of the environment")
    if machine.platform != "pci":
        return verdict(name, "pass", f"an NVIDIA GPU that is on no bus ({machine.platform})")
    found = machine.addresses
    message = f"{len(found)} NVIDIA GPU at {', '.join(found)}"
    if len(found) < least:
        remedy = "check power and seat of the others, or lower preflight.min_gpus"
        return verdict(name, "fail", f"{message}, preflight.min_gpus is {least}", remedy)
    return verdict(name, "pass", message)


def kernel_module(name: str, situation: Situation) -> Check:
    """A GPU whose driver is not loaded is of no use to torch, which would only say that there is none."""
    machine = situation.machine
    if machine.platform == "wsl":
        return verdict(name, "skip", "the driver is on the side of Windows")
    if machine.platform == "jetson":
        return verdict(name, "pass", "nvgpu is loaded")
    stolen = sorted(address for address, driver in machine.bound_drivers.items() if driver == "nouveau")
    if stolen:
        remedy = "blacklist nouveau, rebuild the initramfs and reboot"
        return verdict(name, "fail", f"nouveau has the GPU at {', '.join(stolen)}", remedy)
    if machine.module_version or machine.is_module_loaded:
        return verdict(name, "pass", f"NVIDIA's kernel module {machine.module_version or 'nvidia'} is loaded")
    if machine.is_nouveau_loaded:
        remedy = "blacklist nouveau, rebuild the initramfs and reboot"
        return verdict(name, "fail", "NVIDIA's kernel module is not loaded, nouveau is", remedy)
    kernel = f" {machine.kernel_release}" if machine.kernel_release else ""
    remedy = (
        f"see `dkms status` for a module that was not built for kernel{kernel}, then `modprobe nvidia` and dmesg; "
        "secure boot refuses a module whose key is not enrolled"
    )
    return verdict(name, "fail", "NVIDIA's kernel module is not loaded", remedy)


def device_nodes(name: str, situation: Situation) -> Check:
    nodes, platform = situation.answer.nodes, situation.machine.platform
    if platform == "jetson":
        return verdict(name, "skip", "a Jetson's nodes have other names")
    if not nodes:
        return verdict(name, "unknown", "opening the device nodes did not come to an end")
    remedy = (
        "install nvidia-modprobe and restart, so that retraind-gpu.service makes them first; "
        "in a drop-in DeviceAllow= must name them and PrivateDevices= must be off"
    )
    missing = errno.ENOENT
    if platform == "wsl":
        needed = {"/dev/dxg": nodes.get("/dev/dxg", missing)}
        is_lost = bool(needed["/dev/dxg"])
    else:
        cards = {path: error for path, error in nodes.items() if path.removeprefix("/dev/nvidia").isdecimal()}
        cards = cards or {"/dev/nvidia0": missing}
        needed = {"/dev/nvidiactl": nodes.get("/dev/nvidiactl", missing), **cards}
        is_lost = bool(needed["/dev/nvidiactl"]) or all(cards.values())
    closed = [f"{path} ({errno.errorcode.get(error, error)})" for path, error in needed.items() if error]
    if is_lost:
        return verdict(name, "fail", f"can not be opened: {', '.join(closed)}", remedy)
    if closed:
        return verdict(name, "warn", f"can not be opened: {', '.join(closed)}; others can", remedy)
    if platform != "wsl" and nodes.get("/dev/nvidia-uvm"):
        return verdict(name, "warn", "/dev/nvidia-uvm is not there yet: the first use of CUDA has to make it", remedy)
    return verdict(name, "pass", f"{', '.join(needed)} can be opened")


def nvml(name: str, situation: Situation) -> Check:
    answer = situation.answer
    if answer.silence:
        what = "an earlier probe still hangs in it" if answer.silence == "stuck" else "no answer in time"
        remedy = "read dmesg for Xid and NVRM; a driver that hangs needs a reboot"
        limit = f"{situation.config.deadline_seconds:g} s"
        return verdict(name, "fail", f"the driver is unresponsive: {what} ({limit})", remedy)
    if answer.code in (NO_GPUS, NOT_FOUND) or (answer.code == 0 and not answer.gpus):
        remedy = "read dmesg for NVRM; in a container or virtual machine pass the GPU through"
        return absent(name, situation, "the driver sees no GPU", remedy)
    if answer.code:
        status, cause, remedy = nvml_codes.meaning(answer.code)
        status = "unknown" if status == "skip" else status  # whatever is missing is needed here
        return verdict(name, status, f"{cause} ({answer.source or 'NVML'}, {answer.code})", remedy)
    return verdict(name, "pass", f"{answer.source} answers, {len(answer.gpus)} GPU")


def version(name: str, situation: Situation) -> Check:
    answer, module = situation.answer, situation.machine.module_version
    if not answer.driver_version:
        return verdict(name, "unknown", "the driver does not tell its version")
    if module and answer.driver_version != module:
        message = f"the driver's libraries are of {answer.driver_version}, the kernel module is of {module}"
        return verdict(name, "fail", message, "an upgrade is half done: reboot, or reload the nvidia modules")
    needed, _, _ = (situation.torch_cuda or "").partition(".")
    has = (answer.cuda_version or 0) // 1000
    if needed.isdecimal() and has and has < int(needed):
        message = f"driver {answer.driver_version} is for CUDA {has}, torch is built for CUDA {situation.torch_cuda}"
        return verdict(name, "fail", message, "install a newer driver, or a torch that is built for an older CUDA")
    return verdict(name, "pass", f"driver {answer.driver_version}" + (f", CUDA {has}" if has else ""))


def handle(name: str, situation: Situation) -> Check:
    gpu = situation.choice.gpu
    if gpu is None:
        message = f"{VARIABLE}={situation.visible} names no GPU of this machine"
        return verdict(name, "fail", message, "`nvidia-smi -L` lists them; numbers count in the order of the PCI bus")
    status, cause, remedy = nvml_codes.meaning(gpu.code or gpu.codes.get("uuid", 0))
    if gpu.code or status == "fail":  # some drivers give a handle of a lost card, and then no answer
        return verdict(name, "unknown" if status == "skip" else status, f"GPU {gpu.index}: {cause}", remedy)
    if gpu.mig_uuids == []:
        remedy = "make an instance (nvidia-smi mig -cgi ... -C), or turn MIG off"
        return verdict(name, "fail", f"GPU {gpu.index} has MIG on and no instance: CUDA finds no device there", remedy)
    others = [other for other in situation.answer.gpus if other.code]
    if others:
        causes = ", ".join(f"GPU {other.index}: {nvml_codes.meaning(other.code)[1]} ({other.code})" for other in others)
        return verdict(name, "warn", f"GPU {gpu.index} answers; {causes}", nvml_codes.meaning(others[0].code)[2])
    return verdict(name, "pass", f"GPU {gpu.index}, {gpu.name or gpu.uuid}")


def context(name: str, situation: Situation) -> Check:
    """What can be known without torch; the rest is seen once it is loaded."""
    if situation.torch_cuda == "":
        remedy = "give worker.python an interpreter with a CUDA build of torch: OPERATIONS.md has the commands"
        return verdict(name, "fail", "there is a GPU, and torch is a build without CUDA", remedy)
    return verdict(name, "skip", OWED)
