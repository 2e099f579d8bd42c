"""The preflight of a job: are host, driver and GPU fit for it, and on which device does it run?

Owns the checks of the host (memory, disk, shared memory, processors), the order of all, and what follows from them:
a host that fails defers the job; a GPU that fails defers it with `device: cuda`, and with `auto` sends it to the CPU.
Facts are gathered first and judged by pure functions, so that every verdict can be tested from written-down facts.
Looks only: changes nothing, imports no torch. /proc, /sys and /dev are read under a root that RETRAIND_SYSROOT may
name. Raises HostError preflight_failed from `require`, nothing from the checks themselves.
"""

import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from retraind.config import Device, PreflightConfig, TrainingConfig
from retraind.errors import HostError
from retraind.report import Check, Gpu
from retraind.worker import gpu_machine, gpu_verdicts, probe
from retraind.worker.gpu_facts import Answer, reported
from retraind.worker.gpu_machine import memory_available, read
from retraind.worker.situation import CONTEXT_BYTES, MIB, OWED, Situation
from retraind.worker.visible import VARIABLE

# Measured peak of a job of half a million rows is about 400 MiB; below this torch's import alone would not pass.
MIN_MEMORY_BYTES = 384 * 2**20
# The same with room for a full window of rows and a machine that goes on with its other work.
COMFORTABLE_MEMORY_BYTES = 768 * 2**20
# Weights, report and the cache of a small file. A cache that does not fit ends as disk_full, which waits as well.
MIN_DISK_BYTES = 64 * 2**20
# What containers get by default, and about what two loader processes with 2048 rows of 512 metrics need.
MIN_SHM_BYTES = 64 * 2**20
# What the suite is run with at least; pyproject.toml says the same.
MIN_PYTHON, MIN_TORCH = (3, 11), (2, 6)
# A batch of so many metrics, and how often it stands in memory while a step is made.
USUAL_METRICS, BATCH_COPIES = 512, 4
CONTEXT = "cuda.context"


@dataclass(frozen=True)
class Facts:
    """What was found of the host; None is what could not be read. Sizes in bytes, `cpu_quota` in processors."""

    memory_available: int | None
    disk_free: int | None
    shm_free: int | None
    num_cpus: int
    cpu_quota: float | None


@dataclass(frozen=True)
class Found:
    """What a preflight led to. `asked` is the configured device, `device` the one that the job is given.

    `cuda_device` is the checked GPU as CUDA names it. `fallback` is not empty when the job goes to the CPU although
    there is a GPU, and says why.
    """

    checks: list[Check]
    asked: Device
    config: PreflightConfig
    gpus: list[Gpu] = field(default_factory=list)
    cuda_device: str = ""

    @property
    def bad_host(self) -> list[Check]:
        return [check for check in self._bad if check.name.startswith("host.")]

    @property
    def bad_gpu(self) -> list[Check]:
        return [check for check in self._bad if not check.name.startswith("host.")]

    @property
    def _bad(self) -> list[Check]:
        bad = {"fail", "unknown"} if self.config.strict else {"fail"}
        return [check for check in self.checks if check.status in bad]

    @property
    def fallback(self) -> str:
        return _listed(self.bad_gpu) if self.asked == "auto" else ""

    @property
    def device(self) -> Device:
        return "cpu" if self.fallback else self.asked

    @property
    def owes_context(self) -> bool:
        """Whether CUDA would be used, so that only torch can complete the checks."""
        return self.device != "cpu" and any(check.name == CONTEXT and check.message == OWED for check in self.checks)

    def with_context(self, context: Check) -> "Found":
        """The same with the check that was owed."""
        return replace(self, checks=[context if check.name == CONTEXT else check for check in self.checks])


def run(
    device: Device,
    work_dir: Path,
    state_dir: Path,
    training: TrainingConfig,
    config: PreflightConfig,
    root: Path | None = None,
) -> Found:
    """Gathers and judges. Takes milliseconds without a GPU, and no longer than the deadline with one."""
    root = sysroot() if root is None else root
    machine = gpu_machine.gather(root)
    # Where there is nothing to ask, or nobody wants to know, no driver is woken.
    is_asked = device != "cpu" and machine.has_gpu
    situation = Situation(
        device=device,
        config=config,
        machine=machine,
        answer=probe.ask(state_dir, root, config.deadline_seconds) if is_asked else Answer(),
        visible=os.environ.get(VARIABLE),
        need_bytes=CONTEXT_BYTES + training.batch_size * training.window * USUAL_METRICS * 4 * BATCH_COPIES,
        torch_cuda=torch_cuda() if is_asked else None,
    )
    choice, answer = situation.choice, situation.answer
    return Found(
        checks=[*verdicts(gather(work_dir, root), work_dir, training.num_workers), *gpu_verdicts.judge(situation)],
        asked=device,
        config=config,
        gpus=[reported(gpu, machine, answer, is_chosen=gpu is choice.gpu) for gpu in answer.gpus],
        cuda_device=choice.device,
    )


def require(found: Found) -> None:
    """Raises HostError preflight_failed with every check in its message that keeps the job from being started."""
    failed = found.bad_host + ([] if found.fallback else found.bad_gpu)
    if failed:
        raise HostError("preflight_failed", _listed(failed), remedy=next((c.remedy for c in failed if c.remedy), ""))


