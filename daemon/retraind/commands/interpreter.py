"""The worker's interpreter, asked before a job needs it: what can it import, in which version, and does CUDA answer?

The question is put to `worker.python` in a process of its own, which is given up after a time: a driver that hangs
must not hang the command. The judgement is a pure function of the answer. Changes nothing, raises nothing.
"""

import subprocess
import sys
from contextlib import suppress

import msgspec

from retraind import typed_json
from retraind.config import Config
from retraind.report import Check
from retraind.worker import gpu_machine, preflight
from retraind.worker.preflight import MIN_PYTHON, MIN_TORCH

# Importing torch takes up to 15 s on a busy machine.
_SECONDS = 120
_NAME = "worker.python"
_LACKS = (
    "apt install python3-torch python3-pandas python3-msgspec, or set worker.python to an interpreter with torch, "
    "numpy, pandas and msgspec"
)
# Runs under any Python, however old, and prints one line of JSON. Driver and GPUs are only asked for where they matter.
_QUESTION = """
import json, sys
answer = {"python": list(sys.version_info[:3]), "missing": {}, "torch": "", "cuda": "", "num_gpus": 0}
for name in ("msgspec", "numpy", "pandas", "torch"):
    try:
        __import__(name)
    except Exception as error:
        answer["missing"][name] = "%s: %s" % (type(error).__name__, error)
if "torch" not in answer["missing"]:
    import torch
    answer["torch"], answer["cuda"] = str(torch.__version__), torch.version.cuda or ""
    if sys.argv[1] != "cpu" and torch.cuda.is_available():
        answer["num_gpus"] = torch.cuda.device_count()
print(json.dumps(answer))
"""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the interpreter told. `missing` has the error by module; `cuda` is empty for a build without it."""

    python: tuple[int, int, int]
    missing: dict[str, str]
    torch: str
    cuda: str
    num_gpus: int


def check(config: Config) -> Check:
    """Whether a worker would run under worker.python, and on the device that is asked for."""
    python = sys.executable if config.worker.python == "auto" else config.worker.python
    answer = _ask(python, config.device)
    if isinstance(answer, str):
        return Check(name=_NAME, status="fail", message=f"{python}: {answer}", remedy=_LACKS)
    return judge(python, answer, config.device, gpu_on_bus=bool(gpu_machine.gpu_addresses(preflight.sysroot())))


def judge(python: str, answer: Answer, device: str, *, gpu_on_bus: bool) -> Check:
    """The verdict, from the answer alone."""
    if answer.missing:
        what = "; ".join(f"can not import {name} ({error})" for name, error in answer.missing.items())
        return Check(name=_NAME, status="fail", message=f"{python}: {what}", remedy=_LACKS)
    build = f"CUDA {answer.cuda}" if answer.cuda else "no CUDA"
    version = ".".join(map(str, answer.python))
    found = f"{python}: Python {version}, torch {answer.torch}, {build}"
    if answer.python[:2] < MIN_PYTHON or preflight.torch_version(answer.torch) < MIN_TORCH:
        needed = f"Python {'.'.join(map(str, MIN_PYTHON))} and torch {'.'.join(map(str, MIN_TORCH))}"
        return Check(name=_NAME, status="fail", message=f"{found}: too old", remedy=f"needs {needed} or newer")
    if device == "cpu" or answer.num_gpus:
        gpus = f", {answer.num_gpus} GPU" if answer.num_gpus else ""
        return Check(name=_NAME, status="pass", message=found + gpus)
    remedy = (
        "the driver does not answer this build: see `nvidia-smi` and the driver's version"
        if answer.cuda
        else "give worker.python an interpreter with a CUDA build of torch: OPERATIONS.md has the commands"
    )
    if device == "cuda":
        return Check(name=_NAME, status="fail", message=f"{found}: device is cuda and it finds no GPU", remedy=remedy)
    if gpu_on_bus:
        message = f"{found}: there is a GPU, and this torch can not use it: training on the CPU"
        return Check(name=_NAME, status="warn", message=message, remedy=remedy)
    return Check(name=_NAME, status="pass", message=found)


def _ask(python: str, device: str) -> Answer | str:
    """The answer, or what went wrong in words."""
    try:
        process = subprocess.Popen(
            [python, "-s", "-c", _QUESTION, device], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
    except OSError as error:
        return error.strerror or str(error)
    try:
        out, err = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that is stuck in a driver ends when the driver lets it
            process.wait(1)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        return f"no answer within {_SECONDS} s"
    try:
        return typed_json.decode(out, Answer)
    except typed_json.Malformed:
        last = (err.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return f"it does not answer as a Python does: {last}"
