"""Breaks each invariant of docs/ARCHITECTURE.md by the smallest change that does, and looks whether its test fails.

    python tests/mutations.py [WORD...]      those whose test or change has one of the words; all take half an hour

A test that passes on broken code holds nothing. Works in a copy, and says for each change which test found it; ends
with 1 when one did not. tests/unit/test_mutations.py holds the table to the code, so that it does not rot.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What tests read beside the package; .venv and what git ignores stay behind.
COPIED = (
    "daemon", "tests", "docs", "etc", "systemd", "debian", "benchmarks", "README.md", "Makefile", "pyproject.toml",
)  # fmt: skip
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Mutation:
    """`test` must fail when `old` is `new` in `path`, below daemon/retraind; `what` says it in words."""

    what: str
    test: str
    path: str
    old: str
    new: str


LEAK = "globals().setdefault('KEPT', []).append"

MUTATIONS = [
    Mutation(
        "the supervisor imports numpy",
        "tests/unit/test_layers.py::test_the_supervisor_loads_nothing_heavy",
        "supervisor/loop.py", "import logging\n", "import logging\nimport numpy\n",
    ),
    Mutation(
        "300 KB a job stay in memory",
        "tests/chaos/test_load.py::test_many_jobs_leave_the_service_below_sixty_megabytes_and_without_leaks",
        "supervisor/attempt.py", "        self._ledger.fresh_work_dir(job.id)\n",
        f"        self._ledger.fresh_work_dir(job.id)\n        {LEAK}(bytearray(300_000))\n",
    ),
    Mutation(
        "a full exporter makes no room for a client",
        "tests/service/test_exporter.py::test_two_hundred_idle_and_dripping_clients_do_not_keep_a_scrape_out",
        "supervisor/exporter.py",
        "                self._cut_off(next((one for", "                return bool(next((one for",
    ),
    Mutation(
        "a file is archived over one of its name",
        "tests/service/test_spool_intake.py::test_the_same_name_with_other_content_is_another_dataset_and_overwrites_nothing",
        "fsio.py",
        "    result = _libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE)\n",
        "    result = _libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, os.path.dirname(target) + b'/one.csv', 0)\n",
    ),
    Mutation(
        "what is hidden in done/ goes too",
        "tests/unit/test_retention.py::test_what_goes_is_what_the_limits_say_and_nothing_else_of_the_spool_is_touched",
        "supervisor/retention.py",
        '            if stat.S_ISREG(info.st_mode) and not item.name.startswith("."):\n',
        "            if stat.S_ISREG(info.st_mode):\n",
    ),
    Mutation(
        "a trained job counts as published before it is",
        "tests/service/test_jobs_survive.py::test_a_record_never_leaves_the_table_of_states",
        "supervisor/attempt.py",
        "            self._ledger.save(advance(job, JobState.TRAINED, datetime.now(UTC)))\n",
        "            self._ledger.save(msgspec.structs.replace(job, state=JobState.PUBLISHED))\n",
    ),
    Mutation(
        "a disk that refuses a call ends the service",
        "tests/faults/test_fault_table.py::test_a_disk_that_refuses_a_call_is_waited_out",
        "supervisor/loop.py", "            step(now)\n        except OSError as error:\n",
        "            step(now)\n        except ChildProcessError as error:\n",
    ),
    Mutation(
        "the jobs that ran are not settled at the start",
        "tests/faults/test_kill_points.py::test_a_service_killed_at_any_call_goes_on_after_the_restart",
        "supervisor/recovery.py", "        if job.state is JobState.RUNNING:\n", "        if job.state is None:\n",
    ),
    Mutation(
        "the jobs that ran are not settled at the start",
        "tests/chaos/test_random_kills.py::"
        "test_kills_at_random_moments_lose_nothing_publish_once_and_never_tear_a_model",
        "supervisor/recovery.py", "        if job.state is JobState.RUNNING:\n", "        if job.state is None:\n",
    ),
    Mutation(
        "directories are not synced",
        "tests/faults/test_power_cut.py::"
        "test_after_a_power_cut_at_any_call_nothing_acknowledged_is_lost_and_the_service_goes_on",
        "fsio.py", "def fsync_dir(path: Path) -> None:\n", "def fsync_dir(path: Path) -> None:\n    return\n",
    ),
    Mutation(
        "weights that were read back are not held against what was written",
        "tests/worker/test_evaluate.py::test_one_flipped_bit_on_disk_is_noticed",
        "worker/evaluate.py",
        "    if (found := hashlib.sha256(data).hexdigest()) != sha256:\n",
        "    if (found := hashlib.sha256(data).hexdigest()) == '':\n",
    ),
    Mutation(
        "the manifest has another scaler than the model learned with",
        "tests/service/test_readme.py::test_the_consumers_lines_load_one_version_and_see_a_strange_row",
        "report.py", "        scaler=candidate.scaler,\n",
        "        scaler=Scaler(centre=candidate.scaler.scale, scale=candidate.scaler.scale),\n",
    ),
    Mutation(
        "planted links are written through",
        "tests/unit/test_models_dir.py::test_a_planted_link_is_refused_and_followed_nowhere",
        "supervisor/known_path.py", "    if path.is_symlink():\n", "    if False:\n",
    ),
    Mutation(
        "a job that is published again is made live again",
        "tests/unit/test_models_dir.py::test_a_job_that_is_published_again_does_not_undo_a_rollback",
        "supervisor/publish.py", " and manifest.sequence <= past.newest(history):\n", " and False:\n",
    ),
    Mutation(
        "retention takes the version before the live one",
        "tests/unit/test_models_dir.py::test_retention_keeps_the_newest_the_live_one_the_one_before_and_the_pinned",
        "supervisor/history.py", "    protected = {*live, previous(history), *history.pinned}\n",
        "    protected = {*live, *history.pinned}\n",
    ),
    Mutation(
        "retention takes the live version",
        "tests/unit/test_consumer.py::test_consumers_read_whole_versions_through_a_thousand_switches_and_their_removal",
        "supervisor/history.py", "    protected = {*live, previous(history), *history.pinned}\n",
        "    protected = set(history.pinned)\n",
    ),
    Mutation(
        "what a crash left owed is not read",
        "tests/service/test_publish_programs.py::test_a_hook_that_was_cut_off_by_a_crash_runs_again",
        "supervisor/hook.py", "typed_json.decode(self._path.read_bytes(), list[Owed])\n", "[]\n",
    ),
    Mutation(
        "a broken configuration at a reload ends the service",
        "tests/service/test_service_life.py::test_a_broken_configuration_is_refused_at_reload_and_the_old_one_stays",
        "supervisor/loop.py", "        except ConfigError as error:\n", "        except FileNotFoundError as error:\n",
    ),
    Mutation(
        "the watchdog is not answered while a worker runs",
        "tests/service/test_service_life.py::test_the_watchdog_is_answered_from_the_loop_also_while_a_worker_runs",
        "supervisor/loop.py", "        self._systemd.watchdog(now)\n",
        "        if self._attempt.child is None:\n            self._systemd.watchdog(now)\n",
    ),
    Mutation(
        "arrays of objects are not refused",
        "tests/worker/test_readers_npy.py::test_an_object_array_is_refused_and_nothing_runs",
        "worker/readers/npy.py", "    if dtype.hasobject:\n", "    if False:\n",
    ),
    Mutation(
        "what is no file counts as one",
        "tests/service/test_spool_intake.py::test_what_is_not_a_regular_file_is_put_aside_once_and_never_opened",
        "supervisor/intake.py", "        is_regular = stat.S_ISREG(info.st_mode)\n", "        is_regular = True\n",
    ),
    Mutation(
        "a worker may be silent for ever",
        "tests/service/test_jobs_survive.py::test_a_silent_worker_is_ended_and_counted",
        "supervisor/child.py",
        "        elif now - self._heard_at > self._config.silence_seconds:\n", "        elif now < 0:\n",
    ),
    Mutation(
        "every block of a file is kept",
        "tests/worker/test_ingest.py::test_memory_does_not_grow_with_the_file",
        "worker/ingest.py", "        append(rows_ND, account.moments)\n",
        f"        append(rows_ND, account.moments)\n        {LEAK}(rows_ND.copy())\n",
    ),
    Mutation(
        "rows are shuffled by chance",
        "tests/service/test_end_to_end.py::test_the_same_file_and_seed_give_the_same_weights_bit_for_bit",
        "worker/batches.py", "    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)\n",
        "    return torch.Generator().manual_seed(torch.Generator().seed() ^ digest[0])\n",
    ),
    Mutation(
        "a resumed training begins with fresh weights",
        "tests/worker/test_checkpoint.py::test_a_worker_killed_again_and_again_ends_bit_for_bit_as_one_that_was_not",
        "worker/train.py", '        self._step.restore(state["step"])\n', "",
    ),
    Mutation(
        "a checkpoint of any training is gone on from",
        "tests/worker/test_checkpoint.py::test_a_checkpoint_of_another_training_is_ignored_and_the_difference_is_said",
        "worker/checkpoint.py", "    if difference := _difference(found, identity):\n",
        "    if (difference := _difference(found, identity)) and not difference:\n",
    ),
    Mutation(
        "a web configuration that asks for less comes into force",
        "tests/service/test_exporter_tls.py::test_nothing_on_disk_opens_up_a_running_endpoint",
        "supervisor/web_guard.py",
        "            if in_force is not None and not problems.found:\n", "            if False:\n",
    ),
    Mutation(
        "samples are kept without an end",
        "tests/worker/test_readers_longtable.py::test_memory_is_bounded_by_the_number_of_samples",
        "worker/readers/samples.py", "        if len(self.instants) >= MAX_SAMPLES:\n", "        if False:\n",
    ),
    Mutation(
        "a probe that is stuck in the driver is not waited for",
        "tests/worker/test_probe.py::test_no_second_probe_is_started_while_the_first_is_stuck",
        "worker/probe.py", "                    return Answer(silence=STUCK)\n", "                    pass\n",
    ),
]  # fmt: skip


def main(words: list[str]) -> int:
    chosen = [one for one in MUTATIONS if not words or any(word in one.test + one.what for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        for mutation in chosen:
            tree = Path(name) / "tree"
            copy_to(tree)
            path = tree / "daemon" / "retraind" / mutation.path
            path.write_text(path.read_text().replace(mutation.old, mutation.new))
            is_found = fails(mutation.test, tree)
            missed += not is_found
            verdict = "found" if is_found else "MISSED"
            print(f"{verdict}: {mutation.what} ({mutation.path}): {mutation.test}", flush=True)
            shutil.rmtree(tree)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return 1 if missed else 0


def copy_to(tree: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(source, tree / name)


def fails(test: str, tree: Path) -> bool:
    """Whether the test fails there: 1 is pytest's status for that; 2 and above, an error of the run, are none."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "daemon"), "RETRAIND_TEST_DEADLINE": "30"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    with (tree / "log").open("wb") as log:
        # A test that does not end has not found the change: the rule is that it fails at a deadline of its own.
        try:
            done = subprocess.run(
                command, cwd=tree, env=environment, stdout=log, stderr=log, timeout=TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return False
    if done.returncode > 1:
        print((tree / "log").read_text()[-2000:])
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
