"""A real process that speaks the worker's protocol and behaves, or misbehaves, by its dataset's name.

Takes the worker's arguments, needs only the standard library, and knows the protocol by heart: where it and the
service disagree, the wire has changed. Names: `hold` leaves a checkpoint and waits for <spool>/release, `kill` ends
itself by SIGKILL, `crash` exits 1, `garbage` sends no JSON, `mute` says nothing, `stubborn` ignores SIGTERM, `refuse`
reports a bad dataset, `host` defers and `reader` waits until <spool>/healed exists, `memory` needs a batch of at most
512, `gate` offers NaN, `slow` trains for half a second. As the real one it dies with the service, on a full disk
it says so. It can be kept ready; RETRAIND_FAKE_READY says how that goes wrong: `broken` ends before it is ready,
`leaves` when it has its order, and `stuck` does nothing then.
"""

import ctypes
import errno
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import TracebackType

PR_SET_PDEATHSIG = 1
SIBLING = "extra.bin"  # what is published beside the weights
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
mishap = os.environ.get("RETRAIND_FAKE_READY", "")


def wait_for_order() -> Path:
    """The order of one that was kept ready. Its standard input is no socket from then on: so tests tell them apart."""
    if mishap == "broken":
        sys.exit(1)
    with socket.socket(fileno=os.dup(0)) as channel:
        channel.sendall(b"ready\n")
        path = channel.makefile("rb").readline()
    if not path or mishap == "leaves":
        sys.exit(0)
    while mishap == "stuck":
        signal.pause()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return Path(os.fsdecode(path.rstrip(b"\n")))


order_path = wait_for_order() if sys.argv[-1] == "--ready" else Path(sys.argv[-1])
order = json.loads(order_path.read_text())
directory = os.fsencode(order["datasets"][0])
name = os.listdir(directory)[0]
data = Path(os.fsdecode(os.path.join(directory, name))).read_bytes()
spool = Path(order["datasets"][0]).parent.parent
work = Path(order["work_dir"])
behaviour = name.split(b"-")[0].split(b".")[0].decode("ascii", "replace")
num_sent = 0


def connect() -> socket.socket:
    path = Path(order["socket"])
    fd = os.open(path.parent, os.O_PATH)
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(f"/proc/self/fd/{fd}/{path.name}")
    return channel


def send(kind: str, **body: object) -> None:
    global num_sent
    num_sent += 1
    event = {
        "v": 1, "job": order["job"], "attempt": order["attempt"], "seq": num_sent, "t": time.time(), "kind": kind,
        "body": {"kind": kind, **body},
    }  # fmt: skip
    channel.sendall(json.dumps(event).encode() + b"\n")


def fail(status: int, code: str, message: str, **details: object) -> None:
    send("failed", code=code, message=message, **details)
    sys.exit(status)


def on_sigterm(*_: object) -> None:
    fail(75, "terminated", "stopped at a safe point")


def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        sys.__excepthook__(kind, error, trace)
        return
    send("failed", code="disk_full", message=str(error))
    os._exit(69)


def candidate() -> dict[str, object]:
    tensors = [{"name": "w", "shape": [1], "dtype": "float32", "is_finite": behaviour != "gate"}]
    return {
        "weights_sha256": hashlib.sha256(data).hexdigest(), "weights_bytes": len(data),
        "shape": {"input_dim": 1, "hidden_dim": 24, "latent_dim": 8}, "dataset": dataset(),
        "scaler": {"centre": [0.0], "scale": [1.0]},
        "training": {
            "epochs": 5, "batch_size": order["training"]["batch_size"], "num_steps": 5, "epoch_losses": [1.0],
            "seconds": 0.1, "rows_per_second": 10.0, "device": "cpu", "device_name": "fake", "precision": "float32",
            "seed": order["training"]["seed"],
        },
        "evaluation": {"num_heldout_rows": 1, "heldout_loss": 0.5, "mean_loss": 1.0},
        "tensors": tensors, "expected": [{**tensors[0], "is_finite": True}], "versions": {"retraind": "fake"},
        "siblings": [
            {"name": SIBLING, "sha256": hashlib.sha256(sibling()).hexdigest(), "num_bytes": len(sibling())},
        ],
    }  # fmt: skip