def expose(found: Found) -> None:
    """Lets CUDA see the GPU that was checked and no other, or none after a fall back. Before CUDA is first used."""
    if found.fallback:
        os.environ[VARIABLE] = ""
    elif found.cuda_device and found.device != "cpu":
        os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VARIABLE: found.cuda_device}


def _listed(checks: list[Check]) -> str:
    return "; ".join(f"{check.name}: {check.message}" for check in checks)


def torch_cuda() -> str | None:
    """The CUDA version that this interpreter's torch is built for, without importing it: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(
        r"^cuda\b[^=]*= *(?:None|['\"]([\d.]*)['\"])", read(Path(spec.origin).with_name("version.py")), re.MULTILINE
    )
    return None if found is None else found[1] or ""


def require_torch(version: str) -> None:
    """Raises HostError no_torch for a torch that is too old, by its `__version__`."""
    if torch_version(version) < MIN_TORCH:
        needed = ".".join(map(str, MIN_TORCH))
        remedy = f"install {needed} or newer there, or set worker.python to an interpreter with it"
        raise HostError("no_torch", f"{sys.executable} has torch {version}, {needed} is needed", remedy=remedy)


def torch_version(text: str) -> tuple[int, int]:
    """Major and minor of `2.6.0+debian`; zeros for what is no version."""
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def sysroot() -> Path:
    """Where /proc and /sys are looked for."""
    return Path(os.environ.get("RETRAIND_SYSROOT", "/"))


def gather(work_dir: Path, root: Path) -> Facts:
    """Reads all facts of the host; what can not be read is None."""
    return Facts(
        memory_available=memory_available(root),
        disk_free=_free_bytes(work_dir),
        shm_free=_free_bytes(root / "dev/shm"),
        num_cpus=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(root),
    )


def verdicts(facts: Facts, work_dir: Path, num_workers: int) -> list[Check]:
    """The judgement of the host, from the facts alone."""
    return [_judge_memory(facts), _judge_disk(facts, work_dir), _judge_shm(facts, num_workers), _judge_cpu(facts)]


def _judge_memory(facts: Facts) -> Check:
    name, free = "host.memory", facts.memory_available
    if free is None:
        return Check(name=name, status="unknown", message="/proc/meminfo does not tell MemAvailable")
    message = f"{free // MIB} MiB available"
    if free < MIN_MEMORY_BYTES:
        remedy = "stop something, or give the machine more memory; the job starts when there is enough"
        return Check(name=name, status="fail", message=f"{message}, {MIN_MEMORY_BYTES // MIB} needed", remedy=remedy)
    if free < COMFORTABLE_MEMORY_BYTES:
        return Check(name=name, status="warn", message=f"{message}, a wide dataset may need more")
    return Check(name=name, status="pass", message=message)


def _judge_disk(facts: Facts, work_dir: Path) -> Check:
    name, free = "host.disk", facts.disk_free
    if free is None:
        return Check(name=name, status="unknown", message=f"can not tell the free space of {work_dir}")
    message = f"{free // MIB} MiB free below {work_dir}"
    if free < MIN_DISK_BYTES:
        remedy = "free space there, or move state.dir to a larger filesystem"
        return Check(name=name, status="fail", message=f"{message}, {MIN_DISK_BYTES // MIB} needed", remedy=remedy)
    return Check(name=name, status="pass", message=message)


def _judge_shm(facts: Facts, num_workers: int) -> Check:
    name, free = "host.shm", facts.shm_free
    if num_workers == 0:
        return Check(name=name, status="skip", message="training.num_workers is 0")
    remedy = "enlarge /dev/shm, or set training.num_workers: 0, which is faster for a model this small"
    if free is None:
        return Check(name=name, status="warn", message="there is no /dev/shm for loader processes", remedy=remedy)
    message = f"{free // MIB} MiB free in /dev/shm"
    if free < MIN_SHM_BYTES:
        return Check(name=name, status="warn", message=f"{message}: loader processes may not fit", remedy=remedy)
    return Check(name=name, status="pass", message=message)


def _judge_cpu(facts: Facts) -> Check:
    quota = "" if facts.cpu_quota is None else f", quota of {facts.cpu_quota:g}"
    return Check(name="host.cpu", status="pass", message=f"{facts.num_cpus} processors usable{quota}")


def _free_bytes(directory: Path) -> int | None:
    """What a process without privileges can still write there."""
    try:
        facts = os.statvfs(directory)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


def _cpu_quota(root: Path) -> float | None:
    """The smallest cpu.max of this process's control group and those above it, in processors (cgroup v2 only)."""
    found = re.search(r"^0::/(.*)$", read(root / "proc/self/cgroup"), re.MULTILINE)
    if not found:
        return None
    mount = root / "sys/fs/cgroup"
    group = mount / found[1]
    quotas = []
    for directory in (group, *group.parents):
        if directory != mount and mount not in directory.parents:
            break
        fields = read(directory / "cpu.max").split()
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
            quotas.append(int(fields[0]) / max(int(fields[1]), 1))
    return min(quotas, default=None)


def peak_bytes() -> int:
    """The most memory this process has had resident. Not getrusage's figure, which an exec inherits from its parent."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
