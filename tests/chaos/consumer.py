"""A consumer as README tells it to be, reading all the time: python consumer.py MODELS_DIR, until SIGTERM.

Prints one JSON object at its end: how often it read, how many versions it saw, and each thing that must not be:
weights, manifest and sha256 that are not of one version, a model that is gone again, a version older than the last.
"""

import hashlib
import json
import signal
import sys
from pathlib import Path

models = Path(sys.argv[1])
home = models / "telemetry_autoencoder"
seen: set[str] = set()
wrong: list[str] = []
num_reads = 0
last_sequence = 0


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_version() -> None:
    """By `current`, resolved once: all that follows is of one version."""
    global last_sequence
    version = (home / "current").resolve(strict=True)
    manifest = json.loads((version / "manifest.json").read_text())
    weights = (version / "weights.pt").read_bytes()
    if digest(weights) != manifest["weights_sha256"] or manifest["version"] != version.name:
        wrong.append(f"{version.name}: weights and manifest do not belong together")
    if manifest["sequence"] < last_sequence:
        wrong.append(f"{version.name} came after number {last_sequence}")
    last_sequence = manifest["sequence"]
    seen.add(version.name)


def read_known_path() -> None:
    """By the path that never changes: whole weights of some version."""
    weights = (models / "telemetry_autoencoder.pt").read_bytes()
    of = list(home.glob(f"versions/*-{digest(weights)[:12]}/manifest.json"))
    if not any(json.loads(path.read_text())["weights_sha256"] == digest(weights) for path in of):
        wrong.append(f"{len(weights)} bytes at the known path are of no version")


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
while signal.sigtimedwait({signal.SIGTERM}, 0.01) is None:
    for read, path in ((read_version, home / "current"), (read_known_path, models / "telemetry_autoencoder.pt")):
        try:
            read()
            num_reads += 1
        except (OSError, ValueError, KeyError) as error:
            # The known path follows the first `current` by one rename.
            if num_reads and (path.name == "current" or last_sequence > 1):
                wrong.append(f"{path}: {error!r}")
print(json.dumps({"reads": num_reads, "versions": len(seen), "wrong": wrong[:10]}))
