"""The loop: one thread owns all state. Wakes, tends the worker, settles what is owed, scans, starts the next job.

Each step may fail for the machine's sake and is then tried again after a pause, said in STATUS, the log and a metric;
it never takes a dataset's blame. Nothing here takes time in proportion to a file's size, and every wait is bounded.
"""

import logging
import select
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from retraind import config_file, logs
from retraind.config import Config, keep_restart_keys, restart_changes
from retraind.errors import ConfigError, HostError, PublishError
from retraind.printable import printable
from retraind.supervisor import schedule, status
from retraind.supervisor.attempt import Attempt
from retraind.supervisor.disks import Disks
from retraind.supervisor.faults import OF_WORKER, Faults
from retraind.supervisor.filing import Filing
from retraind.supervisor.hook import Hook
from retraind.supervisor.ledger import Ledger
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.publish import Publisher
from retraind.supervisor.queue import Queue
from retraind.supervisor.recovery import recover
from retraind.supervisor.retention import Retention
from retraind.supervisor.spool import Spool
from retraind.supervisor.systemd import Systemd
from retraind.supervisor.wake import Wake

log = logging.getLogger(__name__)

# The longest sleep: what is shown and checked is never older, and an idle service still costs next to nothing.
_LONGEST_WAIT_SECONDS = 10.0
# While something moves, the line in STATUS moves about once a second.
_PROGRESS_SECONDS = 1.0
# Beyond this without a turn the loop is stuck: /-/healthy says so.
STUCK_SECONDS = 60.0


