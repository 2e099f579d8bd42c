"""The real worker, which ends itself by SIGKILL, or waits for SIGTERM, at a point that a test names.

Takes the worker's arguments. RETRAIND_TEST_PLAN is a file with a line for each start, taken off as it is used:
`step 7` kills after that step of this attempt, `keep 2` right after that checkpoint, `rename 2` while it is written,
`evaluate 1` in the evaluation, `candidate 1` when only candidate.json is missing, `wait 1` stands after that step until
SIGTERM. `autograd` before it takes the step by autograd. Without a line it runs to its end. A checkpoint is due after
every third step.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from retraind import fsio
from retraind.worker import checkpoint, evaluate, main, progress, step, train

EVERY_STEPS = 3
plan = Path(os.environ["RETRAIND_TEST_PLAN"])
words, *later = plan.read_text().splitlines() or [""]
plan.write_text("".join(f"{line}\n" for line in later))
form, point, number = ["", "", "0", *words.split()][-3:]
num_reached = 0


def die_at(name: str, *, is_it: bool = True) -> None:
    """Ends the process when this is the point, for the time that was asked for."""
    global num_reached
    num_reached += name == point and is_it
    if name == point and num_reached == int(number):
        os.kill(os.getpid(), signal.SIGKILL)


class Checkpoints(checkpoint.Checkpoints):
    num_asked = 0

    def is_due(self) -> bool:
        self.num_asked += 1
        return self.num_asked % EVERY_STEPS == 0

    def write(self, state: dict[str, Any]) -> int:
        num_bytes = super().write(state)
        die_at("keep")
        return num_bytes


class Run(progress.Run):
    num_steps_before = 0

    def step_done(self, loss: Tensor, num_rows: int, *, was_skipped: bool) -> None:
        waits = point == "wait" and self.num_steps + 1 - self.num_steps_before == int(number)
        if waits:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        super().step_done(loss, num_rows, was_skipped=was_skipped)
        if waits:
            # Said already that it trains, and SIGTERM is still to come: it is taken here, and given to its handler.
            signal.sigwait({signal.SIGTERM})
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            signal.raise_signal(signal.SIGTERM)
        die_at("step")

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.num_steps_before = self.num_steps


def evaluated(*arguments: Any, **settings: Any) -> Any:
    die_at("evaluate")
    return original_evaluate(*arguments, **settings)


def replace(temporary: Path, path: Path) -> None:
    die_at("rename", is_it=path.name == "checkpoint")
    die_at("candidate", is_it=path.name == "candidate.json")
    original_replace(temporary, path)


original_evaluate, original_replace = evaluate.evaluate, fsio._replace
for module, name, instead in (
    (evaluate, "evaluate", evaluated), (fsio, "_replace", replace),
    (checkpoint, "Checkpoints", Checkpoints), (train, "Run", Run),
):  # fmt: skip
    setattr(module, name, instead)
if "autograd" in words:
    setattr(train, "make_step", step.AutogradStep)  # noqa: B010  (mypy knows it as step's)
sys.exit(main.main(sys.argv[-1:]))
