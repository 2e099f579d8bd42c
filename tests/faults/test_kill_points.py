"""SIGKILL at every call that changes the disk, in the service and in the worker: nothing is lost or done twice."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from invariants import check, consumer_sees
from life import ALL_POINTS, SEED, STATUS, Zygote, in_lanes, living

# One that is published, one that is refused, one with the first one's content, one that the gate rejects.
DROPPED = {"a.csv": b"a.csv", "refuse.csv": b"refuse.csv", "same-as-a.csv": b"a.csv", "gate.csv": b"gate.csv"}
PUBLISHED = {"a.csv"}
# How many points of each kind `make test` tries.
NUM_SAMPLED = 24


def sampled(points: list[Any], kind: str, number: int = NUM_SAMPLED) -> list[Any]:
    """All of them, or some that the seed chooses."""
    rng = random.Random(f"{SEED} {kind}")
    return points if ALL_POINTS or len(points) <= number else sorted(rng.sample(points, number))


def count(root: Path, drop: dict[str, bytes], plan: dict[str, Any], worker: dict[str, Any] | None = None) -> int:
    """The calls of a life in which nothing happens."""
    zygote = Zygote()
    with living(root, zygote) as life:
        for name, data in drop.items():
            life.put(name, data)
        life.begin(wait=True, worker=worker, **plan)
        life.settle()
        number = len(life.calls())
        life.stop()
    zygote.close()
    return number


def killed_and_started_again(
    root: Path,
    zygote: Zygote,
    drop: dict[str, bytes],
    plans: list[dict[str, Any]],
    worker: dict[str, Any] | None = None,
) -> None:
    """One life for each plan, which ends by its own hand if it gets that far; then one without, and the invariants."""
    with living(root, zygote) as life:
        for name, data in drop.items():
            life.put(name, data)
        if drop:
            life.incoming.chmod(0o3730)
        for plan in plans:
            life.begin(**plan)
            while life.process.poll() is None and not life.is_settled():
                consumer_sees(life.models)
                time.sleep(0.01)
            if life.process.poll() is None:
                life.kill()
            assert life.process.poll() == -signal.SIGKILL, life.log()
            consumer_sees(life.models)
        life.begin(wait=True, worker=worker)
        life.settle()
        check(life, drop, PUBLISHED & drop.keys())


@pytest.mark.parametrize("drop", [{}, DROPPED], ids=["start", "jobs"])
def test_a_service_killed_at_any_call_goes_on_after_the_restart(tmp_path: Path, drop: dict[str, bytes]) -> None:
    plan = {"but": STATUS}
    number = count(tmp_path / "count", drop, plan)
    assert number > (100 if drop else 10)
    points = [*sampled(list(range(1, number + 1)), f"kill {len(drop)}"), number + 1]
    in_lanes(
        points,
        lambda nth, zygote: killed_and_started_again(
            tmp_path / f"{nth}", zygote, drop, [{**plan, "nth": nth, "kill": "before"}]
        ),
    )


def test_a_recovery_that_is_killed_as_well_goes_on_after_the_next_restart(tmp_path: Path) -> None:
    """Two kills: at a call of the first life, and at one of the life that recovers from it."""
    plan = {"but": STATUS}
    number = count(tmp_path / "count", DROPPED, plan)
    rng = random.Random(f"{SEED} recovery")
    # A recovery's own calls come first in its life, right after those of the start: there the second kills are dense.
    firsts = rng.sample(range(1, number + 1), 60 if ALL_POINTS else 12)
    points = [(first, second) for first in firsts for second in rng.sample(range(1, 41), 5 if ALL_POINTS else 1)]
    in_lanes(
        points,
        lambda point, zygote: killed_and_started_again(
            tmp_path / f"{point}", zygote, DROPPED, [{**plan, "nth": nth, "kill": "before"} for nth in point]
        ),
    )


def test_a_worker_killed_at_any_call_costs_one_attempt_and_nothing_else(tmp_path: Path) -> None:
    drop = {"a.csv": b"a.csv"}
    # The service makes no note of its own here: only the worker is under the plan.
    number = count(tmp_path / "count", drop, {}, worker={"but": STATUS})
    assert number >= 8, "two files, each written, synced, renamed, and its directory synced"

    def run(nth: int, zygote: Zygote) -> None:
        with living(tmp_path / f"{nth}", zygote, worker={"max_attempts": 3}) as life:
            life.put("a.csv", drop["a.csv"])
            life.incoming.chmod(0o3730)
            # Each attempt counts anew, so only the first worker's call is struck: later ones find the mark.
            life.begin(wait=True, worker={"nth": nth, "kill": "before", "once": str(life.root / "killed")})
            life.settle()
            assert (life.root / "killed").exists()
            # A candidate that was complete when its worker died is published; before that, the attempt is repeated.
            assert len(life.trained()) in (1, 2)
            assert [job["attempts"] for job in life.jobs()] == [len(life.trained())]
            check(life, drop, {"a.csv"})

    in_lanes(list(range(1, number + 1)), run)