class Loop:
    """The running service. `run` returns after a stop."""

    def __init__(
        self,
        config: Config,
        config_path: Path | None,
        spool: Spool,
        ledger: Ledger,
        publisher: Publisher,
        metrics: Metrics,
        faults: Faults,
        systemd: Systemd,
        wake: Wake,
    ) -> None:
        self._config, self._config_path = config, config_path
        self._spool, self._ledger, self._publisher = spool, ledger, publisher
        self._metrics, self._faults, self._systemd, self._wake = metrics, faults, systemd, wake
        directories = {"spool": spool.root, "models": publisher.models_dir, "state": ledger.state_dir}
        self._disks, self._retention = Disks(directories, faults, metrics), Retention(spool.done, metrics)
        self._queue = Queue(config, spool, ledger, wake, metrics)
        self._hook = Hook(ledger.state_dir, metrics)
        self._filing = Filing(spool, ledger, publisher, self._hook, metrics)
        self._attempt = Attempt(spool, ledger, self._queue, self._filing, faults, metrics)
        self._stopping = False
        self._recovery_due = True
        self._settle_at = 0.0  # when what is owed is tried again
        self._num_setbacks = 0
        self.turned_at = time.monotonic()
        self.state, self.text = "starting", "starting"
        self._told_at = 0.0  # when the line was last told
        self._is_told = False  # the line of this moment was told
        self._told_ready = False  # whether a worker was ready when it was told

    def run(self) -> None:
        """Until a stop is asked for and the worker is gone."""
        self._turn()
        self._systemd.ready()
        log.info("ready: watching %s, publishing to %s", self._spool.incoming, self._publisher.link)
        while not (self._stopping and self._attempt.child is None):
            self._wait()
            self._turn()
        self._attempt.close()
        self._hook.close()
        self._retention.close()
        self._queue.close()

    def _turn(self) -> None:
        now = self.turned_at = time.monotonic()
        for wish in self._wake.take():
            self._on_wish(wish, now)
        for step in (
            self._recover,
            self._obey,
            self._tend,
            self._settle,
            self._after,
            self._look,
            self._measure,
            self._retain,
            self._start_next,
            self._prepare,
        ):
            self._guarded(step, now)
        self._report(time.monotonic())

    def _guarded(self, step: Callable[[float], None], now: float) -> None:
        """A step that meets a broken disk may leave a change half made: recovery finds it, after a pause."""
        try:
            step(now)
        except OSError as error:
            self._faults.show("state", f"{error.filename or step.__name__.strip('_')}: {error.strerror or error}")
            self._pause(now)
            self._queue.hold_until = self._settle_at
            self._recovery_due = True

    def _pause(self, now: float) -> None:
        self._num_setbacks += 1
        self._settle_at = now + schedule.backoff(self._num_setbacks)

    def _wait(self) -> None:
        now = time.monotonic()
        times = [now + _LONGEST_WAIT_SECONDS]
        child = self._attempt.child
        if not self._stopping:
            times += [self._queue.scan_at, *([] if self._recovery_due else [self._retention.due_at])]
        attempt_at = self._attempt.next_deadline(self._config, now)
        times += [] if attempt_at is None else [attempt_at]
        if child is not None:
            times.append(now + _PROGRESS_SECONDS)
        elif not self._stopping and not self._faults.is_blocking:
            retry_at = self._queue.next_try(now)
            times += [] if retry_at is None else [retry_at]
        if self._filing.is_owed or self._recovery_due:
            times.append(self._settle_at)
        hook_at = self._hook.next_deadline()
        times += [] if hook_at is None else [hook_at]
        if self._systemd.ping_seconds is not None:
            times.append(now + self._systemd.ping_seconds)
        if self.state not in ("idle", "starting") or not self._is_told:
            times.append(self._told_at + _PROGRESS_SECONDS if now < self._told_at + _PROGRESS_SECONDS else now + 1)
        poller = select.poll()
        for fd in [self._wake.fd, *self._attempt.fds(), *self._hook.fds()]:
            poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, min(times) - now) * 1000 + 1)

    def _on_wish(self, wish: str, now: float) -> None:
        if wish == "scan":
            self._queue.wake(now)
        elif wish == "reload":
            self._reload()
        elif wish == "stop" and not self._stopping:
            log.info("stopping")
            self._stopping = True
            self._systemd.stopping()
            self._attempt.stop(now)
            self._attempt.ready.close()

    def _reload(self) -> None:
        """All of the new configuration or none of it. A running job keeps what it was started with."""
        self._systemd.reloading()
        try:
            new = config_file.load(self._config_path)
        except ConfigError as error:
            log.error("reload refused, the configuration in force stays:\n%s", error.message)
            self._metrics.config_reloaded(success=False)
            self._faults.show("config", "the configuration file has errors, the one in force stays")
        else:
            for key in restart_changes(self._config, new):
                log.warning("%s has changed: it takes effect at the next restart", key)
            self._config = keep_restart_keys(self._config, new)
            logs.set_level(self._config.log.level)
            self._queue.reconfigure(self._config)
            self._disks.look_at = 0.0
            self._metrics.config_reloaded(success=True)
            self._faults.heal("config")
            log.info("configuration reloaded")
        self._systemd.ready()

    def _recover(self, now: float) -> None:
        if not self._recovery_due or now < self._settle_at:
            return
        running = self._attempt.job
        found = recover(self._spool, self._ledger, datetime.now(UTC), running.id if running else "")
        self._filing.unfiled = {job.id: job for job in found.unfiled}
        for job in found.interrupted:
            # A job that takes the service down with it must not keep the others waiting for ever.
            if job.num_interruptions > 1:
                self._queue.retry_at(job.id, now + schedule.backoff(job.num_interruptions - 1))
        self._metrics.bad_records(self._ledger.num_bad_records)
        self._hook.load()
        self._recovery_due, self._num_setbacks = False, 0
        self._faults.heal("state")

    def _obey(self, now: float) -> None:
        """Reads what an operator holds, in every turn: so before each start, and each second while a worker runs."""
        holds, running = self._queue.holds, self._attempt.job
        holds.look()
        if not self._recovery_due:
            holds.forget_ended(self._ledger.open_jobs)
        if running is not None and running.id in holds.now.jobs:
            self._attempt.stop(now)
        num_held = sum(job_id in holds.now.jobs for job_id in self._ledger.open_jobs)
        self._metrics.held(queue=holds.now.queue, num_jobs=num_held)

    def _tend(self, now: float) -> None:
        self._attempt.tend(self._config, now)

    def _settle(self, now: float) -> None:
        """Publishes and files what is owed; a fault of the models directory or the spool is waited out here."""
        if now < self._settle_at or self._recovery_due or not self._filing.is_owed:
            return
        try:
            self._filing.publish(self._config)
            self._faults.heal("models")
        except PublishError as error:
            self._metrics.publish_failed()
            self._faults.show("models", error.message)
            self._pause(now)
        try:
            self._filing.file()
            self._faults.heal("filing")
        except OSError as error:
            self._faults.show("filing", f"{error.filename2 or error.filename}: {error.strerror}")
            self._pause(now)
        if now >= self._settle_at:
            self._num_setbacks = 0

    def _after(self, now: float) -> None:
        """What follows a change of the live version, whoever made it."""
        if not self._recovery_due:
            self._filing.watch_live(self._config)
            self._hook.tend(self._config.publish, now)

    def _look(self, now: float) -> None:
        if now < self._queue.scan_at or self._stopping:
            return
        try:
            self._queue.look(now)
            self._faults.heal("spool")
        except (HostError, OSError) as error:
            self._faults.show("spool", error.message if isinstance(error, HostError) else str(error))
        if self._filing.trained() is None:
            try:
                self._publisher.check()
                self._faults.heal("models")
            except PublishError as error:
                self._faults.show("models", error.message)

    def _measure(self, now: float) -> None:
        self._disks.look(now, self._config.limits.min_free_bytes)

    def _retain(self, now: float) -> None:
        """A slice of the limits of done/. What came in since the oldest job whose last move is owed was made stays."""
        if self._stopping or self._recovery_due:
            return
        owed_since = min((job.created_at for job in self._filing.unfiled.values()), default=None)
        keep_ns = None if owed_since is None else int(owed_since.timestamp() * 1e9)
        self._retention.look(now, time.time_ns(), self._config.spool, keep_ns)

    def _start_next(self, now: float) -> None:
        """One job at a time; what is trained is published first, and nothing is trained that could not be."""
        if self._attempt.child is not None or self._stopping or self._recovery_due:
            return
        if self._faults.is_blocking or self._filing.trained() is not None:
            return
        job = self._queue.take(now)
        if job is not None:
            self._attempt.start(job, self._config, now)

    def _prepare(self, now: float) -> None:
        """A worker for the job that may come: after the start, after a job, and while a file settles."""
        is_well = not self._faults.texts and now >= self._queue.hold_until and not self._queue.holds.now.queue
        if self._queue.scan.settling or self.state == "starting":
            self._attempt.ready.expect(now)
        self._attempt.prepare(self._config, now, may_start=is_well and not self._stopping)

    def _report(self, now: float) -> None:
        self._systemd.watchdog(now)
        self._metrics.ready(not self._faults.is_blocking)
        state, text = self._describe(now)
        is_worker_ready = self._attempt.ready.is_ready
        self._is_told = (state, text, is_worker_ready) == (self.state, self.text, self._told_ready)
        if self._is_told or (state == self.state and now < self._told_at + _PROGRESS_SECONDS):
            return
        self.state, self.text, self._told_at, self._is_told = state, text, now, True
        self._told_ready = is_worker_ready
        self._systemd.status(text)
        job = self._attempt.job
        current = status.Status(
            state=state,
            text=text,
            updated_at=datetime.now(UTC),
            job=job.id if job else "",
            num_ready=len(self._queue.scan.ready),
            num_settling=len(self._queue.scan.settling),
            live_version=self._publisher.live_version(),
            is_worker_ready=is_worker_ready,
            faults=dict(self._faults.texts),
            gpus=self._attempt.checked.gpus,
            cpu_fallback=self._attempt.checked.fallback,
        )
        with suppress(OSError):  # a full disk is said elsewhere
            status.write(self._ledger.state_dir, current)

    def _describe(self, now: float) -> tuple[str, str]:
        is_held = self._queue.holds.now.queue
        queue = status.waiting(len(self._queue.scan.ready)) + ("; the queue is held" if is_held else "")
        child, job = self._attempt.child, self._attempt.job
        if self._stopping:
            return "stopping", "stopping" + (": waiting for the worker to end" if child else "")
        if child is not None and job is not None:
            return "working", status.describe_work(job.name, self._attempt.stage, child.last) + queue
        if self._faults.texts:
            name, text = next(iter(self._faults.texts.items()))
            state = "deferred" if name in OF_WORKER else "degraded"
            pause = max(self._queue.hold_until, self._settle_at) - now
            return state, f"{state}: {text}{status.next_try(pause)}{queue}"
        return self._describe_queue(now)

    def _describe_queue(self, now: float) -> tuple[str, str]:
        """What is waited for when the machine is well and no worker runs."""
        queue = status.waiting(len(self._queue.scan.ready))
        if self._queue.holds.now.queue:
            return "held", f"held: nothing is started until `retraind release --all`{queue}"
        waiting = next(iter(self._queue.free_jobs()), None)
        if waiting is not None and waiting.reason is not None:
            pause = (self._queue.next_try(now) or now) - now
            return "deferred", f"deferred: {waiting.name}: {waiting.reason.code}{status.next_try(pause)}{queue}"
        if self._queue.scan.settling:
            name = printable(self._queue.scan.settling[0].name)
            return "settling", f"waiting for {name} to be complete{queue}"
        held = next(iter(self._ledger.open_jobs.values()), None)
        if held is not None and waiting is None:
            return "held", f"held: {held.name} waits for `retraind release {held.id}`{queue}"
        live = self._publisher.live_version()
        return "idle", f"idle: {f'{live} is live' if live else 'no model published yet'}{queue}"