def dataset() -> dict[str, object]:
    return {
        "name": name.decode("utf-8", "backslashreplace"), "sha256": hashlib.sha256(data).hexdigest(),
        "num_bytes": len(data), "format": "csv", "num_rows": 10, "num_dropped": {"missing": 1},
        "metric_names": ["m"], "ignored_columns": [],
    }  # fmt: skip


def sibling() -> bytes:
    return b"of " + data


def leave(name: str, content: bytes) -> None:
    """As the real worker does: whole or absent, and durable."""
    fd = os.open(work / f".{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, content)
    os.fsync(fd)
    os.close(fd)
    os.replace(work / f".{name}.tmp", work / name)
    fd = os.open(work, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def hold(until: float = float("inf")) -> None:
    epoch = 0
    if (work / "checkpoint").exists():
        send("resumed", epoch=3, epochs=5, num_steps=30)
    leave("checkpoint", b"where it was")
    send("checkpointed", epoch=3, epochs=5, num_steps=30, num_bytes=12)
    while time.monotonic() < until and not (spool / "release").exists():
        epoch = min(epoch + 1, 5)
        send("progress", epoch=epoch, epochs=5, loss=0.7413, rows_per_second=512_000.0, seconds_left=8.0, device="cpu")
        time.sleep(0.05)


signal.signal(signal.SIGTERM, on_sigterm)
if behaviour == "mute":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
if behaviour == "boot":
    sys.exit(3)
channel = connect()
sys.excepthook = on_error
send("hello", pid=os.getpid(), python="fake")
with (spool / "trained.log").open("a") as log:  # what the tests count
    log.write(f"{name.decode('utf-8', 'backslashreplace')} {order['attempt']}\n")
send("stage", name="preflight")
gpu_status = "fail" if behaviour == "host" and not (spool / "healed").exists() else "skip"
checks = [{"name": "gpu.present", "status": gpu_status, "message": "no GPU"}]
if behaviour == "fallback":
    checks = [
        {"name": "gpu.temperature", "status": "fail", "message": "91 C, the limit is 90", "remedy": "see to fans"}
    ]
    gpu = {"index": 0, "uuid": "GPU-1", "name": "Fake Card", "temperature_celsius": 91, "is_chosen": True}
    send("checked", checks=checks, gpus=[gpu], fallback="gpu.temperature: 91 C, the limit is 90")
else:
    send("checked", checks=checks)
send("stage", name="ingest")
match behaviour:
    case "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    case "crash":
        sys.exit(1)
    case "garbage":
        channel.sendall(b"this is not an event\n")
        signal.pause()
    case "refuse":
        fail(65, "malformed", "cell is no number", line=3, column=2, remedy="look at line 3")
    case "memory" if order["training"]["batch_size"] > 512:
        fail(71, "out_of_memory", "no room for the batch")
    case "host" if not (spool / "healed").exists():
        fail(69, "preflight_failed", "gpu.present: no GPU")
    case "reader" if not (spool / "healed").exists():
        fail(69, "no_reader", "no library for this format", remedy="install it")
    case "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
send("ingested", dataset=dataset())
send("stage", name="train")
send("news-from-the-future", anything=1)
if behaviour in ("hold", "stubborn"):
    hold()
if behaviour == "slow":
    hold(time.monotonic() + 0.5)
leave("weights.pt", data)
leave(SIBLING, sibling())
leave("candidate.json", json.dumps(candidate()).encode())
send("finished", weights_sha256=hashlib.sha256(data).hexdigest(), peak_bytes=1)
