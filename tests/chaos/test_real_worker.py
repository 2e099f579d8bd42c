"""Kills of the service and of the real worker while it trains: the weights are those of a service that nobody troubles.

CHAOS_LONG=1 strikes 60 times and trains 12 datasets.
"""

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from accounts import Accounts, settle, versions
from harness import Service, eventually

IS_LONG = bool(os.environ.get("CHAOS_LONG"))
NUM_FILES, NUM_BLOWS = (12, 60) if IS_LONG else (2, 4)
SEED = int(os.environ.get("CHAOS_SEED", "1"))
# Some seconds of training after the import, so that blows fall into it, with several checkpoints.
SETTINGS: dict[str, dict[str, object]] = {
    "training": {"epochs": 1000, "batch_size": 32, "checkpoint_seconds": 0.1},
    "worker": {"stop_seconds": 20.0, "max_attempts": 100},
}


def contents() -> list[bytes]:
    rng = np.random.default_rng(SEED)
    tables = [rng.standard_normal((400, 2)) @ rng.standard_normal((2, 5)) for _ in range(NUM_FILES)]
    return [b"\n".join(b",".join(b"%.6f" % value for value in row) for row in table) + b"\n" for table in tables]


def weights_by_content(service: Service) -> dict[str, str]:
    return {str(one["dataset"]["sha256"]): str(one["weights_sha256"]) for one in versions(service)}


def workers(service: Service) -> list[int]:
    pid = service.process.pid
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def has_checkpoint(service: Service) -> bool:
    return any((service.state / "jobs").glob("*/work/checkpoint"))


@pytest.mark.slow
def test_killed_trainings_publish_bit_for_bit_what_untroubled_ones_do(tmp_path: Path, make_service) -> None:
    calm = make_service(tmp_path / "calm", fake=False, **SETTINGS).start()
    struck = make_service(tmp_path / "struck", fake=False, **SETTINGS).start()
    accounts = Accounts()
    for number, data in enumerate(contents()):
        calm.drop(f"node-{number}.csv", data)
        struck.drop(f"node-{number}.csv", data)
        accounts.note(data)
    strike(struck, random.Random(SEED))
    for service in (calm, struck):
        settle(service, seconds=120 + 30 * NUM_FILES)
    accounts.check(struck)
    expected = weights_by_content(calm)
    assert len(expected) == NUM_FILES
    assert weights_by_content(struck) == expected
    num_resumes = sum(one["training"]["num_resumes"] for one in versions(struck))
    print(f"\n{NUM_BLOWS} blows, seed {SEED}: {NUM_FILES} versions, {num_resumes} resumed trainings")


def strike(service: Service, dice: random.Random) -> None:
    """Blows at random moments of a worker's life; every second one is to the service itself."""
    pause = threading.Event()  # never set: waits for a time that a process may end
    for number in range(NUM_BLOWS):
        found = eventually(lambda: workers(service) or not os.listdir(service.incoming), "a worker, or the end of work")
        if found is True:
            return
        # Half of them after its first checkpoint, where there is something to go on from.
        if dice.random() < 0.5:
            eventually(lambda: has_checkpoint(service) or not workers(service), "a checkpoint")
        pause.wait(dice.uniform(0.0, 1.0))
        if number % 2:
            service.kill()
            service.start()
        else:
            for pid in workers(service):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
