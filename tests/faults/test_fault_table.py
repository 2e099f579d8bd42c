"""A disk that refuses one call, once or until it is healed: said, waited out, and nothing lost, repeated or blamed.

The rows are found by counting the calls of a whole life: {open, write, short write, fsync, rename, fsync of a
directory, unlink, and what else there is} at each path that the service writes, with each errno of CODES.
"""

import errno
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import eventually
from invariants import check
from life import ALL_POINTS, SEED, Zygote, generic, in_lanes, living
from test_kill_points import DROPPED, PUBLISHED

CODES = ("ENOSPC", "EIO", "EROFS", "EACCES", "EDQUOT", "ESTALE")
NUM_SAMPLED = 18


class Row(NamedTuple):
    """Which call fails, and how."""

    operation: str
    path: str
    code: str
    short: bool = False

    @property
    def plan(self) -> dict[str, Any]:
        return {"only": f"^{self.operation} {self.path}$", "nth": 1, "error": getattr(errno, self.code)} | (
            {"short": True} if self.short else {}
        )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Every operation at every path, the errnos dealt out in turn; with RETRAIND_FAULTS=all each with each."""
    zygote = Zygote()
    with living(tmp_path_factory.mktemp("rows") / "counted", zygote) as life:
        for name, data in DROPPED.items():
            life.put(name, data)
        life.begin(wait=True, but="(?!)")
        life.settle()
        life.stop()
        seen = sorted({(call["operation"], generic(call["path"])) for call in life.calls()})
    zygote.close()
    kinds = [
        (operation, path, short) for operation, path in seen for short in (False, True)[: 1 + (operation == "write")]
    ]
    if ALL_POINTS:
        return [Row(operation, path, code, short) for operation, path, short in kinds for code in CODES]
    random.Random(SEED).shuffle(kinds)
    return [Row(*kind[:2], CODES[number % len(CODES)], kind[2]) for number, kind in enumerate(kinds)]


def is_told(row: Row) -> bool:
    """Whether it concerns anybody: a status line that could not be written is followed by the next one."""
    return "status" not in row.path


def run(row: Row, root: Path, zygote: Zygote, *, lasts: bool) -> bool:
    """False when this life did not come by the call: a worker that is stopped leaves more or less behind."""
    healed = root / "healed"
    with living(root, zygote) as life:
        for name, data in DROPPED.items():
            life.put(name, data)
        life.incoming.chmod(0o3730)
        life.begin(**row.plan, **({"until": str(healed)} if lasts else {}))
        eventually(lambda: life.struck() or life.is_settled() or life.process.poll() is not None, f"{row}")
        is_met = bool(life.struck())
        if lasts and is_met and is_told(row):
            eventually(
                lambda: len(life.struck()) > 1 or life.is_settled() or life.process.poll() is not None, "a retry"
            )
        healed.touch()
        life.settle()
        if is_met and is_told(row):
            assert os.strerror(row.plan["error"]) in life.log(), "the fault is said"
        eventually(lambda: "READY=1" in life.notifications())
        life.find_url()
        for job in life.jobs():
            assert job["attempts"] <= 1, "no attempt was used"
        check(life, DROPPED, PUBLISHED)
        return is_met


def test_a_sockets_name_that_can_not_be_removed_does_not_end_the_service(tmp_path: Path) -> None:
    zygote = Zygote()
    assert run(Row("unlink", r"state/events\.sock", "EROFS"), tmp_path / "life", zygote, lasts=False)
    zygote.close()


@pytest.mark.parametrize("tree", ["spool", "state"])
def test_a_lock_that_can_not_be_made_is_waited_for_at_the_start(tree: str, tmp_path: Path) -> None:
    zygote = Zygote()
    assert run(Row("create", rf"{tree}/\.lock", "ENOSPC"), tmp_path / "life", zygote, lasts=True)
    zygote.close()


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "until healed"])
def test_a_disk_that_refuses_a_call_is_waited_out(rows: list[Row], lasts: bool, tmp_path: Path) -> None:
    assert len(rows) > 50
    rng = random.Random(f"{SEED} {lasts}")
    chosen = rows if ALL_POINTS else rng.sample(rows, NUM_SAMPLED)
    if ALL_POINTS and lasts:  # one errno each: they differ in the text only, and in disk_full
        chosen = [row for number, row in enumerate(rows) if number % len(CODES) == number // len(CODES) % len(CODES)]
    met: list[bool] = []
    in_lanes(
        list(enumerate(chosen)),
        lambda item, zygote: met.append(run(item[1], tmp_path / f"{item[0]}", zygote, lasts=lasts)),
    )
    assert sum(met) >= 0.8 * len(chosen), "most lives come by the calls that were counted"
